"""Sizes of VQ models by name, loading their official files, and what describes a `transformers` model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from cspd.discrete.gpt import GPT, Eagle, GPTConfig, VQConfig, VQModel
from mar.checkpoint import KINDS, Kind, load_weights, lookup

# Every VQ model by name: the official sizes and the bundled ones.


@dataclass(frozen=True)
class SamplingDefaults:
    """The settings that a model's authors sample it with.

    Attributes:
        cfg: guidance scale s.
        temperature, top_k, top_p: of the token distribution; top_k = 0 and top_p = 1 allow every token.
        image_size: side of the images, in pixels, in the paper's results; larger images are resized to it.
    """

    cfg: float = 2.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    image_size: int = 256


@dataclass(frozen=True)
class GPTSpec:
    """A named GPT size, its authors' sampling settings and the tokenizer of its tokens."""

    config: GPTConfig
    tokenizer: str
    defaults: SamplingDefaults


def _official(dim: int, n_layer: int, n_head: int, cfg: float, side: int) -> GPTSpec:
    config = GPTConfig(dim=dim, n_layer=n_layer, n_head=n_head, block_size=side * side)
    return GPTSpec(config, "vq16", SamplingDefaults(cfg=cfg))


_DIGITS = GPTConfig(vocab_size=512, block_size=256, num_classes=10, multiple_of=32)
_EMOJI = replace(_DIGITS, num_classes=0, prefix_length=32, caption_dim=128)


def _digits(dim: int, n_layer: int, n_head: int) -> GPTSpec:
    config = replace(_DIGITS, dim=dim, n_layer=n_layer, n_head=n_head)
    return GPTSpec(config, "vq_digits32", SamplingDefaults(image_size=32))


def _emoji(dim: int, n_layer: int, n_head: int) -> GPTSpec:
    config = replace(_EMOJI, dim=dim, n_layer=n_layer, n_head=n_head)
    return GPTSpec(config, "vq_emoji64", SamplingDefaults(cfg=4.5, temperature=0.85, image_size=64))


