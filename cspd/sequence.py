"""What goes into the engine and what comes out: requests, running sequences, outputs and their statistics."""

from __future__ import annotations

import bisect
import dataclasses
import os
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from PIL import Image
from torch import Tensor

from cspd.known import Known
from cspd.option import as_setting, check_seed, option_names, plain
from cspd.parsing import choice, shortened
from cspd.pixels import to_pil
from cspd.records import png_of

PHASES = ("backbone", "head", "draft", "decode", "other")
Label = int | str | None  # a class by number or name, or no class


@dataclass(frozen=True, init=False, repr=False)
class Request:
    """One image to make.

    Attributes:
        label: class, 0 .. number of classes - 1, or its name; None: no class, as the model makes images without one.
        prompt: the text to make an image of, in place of a class, by models of texts. negative_prompt: the text that
            guidance leads away from, in place of the model's null caption.
        seed: of everything random in this image, 0 .. 2^63 - 1.
        method: its name, see `cspd methods`; by default `speculative`.
        family: "MAR" or "VQ", whose models make it; by default the engine's first that have the method.
        settings: by name, those that were given: `num_iter`, `cfg`, `temperature`, the method's own options (see
            docs/api.md). What is left out or None takes the target's published value or the method's default.
        known: the part of an image that is there already, see `cspd.known.Known`; given as `image` and `mask`.

    Numbers may be numpy's, torch's or fractions: they are kept as Python's own. An engine checks values.

    Settings are given as arguments and read as attributes: `Request(3, cfg=2.0).cfg`; one that was left out is None.

    Raises:
        TypeError: a setting that nobody has. ValueError: one that is a tensor without a plain value; or as `Known.of`.
    """

    label: Label = None
    seed: int = 0
    method: str | None = None
    family: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    known: Known | None = None
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
        known: Known | None = None,
        prompt: str | None = None,
        negative_prompt: str | None = None,
        **more: object,
    ) -> None:
        if image is not None or mask is not None:
            known = Known.of(known.image if image is None and known else image, mask)
        given = {**(settings or {}), **more}
        names = option_names()
        for name in given:
            if name not in names:
                raise TypeError(f"a request has no setting {shortened(name)}: {choice(name, sorted(names))}")
        own = {"label": label, "seed": seed, "method": method, "family": family}
        for name, value in own.items():
            object.__setattr__(self, name, plain(value))
        settled = {name: as_setting(name, given[name]) for name in sorted(given) if given[name] is not None}
        object.__setattr__(self, "settings", settled)
        if known is not None and not isinstance(known, Known):
            raise TypeError(f"known={shortened(known)} is no cspd.known.Known: give image=... and mask=...")
        object.__setattr__(self, "known", known)
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "negative_prompt", negative_prompt)

    def __getattr__(self, name: str) -> Any:
        if name in option_names():
            return self.settings.get(name)
        raise AttributeError(f"a request has no {name!r}")

    def __hash__(self) -> int:
        return hash((*self._named().values(), self.known, *self.settings.items()))

    def __repr__(self) -> str:
        named = {**self._named(), **self.settings, "known": self.known}
        always = "prompt" if self.label is None and self.prompt is not None else "label"
        shown = {name: value for name, value in named.items() if value is not None or name == always}
        return f"Request({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def but(self, **changes: Any) -> Request:
        """The same request but for some settings; None leaves one open."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict:
        """All settings as plain values, None where they are open."""
        settings = {name: self.settings.get(name) for name in sorted(option_names())}
        return self._named() | settings | {"known": self.known and self.known.name}

    def _named(self) -> dict:
        """What it asks for beside its settings and what is known of the image."""
        of = {"label": self.label, "prompt": self.prompt, "negative_prompt": self.negative_prompt}
        return of | {"seed": self.seed, "method": self.method, "family": self.family}

    def num_made(self, seq_len: int) -> int:
        """How many of an image's tokens a resolved request makes: all that are not known from the start."""
        return seq_len if self.known is None else self.known.num_made

    @property
    def guided(self) -> bool:
        """Whether the null class is evaluated too."""
        return self.cfg != 1


def requests_of(
    labels: Label | Iterable[Label],
    prompts: str | Iterable[str] | None,
    seed: int,
    method: str | None,
    settings: Mapping[str, Any],
) -> list[Request]:
    """A request of each label, or of each prompt where there are any, of seeds one after the other.

    Raises ValueError if the seed is not an integer in 0..2**63 - 1.
    """
    seed = plain(seed)
    check_seed(seed)
    several: Any = plain(labels) if prompts is None else prompts
    if isinstance(several, (str, bytes, Tensor)) or not isinstance(several, Iterable):  # checking says what is wrong
        several = [several]
    requests = []
    for i, each in enumerate(several):
        of = {"label": each} if prompts is None else {"label": labels, "prompt": each}
        requests.append(Request(**of, seed=seed + i, method=method, **settings))
    return requests


