"""Every model this project can build, by name: the official sizes and the embedded ones."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from mar.model import MAR, MARConfig
from mar.vae import AutoencoderKL, KLConfig

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingDefaults:
    """How a model's authors sample it.

    Attributes:
        num_iter: K, autoregressive iterations.
        cfg, cfg_schedule: guidance scale s and how it runs over the iterations.
        temperature: with guidance. temperature_unguided: with cfg = 1.
        num_sampling_steps: T, denoising steps per token.
    """

    num_iter: int = 64
    cfg: float = 3.0
    cfg_schedule: str = "linear"
    temperature: float = 1.0
    temperature_unguided: float = 0.95
    num_sampling_steps: int = 100


@dataclass(frozen=True)
class MARSpec:
    """A named MAR size, its published sampling settings and the autoencoder of its tokens."""

    config: MARConfig
    vae: str
    defaults: SamplingDefaults


def _official(embed_dim: int, depth: int, num_heads: int, width: int, head_depth: int, cfg: float) -> MARSpec:
    config = MARConfig(embed_dim=embed_dim, depth=depth, num_heads=num_heads, diffloss_w=width, diffloss_d=head_depth)
    return MARSpec(config, "kl16", SamplingDefaults(cfg=cfg))


def _embedded(
    embed_dim: int,
    depth: int,
    num_heads: int,
    width: int,
    head_depth: int,
    img_size: int,
    vae: str,
    defaults: SamplingDefaults,
) -> MARSpec:
    config = MARConfig(
        img_size=img_size,
        vae_stride=4,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        class_num=10,
        buffer_size=8,
        diffloss_w=width,
        diffloss_d=head_depth,
    )
    return MARSpec(config, vae, defaults)


_DIGITS = SamplingDefaults(temperature_unguided=1.0)
_EMOJI = SamplingDefaults(cfg=4.0, cfg_schedule="constant", temperature=0.9, temperature_unguided=1.0)

MARS: dict[str, MARSpec] = {
    "mar_base": _official(768, 12, 12, 1024, 6, cfg=2.9),
    "mar_large": _official(1024, 16, 16, 1280, 8, cfg=3.0),
    "mar_huge": _official(1280, 20, 16, 1536, 12, cfg=3.2),
    "mar_digits32": _embedded(192, 3, 6, 256, 3, 32, "kl_digits32", _DIGITS),
    "mar_digits32_draft": _embedded(96, 2, 4, 160, 2, 32, "kl_digits32", _DIGITS),
    "mar_emoji64": _embedded(192, 4, 6, 256, 3, 64, "kl_emoji64", _EMOJI),
    "mar_emoji64_draft": _embedded(96, 2, 4, 160, 2, 64, "kl_emoji64", _EMOJI),
}

VAES: dict[str, KLConfig] = {
    "kl16": KLConfig(),
    "kl_digits32": KLConfig(ch=32, ch_mult=(1, 2, 2), num_res_blocks=1, scale=1.0),
    "kl_emoji64": KLConfig(ch=32, ch_mult=(1, 2, 2), num_res_blocks=1, attention=False, scale=1.0111),
}


def suggestion(name: str, known: Collection[str]) -> str:
    """What to tell somebody who gave an unknown name: the nearest known one, or all."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known) or 'none'}"


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of a table of named things. Raises ValueError on an unknown name and lists the known ones."""
    if name not in [*table]:  # a list, since what is asked for may not be hashable
        raise ValueError(f"unknown {what} {name!r}: {suggestion(name, table)}")
    return table[name]


def mar_spec(name: str) -> MARSpec:
    """The spec of a MAR size. Raises ValueError on an unknown name."""
    return lookup(MARS, name, "MAR model")


def defaults_of(config: MARConfig) -> SamplingDefaults:
    """The published sampling settings of a size, at any resolution; the common ones for one that has no name.

    Of sizes that differ by their resolution only, those of the resolution itself.
    """
    other = {"img_size": config.img_size, "patch_size": config.patch_size}
    named = [spec for spec in MARS.values() if replace(spec.config, **other) == config]
    named.sort(key=lambda spec: spec.config != config)
    return named[0].defaults if named else SamplingDefaults()


def create_mar(name: str, seq_len: int | None = None, token_dim: int | None = None) -> MAR:
    """A MAR of the named size with random weights.

    Args:
        seq_len, token_dim: of another resolution than the published one, as `--img-size` and `--patch_size` of the
            authors' training script give it. What no resolution has is left out.

    Raises:
        ValueError: unknown name.
    """
    config = mar_spec(name).config
    patch = math.isqrt((token_dim or config.token_dim) // config.vae_embed_dim)
    side = math.isqrt(seq_len or config.seq_len)
    if patch and side:
        config = replace(config, img_size=side * patch * config.vae_stride, patch_size=patch)
    return MAR(config)


def create_vae(name: str) -> AutoencoderKL:
    """An autoencoder of the named size with random weights. Raises ValueError on an unknown name."""
    return AutoencoderKL(lookup(VAES, name, "autoencoder"))


def _entry_point(name: str, create: Callable, doc: str) -> Callable:
    def build():
        return create(name)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = doc
    return build


mar_base = _entry_point("mar_base", create_mar, "MAR-B: 208M parameters, ImageNet 256x256.")
mar_large = _entry_point("mar_large", create_mar, "MAR-L: 478M parameters, ImageNet 256x256.")
mar_huge = _entry_point("mar_huge", create_mar, "MAR-H: 942M parameters, ImageNet 256x256.")
kl16 = _entry_point("kl16", create_vae, "KL-16: 66M parameters, stride 16, 16 channels.")
