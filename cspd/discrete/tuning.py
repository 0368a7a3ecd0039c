"""The tuner of VQ models: it chooses draft configurations, and parameters of rules, by what it measures once."""

from __future__ import annotations

import bisect
import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cspd.device import Precision, free_bytes, seconds_of
from cspd.discrete.fastest_draft import DRAFTING, SPECULATIVE, Race, run_round
from cspd.discrete.kv_cache import bytes_per_slot
from cspd.discrete.rules import DIALS, rule_of
from cspd.discrete.runner import VQRunner
from cspd.files import FileCache, content_hash, remember, user_cache
from cspd.graphs import Graphs
from cspd.heads.calibration import Price
from cspd.method import Method, find
from cspd.option import BUDGET
from cspd.request import Request, Sequence, Stopwatch
from cspd.terminal import Advance, ask, counting, no_advance, telling
from cspd.tuner import PLAIN, Choice, DraftConfig, Times, Tuner, choose_by_gain, in_turns, is_enough, unsteadiness

# The choice of a draft configuration: the one with the fewest seconds per committed token.
#
# Seconds per round depend on the machine, on the shapes of the models and of the batch, and on the configuration.
# Tokens per round depend on the weights and the sampling settings. Both are measured on first use and stored in the
# user's cache directory; the bundled models come with counts at their usual settings. All configurations generate the
# images of `ar`: the choice decides only how long they take.

COUNTS_SCHEMA, PRICES_SCHEMA, TIMES_SCHEMA = "cspd.vq-counts/1", "cspd.vq-prices/2", "cspd.vq-times/1"
MOST_CODES = 6.0  # the largest plausible mean of tokens per round: the largest ever measured is 4.3
TURNS = 12  # how often a round is timed
IMAGES = 4  # images that are generated to count tokens per round
PRICED = 8  # images that are generated to measure the price of a rule
TEXT_STEP = 32  # prompts are timed at lengths that are multiples of this


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


# Draft configurations, and the fastest of them.

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
    given = {name: getattr(request, name) for name in DRAFTING if getattr(request, name) is not None}
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
        if not 0 < self.mean < math.inf:
            raise ValueError(f"expected a finite number of tokens per round above 0, got {self.mean}")


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


class DraftTuner(Tuner):
    """Chooses draft configurations, and parameters of rules, from measurements that are made on first use.

    Args:
        models: of an engine, see `cspd.discrete.family.VQModels`. calibrations: a directory with counts of tokens per
            round, read before the user's cache directory. Others as in `Tuner`.
    """

    def __init__(
        self,
        models: Any,
        precision: Precision,
        compiled: bool,
        graphs: bool,
        calibrations: Path | None,
    ) -> None:
        super().__init__(precision, compiled, graphs)
        self.models = models
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
                features = self.models.text_encoder.features(text, self.models.target.config.prefix_length, self.device)
                longest = max(longest, len(features))
        return math.ceil(longest / TEXT_STEP) * TEXT_STEP

    def _choose(self, request: Request, num_slots: int) -> Choice:
        """The fastest configuration on this device, and the reason."""
        # nothing is measured if the request leaves no choice
        by_name = {name_of(config): config for config in draft_configs(request, self.models.eagle is not None)}
        if len(by_name) == 1:
            [config] = by_name.values()
            return Choice(config, "as asked for")
        seconds = self.seconds(request, num_slots, by_name)
        return fastest(seconds, by_name, functools.partial(self.tokens_per_round, request), num_slots)

    def seconds(self, request: Request, num_slots: int, by_name: Mapping[str, DraftConfig]) -> dict[str, float]:
        """Seconds per round of each configuration, with `num_slots` sequences half-way through an image."""
        settings = {
            "schema": TIMES_SCHEMA,
            "models": [str(model and model.config) for model in (self.models.target, self.models.eagle)],
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
        work = IMAGES * self.models.target.config.block_size * len(missing)
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
        needed = num_slots * bytes_per_slot(self.models.target, [self.models.eagle, self.models.draft], self.precision)
        free = free_bytes(self.device)
        if needed > free:
            raise ValueError(
                f"choosing a window needs {num_slots} more slots, about {needed / 2**30:.1f} GiB, but only"
                f" {free / 2**30:.1f} GiB are free on {self.device}: pass window=0 (baseline sampling) or a smaller"
                " max_batch"
            )
        graphs = Graphs(self.device, self.graphs)
        return VQRunner(self.models, num_slots, self.precision, compiled=self.compiled, graphs=graphs)

    def _hash(self, name: str) -> str:
        if name not in self._hashes:
            self._hashes[name] = content_hash(getattr(self.models, name))
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
        turns: as in `cspd.tuner.in_turns`. clock: returns seconds.

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
    sequences = []
    shared: dict = {}
    for slot in range(runner.num_slots):
        own = request.but(seed=slot, known=None)
        if runner.num_classes:  # classes differ between slots; a prompt is the same in all
            own = own.but(label=slot % runner.num_classes)
        key, uses = method.round_key(own), method.uses(own)
        sequences.append(Sequence(own, slot=slot, key=key, uses=uses, shared=shared))
    runner.admit(sequences)
    return sequences
