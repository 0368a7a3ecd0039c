"""What VQ models draft where nobody says: the fastest way, by what a round takes here and how many codes it commits.

What a round takes depends on the machine, on the shapes of the models and of the batch, and on how much is drafted; how
many codes it commits, on the weights and the sampling settings. Both are measured on first use, with random and with
real codes, and kept in the user's cache folder; of the embedded models, codes at their usual settings come with them.
All ways make the images of `ar`: the choice decides how long they take and nothing else.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cspd.choosing import PLAIN, Choice, Chooser, Way, is_enough, judged
from cspd.discrete.grid import SETTINGS, on_grid
from cspd.discrete.host import VQHost
from cspd.discrete.memory import bytes_per_slot
from cspd.discrete.speculative import DECIDED, METHOD, run_round
from cspd.graphs import Graphs
from cspd.keeping import content_hash, keep, measured_before, measured_once, of_device, user_cache
from cspd.machine import free_bytes
from cspd.precision import Precision, Stopwatch
from cspd.sequence import Request, Sequence
from cspd.telling import Advance, counting, no_advance
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT
from cspd.vq.text import TextEncoder

SCHEMA = "cspd.vq-costs/1"
MOST_CODES = 6.0  # that a round may commit on the average: 4.3 was the most that was ever measured
LARGEST = 1e9
REPEATS = 12  # of a round that is timed
LONG = 0.1  # seconds of a round, of which once is enough
IMAGES = 4  # whose rounds are counted
TEXT_STEP = 32  # tokens of a text, between lengths that are timed apart

JACOBI: list[Way] = [{"draft": "jacobi", "window": window} for window in (4, 8, 16, 32, 64)]
TREES: list[Way] = [
    {"draft": "eagle-dynamic", "gamma": gamma, "window": window}
    for gamma, window in ((2, 6), (3, 12), (4, 24), (6, 60))  # the last one is EAGLE-2's own
]


def name_of(way: Way) -> str:
    """As it is written after a method's name: "draft=jacobi:window=16"."""
    return ":".join(f"{name}={value}" for name, value in way.items())


def ways(request: Request, has_drafter: bool) -> list[Way]:
    """What a request that leaves something open may do, as far as it says; plain sampling first, if that."""
    given = {name: value for name in DECIDED if (value := getattr(request, name)) is not None}
    if given.get("window") == 0:
        return [{}]
    drafting = [*JACOBI, *(TREES if has_drafter else [])]
    if not given:
        return [PLAIN, *drafting]
    fitting = {name_of(way | given): way | given for way in map(dict, drafting) if _goes_with(way, given)}
    return list(fitting.values())


def _goes_with(way: Way, given: Mapping[str, object]) -> bool:
    return given.get("draft", way["draft"]) == way["draft"]


def farthest(way: Way) -> float:
    """The most codes that a round might commit on the average."""
    return min(MOST_CODES, 1.0 + way.get("gamma", way["window"]))


@dataclass(frozen=True)
class Rounds:
    """Of ways, by their names: seconds of a round, or codes that it commits."""

    values: dict[str, float]

    def check(self) -> None:
        """Raises ValueError where they are not what was measured."""
        values = self.values.values() if isinstance(self.values, dict) else [None]
        if not all(isinstance(value, float) and 0 < value < LARGEST for value in values):
            raise ValueError(f"values are no numbers in 0..{LARGEST:g}")


