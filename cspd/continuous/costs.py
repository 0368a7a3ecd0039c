"""How far to look ahead: a cost model of the head on this device, measured once, and the window it recommends."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from cspd import noise
from cspd.continuous.ancestral import ancestral
from cspd.continuous.calibration import WINDOWS, Calibration
from cspd.continuous.chains import Chains, table_size
from cspd.continuous.draft_verify import draft_table
from cspd.precision import Precision
from mar.head import Head

SCHEMA = "cspd.costs/2"
GAIN = 0.7  # of the ancestral chain's time: the most speculation may be predicted to take; joins and uneven iterations
# are not in the model, and took up to a quarter more where measured
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS, WINDOW, ROUNDS = 128, 8, 12  # of what is timed: long enough that no chain ends in it
REPEATS, PATIENCE = 5, 0.5  # sizes grow until one takes this many seconds


@dataclass(frozen=True)
class Costs:
    """Seconds of the head's work against its size.

    Attributes:
        rows: tokens at once; ancestral: seconds of a denoising step of so many, and start: of starting their
            speculative chains, a denoising step.
        inputs: rows times window; round: seconds of a speculative round on so many.
        table_size: rows times steps that speculation has memory for, see `cspd.continuous.chains.table_size`.
    """

    rows: list[int]
    ancestral: list[float]
    start: list[float]
    inputs: list[int]
    round: list[float]
    table_size: int

    def head_seconds(self, num_steps: int, rows: float, window: int, calls: np.ndarray | None = None) -> float:
        """Predicted seconds of `rows` tokens' chains, together; window 0 is ancestral.

        Args:
            calls: head calls of some tokens at this window, as in `Calibration`.
        """
        if window == 0:
            return num_steps * _interpolate(rows, self.rows, self.ancestral)
        seconds = num_steps * _interpolate(rows, self.rows, self.start)
        for r in range(1, int(calls.max())):
            share = (calls > r).mean()
            some = 1 - (1 - share) ** rows  # chance that any token is still under way, and how many then are
            seconds += some * _interpolate(rows * share / some * window, self.inputs, self.round)
        return seconds

    def window(self, num_steps: int, rows: float, calibration: Calibration) -> int:
        """The window W with the least predicted time for so many tokens at once; 0 unless one gains 30%."""
        if rows * num_steps > self.table_size:
            return 0
        predicted = {
            window: self.head_seconds(num_steps, rows, window, calls)
            for window, calls in zip(WINDOWS, calibration.calls)
            if window <= calibration.coefficients.shape[1]
        }
        best = min(predicted, key=predicted.get)
        return best if predicted[best] < GAIN * self.head_seconds(num_steps, rows, 0) else 0


def _interpolate(size: float, sizes: list[int], seconds: list[float]) -> float:
    """Linear between measured sizes, constant below the least, proportional above the largest."""
    return float(np.interp(size, sizes, seconds)) * max(1.0, size / sizes[-1])


class _AcceptAll:
    """Noise whose coins accept every draft, so that all timed rounds do the same."""

    @staticmethod
    def chain(*args: object) -> tuple[torch.Tensor, ...]:
        x, eps_t, coins = noise.chain(*args)
        return x, eps_t, torch.zeros_like(coins)


@torch.inference_mode()
def measure(head: Head, guided: bool, device: torch.device, precision: Precision, compiled: bool = False) -> Costs:
    """Times the ancestral chain and speculative rounds on random conditions; a second or two for small heads."""
    copies, generator = 2 if guided else 1, torch.Generator().manual_seed(0)
    coefficients = np.zeros((STEPS, WINDOW, 3))
    coefficients[..., 1] = 1
    table = torch.as_tensor(draft_table(coefficients, np.zeros((STEPS, WINDOW)), STEPS, WINDOW, 1.0), device=device)
    measured = {"ancestral": [], "start": [], "round": []}
    rows, limit = [], table_size(head, copies, device)
    for size in ROWS:
        if rows and size * STEPS > limit:
            break
        z = torch.randn(copies, size, head.cond_embed.in_features, generator=generator).to(device)
        seed, position = (torch.arange(size, device=device) for _ in range(2))
        ones = torch.ones(size, 1, device=device)

        def chain(z=z, seed=seed, position=position, ones=ones) -> None:
            x = noise.initial(seed, position, head.channels)
            steps = lambda t: noise.steps(seed, position, t, head.channels)  # noqa: E731
            ancestral(head, z, ones, ones, x, steps, STEPS // 4, precision)

        chains = Chains(head, table, precision, _AcceptAll, compiled=compiled)

        def start(chains=chains, z=z, seed=seed, position=position, ones=ones) -> None:
            chains.owners = []
            chains.start(range(len(seed)), seed, position, z, ones, ones)

        times = {name: [] for name in measured}
        for _ in range(REPEATS):
            times["ancestral"].append(_seconds(chain, device) / (STEPS // 4))
            times["start"].append(_seconds(start, device) / STEPS)
            times["round"].append(statistics.median(_seconds(chains.advance, device) for _ in range(ROUNDS)))
        for name, values in times.items():
            before = measured[name][-1:]  # more rows never take less time: where they seem to, it was noise
            measured[name].append(max([min(values), *before]))
        rows.append(size)
        if times["start"][0] * STEPS > PATIENCE:
            break
    return Costs(rows=rows, inputs=[size * WINDOW for size in rows], table_size=limit, **measured)


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    return platform.processor() or platform.machine()


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def measured_costs(
    head: Head,
    guided: bool,
    device: torch.device,
    precision: Precision,
    compiled: bool,
    folder: Path,
    again: bool = False,
) -> Costs:
    """The costs of a head's size on this device: from `folder`, or measured (`again`) and kept there."""
    cuda = device.type == "cuda"
    key = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(device) if cuda else f"{_processor()}, {os.cpu_count()} cores",
        "threads": 0 if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": precision.policy,
        "head": [head.channels, head.width, len(head.res_blocks), head.cond_embed.in_features],
        "guided": guided,
        "compiled": compiled,
    }
    file = folder / "costs.json"
    entries = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        entries = [entry for entry in json.loads(file.read_text()) if isinstance(entry, dict)]
        for entry in [] if again else entries:
            if entry["key"] == key:
                return Costs(**entry["costs"])
    costs = measure(head, guided, device, precision, compiled)
    entries = [entry for entry in entries if entry.get("key") != key]
    with contextlib.suppress(OSError):  # read-only: measured again next time
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps([*entries, {"key": key, "costs": asdict(costs)}], indent=1) + "\n")
        os.replace(temporary, file)
    return costs
