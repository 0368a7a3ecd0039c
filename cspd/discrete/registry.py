"""Sizes of VQ models by name, their official files, and what a configuration of `transformers` says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from cspd.discrete.gpt import GPT, Eagle, GPTConfig, VQConfig, VQModel
from mar.checkpoint import KINDS, Kind, load_weights, lookup

# Every VQ model this project can build, by name: the official sizes and the bundled ones.


@dataclass(frozen=True)
class SamplingDefaults:
    """How a model's authors sample it.

    Attributes:
        cfg: guidance scale s.
        temperature, top_k, top_p: of the token distribution; top_k = 0 and top_p = 1 keep every token.
        image_size: side of the images in the paper's results; larger ones are resized to it.
    """

    cfg: float = 2.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    image_size: int = 256


@dataclass(frozen=True)
class GPTSpec:
    """A named GPT size, its published sampling settings and the tokenizer of its tokens."""

    config: GPTConfig
    tokenizer: str
    defaults: SamplingDefaults


def _official(dim: int, n_layer: int, n_head: int, cfg: float, side: int) -> GPTSpec:
    config = GPTConfig(dim=dim, n_layer=n_layer, n_head=n_head, block_size=side * side)
    return GPTSpec(config, "vq16", SamplingDefaults(cfg=cfg))


def _texts(dim: int, n_layer: int, n_head: int, side: int) -> GPTSpec:
    sizes = {"num_classes": 0, "prefix_length": 120, "caption_dim": 2048}
    config = GPTConfig(dim=dim, n_layer=n_layer, n_head=n_head, block_size=side * side, **sizes)
    return GPTSpec(config, "vq16", SamplingDefaults(cfg=7.5, top_k=1000, image_size=512))


def _digits(dim: int, n_layer: int, n_head: int) -> GPTSpec:
    sizes = {"vocab_size": 512, "block_size": 256, "num_classes": 10, "multiple_of": 32}
    config = GPTConfig(dim=dim, n_layer=n_layer, n_head=n_head, **sizes)
    return GPTSpec(config, "vq_digits32", SamplingDefaults(image_size=32))


def _emoji_texts(dim: int, n_layer: int, n_head: int) -> GPTSpec:
    sizes = {"vocab_size": 512, "block_size": 256, "num_classes": 0, "multiple_of": 32}
    config = GPTConfig(dim=dim, n_layer=n_layer, n_head=n_head, prefix_length=32, caption_dim=128, **sizes)
    return GPTSpec(config, "vq_emoji64", SamplingDefaults(cfg=4.5, temperature=0.85, image_size=64))


# side 24: files trained at 384 pixels, whose images the authors resize to 256; 32: at 512
GPTS: dict[str, GPTSpec] = {
    "llamagen_b": _official(768, 12, 12, cfg=2.0, side=16),
    "llamagen_l": _official(1024, 24, 16, cfg=2.0, side=16),
    "llamagen_xl": _official(1280, 36, 20, cfg=1.75, side=24),
    "llamagen_xxl": _official(1536, 48, 24, cfg=1.75, side=24),
    "llamagen_xxxl": _official(2560, 48, 40, cfg=1.75, side=24),
    "llamagen_1b": _official(2048, 22, 32, cfg=1.75, side=24),
    "llamagen_3b": _official(3200, 24, 32, cfg=1.65, side=24),
    "llamagen_xl_t2i": _texts(1280, 36, 20, side=32),
    "gpt_digits32": _digits(192, 8, 6),
    "gpt_digits32_draft": _digits(160, 3, 5),
    "gpt_emoji64_text": _emoji_texts(128, 6, 4),
    "gpt_emoji64_text_draft": _emoji_texts(64, 2, 2),
}

TOKENIZERS: dict[str, VQConfig] = {
    "vq16": VQConfig(),
    "vq_digits32": VQConfig(ch=32, ch_mult=(1, 2), z_channels=64, codebook_size=512, num_res_blocks=1, attention=False),
    "vq_emoji64": VQConfig(
        ch=32, ch_mult=(1, 1, 1), z_channels=64, codebook_size=512, num_res_blocks=1, attention=False
    ),
}


def gpt_spec(name: str) -> GPTSpec:
    """The spec of a GPT size. Raises ValueError on an unknown name."""
    return lookup(GPTS, name, "GPT")


def defaults_of(config: Any) -> SamplingDefaults:
    """The published sampling settings of a size, at any resolution; the common ones for one without a name.

    Args:
        config: a `GPTConfig`, or a model's own that has them, as `HFConfig`.
    """
    if hasattr(config, "defaults"):
        return config.defaults
    for spec in GPTS.values():
        if replace(spec.config, block_size=config.block_size) == config:
            own_size = config.grid * TOKENIZERS[spec.tokenizer].stride
            return replace(spec.defaults, image_size=min(spec.defaults.image_size, own_size))
    return SamplingDefaults()


def create_gpt(name: str) -> GPT:
    """A GPT of the named size with random weights. Raises ValueError on an unknown name."""
    return GPT(gpt_spec(name).config)


def create_eagle(name: str) -> Eagle:
    """An EAGLE drafter, with random weights, for the GPT of the named size. Raises ValueError on an unknown name."""
    return Eagle(gpt_spec(name).config)


def create_tokenizer(name: str) -> VQModel:
    """A tokenizer of the named size with random weights. Raises ValueError on an unknown name."""
    return VQModel(lookup(TOKENIZERS, name, "tokenizer"))


# What a model of `transformers` is, as far as a model runner must know, and what an architecture must tell.

CHAMELEON_DECODER = ("vqgan.ckpt", "tokenizer/vqgan.ckpt")  # what makes pixels of its codes, in a folder


@dataclass(frozen=True)
class HFConfig:
    """Sizes of a model of `transformers`, by the names of `cspd.discrete.gpt.GPTConfig` where it has them too.

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
        tokens: of the codes, by code, where they are tokens of the text's vocabulary. row_end: see `HFConfig`.
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
        name: `cspd.discrete.architectures.name_of` its configuration, mostly the `model_type` there.
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