@dataclass
class RoundStats:
    """What a request cost. Counts are of the calls it took part in, alone or with others.

    Attributes:
        guarantee: of the request, a key of `cspd.method.GUARANTEES`.
        iterations: autoregressive iterations; rounds of draft and verification count as one.
        backbone_calls: the target's backbone forwards, conditional and null class in one. lazy_backbone_calls: those of
            them that computed a part of it, by a cached backbone.
        head_calls: sequential calls of the target's head, of a cached head those that evaluate its blocks;
            head_calls_per_token: of one token's chain, their mean.
        head_evaluations: rows of this request it was evaluated on, null class included.
        draft_backbone_calls, draft_head_calls: the same of the draft model.
        by_lag, by_step, by_rank: drafts judged, and accepted, by how far ahead they were (from 1) and, if states of a
            chain, by denoising step or, if tokens, by rank in the generation order.
        committed: how many rounds committed 1 VQ code, 2, ... bound: the rule's local bounds, summed: over requests its
            mean bounds the total variation of an image's codes from the target's. 0 where nothing does (heuristic).
        difference, divergence: of a denoiser that is measured, how its tokens compare with the full chain's on held-out
            ones, from the same z and noise: r.m.s. difference in standard deviations of a token's channels, and KL
            divergence of the sampler's path from the chain, nats per token (None at temperature 0: infinite). None of
            others. What another backbone or order changes is not in them.
        audit, audit_error: the same divergence of this image's own tokens, estimated where asked for, and the standard
            error of that; nats per token; None where not finite.
        resample_tries: residual candidates looked at; fallbacks: how often none was kept and the last had to do.
        seconds: wall time of the rounds it took part in, by phase; each sequence is charged the full time of the round.
            "decode" is the time of the images that finished with it; on a GPU that overlaps other rounds.
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
    by_lag: list[list[int]] = field(default_factory=lambda: [[], []])
    by_step: list[list[int]] = field(default_factory=lambda: [[], []])
    by_rank: list[list[int]] = field(default_factory=lambda: [[], []])
    committed: dict[int, int] = field(default_factory=dict)
    bound: float = 0.0
    difference: float | None = None
    divergence: float | None = None
    audit: float | None = None
    audit_error: float | None = None
    resample_tries: int = 0
    fallbacks: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def alpha(self) -> float | None:
        """Share of the judged drafts that were accepted; None where nothing was judged."""
        judged, accepted = map(sum, self.by_lag)
        return accepted / judged if judged else None

    @property
    def step_compression(self) -> float | None:
        """VQ codes per forward of the target; None of MAR."""
        return sum(n * count for n, count in self.committed.items()) / self.backbone_calls if self.committed else None

    def to_dict(self) -> dict:
        return asdict(self) | {"alpha": self.alpha, "step_compression": self.step_compression}


@dataclass(eq=False)
class Sequence:
    """A running request: its slot and how far it is.

    `num_committed` tokens have their final value, those that were known from the start too. The chains of
    `num_under_way` more have begun and not ended between rounds, in any order; `num_started` counts both, which are the
    first ones of the sequence's order. `reached` has `num_started` after each iteration.

    Sequences of equal `key` can share a round, whatever else differs. `uses` names the models that its method needs
    beside the target, see `cspd.method.Method`. `complete_stats` is called before they are handed out: what it reads
    from the device is there by then. `refresh` writes heat to the slot that would be there at the end only, for who
    looks before. `asked` is the request as it was given; what becomes of it goes to the `inbox` of who gave it
    (`cspd.flight`).
    """

    request: Request
    ticket: int = -1
    slot: int = -1
    key: Hashable = None
    uses: Collection[str] = ()
    class_name: str = ""
    asked: Request | None = None
    inbox: deque = field(default_factory=deque)
    iteration: int = 0
    num_committed: int = 0
    num_under_way: int = 0
    reached: list[int] = field(default_factory=list)
    stats: RoundStats = field(default_factory=RoundStats)
    complete_stats: Callable[[], None] = lambda: None
    refresh: Callable[[], None] = lambda: None

    @property
    def num_started(self) -> int:
        """How many tokens are committed or under way."""
        return self.num_committed + self.num_under_way

    def share_made(self, seq_len: int) -> float:
        """The share of the tokens it makes, of an image's so many, that is committed."""
        num_made = self.request.num_made(seq_len)
        return max(0, num_made - seq_len + self.num_committed) / num_made

    def iteration_of(self, rank: int) -> int:
        """The iteration, from 1, that committed the token of a rank, from 0, in the generation order."""
        return bisect.bisect_right(self.reached, rank) + 1


@dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        request: as it ran, defaults filled in.
        tokens: on the CPU, raster order: MAR's float32 [L, d], VQ codes int64 [L] (-1 where there was none to draw).
        image: float32 [3, H, W] in 0..1 on the CPU; None in an engine without autoencoder, and where there is an error.
        heat: float32 [L] on the CPU, raster order: sequential head calls of each token; of `cspd` and VQ models 1 where
            a drafted token was accepted, 0 where the target drew it, NaN where nothing was drafted by design; NaN of
            tokens that were known from the start.
        stats: what it cost.
        error: None; or of a request whose tokens or image are not finite, which request it is, and where that began.
        class_name: of the request's label, its number where classes have no names; or the prompt.

    A notebook shows the picture.
    """

    request: Request
    tokens: Tensor
    image: Tensor | None
    heat: Tensor
    stats: RoundStats
    error: str | None = None
    class_name: str = ""

    def pil(self) -> Image.Image:
        """The image as Pillow's. Raises ValueError where there is none."""
        if self.image is None:
            raise ValueError(f"there is no image: {self.error or 'the engine has no autoencoder or tokenizer'}")
        return to_pil(self.image)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the image to a file, whose name says the format (.png). Raises ValueError, OSError."""
        self.pil().save(path)

    def _repr_png_(self) -> bytes | None:
        return None if self.image is None else png_of(self.pil())

    def __repr__(self) -> str:
        if self.error:
            return f"<Output: {shortened(self.error)}>"
        request = self.request
        size = "no image" if self.image is None else f"{self.image.shape[2]}x{self.image.shape[1]} pixels"
        seconds = sum(self.stats.seconds.values())
        how = f"{request.method}, {self.stats.guarantee}, {seconds:.3g} s"
        return f"<Output: {self.class_name or request.label}, seed {request.seed}, {how}; {size}>"
