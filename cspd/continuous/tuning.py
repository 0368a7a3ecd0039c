"""The tuner of models with a diffusion head: it times the head on this device, and chooses the window by that."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cspd import noise
from cspd.continuous.calibrations import Calibrations, Fitted
from cspd.continuous.rows import ContinuousRunner, MakeRunner
from cspd.device import Precision, seconds_of, send
from cspd.files import user_cache
from cspd.graphs import Graphs
from cspd.heads.calibration import WINDOWS, Calibration, draft_table, frozen
from cspd.heads.chain import Chain, Inputs
from cspd.heads.samplers import ancestral, compiled_ancestral
from cspd.heads.speculative import Chains
from cspd.heads.verify import table_size
from cspd.request import Request, Sequence
from cspd.tuner import PLAIN, Choice, Times, Tuner, choose_by_gain, in_turns, is_enough, unsteadiness

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS, WINDOW, PASSES = 128, 8, 12  # of the timed chains, which are too long to end in it
ANCESTRAL_STEPS = STEPS // 4
TURNS, PATIENCE = 5, 0.5  # sizes grow until one takes PATIENCE seconds
SCHEMA = "cspd.head-times/1"


def head_seconds(times: Times, num_steps: int, rows: float, window: int, calls: Any = None) -> float:
    """Predicted seconds of the chains of `rows` tokens in one batch; window 0 is ancestral.

    Args:
        times: of `time_head`. calls: head calls of some tokens at this window, as in `Calibration`.
    """
    if window == 0:
        return num_steps * times.seconds("ancestral", rows)
    seconds = num_steps * times.seconds("start", rows)
    for num_calls in range(1, int(calls.max())):
        share = (calls > num_calls).mean()  # of the tokens whose chains need more calls
        chance = 1 - (1 - share) ** rows  # that at least one of the rows needs more
        rows_left = rows * share / chance  # expected number of rows that do, if at least one does
        seconds += chance * times.seconds("round", rows_left * window)
    return seconds


def choose_window(times: Times, most: int, num_steps: int, rows: float, calibrate: Callable[[], Calibration]) -> Choice:
    """The fastest window for `rows` tokens at once, or ancestral sampling if the gain is too small.

    Args:
        times: of `time_head`. most: rows times steps whose modulations fit into memory, see `table_size`.
        calibrate: returns the calibration; called only if some window may be fast enough.
    """
    at_once = f"with {rows:.3g} token{'s' if rows > 1 else ''} at once"
    too_large = rows * num_steps / max(1, most)
    if too_large > 1:
        table = f"{at_once} the head's table of {num_steps} steps"
        return Choice(PLAIN, f"{table} needs {too_large:.2f} times the memory that it may take")
    fewest = {window: np.array([1 + math.ceil((num_steps - 1) / window)]) for window in WINDOWS}
    window, gain = _fastest(times, num_steps, rows, fewest)
    if not is_enough(gain):
        return choose_by_gain({"window": window}, gain, f"{at_once} the head", at_best=True)
    window, gain = _fastest(times, num_steps, rows, dict(zip(WINDOWS, calibrate().calls)))
    return choose_by_gain({"window": window}, gain, f"{at_once} the head")


def _fastest(times: Times, num_steps: int, rows: float, calls: Mapping[int, np.ndarray]) -> tuple[int, float]:
    """The window with the least predicted time, and its speed-up over ancestral sampling.

    Args:
        calls: head calls of some tokens, by window.
    """
    seconds = {
        window: head_seconds(times, num_steps, rows, window, own)
        for window, own in calls.items()
        if window <= num_steps
    }
    best = min(seconds, key=seconds.__getitem__)
    return best, head_seconds(times, num_steps, rows, 0) / seconds[best]


class _AcceptAll:
    """Noise whose uniform draws accept every drafted state, so that all timed passes do the same work."""

    @staticmethod
    def chain(*args: Any) -> tuple[Tensor, ...]:
        x, eps_t, uniform = noise.chain(*args)
        return x, eps_t, torch.zeros_like(uniform)


def head_times(tuner: Tuner, head: Any, guided: bool, about: object, again: bool = False) -> Times:
    """The times of a head on a tuner's device: from the cache, or measured (`again`); a second or two for small heads.

    Args:
        about: a plain value, by which the times of this head are found.
    """
    settings = {"schema": SCHEMA, "head": about, "guided": guided}
    return tuner.times(settings, functools.partial(time_head, tuner, head, guided), "timing this device, once", again)


@torch.inference_mode()
def time_head(tuner: Tuner, head: Any, guided: bool) -> Times:
    """Times the ancestral chain and speculative passes on random conditions.

    Returns:
        By the number of tokens at once, "ancestral": a denoising step; "start": the start of speculative chains,
        divided by their steps. By this number times the window, "round": a speculative pass.
    """
    device, precision = tuner.device, tuner.precision
    num_branches, generator = 2 if guided else 1, torch.Generator().manual_seed(0)
    s = head.schedule(STEPS)
    made = draft_table(*frozen(s, WINDOW), s, WINDOW, 1.0)
    table = send({"table": made}, device)["table"]
    runner = Graphs(device, tuner.graphs)
    measured: dict[str, list[float]] = {"ancestral": [], "start": [], "round": []}
    rows: list[int] = []
    unsteady = 0.0
    limit = table_size(head, num_branches, precision)
    for size in tqdm(ROWS, desc="timing this device", unit=" size", leave=False, delay=0.5, disable=None):
        if rows and size * STEPS > limit:
            break
        z = torch.randn(num_branches, size, head.cond_dim, generator=generator).to(device)
        chains = Chains(head, s, table, precision, _AcceptAll, graphs=runner, compiled=tuner.compiled)
        seconds_of_size = _time_one_size(chains, z, runner, tuner.compiled)
        for name, seconds in seconds_of_size.items():
            smaller = measured[name][-1:]
            # a window stays for a whole image: it must be faster than baseline sampling that nobody disturbs
            typical = min(seconds) if name == "ancestral" else statistics.median(seconds)
            measured[name].append(max([typical, *smaller]))  # a larger size is never faster, except by noise
        unsteady = max(unsteady, unsteadiness(seconds_of_size.values()))
        rows.append(size)
        if measured["start"][-1] * STEPS > PATIENCE:
            break
    sizes = {"ancestral": rows, "start": rows, "round": [size * WINDOW for size in rows]}
    times = Times({name: np.array([sizes[name], seconds]) for name, seconds in measured.items()})
    times.unsteadiness = unsteady
    return times


def _time_one_size(chains: Chains, z: Tensor, graphs: Graphs, compiled: bool) -> dict[str, list[float]]:
    """Seconds of an ancestral step, of starting chains (per step), and of a pass, for conditions z [G, R, D]."""
    device, size = z.device, z.shape[1]
    seed, position = torch.arange(size, device=device), torch.arange(size, device=device)
    ones = torch.ones(size, 1, device=device)  # guidance scales and temperatures

    s, sample = chains.head.schedule(ANCESTRAL_STEPS), compiled_ancestral if compiled else ancestral

    def draw(*inputs: Tensor) -> Tensor:
        with chains.precision.fast():
            return sample(Chain(chains.head, s, Inputs(*inputs), noise, chains.precision))

    def run_ancestral() -> None:
        graphs.run("ancestral", draw, z, ones, ones, seed, position)

    def start() -> None:
        chains.clear()
        chains.start(range(size), position, seed, position, z, ones, ones)

    def a_pass() -> float:  # of the chains that were just started
        launches = [seconds_of(chains.advance, device) for _ in range(PASSES // chains.passes)]
        return statistics.median(launches) / chains.passes

    works: dict[str, Callable[[], float]] = {
        "ancestral": lambda: seconds_of(run_ancestral, device) / ANCESTRAL_STEPS,
        "start": lambda: seconds_of(start, device) / STEPS,
        "round": a_pass,
    }
    return in_turns(works, TURNS)


# candidates of `cspd tune` without prices of backbones, see `register_family`
CALIBRATED_CANDIDATES = """
    calibrated:head_calls=8 calibrated:head_calls=10 calibrated:head_calls=12 calibrated:head_calls=16
    calibrated:head_calls=25
