"""What a GPU check runs on: models of official size with random weights, or small ones that finish in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from cspd.discrete.gpt import GPTConfig
from cspd.discrete.registry import GPTS
from cspd.method import PUBLISHED
from mar.checkpoint import MARS
from mar.model import MARConfig

STEPS = 100  # T: the bundled model's, so that its calibrations fit
MODES: dict[str, dict[str, Any]] = {  # how an engine runs its rounds
    "eager": {"compiled": False, "graphs": False},
    "graphs": {"compiled": False, "graphs": True},
    "compiled": {"compiled": True, "graphs": False},
}


class Setting(NamedTuple):
    """A setting that MAR is timed at: a size of `Scale.mars`, images at once, K, precision, and one of `MODES`."""

    size: str
    batch: int
    num_iter: int
    precision: str
    mode: str


@dataclass(frozen=True, eq=False)  # so that it can be the key of a cache
class Scale:
    """The sizes of everything.

    Attributes:
        is_tiny: what takes half a minute on a CPU is skipped.
        matmul: side of the matrices; a buffer that is copied has 16 bytes for each entry of one.
        mars, gpts: the timed models. mar_draft, gpt_draft: smaller models that draft for them.
        settings, more_settings: of the timed MAR models, the most important ones first.
        methods, more_methods: timed at all of these settings, and at the first one of `more_settings`.
        gpt_batches: images at once. rounds: timed at each of several moments of an image.
        test_images: of each sample of a two-sample test.
    """

    is_tiny: bool
    matmul: int
    mars: dict[str, MARConfig]
    mar_draft: MARConfig
    settings: tuple[Setting, ...]
    more_settings: tuple[Setting, ...]
    methods: tuple[str, ...]
    more_methods: tuple[str, ...]
    gpts: dict[str, GPTConfig]
    gpt_draft: GPTConfig
    gpt_batches: tuple[int, ...]
    rounds: int
    test_images: int


@dataclass(frozen=True)
class Settings:
    """The device and the sizes of a check."""

    device: torch.device
    scale: Scale

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


_FULL = Setting("B", 8, 64, "bf16", "graphs")
FULL = Scale(
    is_tiny=False,
    matmul=8192,
    mars={size: MARS[f"mar_{name}"].config for size, name in (("B", "base"), ("L", "large"), ("H", "huge"))},
    mar_draft=replace(MARS["mar_base"].config, embed_dim=384, depth=6, num_heads=6, diffloss_w=512, diffloss_d=3),
    settings=tuple(
        _FULL._replace(size=size, batch=batch)
        for batches in ((8, 64), (1,), (256,))
        for size in "BHL"
        for batch in batches
    ),
    more_settings=(
        _FULL,
        *(_FULL._replace(mode=mode) for mode in ("eager", "compiled")),
        *(_FULL._replace(precision=precision) for precision in ("tf32", "fp32")),
        *(_FULL._replace(num_iter=num_iter) for num_iter in (256, 16)),
        *(_FULL._replace(batch=batch) for batch in (32, 128)),
    ),
    methods=(PUBLISHED, "ar", "calibrated", "speculative:window=12", "lazymar:denoiser=calibrated"),
    more_methods=("speculative:window=24", "cspd:gamma=8"),
    gpts={size: GPTS[f"llamagen_{size.lower()}"].config for size in ("B", "XL", "3B")},
    gpt_draft=replace(GPTS["llamagen_b"].config, n_layer=3),
    gpt_batches=(1, 8, 64),
    rounds=3,
    test_images=500,
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
_SMALL = Setting("B", 2, 8, "bf16", "graphs")
TINY = Scale(
    is_tiny=True,
    matmul=256,
    mars={"B": _SMALL_MAR},
    mar_draft=_SMALL_MAR,
    settings=(_SMALL, _SMALL._replace(batch=1)),
    more_settings=(_SMALL, _SMALL._replace(precision="fp32", num_iter=4)),
    methods=(PUBLISHED, "ar", "calibrated", "speculative:window=4", "lazymar:denoiser=calibrated"),
    more_methods=("cspd:gamma=4",),
    gpts={"B": _SMALL_GPT},
    gpt_draft=replace(_SMALL_GPT, n_layer=1),
    gpt_batches=(1, 2),
    rounds=1,
    test_images=8,
)
