"""What the training programs share: a resumable loop with warm-up, cosine decay and an average of the weights."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from cspd.records import publishing

SAVE_SECONDS = 120
HELD_OUT_SEED = 10**9  # training draws never come near


def fit(
    model: nn.Module,
    loss_fn: Callable[[int], tuple[Tensor, dict[str, float]]],
    *,
    run: Path,
    settings: dict,
    steps: int,
    lr: float,
    warmup: int = 200,
    weight_decay: float = 0.02,
    ema_decay: float = 0.999,
) -> tuple[nn.Module, float]:
    """Trains `model` in place and resumes from `run`/last.pt if it is there.

    Args:
        loss_fn: maps the step's number to (loss, numbers to show). Its randomness must come from the step alone, so
            that a resumed run goes on as if it had not stopped.
        settings: what the run depends on, plain values; a run with other settings is not resumed.

    Returns:
        The exponential average of the weights (ema_decay = 0: the last ones) as a model, and the seconds trained,
        earlier runs included.
    """
    run.mkdir(parents=True, exist_ok=True)
    last = run / "last.pt"
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)

    def ema(averages: list[Tensor], current: list[Tensor], num: Tensor) -> None:
        # a short memory at first: a constant one would keep a share of the initial weights
        torch._foreach_lerp_(averages, current, max(1 - ema_decay, 9 / (int(num) + 10)))

    average = AveragedModel(model, multi_avg_fn=ema)
    start, seconds = 0, 0.0
    if last.exists():
        state = torch.load(last, weights_only=True)
        if state.get("settings") != settings:
            raise SystemExit(f"{last} was trained with {state.get('settings')}: give another --run, or delete it")
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        start, seconds = state["step"], state["seconds"]

    def save(step: int) -> None:
        state = {
            "model": model.state_dict(),
            "average": average.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "seconds": seconds,
            "settings": settings,
        }
        with publishing(last) as temporary:
            torch.save(state, temporary)

    saved = clock = time.monotonic()
    bar = tqdm(range(start, steps), initial=start, total=steps, mininterval=2.0, desc=run.name)
    for step in bar:
        decay = 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warmup, decay)
        loss, shown = loss_fn(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update_parameters(model)
        now = time.monotonic()
        seconds += now - clock
        clock = now
        bar.set_postfix(shown, refresh=False)
        if now - saved > SAVE_SECONDS:
            save(step + 1)
            saved = now
    if start < steps:
        save(steps)
    return average.module.eval(), seconds


def export(
    model: nn.Module, path: Path, arch: str, seconds: float, half: Callable[[str], bool] = lambda name: False
) -> None:
    """Writes weights as safetensors, with architecture, command and training time in the metadata.

    Args:
        half: says of a tensor's name whether it is stored in float16.
    """
    tensors = {name: (t.half() if half(name) else t).contiguous() for name, t in model.state_dict().items()}
    parameters = sum(p.numel() for p in model.parameters())
    metadata = {
        "arch": arch,
        "parameters": str(parameters),
        "command": shlex.join(["python", *sys.argv]),
        "training_seconds": str(round(seconds)),
        "torch": torch.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)
    print(f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB\n{json.dumps(metadata, indent=2)}")