"""
WINDOW_CANDIDATES = "speculative:window=4 speculative:window=8 speculative:window=16 speculative:window=24 "


class HeadTuner(Tuner):
    """Calibrations and times of a diffusion head, each made on first use, and the choice of a window by them.

    Args:
        target, draft: the models. cache: a folder to look for calibrations in, before the user's cache folder.
        make_runner: makes a model runner of one model, whose samples the drafts are fitted to. Others as in `Tuner`.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        precision: Precision,
        compiled: bool,
        graphs: bool,
        cache: Path | None,
        make_runner: MakeRunner,
    ) -> None:
        super().__init__(precision, compiled, graphs)
        self.target = target
        folders = [folder for folder in (cache, user_cache()) if folder]
        self.calibrations = {
            name: Calibrations(model, precision, folders, make_runner)
            for name, model in (("target", target), ("draft", draft))
            if model is not None
        }

    @staticmethod
    def fitted(runner: ContinuousRunner, model: str, sequence: Sequence) -> Fitted:
        """The fits for a running sequence; they live as long as sequences of its settings."""
        shared = sequence.shared
        if ("fitted", model) not in shared:
            shared["fitted", model] = Fitted(runner, model, sequence)
        return shared["fitted", model]

    def head_times(self, guided: bool, again: bool = False) -> Times:
        """The times of the target's head, see `head_times`."""
        head = self.target.head
        about = [head.channels, head.width, len(head.res_blocks), head.cond_dim]
        return head_times(self, head, guided, about, again)

    def window(self, request: Request, rows: float) -> Choice:
        """The fastest window for `rows` tokens at once, and the reason."""
        head = self.target.head
        most = table_size(head, 2 if request.guided else 1, self.precision)
        num_steps = len(head.schedule(request.num_sampling_steps))
        calibrate = functools.partial(self.calibrations["target"].get, request)
        return choose_window(self.head_times(request.guided), most, num_steps, rows, calibrate)

    def _kind(self, request: Request, num_slots: int) -> tuple:
        return *super()._kind(request, num_slots), request.num_generated(self.target.config.seq_len)

    def _choose(self, request: Request, num_slots: int) -> Choice:
        """The fastest window on this device, and the reason."""
        num_steps, temperature = len(self.target.head.schedule(request.num_sampling_steps)), request.temperature
        if temperature == 0 or num_steps < 3:
            settings = f"temperature={temperature}, num_sampling_steps={request.num_sampling_steps}"
            return Choice(PLAIN, f"{settings}: there is nothing to draft")
        num_generated = request.num_generated(self.target.config.seq_len)
        own_rows = request.gamma or num_generated / (request.num_iter or num_generated)
        choice = self.window(request, num_slots * own_rows)  # denoised at once, over all slots
        if choice.config == PLAIN:
            return choice
        return Choice(
            choice.config, f"{choice.why}; --window {choice.config['window']} gives these images on any machine"
        )
