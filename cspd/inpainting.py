"""Inpainting: the part of an image, or of its tokens, that is given before sampling begins."""

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

from cspd.pixels import is_in_unit_range
from cspd.terminal import shortened

MASK = "white (True) marks the area to regenerate, black the area to keep"
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")  # for some other formats Pillow runs external programs
remembered = functools.lru_cache(maxsize=16)  # many requests share an image


class Resized(UserWarning):
    """An image is cropped or resized to the model's size."""


@dataclass(frozen=True, eq=False, repr=False)
class Inpainting:
    """The given part of an image. A model generates the rest, conditioned on this part.

    Two objects are equal if their contents are.

    Attributes:
        image: pixels, float32 [3, H, W] in 0..1; or tokens in raster order, MAR float32 [L, d], VQ int64 [L].
        mask: True for the part to generate: bool [H, W] over pixels, or [L] over tokens. A float is the fraction of
            tokens to generate, 0..1; the seed of the request picks these tokens.
        source: the digest of the `Inpainting` of the request, if this one was derived from it.
    """

    image: Tensor
    mask: Tensor | float
    source: str = ""

    @classmethod
    def of(cls, image: Any, mask: Any) -> Inpainting:
        """An `Inpainting` of the image and mask that a user gives.

        Args:
            image: a path, a PIL image, floats [3, H, W] in 0..1, or tokens such as `Output.tokens`.
            mask: True or white marks the part to generate. For an image: a path or a PIL image of its size (pixels of
                128 and above are white), or a tensor or array [H, W] of bools or numbers in 0..1. For tokens: [L].
                Or a float, the fraction of tokens to generate.

        Raises:
            ValueError: the image or mask has a wrong type, cannot be read, or their sizes differ.
            OSError: a file does not exist.
        """
        if image is None or mask is None:
            raise ValueError(f"image and mask must be given together: in the mask, {MASK}")
        image, mask = _image_of(image), _mask_of(mask)
        is_pixels = image.dim() == 3
        size = image.shape[1:] if is_pixels else image.shape[:1]
        if isinstance(mask, Tensor) and mask.shape != size:
            raise ValueError(
                f"the mask has {_by(mask.shape)} pixels or tokens, and the image has {_by(size)}: give a mask of the"
                " image's size"
            )
        return cls(image, mask)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of image and mask."""
        # Type and shape are part of it: equal bytes may be different images.
        digest = hashlib.sha256()
        mask = self.mask
        if not isinstance(mask, Tensor):
            mask = torch.tensor(mask, dtype=torch.float64)
        for part in (self.image, mask):
            header = f"{part.dtype} {tuple(part.shape)}\n"
            digest.update(header.encode())
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inpainting) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.image.shape))
        fraction = self.mask
        if isinstance(fraction, Tensor):
            fraction = fraction.float().mean().item()
        return f"<Inpainting: {fraction:.3g} of {shape} to generate, {self.name[:8]}>"

    @property
    def name(self) -> str:
        """Its name in records: the digest of the `Inpainting` of the request."""
        return self.source or self.digest

    @property
    def is_pixels(self) -> bool:
        """Whether `image` holds pixels, not tokens."""
        return self.image.dim() == 3

    @functools.cached_property
    def generated(self) -> np.ndarray:
        """Which tokens are generated, bool [L], for an `Inpainting` of tokens."""
        assert isinstance(self.mask, Tensor)  # a checked request has a mask of tokens
        return self.mask.numpy()

    @functools.cached_property
    def num_generated(self) -> int:
        """The number of generated tokens, for an `Inpainting` of tokens."""
        return int(self.generated.sum())

    @remembered
    def fitted(self, size: int) -> Inpainting:
        """The image cropped to the square in its middle, as in training, and resized to `size` by `size` pixels.

        A pixel of the new mask is True if any pixel that it covers was.
        """
        if cropping(self.image, size) is None:
            return self
        image = _resized(_in_the_middle(self.image), (size, size))
        mask = self.mask  # a fraction stays: it counts tokens, not pixels
        if isinstance(mask, Tensor):
            mask = _largest(_in_the_middle(mask), size)[0].bool()
        return Inpainting(image, mask, self.name)

    def to_encode(self, size: int) -> Tensor:
        """The image as encoders take it, [1, 3, size, size] in -1..1. Warns if the image is cropped or resized."""
        change = cropping(self.image, size)
        if change is not None:
            warnings.warn(change, Resized, stacklevel=1)
        return 2 * self.fitted(size).image.unsqueeze(0) - 1

    def pasted(self, image: Tensor, generated: Tensor) -> Tensor:
        """This image with the generated part of an output's image pasted into it, float32 [3, H, W].

        The two images blend over the width of a token.

        Args:
            image: the output's image, of this image's size.
            generated: which tokens of the output were generated, bool [L].
        """
        side = round(len(generated) ** 0.5)
        by_token = generated.view(1, 1, side, side).float()
        # The weight of the output's image, per pixel: between two tokens it changes gradually.
        weight = functional.interpolate(by_token, self.image.shape[1:], mode="bilinear")[0]
        if isinstance(self.mask, Tensor):
            weight = torch.maximum(weight, self.mask.float())
        return torch.lerp(self.image, image, weight)

    def as_tokens(
        self,
        shape: tuple[int, ...],
        encode: Callable[[Inpainting], Tensor],
        order: Tensor,
    ) -> Inpainting | None:
        """This `Inpainting` in tokens of a model, or None if all tokens are generated.

        Args:
            shape: shape of the model's tokens, [L, d] or [L], on a square grid.
            encode: encodes the image to tokens.
            order: a random order of the tokens, int64 [L]. If the mask is a fraction, the first tokens are given.

        Raises:
            ValueError: the mask keeps all tokens, or the given tokens have another shape.
        """
        if not self.is_pixels and self.image.shape != shape:
            raise ValueError(
                f"the given tokens have shape {list(self.image.shape)}, and this model's {list(shape)}: give tokens of"
                " this model"
            )
        length = shape[0]
        mask = self.mask
        if not isinstance(mask, Tensor):
            num_given = length - round(length * mask)
            mask = torch.ones(length, dtype=torch.bool)
            mask[order[:num_given]] = False
        elif self.is_pixels:
            # A token covers a patch of pixels: it is generated if any of them is.
            side = round(length**0.5)
            mask = _largest(_in_the_middle(mask), side).flatten().bool()
        if not mask.any():
            raise ValueError(f"the mask keeps every token, so there is nothing to generate: {MASK}")
        if mask.all():
            return None
        tokens = encode(self) if self.is_pixels else self.image
        return Inpainting(tokens, mask, self.name)


def placed(image: Any, box: tuple[int, int, int, int], size: int) -> Inpainting:
    """Outpainting: an image resized into a box of a canvas; the area around the box is generated.

    The border of the image is repeated around the box: those tokens are generated, but the encoder sees their pixels.

    Args:
        image: as in `Inpainting.of`.
        box: left, top, width and height in pixels.
        size: of the canvas, in pixels a side.

    Raises:
        ValueError: the box is not inside the canvas, or as in `Inpainting.of`.
    """
    left, top, width, height = box
    right, bottom = size - left - width, size - top - height  # of the margins around the box
    is_empty = min(width, height) < 1
    if is_empty or min(left, top, right, bottom) < 0:
        raise ValueError(f"a box of {width} by {height} pixels at {left},{top} is not inside {size} by {size}: move it")
    inside = _resized(_image_of(image), (height, width))
    margins = (left, right, top, bottom)
    canvas = functional.pad(inside[None], margins, mode="replicate")[0]
    given = torch.zeros(height, width, dtype=torch.bool)
    mask = functional.pad(given, margins, value=True)
    return Inpainting(canvas, mask)


def cropping(image: Tensor, size: int) -> str | None:
    """A description of how `Inpainting.fitted` changes an image [3, H, W]; None if it has that size already."""
    height, width = image.shape[1:]
    if height == width == size:
        return None
    cropped = ""
    if height != width:
        square = min(height, width)
        cropped = f"cropped to the {square} by {square} in its middle and "
    return f"the image has {width} by {height} pixels: {cropped}resized to {size} by {size}"


def _by(size: tuple[int, ...]) -> str:
    """A size [H, W] as "W by H"."""
    return " by ".join(map(str, reversed(size)))


def _in_the_middle(image: Tensor) -> Tensor:
    """The largest square in the middle of an image [..., H, W]."""
    height, width = image.shape[-2:]
    square = min(height, width)
    top = (height - square) // 2
    left = (width - square) // 2
    return image[..., top : top + square, left : left + square]


def _largest(mask: Tensor, side: int) -> Tensor:
    """A mask [H, W] at another size, float32 [1, side, side]: 1 if any pixel of the covered area is True."""
    # Not a mean: a token with a single pixel to generate cannot be given.
    return functional.adaptive_max_pool2d(mask[None].float(), side)


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    """An image [3, H, W] at another (height, width)."""
    # Bicubic interpolation overshoots at edges.
    resized = functional.interpolate(image[None], size, mode="bicubic", antialias=True)
    return resized[0].clamp(0, 1)


def of_8_bits(image: Image.Image, mode: str) -> np.ndarray:
    """The pixels of an image in a mode of 8 bits: "RGB", uint8 [H, W, 3], or "L", uint8 [H, W].

    Grey values of 16 bits are scaled: 65535 becomes 255. Pillow's own conversion would clip them.

    Raises:
        ValueError: grey values of 32 bits or floats, whose white is not known.
    """
    if image.mode.startswith("I;16"):
        scaled = np.rint(np.asarray(image) / 257)
        image = Image.fromarray(scaled.astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have the mode {image.mode}: convert them to 8 or 16 bits")
    return np.array(image.convert(mode))


def _opened(source: object, what: str, mode: str) -> np.ndarray | None:
    """The pixels of a file or a PIL image, uint8 [H, W] or [H, W, 3]; None for other sources."""
    if isinstance(source, Image.Image):
        return of_8_bits(source, mode)
    if not isinstance(source, (str, os.PathLike)):
        return None
    try:
        # a pipe would block, and a device might have no end
        if os.path.exists(source) and not os.path.isfile(source):
            raise ValueError("not an ordinary file")
        with Image.open(source, formats=FORMATS) as image:
            return of_8_bits(ImageOps.exif_transpose(image), mode)
    except FileNotFoundError:
        raise FileNotFoundError(f"{os.fspath(source)}: no such file: give an image file as {what}") from None
    except Exception as error:  # Pillow raises almost anything on a damaged file
        raise ValueError(f"{os.fspath(source)} cannot be read as an image ({error}): give a PNG as {what}") from None


def _image_of(source: Any) -> Tensor:
    """The `image` of `Inpainting.of` as a tensor on the CPU."""
    pixels = _opened(source, "image", "RGB")
    if pixels is not None:
        channels_first = torch.from_numpy(pixels).permute(2, 0, 1)
        return channels_first.float().div(255)
    image = _tensor(source)
    is_bool = getattr(source, "dtype", None) in (torch.bool, np.bool_)  # neither pixels nor tokens
    if image is not None and not is_bool and (_is_pixels(image) or _is_tokens(image)):
        return image.float() if image.is_floating_point() else image
    raise ValueError(
        f"image={_shown(source)} is invalid: expected a path, a PIL image, floats [3, H, W] in 0..1, or tokens"
    )


def _is_pixels(image: Tensor) -> bool:
    if image.dim() != 3 or len(image) != 3 or not image.is_floating_point():
        return False
    return is_in_unit_range(image)


def _is_tokens(image: Tensor) -> bool:
    """Whether a tensor may be tokens of VQ models, int64 [L], or of MAR, floats [L, d]."""
    if not image.is_floating_point():
        return image.dim() == 1
    return image.dim() == 2 and bool(image.isfinite().all())


def _mask_of(source: Any) -> Tensor | float:
    """The `mask` of `Inpainting.of` as a bool tensor on the CPU, or as a fraction."""
    pixels = _opened(source, "mask", "L")
    if pixels is not None:
        return torch.from_numpy(pixels >= 128)
    is_number = isinstance(source, Real) and not isinstance(source, bool)
    if is_number and 0 <= source <= 1:
        return float(source)
    mask = _tensor(source)
    if mask is not None and mask.dim() in (1, 2) and is_in_unit_range(mask):
        return mask >= 0.5
    raise ValueError(
        f"mask={_shown(source)} is invalid: expected a path, a PIL image, a tensor of the image's size, or a fraction"
    )


def _tensor(source: Any) -> Tensor | None:
    """A copy of a tensor or array, on the CPU, as int64 or float64; None for other sources."""
    if isinstance(source, np.ndarray) and source.dtype.kind in "biuf":
        # NumPy converts: PyTorch reads neither all of its integers nor other byte orders.
        kind = np.float64 if source.dtype.kind == "f" else np.int64
        return torch.from_numpy(source.astype(kind))
    if not isinstance(source, Tensor):
        return None
    dtype = torch.float64 if source.is_floating_point() else torch.int64
    return source.detach().to("cpu", dtype, copy=True)


def _shown(source: Any) -> str:
    """A value for an error message."""
    if isinstance(source, (Tensor, np.ndarray)):
        return f"<{source.dtype} {list(source.shape)}>"
    return shortened(source)
