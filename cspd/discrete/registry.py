"""Sizes of VQ models by name, loading their official files, and what describes a `transformers` model."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from cspd.discrete.gpt import GPT, Eagle, GPTConfig, VQConfig, VQModel
from mar.checkpoint import IN_CSPD_JSON, KINDS, Kind, Shapes, load_weights, lookup
from mar.tensors import CONFIG, Assumed, CheckpointError

# Every VQ model by name: the official sizes and the bundled ones.


@dataclass(frozen=True)
class VQDefaults:
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
    defaults: VQDefaults


def _official(dim: int, n_layer: int, n_head: int, cfg: float, side: int) -> GPTSpec:
    config = GPTConfig(dim=dim, n_layer=n_layer, n_head=n_head, block_size=side * side)
    return GPTSpec(config, "vq16", VQDefaults(cfg=cfg))


_DIGITS = GPTConfig(vocab_size=512, block_size=256, num_classes=10, multiple_of=32)
_EMOJI = replace(_DIGITS, num_classes=0, prefix_length=32, caption_dim=128)


def _digits(dim: int, n_layer: int, n_head: int) -> GPTSpec:
    config = replace(_DIGITS, dim=dim, n_layer=n_layer, n_head=n_head)
    return GPTSpec(config, "vq_digits32", VQDefaults(image_size=32))


def _emoji(dim: int, n_layer: int, n_head: int) -> GPTSpec:
    config = replace(_EMOJI, dim=dim, n_layer=n_layer, n_head=n_head)
    return GPTSpec(config, "vq_emoji64", VQDefaults(cfg=4.5, temperature=0.85, image_size=64))


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
        VQDefaults(cfg=7.5, top_k=1000, image_size=512),
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


def defaults_of(config: Any) -> VQDefaults:
    """The sampling settings of a size's authors, at any resolution; usual ones for a size without a name.

    Args:
        config: a `GPTConfig` or `HFConfig`; the latter has its own settings.
    """
    if hasattr(config, "defaults"):
        return config.defaults
    for spec in _of_size(config):
        # small images are not enlarged to the paper's size
        own_size = config.grid * TOKENIZERS[spec.tokenizer].stride
        return replace(spec.defaults, image_size=min(spec.defaults.image_size, own_size))
    return VQDefaults()


def _of_size(config: GPTConfig) -> Iterator[GPTSpec]:
    """The named sizes that a model has, at any resolution and for any number of classes."""
    for spec in GPTS.values():
        classes = config.num_classes if spec.config.num_classes else 0
        if replace(spec.config, block_size=config.block_size, num_classes=classes) == config:
            yield spec


def create_gpt(name: str) -> GPT:
    """A GPT of the named size with random weights. Raises ValueError on an unknown name."""
    return GPT(gpt_spec(name).config)


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
    defaults: VQDefaults

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
    defaults: VQDefaults
    text: Callable[[Any], Any]
    image: Callable[[Any, Mapping[str, Any]], Image]
    parts: Callable[[Any, Image, Path | None], Parts]
    prompt: Callable[[Any, str, Image], list[int | None]]
    null: Callable[[Any, list[int], Image], list[int | None]]
    decoder_files: tuple[str, ...] = ()


# Loading VQ models from local files: official `c2i_*.pt`, `t2i_*.pt`, `vq_ds16_*.pt`, and safetensors.


def _gpt_adapted(config: GPTConfig, shapes: Shapes, facts: Mapping[str, Any]) -> GPTConfig:
    """A size for a file's number of classes."""
    table = shapes.get("cls_embedding.embedding_table.weight", ())
    if config.num_classes == 0 or len(table) != 2 or table[0] < 2:
        return config
    return replace(config, num_classes=table[0] - 1)


