"""Every VQ model this project can build, by name: the official sizes and the embedded ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT, GPTConfig
from cspd.vq.tokenizer import VQConfig, VQModel
from mar.registry import lookup


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
        config: a `GPTConfig`, or a model's own that has them, as `cspd.vq.hosted.config.HostedConfig`.
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
