"""The default method of VQ models: the draft that is fastest on this device, with the images of `ar`."""

from __future__ import annotations

import statistics
import time
from collections import deque

from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.discrete.drafts import DRAFTS, run_drafted_round, run_plain_round, run_single_tokens, sample_next
from cspd.discrete.jacobi import run_jacobi_round, slide_by_one
from cspd.discrete.kv_cache import MOST_NODES
from cspd.discrete.methods import EAGLE2, SJD
from cspd.discrete.rules import MIXED
from cspd.discrete.runner import VQRunner
from cspd.method import Method
from cspd.option import Option
from cspd.request import Request, Sequence, Stopwatch

# The default method takes the draft configuration that is fastest on this device, or drafts nothing.
#
# Its rounds are those of other methods with same-image coupling: baseline sampling (if `window` is 0), Jacobi windows
# or EAGLE-2's trees. So a seed gives the image of `ar` on every machine, up to rounding, and the method is exact.

ROUNDS = {"jacobi": run_jacobi_round, "eagle-dynamic": run_drafted_round}
OPEN = " (default: the fastest on this device)"
WINDOW = Option(
    "window",
    int,
    f"tokens drafted for one target forward pass; 0: none, as ar{OPEN}",
    high=MOST_NODES - 1,
    off=0,
    decided=True,
    metavar="W",
)
DRAFT = Option("draft", ROUNDS, f"what drafts the tokens{OPEN}", decided=True)
GAMMA = Option(
    "gamma",
    int,
    f"the tree's height{OPEN}",
    low=1,
    high=DRAFTS["eagle-dynamic"].highest,
    only_with=("draft", ("eagle-dynamic",)),
    decided=True,
)
COUPLED = Option("coupling", ("same-image",), "accept only what ar would sample", default="same-image")
DRAFTING = tuple(option.name for option in (WINDOW, DRAFT, GAMMA))


def run_round(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """A round of baseline sampling, or of the request's draft; returns the finished sequences."""
    request = sequences[0].request
    if request.window == 0:
        return run_plain_round(runner, sequences, watch)
    # what a user asked for is what runs; and the seconds of a GPU's round are known rounds later
    if runner.late or not all(map(_is_open, sequences)):
        return ROUNDS[request.draft](runner, sequences, watch)
    race = runner.tuning.race(sequences[0].key, request)
    drafts = race.begin()
    start = time.perf_counter()
    if drafts:
        ended = ROUNDS[request.draft](runner, sequences, watch)
    else:
        ended = run_single_tokens(runner, sequences, watch, _sample_between)
    race.end(time.perf_counter() - start)
    return ended


def _is_open(sequence: Sequence) -> bool:
    """Whether its user left the draft to this method."""
    asked = sequence.asked
    return asked is not None and all(getattr(asked, name) is None for name in DRAFTING)


def _sample_between(runner: VQRunner, batch: Batch) -> Tensor:
    """As `sample_next`, between rounds that draft."""
    if batch.request.draft == "jacobi":
        slide_by_one(runner, batch)
    return sample_next(runner, batch)


# The choice is a prediction, and other processes may take what it counted on: the cores that work on a window's tokens
# side by side. So a few rounds are of the other kind, and the kind that is faster lately goes on. Only seconds are
# compared: how many tokens a round commits varies much, but its mean does not depend on the machine.

BLOCK = 4  # rounds of one kind in a row: a window that was left alone needs a few to converge again
EVERY, FIRST = 16, 2  # of so many blocks one is of the other kind, and which one
RECENT = 16  # rounds of each kind that count
MARGIN = 1.1  # times as fast: baseline sampling must be, to be run in place of the draft


class Race:
    """Whether rounds that draft, or those of baseline sampling, commit more tokens per second lately.

    Both give the image of `ar`, so that the winner decides only how long an image takes.

    Args:
        tokens: the mean that a round commits that drafts.
    """

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens
        self._rounds = 0
        self._drafts = True  # the kind of this block
        self._recent: dict[bool, deque[float]] = {kind: deque(maxlen=RECENT) for kind in (True, False)}

    def begin(self) -> bool:
        """Begins a round. Returns whether it drafts."""
        block, first = divmod(self._rounds, BLOCK)
        if first == 0:
            self._drafts = self.is_draft_faster() != (block % EVERY == FIRST)
        self._rounds += 1
        return self._drafts

    def end(self, seconds: float) -> None:
        """Ends the round, which took `seconds`."""
        self._recent[self._drafts].append(seconds)

    def is_draft_faster(self) -> bool:
        """Whether drafting is faster, as predicted, or not much slower."""
        if not all(self._recent.values()):
            return True
        by_draft, plain = (statistics.median(self._recent[kind]) for kind in (True, False))
        return by_draft / self.tokens <= MARGIN * plain


def prepare(request: Request, runner: VQRunner) -> Request:
    """The request with the settings that it leaves open set to the fastest draft configuration on this device."""
    return request.but(**runner.tuning.choice(request, runner.at_once).config)


SPECULATIVE = Method(
    name="speculative",
    family="VQ",
    guarantee="exact",
    summary="SJD or EAGLE-2 drafting if predicted to be faster on this device, otherwise ar; same images as ar",
    papers={**SJD.papers, **EAGLE2.papers},
    run_round=run_round,
    options=(WINDOW, DRAFT, GAMMA, COUPLED),
    mixed=lambda request: MIXED,
    prepare=prepare,
    uses=lambda request: {"eagle"} if request.draft == "eagle-dynamic" else set(),
)
