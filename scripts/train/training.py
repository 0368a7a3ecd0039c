"""The loop of the training programs: resumable, with warm-up, cosine decay and an average of the weights.

`python scripts/train/train_....py` trains on a GPU if there is one, otherwise on the CPU. Under
`torchrun --nproc-per-node N -- scripts/train/train_....py` each of N processes has a batch of its own in every step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from run_log import Log
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchvision.utils import make_grid
from tqdm import tqdm

from cspd.files import publishing
from cspd.origin import file_fingerprint
from cspd.pixels import to_pil
from cspd.runs import write_png
from mar.checkpoint import fill, metadata_of
from mar.tensors import read_tensors

Model = TypeVar("Model", bound=nn.Module)
Tensors = tuple[Tensor, ...] | list[Tensor]
Loss = Callable[[int], tuple[Tensor, dict[str, float]]]  # from the number of a batch to its loss and numbers to show
MUON_FACTOR = 4  # Muon's learning rate over AdamW's; 2 and 6 were equally good for MAR's blocks
SAVE_SECONDS = 120
DRAW_SECONDS = 900
FIRST_SEED = 10**6  # of data that is computed once and stored
HELD_OUT_SEED = 10**9  # far above all numbers of batches


def device_of_process() -> torch.device:
    """The device that this process trains on. Under torchrun, the first call connects the processes."""
    # the head's conditions vanish at timestep 999, and denormal numbers took 40 % of a step on a CPU
    torch.set_flush_denormal(True)
    has_gpu = torch.cuda.is_available()
    if "LOCAL_RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if has_gpu else "gloo")
    if has_gpu:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def run_main(main: Callable[[], None]) -> None:
    """Runs a training program. An error of the user or the machine is printed in one line, with exit status 2."""
    try:
        main()
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        message = " ".join(str(error).splitlines())
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)


def rank_and_world() -> tuple[int, int]:
    """The index of this process, and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first() -> bool:
    """Whether this is the process that writes files."""
    return rank_and_world()[0] == 0


def wait_for_all(device: torch.device) -> None:
    """Blocks until all processes call it."""
    if dist.is_initialized():
        nothing = torch.zeros(1, device=device)
        dist.all_reduce(nothing)
        nothing.item()  # on a GPU the sum is asynchronous


def as_first(tensor: Tensor) -> Tensor:
    """Copies a tensor's values from the first process to all processes."""
    if dist.is_initialized():
        dist.broadcast(tensor, src=0)
    return tensor