# Loading weights of VQ models from local files: official `c2i_*.pt`, `t2i_*.pt`, `vq_ds16_*.pt`, and safetensors.

GPT_MODEL = Kind(
    "GPT",
    GPTS,
    create_gpt,
    "give it as checkpoint, with its tokenizer beside it, or as draft of a GPT (--checkpoint, --draft-checkpoint)",
)
TOKENIZER = Kind("tokenizer", TOKENIZERS, create_tokenizer, "give it as vae of a GPT (--vae)")
EAGLE = Kind("EAGLE drafter", GPTS, create_eagle, "give it as eagle of its GPT (--eagle)")
KINDS += [GPT_MODEL, TOKENIZER, EAGLE]
PIXELS = re.compile(r"_(256|384|512)\b")  # in an official file's name; its weights are the same at any resolution


def load_gpt(path: Path | str, arch: str | None = None) -> GPT:
    """A GPT with the weights of a file, on the CPU in float32.

    Args:
        path: `c2i_*.pt`, `t2i_*.pt` or .safetensors. Only an official name tells the resolution (c2i_L_384.pt: 576
            tokens), the weights do not; for another name it is the resolution published for the size.
        arch: a name of `GPTS`; found out from the file by default.

    Raises:
        CheckpointError, ValueError: as in `mar.checkpoint.load_weights`.
    """
    model, name = load_weights(Path(path), GPT_MODEL, arch)
    pixels = PIXELS.search(Path(path).stem)
    if pixels:
        side = int(pixels[1]) // TOKENIZERS[GPTS[name].tokenizer].stride
        model.config = replace(model.config, block_size=side * side)
    return model


def load_tokenizer(path: Path | str, arch: str | None = None) -> VQModel:
    """A tokenizer with the weights of a file, as `load_gpt`; arch is a name of `TOKENIZERS`."""
    return load_weights(Path(path), TOKENIZER, arch)[0]


def load_eagle(path: Path | str, arch: str | None = None) -> Eagle:
    """An EAGLE drafter with the weights of a file, as `load_gpt`; arch is its target's."""
    return load_weights(Path(path), EAGLE, arch)[0]
