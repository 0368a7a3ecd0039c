"""What goes into the engine and what comes out: requests, the given part of an image, running sequences, outputs."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import io
import itertools
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from cspd.option import as_setting, check_seed, option_names, plain
from cspd.terminal import choice, shortened

# What is known of an image before it is made: the part of a picture, or of its tokens, that is kept.

MASK = "what is white (True) in it is made anew, what is black is kept"
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")  # that are read: for some, Pillow runs other programs
KINDS = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}  # of arrays, as what they are read
remembered = functools.lru_cache(maxsize=16)  # of pictures, which many requests have


class Resized(UserWarning):
    """A picture is not of the model's size."""


@dataclass(frozen=True, eq=False, repr=False)
class Known:
    """The part of an image that is known from the start. The rest is made to go with it.

    Two are equal if their contents are.

    Attributes:
        image: a picture, float32 [3, H, W] in 0..1; or tokens in raster order, float32 [L, d] of MAR, int64 [L] of VQ
            models.
        mask: which of it is made anew: bool [H, W] of a picture's pixels, or [L] of tokens; or the share of all tokens
            that is, 0..1: each request's own seed draws which.
        source: the digest of what a request was given, where this was made of it.
    """

    image: Tensor
    mask: Tensor | float
    source: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError on what `Known.of` would have made something else of: rounds take it as it is."""
        image, mask = self.image, self.mask
        fits = isinstance(image, Tensor) and image.dtype == (torch.int64 if image.dim() == 1 else torch.float32)
        fits_too = isinstance(mask, float) or (isinstance(mask, Tensor) and mask.dtype == torch.bool)
        if not fits or not fits_too:
            raise ValueError("Known(image, mask) takes tensors of the right kinds only: call Known.of(image, mask)")

    @classmethod
    def of(cls, image: Any, mask: Any) -> Known:
        """What a request is given.

        Args:
            image: a file, a PIL image, float32 [3, H, W] in 0..1, or tokens as above, such as `Output.tokens`.
            mask: of the image's size, a file or a PIL image (from half grey on it is white), or a tensor or array, bool
                or of numbers in 0..1; of tokens [L]; or a share.

        Raises:
            ValueError: a picture that cannot be read, a mask of another size, or something else. OSError: no such file.
        """
        if image is None or mask is None:
            given, other = ("mask", "image") if image is None else ("image", "mask")
            raise ValueError(f"{given} needs {other} too: image is what is changed, mask says where: {MASK}")
        image, mask = _image_of(image), _mask_of(mask)
        size = image.shape[:1] if image.dim() < 3 else image.shape[1:]
        if isinstance(mask, Tensor) and mask.shape != size:
            ours, theirs = (" by ".join(map(str, reversed(shape))) for shape in (size, mask.shape))
            raise ValueError(f"the mask has another size ({theirs}) than the image ({ours}): give one of the same size")
        return cls(image, mask)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of image and mask."""
        digest = hashlib.sha256()
        mask = self.mask if isinstance(self.mask, Tensor) else torch.tensor(self.mask, dtype=torch.float64)
        for part in (self.image, mask):
            digest.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
            digest.update(np.ascontiguousarray(part.numpy()).tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        of = "x".join(map(str, self.image.shape))
        made = f"{self.mask:g}" if not isinstance(self.mask, Tensor) else f"{self.mask.float().mean():.3g}"
        return f"<Known: {made} of {of} made anew, {self.name[:8]}>"

    @property
    def name(self) -> str:
        """By which records know it: the digest of what the request was given."""
        return self.source or self.digest

    @property
    def is_picture(self) -> bool:
        """Whether it is of pixels, and not of tokens yet."""
        return self.image.dim() == 3

    @functools.cached_property
    def made(self) -> np.ndarray:
        """Which tokens are made anew, bool [L], once it is of tokens."""
        assert isinstance(self.mask, Tensor) and not self.is_picture  # as of every checked request
        return self.mask.numpy()

    @functools.cached_property
    def num_made(self) -> int:
        """How many tokens are made anew, once it is of tokens."""
        return int(self.made.sum())

    def fitted(self, size: int) -> Known:
        """The picture at `size` by `size` pixels: the square in its middle, as in training, resized.

        The mask follows it: a pixel is made anew where any is that it was made of.
        """
        return _fitted(self, size)

    def to_encode(self, size: int) -> Tensor:
        """The picture as encoders take it, [1, 3, size, size] in -1..1. Warns where that crops or resizes it."""
        change = cropping(self.image, size)
        if change is not None:
            warnings.warn(change, Resized, stacklevel=1)
        return 2 * self.fitted(size).image.unsqueeze(0) - 1

    def pasted(self, image: Tensor, made: Tensor) -> Tensor:
        """The picture, float32 [3, H, W], with an output's image where that was made; they blend over a token's width.

        Args:
            image: of the output, of this picture's size. made: the mask of the output's tokens, bool [L].
        """
        side = round(len(made) ** 0.5)
        of_tokens = made.view(1, 1, side, side).float()
        share = functional.interpolate(of_tokens, self.image.shape[1:], mode="bilinear")[0]
        if isinstance(self.mask, Tensor):
            share = torch.maximum(share, self.mask.float())
        return torch.lerp(self.image, image, share)

    def as_tokens(self, shape: tuple[int, ...], encode: Callable[[Known], Tensor], order: Tensor) -> Known | None:
        """The same of a model's tokens; None where none is kept: then nothing is known.

        Args:
            shape: of the tokens, [L, d] or [L], on a square grid. encode: makes them of a picture. order: a random
                order of them, int64 [L], whose first are kept where the mask is a share.

        Raises:
            ValueError: all tokens are kept, or tokens were given that are not of this shape.
        """
        if not self.is_picture and self.image.shape != shape:
            has, wants = (list(each) for each in (self.image.shape, shape))
            raise ValueError(f"the tokens that are given are {has}, and this model's are {wants}: give its own")
        length, mask = shape[0], self.mask
        if not isinstance(mask, Tensor):
            num_kept = length - round(length * mask)
            mask = torch.ones(length, dtype=torch.bool)
            mask[order[:num_kept]] = False
        elif self.is_picture:
            mask = _largest(_in_the_middle(mask), round(length**0.5)).flatten().bool()
        if not mask.any():
            raise ValueError(f"the mask keeps every token, so that nothing is to be made: {MASK}")
        if mask.all():
            return None
        tokens = encode(self) if self.is_picture else self.image
        return Known(tokens, mask, self.name)


def placed(image: Any, box: tuple[int, int, int, int], size: int) -> Known:
    """A picture resized into a box of a canvas of `size` by `size` pixels; all around it is made anew.

    The canvas goes on as the picture's border is: tokens there are made, but the encoder looks at it.

    Args:
        image: as in `Known.of`. box: left, top, width, height, in pixels.

    Raises:
        ValueError: the box is not inside the canvas, or as in `Known.of`.
    """
    left, top, width, height = box
    if min(left, top) < 0 or min(width, height) < 1 or left + width > size or top + height > size:
        raise ValueError(f"a box of {width} by {height} pixels at {left},{top} is not inside {size} by {size}: move it")
    inside = _resized(_image_of(image), (height, width))
    margins = (left, size - left - width, top, size - top - height)
    canvas = functional.pad(inside[None], margins, mode="replicate")[0]
    mask = functional.pad(torch.zeros(height, width, dtype=torch.bool), margins, value=True)
    return Known(canvas, mask)


def cropping(image: Tensor, size: int) -> str | None:
    """What `Known.fitted` does to a picture [3, H, W], in words; None where it is of that size."""
    height, width = image.shape[1:]
    if (height, width) == (size, size):
        return None
    cropped = "" if height == width else f"cropped to the {min(height, width)} in the middle and "
    return f"the image has {width} by {height} pixels: {cropped}resized to {size} by {size}"


@remembered
def _fitted(known: Known, size: int) -> Known:
    image, mask = known.image, known.mask
    if cropping(image, size) is None:
        return known
    if isinstance(mask, Tensor):
        mask = _largest(_in_the_middle(mask), size)[0].bool()
    return Known(_resized(_in_the_middle(image), (size, size)), mask, known.name)


def _in_the_middle(image: Tensor) -> Tensor:
    """The largest square in the middle of an image [..., H, W]."""
    height, width = image.shape[-2:]
    square = min(height, width)
    top, left = (height - square) // 2, (width - square) // 2
    return image[..., top : top + square, left : left + square]


def _largest(mask: Tensor, side: int) -> Tensor:
    """A mask [H, W] at another size, float32 [1, side, side]: 1 where it is anywhere in what a pixel covers."""
    return functional.adaptive_max_pool2d(mask[None].float(), side)


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    """An image [3, H, W] at another (height, width)."""
    made = functional.interpolate(image[None], size, mode="bicubic", antialias=True)
    return made[0].clamp(0, 1)


def _opened(source: object, what: str, mode: str) -> np.ndarray | None:
    """The pixels of a file or a PIL image, uint8 [H, W] or [H, W, 3]; None of anything else."""
    if isinstance(source, Image.Image):
        return np.array(source.convert(mode))
    if not isinstance(source, (str, os.PathLike)):
        return None
    try:
        with Image.open(source, formats=FORMATS) as picture:
            return np.array(ImageOps.exif_transpose(picture).convert(mode))
    except FileNotFoundError:
        raise FileNotFoundError(f"{os.fspath(source)}: no such file: give a picture as {what}") from None
    except Exception as error:  # a damaged picture makes its reader raise almost anything
        raise ValueError(f"{os.fspath(source)} cannot be read as a picture ({error}): give a PNG as {what}") from None


def _image_of(source: Any) -> Tensor:
    """What `Known.of` takes as `image`, as a tensor on the CPU."""
    pixels = _opened(source, "image", "RGB")
    if pixels is not None:
        return torch.from_numpy(pixels).permute(2, 0, 1).float().div(255)
    image = _tensor(source, "image")
    if image is not None and image.dim() == 1 and image.dtype == torch.int64:
        return image
    if image is not None and image.is_floating_point():
        image = image.float()
        is_picture = image.dim() == 3 and len(image) == 3
        if image.numel() and image.isfinite().all():
            if image.dim() == 2 or (is_picture and image.min() >= 0 and image.max() <= 1):
                return image
    raise ValueError(
        f"image={_shown(source)} does not fit: give a file's name, a PIL image, floats [3, H, W] in 0..1, or tokens"
    )


def _mask_of(source: Any) -> Tensor | float:
    """What `Known.of` takes as `mask`: bool, on the CPU, or a share."""
    pixels = _opened(source, "mask", "L")
    if pixels is not None:
        return torch.from_numpy(pixels >= 128)
    if isinstance(source, Real) and not isinstance(source, bool):
        if 0 <= source <= 1:  # type: ignore[operator]
            return float(source)
    else:
        mask = _tensor(source, "mask")
        if mask is not None and mask.dim() in (1, 2) and mask.numel():
            if ((mask >= 0) & (mask <= 1)).all():
                return mask >= 0.5 if mask.is_floating_point() else mask.bool()
    raise ValueError(
        f"mask={_shown(source)} does not fit: give a file's name, a PIL image, a tensor of the image's size, or a share"
    )


def _tensor(source: Any, what: str) -> Tensor | None:
    """A tensor or array as one on the CPU that is nobody else's: bool, int64 or float64; None of anything else.

    Raises ValueError if it is a tensor that is sparse, or has no values.
    """
    if isinstance(source, np.ndarray) and source.dtype.kind in KINDS:
        return torch.from_numpy(source.astype(KINDS[source.dtype.kind]))
    if not isinstance(source, Tensor) or source.is_complex() or source.is_quantized:
        return None
    if source.is_meta:
        raise ValueError(f"{what} is a tensor on the meta device, which has no values: give one that has")
    if source.is_nested or source.layout != torch.strided:
        raise ValueError(f"{what} is a sparse or nested tensor: give a dense one, such as {what}.to_dense()")
    kind = torch.float64 if source.is_floating_point() else torch.int64
    return source.detach().cpu().to(torch.bool if source.dtype == torch.bool else kind, copy=True)


def _shown(source: Any) -> str:
    """A value as an error shows it."""
    if isinstance(source, (Tensor, np.ndarray)):
        return f"<{source.dtype} {list(source.shape)}>"
    return shortened(source)


# From tokens to pixels: what the model runners of both families do with their decoders, and images of 8 bits.

DECODE_BATCH = 8  # images through a decoder at once, which bounds its memory


def decoded(decode: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Images [B, 3, H, W] in about -1..1 by a decoder of tokens [B, ...], a few at a time."""
    return torch.cat([decode(part) for part in tokens.split(DECODE_BATCH)])


def to_unit(images: Tensor) -> Tensor:
    """Images in 0..1 of those in about -1..1. Infinite pixels become NaN: clamped they would pass for white."""
    images = images.add(1).div(2)
    return images.clamp(0, 1).add(images - images)  # 0 where they are finite, or else NaN: few kernels


def to_uint8(image: Tensor) -> Tensor:
    """uint8 of floats in 0..1, of any shape such as [3, H, W]; uint8 stays as it is.

    Raises:
        ValueError: other values, or NaN: as 8 bits they would wrap around.
    """
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point() or not ((image >= 0) & (image <= 1)).all():
        dtype, low, high = image.dtype, image.min().item(), image.max().item()
        raise ValueError(f"an image of {dtype} from {low:g} to {high:g}: give uint8, or floats in 0..1")
    return (image * 255).round().to(torch.uint8)


def to_pil(image: Tensor) -> Image.Image:
    """A PIL image of [3, H, W], rounded as by `to_uint8`."""
    return Image.fromarray(to_uint8(image).permute(1, 2, 0).numpy())


def png_of(picture: Image.Image) -> bytes:
    """The content of its PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, format="png")
    return buffer.getvalue()


# What goes into the engine and what comes out: requests, running sequences, outputs and their statistics.

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
        known: the part of an image that is there already, see `Known`; given as `image` and `mask`.

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
            raise TypeError(f"known={shortened(known)} is no cspd.request.Known: give image=... and mask=...")
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
    (`cspd.engine`).
    """

    request: Request
    method: Any = None  # a `cspd.method.Method`
    ticket: int = -1
    slot: int = -1
    seq_len: int = 0
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

    @property
    def share_made(self) -> float:
        """The share of the tokens it generates that is committed, 0..1."""
        num_made = self.request.num_made(self.seq_len)
        return max(0, num_made - self.seq_len + self.num_committed) / num_made

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
        token_cost: float32 [L] on the CPU, raster order: sequential head calls of each token; of `cspd` and VQ models 1
            where a drafted token was accepted, 0 where the target drew it, NaN where nothing was drafted by design, and
            of tokens that were known from the start.
        stats: what it cost.
        error: None; or of a request whose tokens or image are not finite, which request it is, and where that began.
        class_name: of the request's label, its number where classes have no names; or the prompt.

    A notebook shows the picture.
    """

    request: Request
    tokens: Tensor
    image: Tensor | None
    token_cost: Tensor
    stats: RoundStats
    error: str | None = None
    class_name: str = ""

    @property
    def heat(self) -> Tensor:
        """The old name of `token_cost`, for one version."""
        warnings.warn("Output.heat is now Output.token_cost", DeprecationWarning, stacklevel=2)
        return self.token_cost

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


class Stopwatch:
    """Seconds by phase, beginning in phase "other". On CUDA it records events, on the stream that was current when it
    was made: they are read once it is stopped and the stream is past, so that nobody waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self.cuda else None
        self._marks = [("other", self._now())]

    def _now(self) -> Any:
        """Seconds of a clock, or on CUDA an event."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def start(self, phase: str) -> None:
        """Ends the phase before and begins `phase`."""
        self._marks.append((phase, self._now()))

    def stop(self) -> None:
        """Ends the last phase."""
        self.start("")

    def is_past(self) -> bool:
        """Whether the stream has come to the end of the last phase, and `seconds` need not wait."""
        return not self.cuda or self._marks[-1][1].query()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase until the stop; waits for the stream where it is not past."""
        if self.cuda and not self.is_past():
            self._marks[-1][1].synchronize()
        total = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, end) in itertools.pairwise(self._marks):
            total[phase] += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
        return total