# A side of 24 tokens: trained at 384 pixels, and the authors resize the images to 256. A side of 32: 512 pixels.
GPTS: dict[str, GPTSpec] = {
    "llamagen_b": _official(768, 12, 12, cfg=2.0, side=16),
    "llamagen_l": _official(1024, 24, 16, cfg=2.0, side=16),
    "llamagen_xl": _official(1280, 36, 20, cfg=1.75, side=24),
    "llamagen_xxl": _official(1536, 48, 24, cfg=1.75, side=24),
    "llamagen_xxxl": _official(2560, 48, 40, cfg=1.75, side=24),
    "llamagen_1b": _official(2048, 22, 32, cfg=1.75, side=24),
    "llamagen_3b": _official(3200, 24, 32, cfg=1.65, side=24),
    "llamagen_xl_t2i": GPTSpec(
        GPTConfig(1280, 36, 20, block_size=32 * 32, num_classes=0, prefix_length=120, caption_dim=2048),
        "vq16",
        SamplingDefaults(cfg=7.5, top_k=1000, image_size=512),
    ),
    "gpt_digits32": _digits(192, 8, 6),
    "gpt_digits32_draft": _digits(160, 3, 5),
    "gpt_emoji64_text": _emoji(128, 6, 4),
    "gpt_emoji64_text_draft": _emoji(64, 2, 2),
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
    """The sampling settings of a size's authors, at any resolution; usual ones for a size without a name.

    Args:
        config: a `GPTConfig` or `HFConfig`; the latter has its own settings.
    """
    if hasattr(config, "defaults"):
        return config.defaults
    for spec in GPTS.values():
        # files of a size exist for several resolutions; small images are not enlarged to the paper's size
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


# The description of a `transformers` model. `cspd.discrete.architectures` fills it in, and needs `transformers`.

CHAMELEON_DECODER = ("vqgan.ckpt", "tokenizer/vqgan.ckpt")  # the file with its image decoder, in its directory


@dataclass(frozen=True)
class HFConfig:
    """Sizes of a `transformers` model, under the names of `cspd.discrete.gpt.GPTConfig` where both have them.

    Attributes:
        architecture: its name.
        dim, n_layer, n_head, key_heads, head_dim: of its decoder; groups of query heads may share a key head.
        vocab_size: entries of the VQ codebook. block_size: L, tokens of a square image.
        prefix_length: the most tokens of a prompt.
        stride: pixels per token, along a side.
        row_end: a token, outside the codebook, that follows each row of the image; None if there is no such token.
        defaults: the authors' sampling settings.
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
        """Tokens along a side of the image."""
        return round(self.block_size**0.5)


@dataclass(frozen=True)
class Image:
    """The format of a model's images.

    Attributes:
        side: tokens along a side. stride: pixels per token, along a side. num_codes: entries of the codebook.
        tokens: the token of each code in the vocabulary of prompts, if images share that vocabulary.
        row_end: see `HFConfig`.
        mean, std: of each colour, for pixels in 0..1; the VQ model's images are normalised with them.
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
    """The modules of a model that generate images.

    Attributes:
        decoder: the transformer. codes: embeddings [V, dim] of the codes.
        output: from features [..., dim] to the logits [..., V] of the codes.
        tokenizer: between pixels and codes, or None if there is no decoder to pixels.
    """

    decoder: nn.Module
    codes: Tensor
    output: nn.Module
    tokenizer: nn.Module | None


@dataclass(frozen=True)
class Architecture:
    """A text-to-image architecture of `transformers` that samples VQ tokens.

    Attributes:
        name: `cspd.discrete.architectures.name_of` its configuration, mostly the `model_type` there.
        model_class: () -> the class that loads its weights. example: a model on the Hub.
        defaults: the authors' sampling settings.
        text: configuration -> the configuration of its decoder.
        image: (configuration, settings of the image processor) -> the format of its images.
        parts: (model, image, the file with the decoder to pixels or None) -> its modules.
        prompt: (tokenizer, text, image) -> the tokens before those of the image; None stands for a special token that
            the tokenizer lacks.
        null: (tokenizer, prompt, image) -> the tokens of the unconditional branch without a negative prompt; as there.
        decoder_files: names of the file with the decoder to pixels, if `transformers` does not have it.
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


# Loading VQ models from local files: official `c2i_*.pt`, `t2i_*.pt`, `vq_ds16_*.pt`, and safetensors.

GPT_MODEL = Kind(
    "GPT",
    GPTS,
    create_gpt,
    "pass it as the checkpoint, with its tokenizer in the same directory, or as the draft of a GPT (--checkpoint,"
    " --draft-checkpoint)",
)
TOKENIZER = Kind("tokenizer", TOKENIZERS, create_tokenizer, "pass it as the vae of a GPT (--vae)")
EAGLE = Kind("EAGLE drafter", GPTS, create_eagle, "pass it as the eagle of its GPT (--eagle)")
KINDS += [GPT_MODEL, TOKENIZER, EAGLE]
PIXELS = re.compile(r"_(256|384|512)\b")  # in the names of official files


def load_gpt(path: Path | str, arch: str | None = None) -> GPT:
    """Loads a GPT, on the CPU in float32.

    Args:
        path: `c2i_*.pt`, `t2i_*.pt` or .safetensors. The weights are the same at any resolution, so it is read from the
            name of an official file (c2i_L_384.pt: 384 pixels, 576 tokens). Other files get the usual one of the size.
        arch: a name in `GPTS`; by default found from the tensors.

    Raises:
        CheckpointError, ValueError: as in `mar.checkpoint.load_weights`.
    """
    model, name = load_weights(Path(path), GPT_MODEL, arch)
    # the rotary angles are computed from block_size, so weights of one resolution run at any other
    pixels = PIXELS.search(Path(path).stem)
    if pixels:
        side = int(pixels[1]) // TOKENIZERS[GPTS[name].tokenizer].stride
        model.config = replace(model.config, block_size=side * side)
    return model


def load_tokenizer(path: Path | str, arch: str | None = None) -> VQModel:
    """Loads a tokenizer, as `load_gpt`; arch is a name in `TOKENIZERS`."""
    return load_weights(Path(path), TOKENIZER, arch)[0]


def load_eagle(path: Path | str, arch: str | None = None) -> Eagle:
    """Loads an EAGLE drafter, as `load_gpt`; arch is that of its target."""
    return load_weights(Path(path), EAGLE, arch)[0]
