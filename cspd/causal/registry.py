"""Sizes of SphereAR and BitDance by name, and loading their official files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cspd.causal.autoencoders import BitAutoencoder, BitAutoencoderConfig, SphereVAE, SphereVAEConfig
from cspd.causal.models import Causal, CausalConfig
from mar.checkpoint import KINDS, Kind, Shapes, lookup, model_of
from mar.tensors import Weights, read_weights

# Every model and autoencoder by name: the official sizes, for images of 256 pixels, and the bundled ones.


@dataclass(frozen=True)
class CausalDefaults:
    """The settings that a model's authors sample it with; see `cspd.option.CAUSAL_OPTIONS`."""

    cfg: float = 4.5
    cfg_schedule: str = "linear"
    temperature: float = 1.0
    num_sampling_steps: int = 100


@dataclass(frozen=True)
class CausalSpec:
    """A named size, and its authors' sampling settings."""

    config: CausalConfig
    defaults: CausalDefaults


_B = CausalConfig()
_L = replace(_B, dim=1024, n_layer=32, n_head=16, diff_dim=1024, diff_layers=8)
_H = replace(_B, dim=1280, n_layer=40, n_head=20, diff_dim=1280, diff_layers=12, diff_adanln_layers=3)


def _sphere(size: CausalConfig, cfg: float) -> CausalSpec:
    return CausalSpec(size, CausalDefaults(cfg))


def _bits(size: CausalConfig, cfg: float, parallel_num: int = 1) -> CausalSpec:
    config = replace(size, latent_dim=32, binary=True, parallel_num=parallel_num, cls_token_num=64)
    return CausalSpec(config, CausalDefaults(cfg))


_EMOJI = CausalConfig(
    dim=128,
    n_layer=5,
    n_head=4,
    diff_dim=128,
    side=8,
    stride=8,
    cls_token_num=4,
    num_classes=10,
)  # the bundled model

CAUSALS: dict[str, CausalSpec] = {
    "sphere_ar_b": _sphere(_B, 4.5),
    "sphere_ar_l": _sphere(_L, 4.6),
    "sphere_ar_h": _sphere(_H, 4.5),
    "bitdance_b_1x": _bits(_B, 3.2),
    "bitdance_b_4x": _bits(_B, 3.9, parallel_num=4),
    "bitdance_b_16x": _bits(_B, 6.1, parallel_num=16),
    "bitdance_l_1x": _bits(_L, 4.0),
    "bitdance_h_1x": _bits(_H, 4.55),
    "sphere_ar_emoji64": CausalSpec(_EMOJI, CausalDefaults(4.0, "constant", 0.9)),
}
Autoencoder = SphereVAE | BitAutoencoder
AUTOENCODERS: dict[str, SphereVAEConfig | BitAutoencoderConfig] = {
    "s_vae": SphereVAEConfig(),
    "s_vae_emoji64": SphereVAEConfig(
        z_channels=128, cnn_chs=(16, 32, 64, 128), encoder_layers=1, decoder_layers=1, side=8
    ),
    "ae_d16c32": BitAutoencoderConfig(),
}


def defaults_of(config: CausalConfig) -> CausalDefaults:
    """The sampling settings of a size's authors, for any images; usual ones for a size without a name."""
    trained_for = {name: getattr(config, name) for name in ("side", "stride", "num_classes")}
    for spec in CAUSALS.values():
        if replace(spec.config, **trained_for) == config:
            return spec.defaults
    return CausalDefaults()


def create_causal(name: str) -> Causal:
    """A model of the named size with random weights. Raises ValueError on an unknown name."""
    return Causal(lookup(CAUSALS, name, "causal model").config)


def create_autoencoder(name: str) -> Autoencoder:
    """An autoencoder of the named size with random weights. Raises ValueError on an unknown name."""
    return _built(lookup(AUTOENCODERS, name, "autoencoder of causal models"))


def _built(config: SphereVAEConfig | BitAutoencoderConfig) -> Autoencoder:
    return SphereVAE(config) if isinstance(config, SphereVAEConfig) else BitAutoencoder(config)


# Loading: `SphereAR_*.pt` has its autoencoder inside. `BitDance_*.pt` may have one too; `ae_d16c32.pt` replaces it.


def _adapted(config: CausalConfig, shapes: Shapes, facts: Mapping[str, Any]) -> CausalConfig:
    """A size for a file's number of cells and of classes."""
    cells, classes = shapes.get("pos_for_diff.weight", ()), shapes.get("cls_embedding.weight", ())
    if len(cells) != 2 or len(classes) != 2:
        return config
    return replace(config, side=math.isqrt(cells[0]), num_classes=max(1, classes[0] - 1))


CAUSAL = Kind(
    "causal model", CAUSALS, Causal, "pass it as the checkpoint (--checkpoint)", _adapted, configs=(CausalConfig,)
)
AUTOENCODER: Kind[nn.Module] = Kind(
    "autoencoder of causal models",
    AUTOENCODERS,
    _built,
    "pass it as the vae of a causal model (--vae)",
    configs=(SphereVAEConfig, BitAutoencoderConfig),
)
KINDS += [CAUSAL, AUTOENCODER]
INSIDE = "vae."  # the autoencoder's names inside a model's file
PARTS = ("encoder.", "decoder.", "quant_proj.", "post_quant_proj.")  # of an autoencoder; training adds others


def load_causal(
    path: Path, arch: str | None = None, sizes: Mapping[str, Any] | None = None
) -> tuple[Causal, Autoencoder | None]:
    """Loads a model, and the autoencoder if its file has one; both on the CPU in float32.

    Args:
        path: an official file or .safetensors. arch: a name in `CAUSALS`; by default found from the file.
        sizes: some of the model's sizes in `CausalConfig`.

    Raises:
        CheckpointError, ValueError: as in `mar.checkpoint.load_weights`.
    """
    weights = read_weights(path)
    own = {name: tensor for name, tensor in weights.tensors.items() if not name.startswith(INSIDE)}
    model = model_of(Weights(own, weights.facts), path, CAUSAL, arch, sizes)
    return model, _autoencoder_in(weights.tensors, path)


def load_autoencoder(path: Path, sizes: Mapping[str, Any] | None = None) -> Autoencoder:
    """Loads an autoencoder from its own file, or from that of a model. Raises CheckpointError as `load_causal`."""
    weights = read_weights(path)
    inside = _autoencoder_in(weights.tensors, path)
    if inside is not None:
        return inside
    own = {name: tensor for name, tensor in weights.tensors.items() if name.startswith(PARTS)}
    found = model_of(Weights(own or weights.tensors, weights.facts), path, AUTOENCODER, sizes=sizes)
    return found  # type: ignore[return-value]


def _autoencoder_in(tensors: Mapping[str, Tensor], path: Path) -> Autoencoder | None:
    inside = {name.removeprefix(INSIDE): tensor for name, tensor in tensors.items() if name.startswith(INSIDE)}
    return model_of(Weights(inside), path, AUTOENCODER) if inside else None  # type: ignore[return-value]
