"""Requests, running sequences, and outputs with their statistics."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from cspd.inpainting import Inpainting
from cspd.option import LARGEST_INTEGER, check_integer, check_seed, method_now, option_names, plain
from cspd.pixels import png_of, png_text, to_pil
from cspd.terminal import choice, shortened

CLASS_NAMES = ("class_labels", "class_label", "classes", "labels", "label")  # as other libraries and our functions say
PHASES = ("backbone", "head", "draft", "decode", "other")
Label = int | str | None  # a class by number or name; None: unconditional


@dataclass(frozen=True, init=False, repr=False)
class Request:
    """A request for one image.

    Settings are given as arguments and read as attributes: `Request(3, cfg=2.0).cfg`; a setting that was not given is
    None. Numbers of numpy and torch become Python numbers. The engine checks the values.

    Attributes:
        label: class, 0 .. number of classes - 1, or its name; None: an unconditional image.
        prompt: the prompt of a text-to-image model, in place of a label.
        negative_prompt: the text that guidance steers away from, in place of the model's null caption.
        seed: the seed of all random numbers of this image, 0 .. 2^63 - 1.
        method: name of the method, see `cspd methods`; default: `speculative`.
        family: "MAR", "VQ" or "causal"; default: the first family of the engine that has the method.
        settings: the given settings by name: `num_iter`, `cfg`, `temperature` and the method's options
            (docs/reference.md). The others take the model's or the method's default.
        known: the given part of the image, see `Inpainting`; usually given as `image` and `mask`.

    Raises:
        TypeError: unknown setting.
        ValueError, OSError: as in `Inpainting.of`.
    """

    label: Label = None
    seed: int = 0
    method: str | None = None
    family: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    known: Inpainting | None = None
    prompt: str | None = None
    negative_prompt: str | None = None

    def __init__(
        self,
        label: Label = None,
        seed: int = 0,
        method: str | None = None,
        *,
        family: str | None = None,
        settings: Mapping[str, object] | None = None,
        image: Any = None,
        mask: Any = None,
        known: Inpainting | None = None,
        prompt: str | None = None,
        negative_prompt: str | None = None,
        **more: object,
    ) -> None:
        if image is not None or mask is not None:
            if image is None and known is not None:
                image = known.image
            known = Inpainting.of(image, mask)
        given = {**(settings or {}), **more}
        valid = option_names()
        own_settings = {}
        for name in sorted(given):
            if name not in valid:
                remedy = choice(name, sorted(valid))
                if name in CLASS_NAMES:
                    remedy = "the class is labels=.. of sample(), label=.. of Request(), and the prompt over HTTP"
                raise TypeError(f"a request has no setting {shortened(name)}: {remedy}")
            if given[name] is not None:
                own_settings[name] = plain(given[name])
        fields = {
            "label": plain(label),
            "seed": plain(seed),
            "method": method_now(plain(method)),
            "family": plain(family),
            "settings": own_settings,
            "known": known,
            "prompt": prompt,
            "negative_prompt": negative_prompt,
        }
        # The dataclass is frozen: requests are keys of caches, and are shared between threads.
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Called for names that are not fields: an option that was not given is None.
        if name in option_names():
            return self.settings.get(name)
        raise AttributeError(f"a request has no attribute {name!r}")

    def __hash__(self) -> int:
        # The hash that a dataclass generates would fail on the dictionary of settings.
        fields = self._named().values()
        return hash((*fields, self.known, *self.settings.items()))

    def __repr__(self) -> str:
        fields = {**self._named(), **self.settings, "known": self.known}
        always = "label" if self.prompt is None else "prompt"
        shown = []
        for name, value in fields.items():
            if value is not None or name == always:
                shown.append(f"{name}={value!r}")
        return f"Request({', '.join(shown)})"

    def but(self, **changes: Any) -> Request:
        """The request with changed settings; None takes the default."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict:
        """All settings as plain values; None for those that were not given."""
        settings = {name: self.settings.get(name) for name in sorted(option_names())}
        known = None if self.known is None else self.known.name
        return self._named() | settings | {"known": known}

    def _named(self) -> dict:
        """All fields but the settings and the given part of the image."""
        names = ("label", "prompt", "negative_prompt", "seed", "method", "family")
        return {name: getattr(self, name) for name in names}

    def settings_alone(self) -> Request:
        """The request without seed, class, prompt and given image: equal for requests that differ in these only."""
        return self.but(seed=0, label=None, prompt=None, negative_prompt=None, known=None)

    def num_generated(self, seq_len: int) -> int:
        """The number of tokens that a resolved request generates: all but the given ones."""
        return seq_len if self.known is None else self.known.num_generated

    @property
    def guided(self) -> bool:
        """Whether the unconditional branch is evaluated too."""
        return self.cfg != 1


