"""What a model of `transformers` is, as far as a host must know, and what an architecture must tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from cspd.vq.registry import SamplingDefaults

CHAMELEON_DECODER = ("vqgan.ckpt", "tokenizer/vqgan.ckpt")  # what makes pixels of its codes, in a folder


@dataclass(frozen=True)
class HostedConfig:
    """Sizes of a model of `transformers`, by the names of `cspd.vq.gpt.GPTConfig` where it has them too.

    Attributes:
        architecture: its name. dim, n_layer, n_head, key_heads, head_dim: of its decoder; groups of query heads
            may share a head of keys.
        vocab_size: codes. block_size: L, codes of a square image. prefix_length: tokens of a prompt at most.
        stride: pixels per code, along a side.
        row_end: the token that follows each row of codes, which no code is; None where rows follow each other.
        defaults: how its authors sample it.
    """

    num_classes: ClassVar[int] = 0
    caption_dim: ClassVar[int] = 0
    text_places: ClassVar[bool] = True

    architecture: str
    dim: int
    n_layer: int
    n_head: int
    key_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    prefix_length: int
    stride: int
    row_end: int | None
    defaults: SamplingDefaults

    @property
    def grid(self) -> int:
        """Codes along a side of the image."""
        return round(self.block_size**0.5)


@dataclass(frozen=True)
class Image:
    """The images of a model.

    Attributes:
        side: codes along a side. stride: pixels per code, along a side. num_codes: in the codebook.
        tokens: of the codes, by code, where they are tokens of the text's vocabulary. row_end: see `HostedConfig`.
        mean, std: of the pixels of each colour, 0..1, by which they are normed.
    """

    side: int
    stride: int
    num_codes: int
    tokens: list[int] = field(default_factory=list)
    row_end: int | None = None
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    std: Sequence[float] = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Parts:
    """The modules of a model that make images.

    Attributes:
        decoder: its layers. codes: embeddings [V, dim] of the codes. output: logits of the codes [..., V] of features.
        tokenizer: of the images' pixels, None where there is nothing that makes them.
    """

    decoder: nn.Module
    codes: Tensor
    output: nn.Module
    tokenizer: nn.Module | None


@dataclass(frozen=True)
class Architecture:
    """An architecture of `transformers` that makes images of texts by VQ codes.

    Attributes:
        name: `cspd.vq.hosted.architectures.name_of` its configuration, mostly the `model_type` there.
        model_class: () the class that reads its weights. example: a name on the hub.
        defaults: how its authors sample it.
        text: (config) the configuration of its decoder. image: (config, the processor's settings) what images it makes.
        parts: (model, image, a decoder's file or None) the modules that make them.
        decoder_files: names of the file that decodes codes to pixels, where `transformers` does not.
        prompt: (tokenizer, text, image) the tokens that come before the codes.
        null: (tokenizer, prompt, image) those that guidance leads away from, where no negative prompt is given; in the
            place of a token that the tokenizer does not have is None.
    """

    name: str
    model_class: Callable[[], type]
    example: str
    defaults: SamplingDefaults
    text: Callable[[Any], Any]
    image: Callable[[Any, Mapping[str, Any]], Image]
    parts: Callable[[Any, Image, Path | None], Parts]
    prompt: Callable[[Any, str, Image], list[int | None]]
    null: Callable[[Any, list[int], Image], list[int | None]]
    decoder_files: tuple[str, ...] = ()
