"""What is known of an image before it is made: the part of a picture, or of its tokens, that is kept."""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from cspd.parsing import shortened

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
        if 0 <= source <= 1:
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