def is_several(value: object) -> bool:
    """Whether an argument lists labels, prompts or seeds: any iterable but a text."""
    return isinstance(plain(value), Iterable) and not isinstance(value, str)


def requests_of(
    labels: Label | Iterable[Label],
    prompts: str | Iterable[str] | None,
    seed: int | Iterable[int],
    num: int | None,
    method: str | None,
    settings: Mapping[str, Any],
) -> list[Request]:
    """Requests for labels, or for prompts if prompts are given, as `Engine.sample` describes them.

    Raises ValueError if a seed is not an integer in 0..2**63 - 1, or if the numbers of seeds and images differ.
    """
    asked: Any = labels if prompts is None else prompts
    conditions = list(plain(asked)) if is_several(asked) else [plain(asked)]
    seeds: list = list(plain(seed)) if is_several(seed) else []  # type: ignore[arg-type]
    if num is not None:
        num = plain(num)
        check_integer("num", num, 1, LARGEST_INTEGER, "it is the number of images")
    elif len(conditions) == 1 and seeds:
        num = len(seeds)
    else:
        num = len(conditions)
    if not is_several(seed):
        first = plain(seed)
        check_seed(first)
        seeds = [first + i for i in range(num)]
    if len(seeds) != num:
        raise ValueError(f"seed has {len(seeds)} numbers for {num} images: give one for each image, or the first one")
    if num and not conditions:
        raise ValueError(f"num={num} is invalid: there are no labels or prompts: give at least one")
    requests = []
    for i, each_seed in enumerate(seeds):
        each = conditions[i % len(conditions)]
        condition: dict[str, Any] = {"label": each}
        if prompts is not None:  # a label next to prompts stays in the request: checking it names the mistake
            condition = {"label": labels, "prompt": each}
        requests.append(Request(**condition, seed=each_seed, method=method, **settings))
    return requests


def _no_drafts() -> list[list[int]]:
    """The numbers of verified and of accepted drafts, before any."""
    return [[], []]


def _no_seconds() -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0)


@dataclass(repr=False)
class RoundStats:
    """The cost of a request. A call on a batch counts once for every request in the batch.

    As a text it is the four lines that matter most; `to_dict` has everything.

    Attributes:
        guarantee: guarantee of the request, a key of `cspd.method.GUARANTEES`.
        iterations: autoregressive iterations; a round of draft and verification is one.
        backbone_calls: forward passes of the target's backbone; both guidance branches are one pass.
        lazy_backbone_calls: those of `backbone_calls` in which a cached backbone computed only a part.
        head_calls: sequential calls of the target's head; for a cached head, the calls that evaluate its blocks.
        head_calls_per_token: mean number of calls in the chain of one token.
        head_evaluations: rows of this request that the head was evaluated on, both guidance branches counted.
        draft_backbone_calls, draft_head_calls: the same counts for the draft model.
        by_lag: numbers of verified and of accepted drafts by draft position (1 = next after the anchor).
        by_step: for drafted chain states, the same by denoising step.
        by_rank: for drafted tokens, the same by index in the generation order.
        committed: number of rounds by the number of VQ tokens that they committed.
        bound: sum of the rule's local bounds. Its mean over requests is an upper bound on the total variation distance
            between this method's and the target's distribution of an image's tokens. Also 0 for heuristic methods,
            which have no bound.
        difference: for a measured denoiser, the r.m.s. difference between its tokens and those of the full chain, on
            held-out tokens with the same z and noise, in standard deviations of a token's channels; otherwise None.
            The effect of another backbone or order is not included.
        difference_error: its standard error, by the differences between images.
        difference_worst_percent, difference_worst: the r.m.s. difference of a single token that 1 % of them reach, and
            the largest.
        divergence, divergence_error: for a measured denoiser, the KL divergence of the sampler's path from the full
            chain, on some of these tokens, in nats per token, and its standard error; None at temperature 0, where
            both are infinite.
        audit, audit_error: an estimate of `divergence` on this image's own tokens and its standard error, if the
            request asks for it; of a VQ request with a relaxed rule, of the KL divergence of its tokens' distributions
            from the target's. None if not finite.
        resample_tries: residual candidates that were tested.
        fallbacks: how often all candidates were rejected, so that the last one was taken.
        seconds: wall time of the rounds by phase; every sequence of a round is charged its full time. "decode" is the
            time of the images that finished together; on a GPU it overlaps other rounds.
    """

    guarantee: str = "exact"
    iterations: int = 0
    backbone_calls: int = 0
    lazy_backbone_calls: int = 0
    head_calls: int = 0
    head_calls_per_token: float = 0.0
    head_evaluations: int = 0
    draft_backbone_calls: int = 0
    draft_head_calls: int = 0
    by_lag: list[list[int]] = field(default_factory=_no_drafts)
    by_step: list[list[int]] = field(default_factory=_no_drafts)
    by_rank: list[list[int]] = field(default_factory=_no_drafts)
    committed: dict[int, int] = field(default_factory=dict)
    bound: float = 0.0
    difference: float | None = None
    difference_error: float | None = None
    difference_worst_percent: float | None = None
    difference_worst: float | None = None
    divergence: float | None = None
    divergence_error: float | None = None
    audit: float | None = None
    audit_error: float | None = None
    resample_tries: int = 0
    fallbacks: int = 0
    seconds: dict[str, float] = field(default_factory=_no_seconds)

    @property
    def alpha(self) -> float | None:
        """Acceptance rate: accepted / verified drafts; None if no draft was verified."""
        # Accepted over verified drafts; vLLM's rate divides by all drafted ones.
        verified, accepted = map(sum, self.by_lag)
        return accepted / verified if verified else None

    @property
    def step_compression(self) -> float | None:
        """VQ tokens per forward pass of the target; None for MAR."""
        if not self.committed:
            return None
        num_tokens = 0
        for num_committed, rounds in self.committed.items():
            num_tokens += num_committed * rounds
        return num_tokens / self.backbone_calls

    def to_dict(self) -> dict:
        return asdict(self) | {"alpha": self.alpha, "step_compression": self.step_compression}

    def __repr__(self) -> str:
        return (
            f"guarantee: {self.guarantee}\ncalls: {self._calls()}\ndrafts: {self._drafts()}\nseconds: {self._times()}"
        )

    def _calls(self) -> str:
        if self.step_compression is not None:
            return f"{self.backbone_calls} target forward passes, {self.step_compression:.2f} tokens each"
        lazy = f" ({self.lazy_backbone_calls} lazy)" if self.lazy_backbone_calls else ""
        per_token = f"{self.head_calls} of the head, {self.head_calls_per_token:.1f} per token"
        return f"{self.backbone_calls} of the backbone{lazy}, {per_token}"

    def _drafts(self) -> str:
        """The acceptance rate, and how far an approximate method is from its exact one, as far as it was measured."""
        parts = ["none" if self.alpha is None else f"{self.alpha:.1%} accepted"]
        if self.difference is not None:
            parts.append(f"a token differs by {self.difference:.3f} standard deviations")
        if self.divergence is not None:
            parts.append(f"divergence {self.divergence:.3g} nats per token")
        if self.bound:
            parts.append(f"bound {min(self.bound, 1):.3f}")
        return "; ".join(parts)

    def _times(self) -> str:
        phases = [f"{phase} {spent:.2f}" for phase, spent in self.seconds.items() if spent]
        return f"{sum(self.seconds.values()):.2f} ({', '.join(phases)})" if phases else "0"