def fastest(
    seconds: Mapping[str, float],
    by_name: Mapping[str, Way],
    count: Callable[[list[Way]], Mapping[str, float]],
    num_slots: int,
) -> Choice:
    """The way that is fastest, or plain sampling if that is one of the ways and the others gain too little; and why.

    Args:
        seconds: of a round of each way, by name. count: tells how many codes a round commits by some ways, by name; it
            is asked only of those that may be worth it.
    """
    at_once = f"with {num_slots} image{'s' if num_slots > 1 else ''} at once"
    drafting = {name: way for name, way in by_name.items() if way is not PLAIN}
    plain = seconds.get(name_of(PLAIN))
    if plain is None:
        codes = count(list(drafting.values()))
        best = min(codes, key=lambda name: seconds[name] / codes[name])
        return Choice(by_name[best], f"{at_once} {best} is predicted to be the fastest way to draft")
    most = {name: plain * farthest(way) / seconds[name] for name, way in drafting.items()}
    promising = [way for name, way in drafting.items() if is_enough(most[name])]
    if not promising:
        best = max(most, key=most.__getitem__)
        return judged(by_name[best], most[best], f"{at_once} {best}", at_best=True)
    gains = {name: plain * codes / seconds[name] for name, codes in count(promising).items()}
    best = max(gains, key=gains.__getitem__)
    return judged(by_name[best], gains[best], f"{at_once} {best}")


