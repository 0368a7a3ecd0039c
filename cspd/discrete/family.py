"""The family of VQ models: the models, the measurements that choose their drafts, and the list of their methods."""

from __future__ import annotations

import bisect
import functools
import math
import statistics
import time
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from cspd.device import Precision, check_fits, free_bytes, seconds_of
from cspd.discrete.batch import Batch
from cspd.discrete.drafts import (
    DRAFTS,
    check_model,
    drafting,
    run_drafted_round,
    run_plain_round,
    run_single_tokens,
    sample_next,
)
from cspd.discrete.gpt import GPT, Eagle, GPTConfig, VQModel
from cspd.discrete.jacobi import jacobi, run_jacobi_round, slide_by_one
from cspd.discrete.kv_cache import MOST_NODES, most_columns
from cspd.discrete.registry import HFConfig
from cspd.discrete.rules import DIALS, MIXED, rule_of
from cspd.discrete.runner import VQRunner
from cspd.discrete.text import TextEncoder
from cspd.discrete.zipar import ZIPAR
from cspd.files import FileCache, content_hash, remember, user_cache
from cspd.graphs import Graphs
from cspd.heads.calibration import Price
from cspd.method import Method, find, register_family
from cspd.models import NO_NAMES, ClassNames
from cspd.option import BUDGET, Option
from cspd.request import Request, Sequence, Stopwatch
from cspd.terminal import Advance, ask, counting, no_advance, telling
from cspd.tuner import PLAIN, Choice, DraftConfig, Times, Tuner, choose_by_gain, in_turns, is_enough, unsteadiness

# Tokens per round are counted on a coarse grid of sampling settings, so that moving a slider seldom needs a new count.

STEPS = {"cfg": 0.5, "temperature": 0.1, "top_p": 0.05}
OFF = {"cfg": 1.0, "temperature": 0.0, "top_p": 1.0}
SETTINGS = (*STEPS, "top_k")


def on_grid(request: Request) -> Request:
    """A resolved request with its sampling settings rounded to a grid.

    The grid has steps of 0.5 for guidance, 0.1 for temperature, 0.05 for top-p and powers of two for top-k. A setting
    that is off stays off, and one that is on stays on. A coarse grid is enough: a count is the mean of a few images,
    with an error of 5 %, and it decides only how long images take.
    """
    settings: dict[str, float] = {}
    for name, step in STEPS.items():
        settings[name] = _nearest(getattr(request, name), step, OFF[name])
    if request.top_k:
        settings["top_k"] = 2 ** round(math.log2(request.top_k))
    return request.but(**settings)


def _nearest(value: float, step: float, off: float) -> float:
    """The nearest positive multiple of a step. Only the value `off` itself gives `off`."""
    if value == off:
        return value
    nearest = round(max(1, round(value / step)) * step, 9)
    if nearest != off:
        return nearest
    return round(off + step if value > off else off - step, 9)


# Estimates of memory, made before anything is allocated.

WORKING = 10  # tensors [nodes, vocab_size] that a round holds at once, at most


def bytes_per_slot(target: GPT, others: Iterable[GPT | Eagle | None], precision: Precision) -> int:
    """Estimated peak bytes that a slot adds: key-value caches, and the distributions of a round.

    `others`: the models that draft; None stands for a model that was not loaded.
    """
    total = working_bytes(target.config)
    for model in (target, *others):
        if model is not None:
            total += cache_bytes(target.config, model.config, len(model.layers), precision.type_of(model))
    return total


def cache_bytes(target: Any, config: Any, layers: int, dtype: torch.dtype) -> int:
    """Bytes of one slot's key-value cache for a model.

    Args:
        target: the configuration of the target, which decides the number of columns. config: that of the model.
    """
    tensors = 4  # keys and values, for each of the two guidance branches
    return tensors * dtype.itemsize * layers * most_columns(target) * config.key_heads * config.head_dim


def working_bytes(config: Any) -> int:
    """The most bytes that one slot's float32 distributions take during a round."""
    return torch.float32.itemsize * MOST_NODES * config.vocab_size * WORKING