@dataclass(eq=False)
class Sequence:
    """A running request: its slot and its progress.

    Attributes:
        method: the `cspd.method.Method` of the request. asked: the request as the user gave it.
        model: the name of its models in the engine.
        key: sequences with equal keys can share a round, even if their progress differs.
        uses: the models that the method needs in addition to the target, see `cspd.method.Method`.
        results: the queue for the result of the request, see `cspd.engine`.
        num_committed: tokens that have their final value, given tokens included.
        schedule: `num_committed` after each round, if it is known beforehand.
        num_under_way: tokens whose denoising chains have begun but not ended. `num_started` counts them and the
            committed ones; together these are the first tokens of the generation order.
        reached: `num_started` after each iteration.
        audits: of a VQ sequence with a relaxed rule, each round's audit, see `cspd.discrete.drafts.price`.
        shared: what methods keep from round to round: a dictionary of all running sequences of a key, which is emptied
            when the last of them leaves.
        complete_stats: fills in `stats`; called once the device has finished the sequence.
    """

    request: Request
    method: Any = None  # a `cspd.method.Method`
    model: str = ""
    ticket: int = -1
    slot: int = -1
    seq_len: int = 0
    key: Hashable = None
    uses: Collection[str] = ()
    class_name: str = ""
    models: Mapping[str, object] = field(default_factory=dict)
    asked: Request | None = None
    results: SimpleQueue = field(default_factory=SimpleQueue)
    iteration: int = 0
    num_committed: int = 0
    num_under_way: int = 0
    schedule: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    audits: list[float] = field(default_factory=list)
    stats: RoundStats = field(default_factory=RoundStats)
    shared: dict[Hashable, Any] = field(default_factory=dict)
    complete_stats: Callable[[], None] = lambda: None

    @property
    def num_started(self) -> int:
        """The number of tokens that are committed or under way."""
        return self.num_committed + self.num_under_way

    @property
    def fraction_done(self) -> float:
        """The fraction of the work that is done, 0..1: the mean of the fractions of iterations and of tokens.

        The work of a MAR iteration grows with its tokens, but the first ones, which commit few, take time too.
        """
        # Given tokens are committed from the start, and are no progress.
        num_generated = self.request.num_generated(self.seq_len)
        num_given = self.seq_len - num_generated
        of_tokens = max(0, self.num_committed - num_given) / num_generated
        committed = [num_given, *(self.schedule or [self.seq_len])]
        of_iterations = np.interp(self.num_committed, committed, np.linspace(0, 1, len(committed)))
        return float(of_iterations + of_tokens) / 2

    def iteration_of(self, rank: int) -> int:
        """The iteration, from 1, that committed token `rank`, from 0, of the generation order."""
        return bisect.bisect_right(self.reached, rank) + 1