class Tuning(Chooser):
    """Chooses, by measurements that are each made on first use.

    Args:
        target, eagle, text_encoder: the models. device, precision, compiled, graphs: how they run.
        calibrations: a folder where counts of codes are looked for before the user's cache folder.
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
    ) -> None:
        super().__init__()
        self.target, self.eagle, self.text_encoder = target, eagle, text_encoder
        self.device, self.precision, self.compiled, self.graphs = device, precision, compiled, graphs
        self._calibrations = calibrations
        self._hashes: dict[str, str] = {}

    def _kind(self, request: Request, num_slots: int) -> Hashable:
        return *super()._kind(request, num_slots), self._text_length(request)

    def _text_length(self, request: Request) -> int:
        """Tokens of a request's longer text, in steps; 0 of a class."""
        texts = [text for text in (request.prompt, request.negative_prompt) if text is not None]
        most = self.target.config.prefix_length
        lengths = [len(self.text_encoder.features(text, most, self.device)) for text in texts]
        return -(-max(lengths, default=0) // TEXT_STEP) * TEXT_STEP

    def _choose(self, request: Request, num_slots: int) -> Choice:
        """The way that is fastest on this device, and why."""
        by_name = {name_of(way): way for way in ways(request, self.eagle is not None)}
        if len(by_name) == 1:
            return Choice(*by_name.values(), "as asked for")
        seconds = self.seconds(request, num_slots, by_name)
        return fastest(seconds, by_name, functools.partial(self.codes, request), num_slots)

    def seconds(self, request: Request, num_slots: int, by_name: Mapping[str, Way]) -> dict[str, float]:
        """Of a round of so many sequences by each way, half-way through an image."""
        key = {
            "schema": SCHEMA,
            **of_device(self.device),
            "precision": self.precision.policy,
            "compiled": self.compiled,
            "graphs": self.graphs,
            "models": [str(model and model.config) for model in (self.target, self.eagle)],
            "slots": num_slots,
            "text": self._text_length(request),
            "guided": request.guided,
            "greedy": request.temperature == 0,
            "filters": bool(request.top_k) or request.top_p < 1,
            "seconds of": list(by_name),
        }

        def measure() -> Rounds:
            requests = {name: request.but(**way) for name, way in by_name.items()}
            times = round_seconds(self._host(num_slots), requests, long=LONG)
            return Rounds({name: min(own) for name, own in times.items()})

        return measured_once(Rounds, key, measure, "timing this device, once", user_cache()).values

    def codes(self, request: Request, some: list[Way]) -> dict[str, float]:
        """Codes that a round commits on the average by some ways, of whole images by settings near a request's."""
        request = on_grid(request)
        keys = {name_of(way): self._key(request, way) for way in some}
        folders = [folder for folder in (self._calibrations, user_cache()) if folder]
        known = {name: measured_before(Rounds, key, folders) for name, key in keys.items()}
        missing = [way for way in some if known[name_of(way)] is None]
        settings = ", ".join(f"{name}={getattr(request, name):g}" for name in SETTINGS)
        told = f"counting the codes that a round of this model commits, for the first time with {settings}"
        work = IMAGES * self.target.config.block_size * len(missing)
        with counting(f"{told} (kept in {user_cache()})", work) as advance:
            for way in missing:
                name = name_of(way)
                found = Rounds({"codes": codes_a_round(self._host(IMAGES), request.but(**way), advance)})
                keep(keys[name], found, user_cache())
                known[name] = found
        return {name: found.values["codes"] for name, found in known.items() if found is not None}

    def _key(self, request: Request, way: Way) -> dict:
        """All that codes of rounds depend on. What else a device changes is rounding."""
        models = ["target", *sorted(METHOD.uses(request.but(**way)))]
        return {
            "schema": SCHEMA,
            "precision": self.precision.policy,
            "weights": [self._hash(model) for model in models],
            **{name: getattr(request, name) for name in SETTINGS},
            "codes of": name_of(way),
        }

    def _host(self, num_slots: int) -> VQHost:
        """A host of its own, beside whatever runs. Raises ValueError where it does not fit into memory."""
        needed = num_slots * bytes_per_slot(self.target, [self.eagle], self.precision)
        free = free_bytes(self.device)
        if needed > free:
            raise ValueError(
                f"choosing how far to draft takes {num_slots} slots more, about {needed / 2**30:.1f} GiB, and there are"
                f" {free / 2**30:.1f} GiB free on {self.device}: give window=0 (plain sampling) or a smaller max_batch"
            )
        graphs = Graphs(self.device, self.graphs)
        how = {"eagle": self.eagle, "text_encoder": self.text_encoder, "compiled": self.compiled, "graphs": graphs}
        return VQHost(self.target, num_slots, self.device, self.precision, **how)

    def _hash(self, name: str) -> str:
        if name not in self._hashes:
            self._hashes[name] = content_hash(getattr(self, name))
        return self._hashes[name]


@torch.inference_mode()
def round_seconds(
    host: VQHost,
    requests: Mapping[str, Request],
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
    long: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of rounds of all slots by each of some resolved requests, half-way through an image, in turn.

    Args:
        clock: tells seconds. long: of a round that takes so many, one is enough: noise matters where times are short.
    """
    times: dict[str, list[float]] = {name: [] for name in requests}
    for _ in range(1 + repeats):  # the first warms up
        for name, request in requests.items():
            if max(times[name][1:], default=0.0) < long:
                times[name].append(_seconds_half_way(host, _begun(host, request), clock))
    return {name: own[1:] for name, own in times.items()}


def _seconds_half_way(host: VQHost, sequences: list[Sequence], clock: Callable[[], float]) -> float:
    half = host.seq_len // 2
    host.known.fill_(half)
    for sequence in sequences:
        sequence.num_committed = half
    _synchronize(host.device)
    start = clock()
    run_round(host, sequences, Stopwatch(host.device))
    _synchronize(host.device)
    return clock() - start


@torch.inference_mode()
def codes_a_round(host: VQHost, request: Request, advance: Advance = no_advance) -> float:
    """Codes that a round commits, the mean of whole images in all slots, of different seeds and classes.

    `advance` is told how many more are committed.
    """
    sequences = _begun(host, request)
    running = list(sequences)
    num_known = 0
    while running:
        finished = set(run_round(host, running, Stopwatch(host.device)))
        before, num_known = num_known, sum(min(host.seq_len, sequence.num_committed) for sequence in sequences)
        advance(num_known - before)
        running = [sequence for sequence in running if sequence not in finished]
    return statistics.mean(host.seq_len / sequence.stats.backbone_calls for sequence in sequences)


def _begun(host: VQHost, request: Request) -> list[Sequence]:
    """A sequence of a resolved request in every slot, about to run."""
    host.clear()
    sequences = []
    for slot in range(host.num_slots):
        own = request.but(seed=slot, known=None)
        if host.num_classes:  # a text is the same in all of them
            own = own.but(label=slot % host.num_classes)
        sequences.append(Sequence(own, slot=slot, key=METHOD.round_key(own), uses=METHOD.uses(own)))
    host.admit(sequences)
    return sequences


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