# The methods: pairs of a draft and a rule, each with the settings of its paper.

AR = Method(
    name="ar",
    family="VQ",
    guarantee="exact",
    summary="baseline sampling: one token per forward pass",
    papers={"2406.06525": "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation"},
    run_round=run_plain_round,
    mixed=lambda request: MIXED,
)
SD = drafting(
    "sd",
    "speculative sampling: a smaller GPT drafts a chain of tokens",
    {"2211.17192": "Fast Inference from Transformers via Speculative Decoding"},
    draft="chain",
    gamma=5,
)
EAGLE = drafting(
    "eagle",
    "EAGLE-1: a drafter on the target's features drafts a fixed tree",
    {"2401.15077": "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"},
    draft="eagle-static",
    gamma=5,
)
EAGLE2 = drafting(
    "eagle2",
    "EAGLE-2: the drafter's confidence shapes the tree; same images as ar",
    {"2406.16858": "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees"},
    draft="eagle-dynamic",
    gamma=6,
    coupling="same-image",
)
COOL_SD_PAPER = {
    "2601.09212": "Annealed Relaxation of Speculative Decoding for Faster Autoregressive Image Generation (COOL-SD)"
}
UNIFORM_RSD = drafting(
    "uniform-rsd",
    "relaxes acceptance by a constant, on EAGLE-1's tree",
    COOL_SD_PAPER,
    draft="eagle-static",
    gamma=5,
    rule="uniform-rsd",
)
COOL_SD = drafting(
    "cool-sd",
    "relaxes acceptance by a schedule that decays with depth, on EAGLE-1's tree",
    COOL_SD_PAPER,
    draft="eagle-static",
    gamma=5,
    rule="cool-sd",
)
LANTERN = drafting(
    "lantern",
    "pools acceptance over near codebook entries, on EAGLE-2's tree",
    {"2410.03355": "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding"},
    draft="eagle-dynamic",
    gamma=6,
    rule="lantern",
    k=100,
    optimal=False,
)
LANTERN_PLUS = drafting(
    "lantern++",
    "LANTERN with a relative limit, on EAGLE-1's tree",
    {
        "2502.06352": "LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual"
        " Auto-regressive Models"
    },
    draft="eagle-static",
    gamma=5,
    rule="lantern++",
    lam=1.0,
    k=10,
    optimal=False,
)
SJD = jacobi(
    "sjd",
    "Jacobi decoding: the target drafts a window for itself; same images as ar",
    {
        "2410.01699": "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi"
        " Decoding"
    },
    coupling="same-image",
)
MC_SJD = jacobi(
    "mc-sjd",
    "Jacobi decoding that keeps drafted tokens from round to round if it can",
    {
        "2510.24211": "MC-SJD: Maximal Coupling Speculative Jacobi Decoding for Autoregressive Visual Generation"
        " Acceleration"
    },
    continuation=True,
)
SJD_PAC = jacobi(
    "sjd-pac",
    "Jacobi decoding with proactive drafting and adaptive continuation",
    {
        "2603.18599": "SJD-PAC: Accelerating Speculative Jacobi Decoding via Proactive Drafting and Adaptive"
        " Continuation"
    },
    pd_k=4,
    pd_d=3,
    continuation=True,
)
GSD = jacobi(
    "gsd",
    "Jacobi decoding that accepts by groups of about equally likely tokens",
    {"2508.07747": "Grouped Speculative Decoding for Autoregressive Image Generation"},
    rule="gsd",
    optimal=False,
)


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
    return asked is not None and all(getattr(asked, name) is None for name in DECIDED)


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


def check(request: Request, runner: VQRunner) -> None:
    """Raises ValueError if the request names a drafter that was not loaded."""
    if request.draft == "eagle-dynamic":
        check_model(request.draft, runner)


def resolve(request: Request, runner: VQRunner) -> Request:
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
    check=check,
    resolve=resolve,
    uses=lambda request: {"eagle"} if request.draft == "eagle-dynamic" else set(),
)


