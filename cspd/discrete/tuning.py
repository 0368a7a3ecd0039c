"""What VQ models draft where nobody says: the fastest way, by what a round takes here and how many codes it commits.

What a round takes depends on the machine, on the shapes of the models and of the batch, and on how much is drafted; how
many codes it commits, on the weights and the sampling settings. Both are measured on first use, with random and with
real codes, and kept in the user's cache folder. All ways make the images of `ar`: the choice decides how long they take
and nothing else.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cspd.discrete.grid import SETTINGS, on_grid
from cspd.discrete.host import VQHost
from cspd.discrete.memory import bytes_per_slot
from cspd.discrete.speculative import DECIDED, METHOD, run_round
from cspd.graphs import Graphs
from cspd.keeping import content_hash, measured_once, of_device, remember, user_cache
from cspd.machine import free_bytes
from cspd.precision import Precision, Stopwatch
from cspd.sequence import Request, Sequence
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT
from cspd.vq.text import TextEncoder

SCHEMA = "cspd.vq-costs/1"
GAIN = 0.7  # drafts only if the predicted time is below this share of plain sampling's, as in MAR's head
MOST_CODES = 6.0  # that a round may commit on the average: 4.3 was the most that was ever measured
LARGEST = 1e9
REPEATS = 12  # of a round that is timed
LONG = 0.1  # seconds of a round, of which once is enough
IMAGES = 4  # whose rounds are counted
TEXT_STEP = 32  # tokens of a text, between lengths that are timed apart

Way = Mapping[str, Any]  # settings of a request: how it drafts
PLAIN: Way = {"window": 0}
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


class Choice(NamedTuple):
    """The way that is taken, and how many times as fast as plain sampling each one is predicted to be, by its name."""

    way: Way
    gains: dict[str, float]


def fastest(seconds: Mapping[str, float], codes: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """The name of the way that is fastest, and the ways' gains over plain sampling.

    Args:
        seconds: of a round of each way. codes: that it commits, of those that may be worth it; plain sampling, if that
            is one of the ways, must be beaten by `GAIN`.
    """
    per_code = {name: seconds[name] / codes[name] for name in codes}
    plain = seconds.get(name_of(PLAIN))
    gains = {name: plain / spent for name, spent in per_code.items()} if plain else {}
    best = min(per_code, key=per_code.__getitem__) if per_code else name_of(PLAIN)
    if plain and per_code and per_code[best] >= GAIN * plain:
        best = name_of(PLAIN)
    return best, gains


class Tuning:
    """Chooses, by measurements that are each made on first use.

    Args:
        target, eagle, text_encoder: the models. device, precision, compiled, graphs: how they run.
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
    ) -> None:
        self.target, self.eagle, self.text_encoder = target, eagle, text_encoder
        self.device, self.precision, self.compiled, self.graphs = device, precision, compiled, graphs
        self._choices: dict[tuple[Request, int], Choice] = {}
        self._hashes: dict[str, str] = {}

    def choice(self, request: Request, num_slots: int) -> Choice:
        """The fastest way for what is known of a checked request and the engine, whatever else is in flight."""
        kind = self._kind(request, num_slots)
        if kind not in self._choices:
            remember(self._choices, kind, self._choose(request, num_slots))
        return self._choices[kind]

    def why(self, asked: Request, window: int, num_slots: int) -> str:
        """What to tell of the window that a checked request runs with."""
        choice = self._choices.get(self._kind(asked, num_slots))
        if asked.window is not None or choice is None:
            return "as asked for" if asked.window is not None else "as the run began that this one went on from"
        best = max(choice.gains, key=choice.gains.__getitem__, default=None)
        predicted = f"; {best}: {choice.gains[best]:.2f} times as fast is predicted" if best else ""
        if window:
            return f"the fastest here with {num_slots} slots{predicted}"
        return f"nothing was drafted: on this device, with {num_slots} slots, it would hardly be faster{predicted}"

    def _kind(self, request: Request, num_slots: int) -> tuple[Request, int, int]:
        """What a choice depends on."""
        alike = request.but(label=None, prompt=None, negative_prompt=None, seed=0, known=None)
        return alike, num_slots, self._text_length(request)

    def _text_length(self, request: Request) -> int:
        """Tokens of a request's longer text, in steps; 0 of a class."""
        texts = [text for text in (request.prompt, request.negative_prompt) if text is not None]
        most = self.target.config.prefix_length
        lengths = [len(self.text_encoder.features(text, most, self.device)) for text in texts]
        return -(-max(lengths, default=0) // TEXT_STEP) * TEXT_STEP

    def _choose(self, request: Request, num_slots: int) -> Choice:
        by_name = {name_of(way): way for way in ways(request, self.eagle is not None)}
        if len(by_name) == 1:
            return Choice(*by_name.values(), {})
        seconds = self.seconds(request, num_slots, by_name)
        plain = seconds.get(name_of(PLAIN), LARGEST)
        promising = [
            name for name, way in by_name.items() if way is not PLAIN and seconds[name] < GAIN * plain * farthest(way)
        ]
        codes = {name: self.codes(request, by_name[name]) for name in promising}
        best, gains = fastest(seconds, codes)
        return Choice(by_name[best], gains)

    def seconds(self, request: Request, num_slots: int, by_name: Mapping[str, Way]) -> dict[str, float]:
        """Of a round of so many sequences by each way, half-way through an image."""
        key = {
            "schema": SCHEMA,
            **of_device(self.device),
            **self._how(),
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

    def codes(self, request: Request, way: Way) -> float:
        """Codes that a round commits on the average, of whole images by settings near a request's."""
        request = on_grid(request)
        models = ["target", *sorted(METHOD.uses(request.but(**way)))]
        key = {
            "schema": SCHEMA,
            **self._how(),
            "weights": [self._hash(model) for model in models],
            **{name: getattr(request, name) for name in SETTINGS},
            "codes of": name_of(way),
        }

        def measure() -> Rounds:
            return Rounds({"codes": codes_a_round(self._host(IMAGES), request.but(**way))})

        what = f"counting the codes of rounds, once ({name_of(way)})"
        return measured_once(Rounds, key, measure, what, user_cache()).values["codes"]

    def _how(self) -> dict:
        return {"precision": self.precision.policy, "compiled": self.compiled, "graphs": self.graphs}

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
def codes_a_round(host: VQHost, request: Request) -> float:
    """Codes that a round commits, the mean of whole images in all slots, of different seeds and classes."""
    sequences = _begun(host, request)
    running = list(sequences)
    while running:
        finished = set(run_round(host, running, Stopwatch(host.device)))
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
