"""What the training programs share: a resumable loop with warm-up, cosine decay and an average of the weights.

`python scripts/train_....py` trains on a GPU where there is one, else on the CPU; under `torchrun --nproc-per-node N`
each of N processes draws its own part of a step's batch.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchvision.utils import make_grid
from tqdm import tqdm

from cspd.plots import to_pil
from cspd.records import append_json, publishing, write_bytes, write_png

Model = TypeVar("Model", bound=nn.Module)
Tensors = tuple[Tensor, ...] | list[Tensor]
SAVE_SECONDS = 120
DRAW_SECONDS = 900
LOG_EVERY = 10  # steps
HELD_OUT_SEED = 10**9  # training draws never come near


def device_of_process() -> torch.device:
    """Where this process trains. Under torchrun, the first call joins the others."""
    has_gpu = torch.cuda.is_available()
    if "LOCAL_RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if has_gpu else "gloo")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first() -> bool:
    """Whether this process is the one that writes files."""
    return _rank_and_world()[0] == 0


def fit(
    model: Model,
    loss_fn: Callable[[int], tuple[Tensor, dict[str, float]]],
    *,
    run: Path,
    settings: dict,
    steps: int,
    lr: float,
    warmup: int = 200,
    weight_decay: float = 0.02,
    ema_decay: float = 0.999,
    show: Callable[[Model], Tensor] | None = None,
) -> tuple[Model, float]:
    """Trains `model` in place and resumes from `run`/last.pt if it is there.

    Beside it are log.jsonl and curves.png, of the numbers that `loss_fn` gives, and samples.png. The pictures are drawn
    every quarter of an hour.

    Args:
        loss_fn: maps the number of a draw to (loss, numbers to show). Its randomness must come from that number alone,
            so that a resumed run goes on as if it had not stopped.
        settings: what the run depends on, plain values; a run with other settings is not resumed.
        show: maps the averaged model to images [N, 3, H, W] in 0..1.

    Returns:
        The exponential average of the weights (ema_decay = 0: the last ones) as a model, and the seconds trained,
        earlier runs included.
    """
    run.mkdir(parents=True, exist_ok=True)
    last = run / "last.pt"
    rank, world = _rank_and_world()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)

    def ema(averages: Tensors, current: Tensors, num: Tensor | int) -> None:
        # a short memory at first: a constant one would keep a share of the initial weights
        torch._foreach_lerp_(averages, current, max(1 - ema_decay, 9 / (int(num) + 10)))

    average = AveragedModel(model, multi_avg_fn=ema)
    averaged = cast(Model, average.module)
    start, seconds = 0, 0.0
    if last.exists():
        state = torch.load(last, weights_only=True, map_location="cpu")
        if state.get("settings") != settings:
            raise SystemExit(f"{last} was trained with {state.get('settings')}: give another --run, or delete it")
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        start, seconds = state["step"], state["seconds"]
    log = Log(run, start)

    def save(step: int) -> None:
        if rank > 0:
            return
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
        log.write(step, seconds)

    def draw() -> None:
        if rank > 0:
            return
        log.draw()
        if show is None:
            return
        with torch.inference_mode():
            images = show(averaged.eval())
        write_png(run / "samples.png", to_pil(make_grid(images.clamp(0, 1).cpu(), padding=0)))

    saved = drawn_at = clock = time.monotonic()
    bar = tqdm(range(start, steps), initial=start, total=steps, mininterval=2.0, desc=run.name, disable=rank > 0)
    for step in bar:
        decay = 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warmup, decay)
        loss, shown = loss_fn(step * world + rank)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if world > 1:
            _average_gradients(parameters, world)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update_parameters(model)
        now = time.monotonic()
        seconds += now - clock
        clock = now
        bar.set_postfix(shown, refresh=False)
        if rank == 0:
            log.pending.append(shown)
            if len(log.pending) == LOG_EVERY:
                log.write(step + 1, seconds)
        if now - saved > SAVE_SECONDS:
            save(step + 1)
            saved = now
        if now - drawn_at > DRAW_SECONDS:
            draw()
            drawn_at = now
    if start < steps:
        save(steps)
        draw()
    return averaged.eval(), seconds


def _average_gradients(parameters: list[nn.Parameter], world: int) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


class Log:
    """The numbers of a run: a line of log.jsonl for every few steps, with their means, and curves of all."""

    def __init__(self, run: Path, start: int) -> None:
        self.file, self.picture = run / "log.jsonl", run / "curves.png"
        self.pending: list[dict[str, float]] = []
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.entries = [entry for entry in map(json.loads, lines) if entry["step"] <= start]
        if len(self.entries) < len(lines):  # steps after the last save are taken once more
            write_bytes(self.file, "".join(json.dumps(entry) + "\n" for entry in self.entries).encode())

    def write(self, step: int, seconds: float) -> None:
        """The means of what is pending, if anything is."""
        if not self.pending:
            return
        means = {name: sum(each[name] for each in self.pending) / len(self.pending) for name in self.pending[0]}
        entry = {"step": step, "seconds": round(seconds, 1)} | {name: round(mean, 6) for name, mean in means.items()}
        self.pending.clear()
        self.entries.append(entry)
        append_json(self.file, entry)

    def draw(self) -> None:
        if not self.entries:
            return
        names = [name for name in self.entries[-1] if name not in ("step", "seconds")]
        figure = Figure(figsize=(6, 2 * len(names)), layout="constrained")
        steps = [entry["step"] for entry in self.entries]
        for axes, name in zip(figure.subplots(len(names), sharex=True, squeeze=False).flat, names):
            axes.plot(steps, [entry[name] for entry in self.entries])
            axes.set_ylabel(name)
        axes.set_xlabel("step")
        with publishing(self.picture) as temporary:
            FigureCanvasAgg(figure).print_png(temporary)


def export(
    model: nn.Module, path: Path, arch: str, seconds: float, half: Callable[[str], bool] = lambda name: False
) -> None:
    """Writes weights as safetensors, with architecture, command and training time in the metadata.

    Args:
        half: says of a tensor's name whether it is stored in float16.
    """
    if not is_first():
        return
    tensors = {name: (t.half() if half(name) else t).cpu().contiguous() for name, t in model.state_dict().items()}
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