@dataclass(frozen=True)
class Output:
    """The result of a request. A notebook shows its image.

    Attributes:
        request: the request with the defaults filled in.
        tokens: on the CPU, in raster order: MAR float32 [L, d], VQ int64 [L] (-1: no valid token could be sampled).
        image: float32 [3, H, W] in 0..1 on the CPU; None if the engine has no decoder, or if there is an error.
        token_cost: float32 [L] on the CPU, raster order. MAR: sequential head calls per token. `mar-draft` and VQ
            methods: 1 for an accepted draft, 0 for a token sampled by the target, NaN where nothing is drafted by
            design. NaN for given tokens.
        stats: the cost of the request.
        error: where the first value that is not finite arose; None if all tokens and pixels are finite.
        class_name: name of the class, or its number if the classes have no names; or the prompt.
        models: the arguments of `cspd.load` that the models came from; empty for models in memory.
    """

    request: Request
    tokens: Tensor
    image: Tensor | None
    token_cost: Tensor
    stats: RoundStats
    error: str | None = None
    class_name: str = ""
    models: Mapping[str, object] = field(default_factory=dict)

    def pil(self) -> Image.Image:
        """The image as a PIL image. Raises ValueError if there is no image."""
        if self.image is None:
            raise ValueError(f"there is no image: {self.error or 'the engine has no autoencoder or tokenizer'}")
        return to_pil(self.image)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the image to a file; its extension sets the format. Raises ValueError, OSError.

        A PNG carries the settings, from which `cspd sample --like` generates the image again.
        """
        self.pil().save(path, pnginfo=self.png_text())

    def png_text(self) -> PngInfo:
        """The text of a PNG with all settings of the image, see the function `png_text`."""
        return png_text(self.request.to_dict(), self.models)

    def _repr_png_(self) -> bytes | None:
        return None if self.image is None else png_of(self.pil(), self.png_text())

    def __repr__(self) -> str:
        if self.error:
            return f"<Output: {shortened(self.error)}>"
        request, stats = self.request, self.stats
        seconds = sum(stats.seconds.values())
        how = f"{request.method}, {stats.guarantee}, {seconds:.3g} s"
        size = "no image"
        if self.image is not None:
            height, width = self.image.shape[1:]
            size = f"{width}x{height} pixels"
        return f"<Output: {self.class_name or request.label}, seed {request.seed}, {how}; {size}>"


def grid(outputs: Iterable[Output] | Output, columns: int | None = None) -> Image.Image:
    """One picture of the images of outputs of one size, each over its class or prompt. Raises ValueError.

    Args:
        columns: images in a row; by default about 10.
    """
    from cspd.plots import grid as captioned_grid  # matplotlib takes long to import

    listed = [outputs] if isinstance(outputs, Output) else list(outputs)
    if not listed:
        raise ValueError("there are no outputs: give at least one")
    captions = [output.class_name or str(output.request.label) for output in listed]
    return captioned_grid([output.pil() for output in listed], captions, columns)


class Stopwatch:
    """Measures seconds by phase, from the phase "other" on.

    On CUDA it records events on the stream that was current at its creation. They can be read without waiting once the
    stopwatch is stopped and the stream is past its last event.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self.cuda else None
        self._marks = [("other", self._now())]

    def _now(self) -> Any:
        """The time in seconds; on CUDA, an event."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # the GPU notes the time when it gets there
        event.record(self._stream)
        return event

    def start(self, phase: str) -> None:
        """Ends the current phase and begins `phase`."""
        self._marks.append((phase, self._now()))

    def stop(self) -> None:
        """Ends the last phase."""
        self.start("")

    def is_past(self) -> bool:
        """Whether the stream is past the last phase, so that `seconds` does not wait."""
        _, last = self._marks[-1]
        return not self.cuda or last.query()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase until the stop. Waits for the stream if necessary."""
        _, last = self._marks[-1]
        if self.cuda and not self.is_past():
            last.synchronize()
        total = _no_seconds()
        for (phase, begin), (_, end) in itertools.pairwise(self._marks):
            spent = begin.elapsed_time(end) / 1000 if self.cuda else end - begin
            total[phase] += spent
        return total