def chosen(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of flags by name: settings that a run depends on."""
    return {name: getattr(args, name) for name in names}


def go_on_with(model: nn.Module, path: Path, settings: dict) -> None:
    """Loads the weights of --init into a model, and records the file in `settings`. Raises CheckpointError."""
    fill(model, read_tensors(path), path)
    settings["init"] = file_fingerprint(path)


def fit(
    model: Model,
    loss_fn: Loss,
    *,
    run: Path,
    settings: dict,
    steps: int,
    lr: float,
    warmup: int = 200,
    weight_decay: float = 0.02,
    ema_decay: float = 0.999,
    hidden: Callable[[str], bool] = lambda name: False,
    show: Callable[[Model], Tensor] | None = None,
    measure: Callable[[Model], dict[str, float]] | None = None,
) -> tuple[Model, float]:
    """Trains `model` in place; resumes from `run`/last.pt if it exists.

    `run` also gets log.jsonl and curves.png, with the numbers that `loss_fn` returns, and samples.png. The images are
    drawn every 15 minutes.

    Args:
        loss_fn: the number of a batch -> (loss, numbers to show). Its randomness must come from that number alone, so
            that a resumed run ends with the same weights.
        settings: the settings that the run depends on, plain values; a run with other settings is not resumed.
        hidden: the name of a weight -> whether Muon (Jordan et al. 2024) trains it in place of AdamW, if it is a
            matrix. For matrices between hidden layers; needs torch 2.9.
        show: the averaged model -> images [N, 3, H, W] in 0..1.
        measure: the averaged model -> more numbers for the log, at each save.

    Returns:
        A model with the exponential average of the weights (ema_decay = 0: with the last weights), and the seconds
        trained, including earlier runs.
    """
    rank, world = rank_and_world()
    state = _State(run, model, settings, ema_decay, _optimizers(model, hidden, lr, weight_decay))
    log = Log(run, state.step)
    averaged = cast(Model, state.average.module)
    saved = drawn = clock = time.monotonic()
    numbers = range(state.step, steps)
    bar = tqdm(numbers, initial=state.step, total=steps, mininterval=2.0, desc=run.name, disable=rank > 0)
    for step in bar:
        state.set_rate(step, steps, warmup)
        loss, shown = loss_fn(step * world + rank)
        state.learn_from(loss, world)
        now = time.monotonic()
        state.seconds += now - clock
        state.step, clock = step + 1, now
        bar.set_postfix(shown, refresh=False)
        is_last = state.step == steps
        if rank > 0:
            continue
        log.add(state.step, state.seconds, shown)
        if now - saved > SAVE_SECONDS or is_last:
            log.write(state.step, state.seconds)
            if measure is not None:
                log.note(state.step, state.seconds, measure(averaged.eval()))
            state.save()
            saved = now
        if now - drawn > DRAW_SECONDS or is_last:
            log.draw()
            if show is not None:
                _draw(show, averaged, run / "samples.png")
            drawn = now
    return averaged.eval(), state.seconds


@torch.inference_mode()
def _draw(show: Callable[[Model], Tensor], model: Model, path: Path) -> None:
    images = show(model.eval())
    write_png(path, to_pil(make_grid(images.clamp(0, 1).cpu(), padding=0)))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _optimizers(
    model: nn.Module, hidden: Callable[[str], bool], lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon if it trains weights, see `fit`. `peak` of a group is its learning rate after the warm-up.

    Muon's steps are scaled to the size of AdamW's (Liu et al., arXiv 2502.16982).
    """
    matrices = [p for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2 and hidden(name)]
    by_muon = set(map(id, matrices))
    others = [p for p in _trained(model) if id(p) not in by_muon]
    adamw = torch.optim.AdamW([{"params": others, "peak": lr}], betas=(0.9, 0.95), weight_decay=weight_decay)
    if not matrices:
        return [adamw]
    group = {"params": matrices, "peak": MUON_FACTOR * lr}
    muon = torch.optim.Muon([group], weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [adamw, muon]


class _State:
    """The state of a run, saved for resuming: weights, their average, the optimizers' moments, the step."""

    def __init__(
        self,
        run: Path,
        model: nn.Module,
        settings: dict,
        ema_decay: float,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        def ema(averages: Tensors, current: Tensors, num: Tensor | int) -> None:
            # a short memory at first, so that the average does not contain the initial weights
            torch._foreach_lerp_(averages, current, max(1 - ema_decay, 9 / (int(num) + 10)))

        self.model, self.average = model, AveragedModel(model, multi_avg_fn=ema)
        self.optimizers = optimizers
        self.settings, self.step, self.seconds = settings, 0, 0.0
        self.file = run / "last.pt"
        run.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self._load()

    def learn_from(self, loss: Tensor, world: int) -> None:
        """Takes a step of the optimizers, with gradients averaged over all processes."""
        parameters = _trained(self.model)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        _average_gradients(parameters, world)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.average.update_parameters(self.model)

    def set_rate(self, step: int, steps: int, warmup: int) -> None:
        """Sets the learning rates of a step: linear warm-up, then cosine decay."""
        decay = 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * min((step + 1) / warmup, decay)

    def _load(self) -> None:
        state = torch.load(self.file, weights_only=True, map_location="cpu")
        parts = [self.model, self.average, *self.optimizers]
        if state.get("settings") != self.settings or len(state.get("states", ())) != len(parts):
            raise SystemExit(f"{self.file} was trained with {state.get('settings')}: pass another --run, or delete it")
        for each, saved in zip(parts, state["states"]):
            each.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        states = [part.state_dict() for part in (self.model, self.average, *self.optimizers)]
        state = {"states": states, "step": self.step, "seconds": self.seconds, "settings": self.settings}
        with publishing(self.file) as temporary:
            torch.save(state, temporary)


def _average_gradients(parameters: list[nn.Parameter], world: int) -> None:
    if world == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def export(
    model: nn.Module, path: Path, arch: str, seconds: float, half: Callable[[str], bool] = lambda name: False
) -> None:
    """Writes weights as safetensors, with architecture, sizes, command and training time in the metadata.

    Args:
        half: the name of a tensor -> whether it is stored in float16.
    """
    if not is_first():
        return
    tensors = {name: (t.half() if half(name) else t).cpu().contiguous() for name, t in model.state_dict().items()}
    parameters = sum(p.numel() for p in model.parameters())
    about = {
        "arch": arch,
        "parameters": str(parameters),
        "command": shlex.join(["python", *sys.argv]),
        "training_seconds": str(round(seconds)),
        "torch": torch.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=about | metadata_of(model))
    print(f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB\n{json.dumps(about, indent=2)}")
