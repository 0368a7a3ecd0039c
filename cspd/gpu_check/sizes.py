"""What a GPU check runs on: models of official size, or small ones that finish in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from cspd.causal.autoencoders import SphereVAEConfig
from cspd.causal.models import CausalConfig
from cspd.causal.registry import CAUSALS
from cspd.discrete.gpt import GPTConfig, VQConfig
from cspd.discrete.registry import GPTS
from mar.checkpoint import MARS
from mar.model import MARConfig
from mar.vae import KLConfig


class Subject(NamedTuple):
    """A model that is run: a family, and a size of `Scale`."""

    family: str
    size: str

    def __str__(self) -> str:
        return f"{ {'VQ': 'LlamaGen', 'causal': 'SphereAR'}.get(self.family, self.family) }-{self.size}"


MAR_L, VQ_L, SPHERE_L = (Subject(family, "L") for family in ("MAR", "VQ", "causal"))


@dataclass(frozen=True, eq=False)  # so that it can be the key of a cache
class Scale:
    """The sizes of everything.

    Attributes:
        is_tiny: everything is small, and what takes half a minute on a CPU is skipped.
        mars, gpts, causals: models by size. vae, tokenizer, sphere_vae: their decoders.
        cells: images at once, and the models that are timed, the most important ones first.
        num_iter, window: of MAR, and of speculation. plan: the rounds and refreshes of `budget`.
    """

    is_tiny: bool
    mars: dict[str, MARConfig]
    gpts: dict[str, GPTConfig]
    causals: dict[str, CausalConfig]
    vae: KLConfig
    tokenizer: VQConfig
    sphere_vae: SphereVAEConfig
    cells: tuple[tuple[int, tuple[Subject, ...]], ...]
    num_iter: int
    window: int
    plan: tuple[str, str]


_MARS = tuple(Subject("MAR", size) for size in "LBH")
_OTHERS = (VQ_L, SPHERE_L, Subject("VQ", "XL"), Subject("VQ", "B"), Subject("causal", "B"))
# 22 rounds, 7 of them full: more of both in the beginning, as in plans of `budget`
_ROUNDS = "0,2,4,6,9,11,14,17,20,23,26,29,32,35,39,42,45,49,52,56,59,63"
FULL = Scale(
    is_tiny=False,
    mars={size: MARS[f"mar_{name}"].config for size, name in (("L", "large"), ("B", "base"), ("H", "huge"))},
    gpts={size: GPTS[f"llamagen_{size.lower()}"].config for size in ("L", "XL", "B")},
    causals={size: CAUSALS[f"sphere_ar_{size.lower()}"].config for size in "LB"},
    vae=KLConfig(),
    tokenizer=VQConfig(),
    sphere_vae=SphereVAEConfig(),
    cells=(
        (64, (*_MARS, VQ_L, SPHERE_L)),
        (1, (*_MARS, VQ_L, SPHERE_L)),
        (8, _MARS),
        (64, _OTHERS[2:]),
        (1, _OTHERS[2:]),
        (8, _OTHERS),
        (256, (*_MARS, VQ_L)),
    ),
    num_iter=64,
    window=12,
    plan=(_ROUNDS, "0,1,2,3,5,8,13"),
)

_SMALL_MAR = MARConfig(
    img_size=32,
    vae_stride=4,
    embed_dim=32,
    depth=1,
    num_heads=2,
    class_num=10,
    buffer_size=4,
    diffloss_w=32,
    diffloss_d=1,
)
_SMALL_GPT = GPTConfig(dim=32, n_layer=2, n_head=2, vocab_size=64, block_size=64, num_classes=10, multiple_of=32)
_SMALL_CAUSAL = replace(
    CAUSALS["sphere_ar_emoji64"].config,
    dim=64,
    n_layer=2,
    n_head=2,
    diff_dim=32,
    diff_layers=1,
    diff_adanln_layers=1,
    side=4,
)
TINY = Scale(
    is_tiny=True,
    mars={"L": _SMALL_MAR},
    gpts={"L": _SMALL_GPT},
    causals={"L": _SMALL_CAUSAL},
    vae=KLConfig(ch=32, ch_mult=(1, 1, 1), num_res_blocks=1),
    tokenizer=VQConfig(ch=32, ch_mult=(1, 1, 1), z_channels=32, num_res_blocks=1),
    sphere_vae=SphereVAEConfig(z_channels=64, cnn_chs=(16, 16, 32, 64), encoder_layers=1, decoder_layers=1, side=4),
    cells=((2, (MAR_L, VQ_L, SPHERE_L)), (1, (MAR_L,))),
    num_iter=8,
    window=4,
    plan=("0,1,2,4,6", "0,1"),
)


@dataclass(frozen=True)
class Setup:
    """The device and the sizes of a check.

    Attributes:
        until: when the time is over, by `time.monotonic`. mar: a clone of MAR's own code.
    """

    device: torch.device
    scale: Scale
    until: float = float("inf")
    mar: Path | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()