# The choice of a draft configuration: the one with the fewest seconds per committed token.
#
# Seconds per round depend on the machine, on the shapes of the models and of the batch, and on the configuration.
# Tokens per round depend on the weights and the sampling settings. Both are measured on first use and stored in the
# user's cache directory; the bundled models come with counts at their usual settings. All configurations generate the
# images of `ar`: the choice decides only how long they take.

COUNTS_SCHEMA, PRICES_SCHEMA, TIMES_SCHEMA = "cspd.vq-counts/1", "cspd.vq-prices/2", "cspd.vq-times/1"
MOST_CODES = 6.0  # the largest plausible mean of tokens per round: the largest ever measured is 4.3
LARGEST = 1e9
TURNS = 12  # how often a round is timed
IMAGES = 4  # images that are generated to count tokens per round
PRICED = 8  # images that are generated to measure the price of a rule
TEXT_STEP = 32  # prompts are timed at lengths that are multiples of this

JACOBI: list[DraftConfig] = [{"draft": "jacobi", "window": window} for window in (4, 8, 16, 32, 64)]
TREES: list[DraftConfig] = [
    {"draft": "eagle-dynamic", "gamma": gamma, "window": window}
    for gamma, window in ((2, 6), (3, 12), (4, 24), (6, 60))  # the last pair is EAGLE-2's own
]


def name_of(config: DraftConfig) -> str:
    """The configuration as it is written after a method's name: "draft=jacobi:window=16"."""
    return ":".join(f"{name}={value}" for name, value in config.items())


def draft_configs(request: Request, has_drafter: bool) -> list[DraftConfig]:
    """The draft configurations that agree with the settings of a request; baseline sampling, if allowed, is first."""
    given = {name: getattr(request, name) for name in DECIDED if getattr(request, name) is not None}
    if given.get("window") == 0:
        return [{}]
    drafting = [*JACOBI, *TREES] if has_drafter else JACOBI
    if not given:
        return [PLAIN, *drafting]
    by_name = {}  # a given window makes some of them equal
    for config in drafting:
        if given.get("draft") in (None, config["draft"]):
            own = {**config, **given}
            by_name[name_of(own)] = own
    return list(by_name.values())


def farthest(config: DraftConfig) -> float:
    """The largest plausible mean of tokens per round."""
    return min(MOST_CODES, 1.0 + config.get("gamma", config["window"]))


class TokensPerRound(NamedTuple):
    """The mean number of tokens that a round of a draft configuration commits."""

    mean: float

    def check(self, *_: int) -> None:
        """Raises ValueError unless it is positive and finite: it is used as a divisor."""
        if not 0 < self.mean < LARGEST:
            raise ValueError(f"expected tokens per round in 0..{LARGEST:g}, got {self.mean}")


