"""The default method of VQ codes: drafts as much as makes images soonest on this device, or nothing. Guarantee: exact.

Its rounds are those of others, with same-image coupling (`cspd.discrete.draft_verify`): plain sampling, where the
window is 0, Jacobi windows or EAGLE-2's trees. So a seed's image is that of `ar`, on every machine, but for rounding.
What is left open is decided by `cspd.discrete.tuning`.
"""

from __future__ import annotations

from cspd.discrete import ar, draft_verify, jacobi
from cspd.discrete.cache import MOST_NODES
from cspd.discrete.draft import DRAFTS
from cspd.discrete.host import VQHost
from cspd.discrete.options import MIXED
from cspd.discrete.published import EAGLE2, SJD
from cspd.method import Method
from cspd.option import Option
from cspd.precision import Stopwatch
from cspd.sequence import Request, Sequence

ROUNDS = {"jacobi": jacobi.run_round, "eagle-dynamic": draft_verify.run_round}
OPEN = " (default: the fastest on this device)"
WINDOW = Option(
    "window",
    int,
    f"tokens drafted for one target forward pass; 0: none, as ar{OPEN}",
    high=MOST_NODES - 1,
    off=0,
    metavar="W",
)
DRAFT = Option("draft", ROUNDS, f"what drafts the tokens{OPEN}")
GAMMA = Option(
    "gamma",
    int,
    f"the tree's height{OPEN}",
    low=1,
    high=DRAFTS["eagle-dynamic"].highest,
    only_with=("draft", ("eagle-dynamic",)),
)
COUPLED = Option("coupling", ("same-image",), "accept only what ar would sample", default="same-image")
DECIDED = tuple(option.name for option in (WINDOW, DRAFT, GAMMA))


def run_round(host: VQHost, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """A round of plain sampling, or of what drafts; returns the sequences that are finished."""
    request = sequences[0].request
    own = ar.run_round if request.window == 0 else ROUNDS[request.draft]
    return own(host, sequences, watch)


def check(request: Request, host: VQHost) -> None:
    """Raises ValueError where the drafter that is asked for is not there."""
    if request.draft == "eagle-dynamic":
        draft_verify.check_model(request.draft, host)


def resolve(request: Request, host: VQHost) -> Request:
    """The request with the way to draft that is fastest for it on this device, where it leaves that open."""
    return request.but(**host.tuning.choice(request, host.num_slots).way)


METHOD = Method(
    name="speculative",
    family="VQ",
    guarantee="exact",
    summary="SJD or EAGLE-2 drafting if predicted to be faster on this device, otherwise ar; same images as ar",
    papers={**SJD.papers, **EAGLE2.papers},
    run_round=run_round,
    options=(WINDOW, DRAFT, GAMMA, COUPLED),
    mixed=lambda request: MIXED,
    check=check,
    resolve=resolve,
    uses=lambda request: {"eagle"} if request.draft == "eagle-dynamic" else set(),
)
