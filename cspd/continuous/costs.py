"""How far to look ahead: a cost model of the head on this device, and the window it recommends."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cspd import noise
from cspd.choosing import PLAIN, Choice, is_enough, judged
from cspd.continuous.ancestral import drawing
from cspd.continuous.calibration import WINDOWS, Calibration
from cspd.continuous.chains import Chains
from cspd.continuous.draft_verify import draft_table
from cspd.continuous.slots import table_size
from cspd.graphs import Graphs
from cspd.machine import seconds_of
from cspd.precision import Precision
from cspd.transfer import send
from mar.head import Head

LARGEST = 1e18  # seconds, sizes or bytes
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS, WINDOW, ROUNDS = 128, 8, 12  # of what is timed: long enough that no chain ends in it
ANCESTRAL_STEPS = STEPS // 4
REPEATS, PATIENCE = 5, 0.5  # sizes grow until one takes this many seconds
ENOUGH = 3.0  # seconds of one size, after which two repeats will do: noise matters where times are short


@dataclass(frozen=True)
class Costs:
    """Seconds of the head's work against its size.

    Attributes:
        rows: tokens at once; ancestral: seconds of a denoising step of so many, and start: of starting their
            speculative chains, a denoising step.
        inputs: rows times window; round: seconds of a speculative round on so many.
        table_size: rows times steps that speculation has memory for, see `cspd.continuous.slots.table_size`.
    """

    rows: list[int]
    ancestral: list[float]
    start: list[float]
    inputs: list[int]
    round: list[float]
    table_size: int

    def check(self) -> None:
        """Raises ValueError where they are not what `measure` can have given."""
        sizes = {"rows": self.rows, "inputs": self.inputs, "table_size": [self.table_size]}
        seconds = {"ancestral": self.ancestral, "start": self.start, "round": self.round}
        for name, values in (sizes | seconds).items():
            kind = int if name in sizes else float
            if not isinstance(values, list) or not all(type(each) is kind and 0 <= each < LARGEST for each in values):
                raise ValueError(f"{name} are no numbers in 0..{LARGEST:g}")
            if name != "table_size" and not 0 < len(values) == len(self.rows) <= len(ROWS):
                raise ValueError(f"{name} are {len(values)}, and there are 1..{len(ROWS)} sizes")
        if sorted({*self.rows, 0}) != [0, *self.rows] or sorted({*self.inputs, 0}) != [0, *self.inputs]:
            raise ValueError("sizes do not grow")

    def head_seconds(self, num_steps: int, rows: float, window: int, calls: np.ndarray | None = None) -> float:
        """Predicted seconds of `rows` tokens' chains, together; window 0 is ancestral.

        Args:
            calls: head calls of some tokens at this window, as in `Calibration`.
        """
        if window == 0:
            return num_steps * _interpolate(rows, self.rows, self.ancestral)
        seconds = num_steps * _interpolate(rows, self.rows, self.start)
        for num_calls in range(1, int(calls.max())):
            share = (calls > num_calls).mean()  # of the tokens that are still under way after so many calls
            chance = 1 - (1 - share) ** rows  # that any of the rows is
            rows_left = rows * share / chance  # how many then are, on average
            seconds += chance * _interpolate(rows_left * window, self.inputs, self.round)
        return seconds

    def choose(self, num_steps: int, rows: float, calibrate: Callable[[], Calibration]) -> Choice:
        """The window that the head is fastest with for so many tokens at once, or none where that gains too little.

        Args:
            calibrate: gives the calibration; it is asked for only if some window may be worth it.
        """
        at_once = f"with {rows:.3g} token{'s' if rows > 1 else ''} at once"
        too_large = rows * num_steps / max(1, self.table_size)
        if too_large > 1:
            table = f"{at_once} the head's table of {num_steps} steps"
            return Choice(PLAIN, f"{table} needs {too_large:.2f} times the memory that it may take")
        fewest = {window: np.array([1 + math.ceil((num_steps - 1) / window)]) for window in WINDOWS}
        window, gain = self._fastest(num_steps, rows, fewest)
        if not is_enough(gain):
            return judged({"window": window}, gain, f"{at_once} the head", at_best=True)
        window, gain = self._fastest(num_steps, rows, dict(zip(WINDOWS, calibrate().calls)))
        return judged({"window": window}, gain, f"{at_once} the head")

    def _fastest(self, num_steps: int, rows: float, calls: Mapping[int, np.ndarray]) -> tuple[int, float]:
        """The window with the least predicted time, and how many times as fast as ancestral sampling that is.

        Args:
            calls: head calls of some tokens, by window.
        """
        seconds = {
            window: self.head_seconds(num_steps, rows, window, own)
            for window, own in calls.items()
            if window <= num_steps
        }
        best = min(seconds, key=seconds.__getitem__)
        return best, self.head_seconds(num_steps, rows, 0) / seconds[best]


def _interpolate(size: float, sizes: list[int], seconds: list[float]) -> float:
    """Linear between measured sizes, constant below the least, proportional above the largest."""
    return float(np.interp(size, sizes, seconds)) * max(1.0, size / sizes[-1])


class _AcceptAll:
    """Noise whose uniform draws accept every drafted state, so that all timed rounds do the same."""

    @staticmethod
    def chain(*args: object) -> tuple[Tensor, ...]:
        x, eps_t, uniform = noise.chain(*args)
        return x, eps_t, torch.zeros_like(uniform)


@torch.inference_mode()
def measure(
    head: Head,
    guided: bool,
    device: torch.device,
    precision: Precision,
    compiled: bool = False,
    graphs: bool | None = None,
) -> Costs:
    """Times the ancestral chain and speculative rounds on random conditions; a second or two for small heads.

    Args:
        compiled, graphs: as of `cspd.engine.Engine`.
    """
    copies, generator = 2 if guided else 1, torch.Generator().manual_seed(0)
    coefficients = np.zeros((STEPS, WINDOW, 3))
    coefficients[..., 1] = 1
    table = draft_table(coefficients, np.zeros((STEPS, WINDOW)), STEPS, WINDOW, 1.0)
    table = send({"table": table}, device)["table"]
    runner = Graphs(device, graphs)
    measured = {"ancestral": [], "start": [], "round": []}
    rows, limit = [], table_size(head, copies, precision)
    for size in tqdm(ROWS, desc="timing this device", unit=" size", leave=False, delay=0.5, disable=None):
        if rows and size * STEPS > limit:
            break
        z = torch.randn(copies, size, head.cond_embed.in_features, generator=generator).to(device)
        chains = Chains(head, table, precision, _AcceptAll, graphs=runner, compiled=compiled)
        times = _time_one_size(chains, z, runner)
        for name, seconds in times.items():
            smaller = measured[name][-1:]  # more rows never take less time: where they seem to, it was noise
            measured[name].append(max([min(seconds), *smaller]))
        rows.append(size)
        if times["start"][0] * STEPS > PATIENCE:
            break
    return Costs(rows=rows, inputs=[size * WINDOW for size in rows], table_size=limit, **measured)


def _time_one_size(chains: Chains, z: Tensor, graphs: Graphs) -> dict[str, list[float]]:
    """Seconds of an ancestral step, of starting chains (a step), and of a round, for conditions z [G, R, D]."""
    device, size = z.device, z.shape[1]
    seed, position = torch.arange(size, device=device), torch.arange(size, device=device)
    ones = torch.ones(size, 1, device=device)  # guidance scales and temperatures

    draw = drawing(chains.head, noise, ANCESTRAL_STEPS, chains.precision)

    def run_ancestral() -> None:
        graphs.run("ancestral", draw, z, ones, ones, seed, position)

    def start() -> None:
        chains.clear()
        chains.start(range(size), position, seed, position, z, ones, ones)

    times = {"ancestral": [], "start": [], "round": []}
    begun = time.perf_counter()
    for repeat in range(REPEATS):
        if repeat > 1 and time.perf_counter() - begun > ENOUGH:
            break
        times["ancestral"].append(seconds_of(run_ancestral, device) / ANCESTRAL_STEPS)
        times["start"].append(seconds_of(start, device) / STEPS)
        launches = [seconds_of(chains.advance, device) for _ in range(ROUNDS // chains.rounds)]
        times["round"].append(statistics.median(launches) / chains.rounds)
    return times