def typical_seconds(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Seconds per round of each configuration, from those of several turns.

    Drafts must be faster than baseline sampling that nobody disturbs. Their rounds do its work and more, so where they
    seem shorter, the machine was busy.
    """
    seconds = {name: statistics.median(own) for name, own in times.items()}
    if (plain := name_of(PLAIN)) in times:
        seconds[plain] = min(times[plain])
        seconds = {name: max(seconds[plain], own) for name, own in seconds.items()}
    return seconds


def fastest(
    seconds: Mapping[str, float],
    by_name: Mapping[str, DraftConfig],
    count: Callable[[list[DraftConfig]], Mapping[str, float]],
    num_slots: int,
) -> Choice:
    """Chooses the fastest configuration, or baseline sampling if it is a candidate and the others gain too little.

    Args:
        seconds: per round, by configuration name. by_name: the candidates.
        count: measures the tokens per round of some configurations, by name. It generates images, so it is called only
            for configurations that would win at the largest plausible count.
    """
    at_once = f"with {num_slots} image{'s' if num_slots > 1 else ''} at once"
    drafting = {name: config for name, config in by_name.items() if config is not PLAIN}
    if len(drafting) == len(by_name):  # the request asks for drafting
        tokens = count(list(drafting.values()))
        best = min(tokens, key=lambda name: seconds[name] / tokens[name])
        return Choice(by_name[best], f"{at_once} {best} is predicted to be the fastest draft configuration")

    # the gain of a configuration is its speed-up over baseline sampling, which commits one token per round
    baseline = seconds[name_of(PLAIN)]
    bounds = {name: farthest(config) * baseline / seconds[name] for name, config in drafting.items()}
    promising = [config for name, config in drafting.items() if is_enough(bounds[name])]
    if not promising:
        best = max(bounds, key=bounds.__getitem__)
        return choose_by_gain(by_name[best], bounds[best], f"{at_once} {best}", at_best=True)
    gains = {name: tokens * baseline / seconds[name] for name, tokens in count(promising).items()}
    best = max(gains, key=gains.__getitem__)
    return choose_by_gain(by_name[best], gains[best], f"{at_once} {best}")


class Tuning(Tuner):
    """Chooses draft configurations, and parameters of rules, from measurements that are made on first use.

    Args:
        target, eagle, text_encoder, draft, tokenizer: the models.
        calibrations: a directory with counts of tokens per round, read before the user's cache directory. Others as in
            `Tuner`.
    """

    def __init__(
        self,
        target: GPT,
        eagle: Eagle | None,
        device: torch.device,
        precision: Precision,
        compiled: bool,
        graphs: bool,
        text_encoder: TextEncoder | None = None,
        calibrations: Path | None = None,
        draft: GPT | None = None,
        tokenizer: VQModel | None = None,
    ) -> None:
        super().__init__(device, precision, compiled, graphs)
        self.target, self.eagle = target, eagle
        self.text_encoder = cast(TextEncoder, text_encoder)  # may be None: there are then no prompts
        self.draft, self.tokenizer = draft, tokenizer
        self._bundled = FileCache([calibrations] if calibrations else [])
        self._hashes: dict[str, str] = {}
        self._races: dict[Hashable, Race] = {}

    def race(self, key: Hashable, request: Request) -> Race:
        """The race between the draft and baseline sampling, for sequences of one key, such as the resolved request."""
        if key not in self._races:
            [config] = (each for each in (*JACOBI, *TREES) if request.but(**each) == request)
            [tokens] = self.tokens_per_round(request, [config]).values()
            remember(self._races, key, Race(tokens))
        return self._races[key]

    def _kind(self, request: Request, num_slots: int) -> tuple:
        return *super()._kind(request, num_slots), self._text_length(request)

    def _text_length(self, request: Request) -> int:
        """The length of a request's longer prompt, rounded up to TEXT_STEP; 0 for a class."""
        longest = 0
        for text in (request.prompt, request.negative_prompt):
            if text is not None:
                features = self.text_encoder.features(text, self.target.config.prefix_length, self.device)
                longest = max(longest, len(features))
        return math.ceil(longest / TEXT_STEP) * TEXT_STEP

    def _choose(self, request: Request, num_slots: int) -> Choice:
        """The fastest configuration on this device, and the reason."""
        # nothing is measured if the request leaves no choice
        by_name = {name_of(config): config for config in draft_configs(request, self.eagle is not None)}
        if len(by_name) == 1:
            [config] = by_name.values()
            return Choice(config, "as asked for")
        seconds = self.seconds(request, num_slots, by_name)
        return fastest(seconds, by_name, functools.partial(self.tokens_per_round, request), num_slots)

    def seconds(self, request: Request, num_slots: int, by_name: Mapping[str, DraftConfig]) -> dict[str, float]:
        """Seconds per round of each configuration, with `num_slots` sequences half-way through an image."""
        settings = {
            "schema": TIMES_SCHEMA,
            "models": [str(model and model.config) for model in (self.target, self.eagle)],
            "slots": num_slots,
            "text": self._text_length(request),
            "guided": request.guided,
            "greedy": request.temperature == 0,
            "filters": bool(request.top_k) or request.top_p < 1,
            "works": list(by_name),
        }

        def measure() -> Times:
            requests = {name: request.but(**config) for name, config in by_name.items()}
            measured = round_seconds(self._runner(num_slots), requests)
            typical = typical_seconds(measured)
            times = Times({name: np.array([[num_slots], [seconds]]) for name, seconds in typical.items()})
            times.unsteadiness = unsteadiness(measured.values())
            return times

        times = self.times(settings, measure, "timing this device, once")
        return {name: float(times.seconds(name, num_slots)) for name in by_name}

    def tokens_per_round(self, request: Request, some: list[DraftConfig]) -> dict[str, float]:
        """The mean of tokens per round of some configurations, for whole images at settings near the request's."""
        request = on_grid(request)
        tokens = {}
        missing = []
        for config in some:
            key = self._key(request, config)
            found = self._bundled.find(TokensPerRound, key) or self.cache.find(TokensPerRound, key)
            if found is None:
                missing.append(config)
            else:
                tokens[name_of(config)] = found.mean

        if missing:
            ask(begins=True)
        settings = ", ".join(f"{name}={getattr(request, name):g}" for name in SETTINGS)
        message = f"counting the tokens per round of this model, for the first time with {settings}"
        work = IMAGES * self.target.config.block_size * len(missing)
        with counting(f"{message} (stored in {user_cache()})", work) as advance:
            for config in missing:
                count = tokens_per_round(self._runner(IMAGES), request.but(**config), advance)
                self.cache.put(TokensPerRound(count), self._key(request, config))
                tokens[name_of(config)] = count
        return tokens

    def dial(self, request: Request) -> dict[str, object]:
        """The most relaxed parameter of a request's rule with a price within its budget; or the exact rule.

        Prices grow along the values of `DIALS`, so that few of them are measured.
        """
        name, values = DIALS[request.rule]

        def is_beyond(value: float) -> bool:
            return self.price(request.but(**{name: value})).divergence > request.budget

        count = bisect.bisect_left(values, True, key=is_beyond) if request.budget else 0
        return {name: values[count - 1]} if count else {"rule": "exact"}

    def price(self, request: Request) -> Price:
        """The price of a request's rule with its parameters, on a few whole images at settings near the request's."""
        request = on_grid(request)
        method = find(str(request.method), "VQ")
        models = ["target", *sorted(method.uses(request))]
        if rule_of(request).pools:  # its neighbours are those of the tokenizer's codebook
            models.append("tokenizer")
        key = {
            "schema": PRICES_SCHEMA,
            "precision": self.precision.policy,
            "weights": [self._hash(model) for model in models],
            "settings": {name: value for name, value in request.settings.items() if name != BUDGET.name},
        }

        def measure() -> Price:
            with telling(f"measuring the price of {request.rule} for this model, once"):
                stats = [sequence.stats for sequence in whole_images(self._runner(PRICED), method, request)]
            audits: list[Any] = [own.audit for own in stats]
            if None in audits:
                return Price(math.inf, math.inf)
            return Price(statistics.mean(audits), statistics.stdev(audits) / len(audits) ** 0.5)

        return self.cache.get(Price, key, measure)

    def _key(self, request: Request, config: DraftConfig) -> dict:
        """Everything that tokens per round depend on. Rounding is left out, so that one count serves all devices."""
        # only the weights that the configuration uses, by content, so that a copied file counts as the same
        models = ["target", *sorted(SPECULATIVE.uses(request.but(**config)))]
        return {
            "schema": COUNTS_SCHEMA,
            "precision": self.precision.policy,
            "weights": [self._hash(model) for model in models],
            **{name: getattr(request, name) for name in SETTINGS},
            "codes of": name_of(config),
        }

    def _runner(self, num_slots: int) -> VQRunner:
        """A separate model runner for measurements. Raises ValueError if it does not fit into memory."""
        needed = num_slots * bytes_per_slot(self.target, [self.eagle, self.draft], self.precision)
        free = free_bytes(self.device)
        if needed > free:
            raise ValueError(
                f"choosing a window needs {num_slots} more slots, about {needed / 2**30:.1f} GiB, but only"
                f" {free / 2**30:.1f} GiB are free on {self.device}: pass window=0 (baseline sampling) or a smaller"
                " max_batch"
            )
        return VQRunner(
            self.target,
            num_slots,
            self.device,
            self.precision,
            draft=self.draft,
            eagle=self.eagle,
            tokenizer=self.tokenizer,
            text_encoder=self.text_encoder,
            compiled=self.compiled,
            graphs=Graphs(self.device, self.graphs),
        )

    def _hash(self, name: str) -> str:
        if name not in self._hashes:
            self._hashes[name] = content_hash(getattr(self, name))
        return self._hashes[name]


@torch.inference_mode()
def round_seconds(
    runner: VQRunner,
    requests: Mapping[str, Request],
    turns: int = TURNS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times rounds of resolved requests, interleaved, with all slots half-way through an image.

    Args:
        turns: as in `cspd.device.in_turns`. clock: returns seconds.

    Returns:
        The seconds of each timed round, by the name of its request.
    """
    works = {}
    for name, request in requests.items():
        works[name] = functools.partial(_seconds_half_way, runner, request, clock)
    return in_turns(works, turns, clock)


def _seconds_half_way(runner: VQRunner, request: Request, clock: Callable[[], float]) -> float:
    # half-way, a round has the mean cost of attention; the tokens themselves do not matter
    sequences = _begun(runner, request)
    half = runner.seq_len // 2
    runner.num_committed.fill_(half)
    for sequence in sequences:
        sequence.num_committed = half
    return seconds_of(lambda: run_round(runner, sequences, Stopwatch(runner.device)), runner.device, clock)


@torch.inference_mode()
def tokens_per_round(runner: VQRunner, request: Request, advance: Advance = no_advance) -> float:
    """Mean tokens per round of whole images in all slots, with different seeds and classes.

    `advance` is called with the number of newly committed tokens.
    """
    sequences = whole_images(runner, SPECULATIVE, request, advance)
    return statistics.mean(runner.seq_len / sequence.stats.backbone_calls for sequence in sequences)


@torch.inference_mode()
def whole_images(runner: VQRunner, method: Method, request: Request, advance: Advance = no_advance) -> list[Sequence]:
    """Sequences of whole images in all slots, with different seeds and classes; `advance` as in `tokens_per_round`."""
    # every slot stays busy until its own image ends, so the last rounds have fewer sequences
    sequences = _begun(runner, request, method)
    running = list(sequences)
    done = 0
    while running:
        finished = set(method.run_round(runner, running, Stopwatch(runner.device)))
        running = [sequence for sequence in running if sequence not in finished]
        before = done
        done = sum(min(runner.seq_len, sequence.num_committed) for sequence in sequences)
        advance(done - before)
    return sequences


def _begun(runner: VQRunner, request: Request, method: Method = SPECULATIVE) -> list[Sequence]:
    """Starts a sequence of a resolved request in every slot."""
    runner.clear()
    sequences = []
    for slot in range(runner.num_slots):
        own = request.but(seed=slot, known=None)
        if runner.num_classes:  # classes differ between slots; a prompt is the same in all
            own = own.but(label=slot % runner.num_classes)
        sequences.append(Sequence(own, slot=slot, key=method.round_key(own), uses=method.uses(own)))
    runner.admit(sequences)
    return sequences


# The models of an engine, and whether they are compatible.

SHARED = "block_size", "vocab_size", "num_classes", "prefix_length", "caption_dim", "text_places", "row_end"


def check_draft(target: GPTConfig | HFConfig, draft: GPTConfig | HFConfig) -> None:
    """Raises ValueError if draft model and target have different tokens or conditions, by their configurations."""
    for name in SHARED:
        fix = "use a draft model for the same tokens"
        _check_equal("draft model", name, getattr(draft, name), getattr(target, name), fix)


def _check_equal(model: str, size: str, theirs: object, ours: object, fix: str) -> None:
    """Raises ValueError unless a size of a model equals the target's."""
    if theirs != ours:
        raise ValueError(f"{model} and target are incompatible: {size} is {theirs} and {ours}; {fix}")


@dataclass(frozen=True)
class VQModels:
    """The models that sample images from a transformer over VQ tokens.

    Attributes:
        target: the model whose images are generated; its authors' sampling settings are the defaults of requests.
        draft: a smaller model of the same tokens, which drafts chains.
        eagle: a drafter on the target's features, which drafts trees.
        tokenizer: decodes tokens to pixels. Without it outputs have tokens but no image, and LANTERN's rules, which
            pool near codebook entries, are not available.
        classes: the names of the target's classes.
        text_encoder: encodes prompts, for a text-to-image target.
        calibrations: a directory with counts of tokens per round, such as the checkpoint's own.
    """

    family: ClassVar[str] = VQRunner.family

    target: GPT
    draft: GPT | None = None
    eagle: Eagle | None = None
    tokenizer: VQModel | None = None
    classes: ClassNames = NO_NAMES
    text_encoder: TextEncoder | None = None
    calibrations: Path | None = None

    def runner(
        self,
        num_slots: int,
        device: torch.device,
        precision: Precision,
        noise: types.ModuleType,
        *,
        compiled: bool = False,
        graphs: Graphs | None = None,
        cache: Path | None = None,
    ) -> VQRunner:
        """A model runner of these models, which are on the device already; arguments as in `VQRunner`.

        Args:
            cache: replaces `calibrations`.

        Raises:
            ValueError: there is too little memory, or `compiled` is set for a `transformers` model.
        """
        if compiled and not isinstance(self.target, GPT):
            raise ValueError("compiled=True (--compile) works with LlamaGen and MAR models only: omit it")
        # checked before the caches are allocated
        fix = "use a smaller model or another device"
        weights = sum(precision.bytes_to_copy(model) for model in (self.target, self.draft, self.eagle))
        encoder = self.text_encoder.bytes_to_load if self.text_encoder is not None else 0
        per_slot = bytes_per_slot(self.target, (self.draft, self.eagle), precision)
        check_fits(per_slot, num_slots, " with its key-value caches", fix, device, weights + encoder)
        tuning = Tuning(
            self.target,
            self.eagle,
            device,
            precision,
            compiled,
            graphs is not None and graphs.enabled,
            self.text_encoder,
            cache or self.calibrations,
            self.draft,
            self.tokenizer,
        )
        return VQRunner(
            self.target,
            num_slots,
            device,
            precision,
            noise,
            draft=self.draft,
            eagle=self.eagle,
            tokenizer=self.tokenizer,
            text_encoder=self.text_encoder,
            tuning=tuning,
            compiled=compiled,
            graphs=graphs,
        )

    def check(self) -> None:
        """Raises ValueError if draft, drafter, tokenizer or text encoder are incompatible with the target."""
        config = self.target.config
        if self.draft is not None:
            check_draft(config, self.draft.config)
        if self.eagle is not None:
            for name in ("dim", "n_head", "block_size"):
                theirs = getattr(self.eagle.config, name)
                fix = "use the drafter that was trained on this target"
                _check_equal("EAGLE drafter", name, theirs, getattr(config, name), fix)
        fix = "use the one that the target was trained on"
        if self.tokenizer is not None:
            theirs = self.tokenizer.config.codebook_size
            _check_equal("tokenizer", "the number of codes", theirs, config.vocab_size, fix)
        if self.text_encoder is not None:
            width = self.text_encoder.width
            _check_equal("text encoder", "the number of channels", width, config.caption_dim, fix)


def _named_by(request: Request) -> str | None:
    """The method `sd` if a request names a draft, since it takes any draft.

    `uniform-rsd` if it has a budget only: of the rules on EAGLE's tree it gained most for its price.
    """
    if isinstance(request.draft, str) and request.draft in DRAFTS:
        return SD.name
    return None if request.budget is None else UNIFORM_RSD.name


register_family(
    VQModels.family,
    [AR, SPECULATIVE, SD, EAGLE, EAGLE2, UNIFORM_RSD, COOL_SD, LANTERN, LANTERN_PLUS, SJD, MC_SJD, SJD_PAC, GSD, ZIPAR],
    named_by=_named_by,
    searched="""
        speculative sd:gamma=3 sd:gamma=5 eagle eagle2
        sjd mc-sjd sjd-pac gsd
        uniform-rsd cool-sd:delta=1.1 cool-sd:delta=1.5 lantern lantern++
    """,
    windows="sjd:window=8 sjd:window=16 sjd:window=32 sjd-pac:window=16 sjd-pac:window=32",
)
