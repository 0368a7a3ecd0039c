"""How much is checked: the sizes of everything, of a real run and of one that is over in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cspd.gpu_check.golden import SAMPLES
from cspd.vq.gpt import GPTConfig
from cspd.vq.registry import GPTS
from cspd.vq.tokenizer import VQConfig
from mar.model import MARConfig
from mar.registry import MARS

Cases = dict[str, Callable[[], dict[str, Any]]]  # of a part: what is checked or timed, by name


class Setting(NamedTuple):
    """Where MAR is timed: a size of `Scale.mars`, images at once, K, precision, and a way to run of `MODES`."""

    size: str
    batch: int
    num_iter: int
    precision: str
    mode: str


MODES = {  # how an engine runs its rounds
    "eager": {"compiled": False, "graphs": False},
    "compiled": {"compiled": True, "graphs": False},
    "graphs": {"compiled": False, "graphs": True},
}


@dataclass(frozen=True)
class Scale:
    """The sizes of everything.

    Attributes:
        is_tiny: models are small ones with random weights, also where the embedded ones are checked otherwise.
        matmul: side of the matrices. copy_bytes: of the buffer that is copied. launches: kernels that are timed.
        mars, gpts: the models that are timed, with random weights; mar_draft, gpt_draft: smaller ones that draft.
        mar_settings: where MAR is timed. windows: W of `speculative`. head_calls: N of `calibrated`. gamma: of `cspd`.
        gpt_batches: codes are timed for so many images at once.
        steps: T, denoising steps. warm_ups, rounds: before a round is timed, and timed.
        golden: which samples are compared with golden ones. same_seeds: settings of images that two devices make.
        images, samples: of two-sample tests, and draws of the coupling.
        tokenizer: of codes, where a small model is taken.
    """

    is_tiny: bool
    matmul: int
    copy_bytes: int
    launches: int
    mars: dict[str, MARConfig]
    mar_draft: MARConfig
    gpts: dict[str, GPTConfig]
    gpt_draft: GPTConfig
    mar_settings: tuple[Setting, ...]
    windows: tuple[int, ...]
    head_calls: int
    gamma: int
    gpt_batches: tuple[int, ...]
    steps: int
    warm_ups: int
    rounds: int
    golden: tuple[str, ...]
    same_seeds: dict[str, int]
    images: int
    samples: int
    tokenizer: VQConfig


@dataclass(frozen=True)
class Settings:
    """What a part is told: the device, the sizes, and a folder for what is fitted to random weights."""

    device: torch.device
    scale: Scale
    cache: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def one_at_a_time(base: Setting, **others: tuple) -> tuple[Setting, ...]:
    """A setting, and those that differ from it in one factor."""
    changed = [base._replace(**{name: value}) for name, values in others.items() for value in values]
    return (base, *changed)


_B8 = Setting("B", 8, 64, "bf16", "graphs")
FULL = Scale(
    is_tiny=False,
    matmul=8192,
    copy_bytes=2**30,
    launches=2000,
    mars={size: MARS[f"mar_{name}"].config for size, name in (("B", "base"), ("L", "large"), ("H", "huge"))},
    mar_draft=replace(MARS["mar_base"].config, embed_dim=384, depth=6, num_heads=6, diffloss_w=512, diffloss_d=3),
    gpts={size: GPTS[f"llamagen_{size.lower()}"].config for size in ("B", "XL", "3B")},
    gpt_draft=replace(GPTS["llamagen_b"].config, n_layer=3),
    mar_settings=(
        *one_at_a_time(
            _B8,
            batch=(1, 32, 128, 256),
            size=("L", "H"),
            mode=("eager", "compiled"),
            precision=("tf32", "fp32"),
            num_iter=(256, 16),
        ),
        _B8._replace(size="H", batch=1),
        _B8._replace(size="H", batch=64),
    ),
    windows=(12, 24),
    head_calls=10,
    gamma=8,
    gpt_batches=(1, 8, 64),
    steps=100,
    warm_ups=2,
    rounds=5,
    golden=tuple(SAMPLES),
    same_seeds={"images": 4, "num_iter": 8, "num_sampling_steps": 25},
    images=500,
    samples=1_000_000,
    tokenizer=VQConfig(),
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
    copy_bytes=2**22,
    launches=20,
    mars={"B": _SMALL_MAR},
    mar_draft=_SMALL_MAR,
    gpts={"B": _SMALL_GPT},
    gpt_draft=replace(_SMALL_GPT, n_layer=1),
    mar_settings=one_at_a_time(_SMALL, batch=(1,), precision=("fp32",), num_iter=(4,)),
    windows=(4,),
    head_calls=5,
    gamma=4,
    gpt_batches=(1, 2),
    steps=25,
    warm_ups=1,
    rounds=1,
    golden=("iter4_cfg3_linear",),
    same_seeds={"images": 2, "num_iter": 8, "num_sampling_steps": 25},
    images=8,
    samples=4_000,
    tokenizer=VQConfig(
        ch=32, ch_mult=(1, 1), z_channels=32, codebook_size=64, codebook_dim=2, num_res_blocks=1, attention=False
    ),
)