GPT_MODEL = Kind(
    "GPT",
    GPTS,
    GPT,
    "pass it as the checkpoint, with its tokenizer in the same directory, or as the draft of a GPT (--checkpoint,"
    " --draft-checkpoint)",
    _gpt_adapted,
    configs=(GPTConfig,),
)
TOKENIZER = Kind("tokenizer", TOKENIZERS, VQModel, "pass it as the vae of a GPT (--vae)", configs=(VQConfig,))
EAGLE = Kind(
    "EAGLE drafter", GPTS, Eagle, "pass it as the eagle of its GPT (--eagle)", _gpt_adapted, configs=(GPTConfig,)
)
KINDS += [GPT_MODEL, TOKENIZER, EAGLE]
# pixels along a side, in the names of files: of three or four digits, but not the number of a step
PIXELS = re.compile(r"(?<!\d)([1-9]\d{2,3})(?!\d)")
MOST_PIXELS = 1024
USUAL_STRIDE = 16


def load_gpt(path: Path | str, arch: str | None = None, sizes: Mapping[str, Any] | None = None) -> GPT:
    """Loads a GPT, on the CPU in float32.

    The weights are the same at any resolution. It is, in this order, `block_size` in `sizes`, in the metadata of a file
    that was saved here, `image_size` in the `args` of a training script, or pixels in the file's name (c2i_L_384.pt:
    576 tokens). If only the name of the size is left, its usual resolution is assumed, with a warning.

    Args:
        path: `c2i_*.pt`, `t2i_*.pt` or .safetensors. arch: a name in `GPTS`; by default found from the file.
        sizes: some of the sizes in `GPTConfig`.

    Raises:
        CheckpointError, ValueError: as in `mar.checkpoint.load_weights`.
    """
    path = Path(path)
    model, facts = load_weights(path, GPT_MODEL, arch, sizes=sizes)
    if "block_size" not in (sizes or {}):
        model.config = replace(model.config, block_size=_tokens(model.config, facts, path))
    if model.config.grid**2 != model.config.block_size or model.config.block_size < 1:
        raise CheckpointError(f"{path}: block_size={model.config.block_size} is not a square number: correct it")
    return model


def _tokens(config: GPTConfig, facts: Mapping[str, Any], path: Path) -> int:
    """The number of tokens of an image, see `load_gpt`."""
    # the rotary angles are computed from it, so weights of one resolution run at any other
    if isinstance(facts.get(CONFIG), dict):
        return config.block_size
    stride = facts.get("downsample_size")
    if type(stride) is not int or stride < 1:
        stride = next((TOKENIZERS[spec.tokenizer].stride for spec in _of_size(config)), USUAL_STRIDE)
    stated = facts.get("image_size")
    if type(stated) is int and stated > 0 and stated % stride == 0:
        return (stated // stride) ** 2
    named = [int(pixels) for pixels in PIXELS.findall(path.stem)]
    named = [pixels for pixels in named if pixels % stride == 0 and pixels <= MOST_PIXELS]
    if named:
        tokens, why = (named[0] // stride) ** 2, f"as its name has {named[0]}"
    else:
        tokens, why = config.block_size, "the usual ones of its size"
    if not (path.match("[ct]2i_*") and named) and facts.get("arch") not in GPTS:
        pixels = math.isqrt(tokens) * stride
        warnings.warn(f"{path}: images of {pixels} pixels are assumed, {why}; if not, {IN_CSPD_JSON}", Assumed, 2)
    return tokens


def load_tokenizer(path: Path | str, arch: str | None = None, sizes: Mapping[str, Any] | None = None) -> VQModel:
    """Loads a tokenizer, as `load_gpt`; arch is a name in `TOKENIZERS`, and sizes are of `VQConfig`."""
    return load_weights(Path(path), TOKENIZER, arch, sizes=sizes)[0]


def load_eagle(path: Path | str, arch: str | None = None, sizes: Mapping[str, Any] | None = None) -> Eagle:
    """Loads an EAGLE drafter, as `load_gpt`; arch is that of its target."""
    return load_weights(Path(path), EAGLE, arch, sizes=sizes)[0]
