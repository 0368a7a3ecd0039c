"""Tuning of the head's samplers: fits to the models and times of this device, made once and cached on disk."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cspd import noise
from cspd.continuous.rows import BASELINE, ContinuousRunner, Drawn, MakeRunner, Rows, run_plain_round
from cspd.device import Precision, seconds_of, send
from cspd.files import Entry, FileCache, content_hash, remember, user_cache
from cspd.graphs import Graphs
from cspd.heads.calibrated import (
    Plan,
    Predictor,
    Segment,
    Shortcut,
    fit_predictor,
    fit_shortcut,
    make_segments,
    plan_of,
)
from cspd.heads.calibration import (
    TRACE_TOKENS,
    WINDOWS,
    Calibration,
    Recorder,
    Trace,
    draft_table,
    fit,
    frozen,
    joined,
)
from cspd.heads.chain import Chain, Inputs, Schedule
from cspd.heads.samplers import ancestral, compiled_ancestral
from cspd.heads.speculative import Chains
from cspd.heads.verify import table_size
from cspd.request import Request, Sequence, Stopwatch
from cspd.terminal import Advance, counting, no_advance
from cspd.tuner import PLAIN, Choice, Times, Tuner, choose_by_gain, in_turns, is_enough, unsteadiness

# The window: times of the head on this device, and the window that they recommend.

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


# Traces: chains of the model's own samples.

TRACE_ITERATIONS, TRACE_SEED = 8, 2**40
REPORTED_IMAGES, REPORTED_SEED = 16, 2**42  # images differ more than an image's tokens: a few would not show the error

# The part of the images that a trace has. A fit sees the first, chooses by the second, and what is reported of it is
# measured on the third: the smallest of several values that were measured on the same images is too small.
SEEN, CHOOSING, REPORTED = PARTS = ("seen", "choosing", "reported")


def num_traced(length: int, device: torch.device, part: str = SEEN) -> int:
    """Images of L tokens in a part's trace.

    Fits take at least two, or one on a CPU, where a large model would take minutes.
    """
    least = 1 if device.type == "cpu" else 2
    if part == REPORTED:
        least = REPORTED_IMAGES
    return max(least, -(-TRACE_TOKENS // length))


def trace(
    model: Any,
    request: Request,
    device: torch.device,
    precision: Precision,
    make_runner: MakeRunner,
    part: str = SEEN,
    advance: Advance = no_advance,
) -> Trace:
    """Samples the images of a part, with labels and iterations mixed; each part has other labels and seeds.

    `advance` is called with each share of the work, 1 in all.
    """
    length, num_classes = model.config.seq_len, model.config.class_num
    num_images = num_traced(length, device, part)
    spread = max(1, num_classes // num_images)  # distance between labels
    seeds = {SEEN: TRACE_SEED, CHOOSING: TRACE_SEED + num_images, REPORTED: REPORTED_SEED}
    common = {"num_iter": min(TRACE_ITERATIONS, length), "cfg": request.cfg, "cfg_schedule": request.cfg_schedule}
    common |= {"temperature": request.temperature, "num_sampling_steps": request.num_sampling_steps}
    batch = []
    for i in range(num_images):
        label = (i * spread + PARTS.index(part)) % num_classes
        batch.append(Sequence(Request(label, seeds[part] + i, "ar", **common), ticket=i, slot=i))
    runner, watch = make_runner(model, num_images, device, precision), Stopwatch(device)
    runner.admit(batch)
    parts: list[Trace] = []
    num_rounds = len(runner.num_masked(batch[0].request))
    share = 1 / (num_rounds * request.num_sampling_steps)
    denoise = functools.partial(traced, parts, lambda: advance(share))
    for _ in range(num_rounds):
        run_plain_round(runner, batch, watch, denoise=denoise)
    return joined(parts)


class _ShownRecorder(Recorder):
    """A recorder that shows its progress."""

    def __init__(self, advance: Callable[[], None]) -> None:
        super().__init__()
        self.advance = advance

    def evaluated(self, *call: Any) -> None:
        super().evaluated(*call)
        self.advance()


def traced(
    parts: list[Trace], advance: Callable[[], None], runner: ContinuousRunner, model: str, rows: Rows, z: Tensor
) -> Drawn:
    """Draws an iteration's rows, adds their chains to `parts`, and calls `advance` at each step."""
    recorder = _ShownRecorder(advance)
    made = BASELINE.denoise(runner, model, rows, z, observers=(recorder,))
    parts.append(recorder.trace(made.tokens, rows.seed))
    return made


class Fitted:
    """The fits of a model's head for sequences of equal settings: `Chain.fitted`."""

    def __init__(self, runner: ContinuousRunner, model: str, sequence: Sequence) -> None:
        self.runner, self.model, self.request, self.key = runner, model, sequence.request, sequence.key
        self.calibrations = runner.tuning.calibrations[model]
        self._made: dict[bool, Chains] = {}

    @functools.cached_property
    def measured(self) -> dict[str, float | None]:
        """What was measured of `calibrated`, by the names in `RoundStats`."""
        return {} if self.request.corrected is False else self.calibrations.shortcut(self.request).measured()

    def segments(self, *settings: Any) -> list[Segment]:
        """Those of the request's plan, whose settings these are."""
        return self.calibrations.segments(self.request)

    def plan(self, head_calls: int) -> tuple[int, ...]:
        """Steps of head calls; equal for both models, since CSpD compares their chains."""
        return self.runner.tuning.calibrations["target"].plan(self.request, head_calls).steps

    def chains(self, chain: Chain, window: int | None, draft: str) -> Chains | None:
        """Empty `Chains` for these tokens; None if nothing is drafted."""
        if not window:
            return None
        is_watched = bool(chain.observers)
        if is_watched not in self._made:
            self._made[is_watched] = self.chains_of(is_watched)
        return self._made[is_watched]

    def chains_of(self, trace_sigma: bool = False) -> Chains:
        """Empty `Chains`. With CUDA graphs, those of the last requests with equal settings are reused."""
        make = functools.partial(self._make_chains, trace_sigma)
        chains = self.runner.graphs.last(f"chains of {self.model}, {trace_sigma=}", self.key, make)
        chains.clear()
        return chains

    def _make_chains(self, trace_sigma: bool) -> Chains:
        request, runner = self.request, self.runner
        head = runner.models[self.model].head
        s = head.schedule(request.num_sampling_steps)
        if request.draft == "frozen":
            coefficients, drift = frozen(s)
        else:
            calibration = self.calibrations.get(request)
            coefficients, drift = calibration.coefficients, calibration.drift
        table = draft_table(coefficients, drift, s, request.window, request.temperature)
        return Chains(
            head,
            s,
            send({"table": table}, runner.device)["table"],
            runner.precision,
            runner.noise,
            graphs=runner.graphs,
            trace_sigma=trace_sigma,
            drafting=self.model == "draft",
            compiled=runner.tuning.compiled,
        )


# Fits to the models, and the times of this device.
#
# Both are made on first use and cached on disk: calibrations beside the checkpoint, or else in the user's cache folder,
# and times in the user's cache folder. The key of an entry has everything that it depends on. The bundled checkpoints
# come with calibrations for their usual settings (scripts/bundle_calibrations.py).

# the time of a fit in units of one trace, without its traces, and the traces that it needs: measured with `digits32`
WORK = {Calibration: 0.15, Predictor: 0.3, Shortcut: 0.9}
TRACES = {Calibration: (SEEN,), Predictor: (SEEN, CHOOSING), Shortcut: PARTS}
SCHEMAS = {Calibration: "cspd.calibration/1", Predictor: "cspd.predictor/1", Shortcut: "cspd.shortcut/2"}


# candidates of `cspd tune` without prices of backbones, see `register_family`
SEARCHED = """
    calibrated:head_calls=8 calibrated:head_calls=10 calibrated:head_calls=12 calibrated:head_calls=16
    calibrated:head_calls=25
"""
SEARCHED_WINDOWS = "speculative:window=4 speculative:window=8 speculative:window=16 speculative:window=24 "


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
        device: torch.device,
        precision: Precision,
        compiled: bool,
        graphs: bool,
        cache: Path | None,
        make_runner: MakeRunner,
    ) -> None:
        super().__init__(device, precision, compiled, graphs)
        self.target = target
        folders = [folder for folder in (cache, user_cache()) if folder]
        self.calibrations = {
            name: Calibrations(model, device, precision, folders, make_runner)
            for name, model in (("target", target), ("draft", draft))
            if model is not None
        }

    @staticmethod
    def fitted(runner: ContinuousRunner, model: str, sequence: Sequence) -> Fitted:
        """The fits for a running sequence; they live as long as sequences of its settings."""
        state = runner.round_state[sequence.key]
        if ("fitted", model) not in state:
            state["fitted", model] = Fitted(runner, model, sequence)
        return state["fitted", model]

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


class Calibrations:
    """The calibrations of one model, made on first use and cached.

    Args:
        model, device, precision: the model, and how it computes.
        folders: cache folders, in the order of look-up; a new entry goes to the first writable one.
        make_runner: makes a model runner of the model, whose samples the drafts are fitted to.
    """

    def __init__(
        self, model: Any, device: torch.device, precision: Precision, folders: list[Path], make_runner: MakeRunner
    ) -> None:
        self.model, self.device, self.precision, self.make_runner = model, device, precision, make_runner
        self._cache = FileCache(folders)
        self._weights: str | None = None
        self._plans: dict[tuple, Plan] = {}
        self._segments: dict[str, list[Segment]] = {}
        self._traces: tuple[dict, dict[str, Trace]] = {}, {}  # the last settings, and their traces
        self._advance: Callable[[float], None] = no_advance  # the progress bar of the fit that is running

    @contextlib.contextmanager
    def fitting(self, request: Request, *kinds: type) -> Iterator[None]:
        """Shows one progress bar for all fits of these kinds that are made inside the block."""
        if self._advance is not no_advance:  # the fit is part of one that already has a bar
            yield
            return
        missing = [kind for kind in kinds if self.find(request, kind) is None]
        traces = {part for kind in missing for part in TRACES[kind]} - self._remembered(request).keys()
        work = sum(map(self._work, traces)) + sum(WORK[kind] for kind in missing)
        settings = f"cfg={request.cfg:g}, temperature={request.temperature:g}, {request.num_sampling_steps} steps"
        how = f"{settings}, {self.precision.policy}"
        folder = next(iter(self._cache.writable), "memory")
        description = f"fitting the calibration of `{request.method}` to this model, for the first time with {how}"
        with counting(f"{description} (cached in {folder})", work) as self._advance:
            try:
                yield
            finally:
                self._advance = no_advance

    def get(self, request: Request) -> Calibration:
        """The calibration for a resolved request's guidance, temperature, T and draft."""
        return self._cache.get(Calibration, self._settings(request, Calibration), lambda: self._fit(request))

    def predictor(self, request: Request) -> Predictor:
        """The predictor for a request's guidance, temperature and T."""
        return self._cache.get(Predictor, self._settings(request, Predictor), lambda: self._fit_predictor(request))

    def find(self, request: Request, kind: type[Entry]) -> Entry | None:
        """The cached fit of a kind for a request's settings; None if it has not been made."""
        return self._cache.find(kind, self._settings(request, kind))

    def plan(self, request: Request, head_calls: int | None, most: float | None = None) -> Plan:
        """The plan for a request's chains; arguments as in `plan_of`."""
        settings = json.dumps(self._settings(request, Predictor)), head_calls, most
        if settings not in self._plans:
            remember(self._plans, settings, plan_of(self.predictor(request).skip_cost, head_calls, most))
        return self._plans[settings]

    def shortcut(self, request: Request) -> Shortcut:
        """The shortcut for a resolved request's guidance, temperature, T, head_calls and null_every."""
        return self._cache.get(Shortcut, self._settings(request, Shortcut), lambda: self._fit_shortcut(request))

    def cached(self, request: Request, kind: type[Entry], own: Mapping, make: Callable[[], Entry]) -> Entry:
        """Other arrays that depend on a request's chains and on the settings `own`: from the cache, or made."""
        return self._cache.get(kind, {**self._of_chains(request), **own}, make)

    def segments(self, request: Request) -> list[Segment]:
        """The segments of a request's shortcut, or of its plan if they are not corrected, on the device."""
        settings = json.dumps([self._settings(request, Shortcut), request.corrected is not False])
        if settings not in self._segments:
            own = self._schedule(request), self.predictor(request)
            if request.corrected is False:
                steps = self.plan(request, request.head_calls).steps
                nothing = np.zeros((len(steps), 2), np.float32)
                segments = make_segments(steps, *own, nothing, request.null_every, self.device)
            else:
                segments = self.shortcut(request).segments(*own, request.null_every, self.device)
            remember(self._segments, settings, segments)
        return self._segments[settings]

    def folder_of(self, request: Request, kind: type = Calibration) -> Path | None:
        """The folder with the cached fit of a kind for a request's settings; None if it is not on disk."""
        return self._cache.folder_of(kind, self._settings(request, kind))

    def _settings(self, request: Request, kind: type) -> dict:
        """The cache key of a kind of fit: all settings that its arrays depend on."""
        own: dict[type, dict] = {
            Calibration: {"draft": request.draft},
            Shortcut: {"head_calls": request.head_calls, "null_every": request.null_every if request.guided else None},
        }
        return self._of_chains(request) | {"schema": SCHEMAS[kind]} | own.get(kind, {})

    def _of_chains(self, request: Request) -> dict:
        """All settings that the chains of a trace depend on."""
        if self._weights is None:
            self._weights = content_hash(self.model)
        return {
            "weights": self._weights,
            "cfg": float(request.cfg),
            "cfg_schedule": request.cfg_schedule if request.guided else None,
            "temperature": float(request.temperature),
            "num_sampling_steps": len(self._schedule(request)),
            "precision": self.precision.policy,
            "seed": TRACE_SEED,
        }

    @torch.inference_mode()
    def _fit(self, request: Request) -> Calibration:
        with self.fitting(request, Calibration):
            chains = self._trace(request, SEEN).chains
            made = fit(*chains, self._schedule(request), request.temperature, request.draft == "frozen")
            self._advance(WORK[Calibration])
        return made

    @torch.inference_mode()
    def _fit_predictor(self, request: Request) -> Predictor:
        with self.fitting(request, Predictor):
            seen, choosing = (self._trace(request, part).finite().chains for part in (SEEN, CHOOSING))
            made = fit_predictor(seen, choosing, self._schedule(request), request.temperature)
            self._advance(WORK[Predictor])
        return made

    @torch.inference_mode()
    def _fit_shortcut(self, request: Request) -> Shortcut:
        with self.fitting(request, Predictor, Shortcut):
            predictor, steps = self.predictor(request), self.plan(request, request.head_calls).steps
            seen, choosing, reported = (self._trace(request, part).finite().to(self.device) for part in PARTS)
            advance = lambda share: self._advance(share * WORK[Shortcut])  # noqa: E731
            own = seen, choosing, reported, self._schedule(request), predictor, steps
            return fit_shortcut(self.model.head, *own, request.null_every, self.precision, advance)

    def _schedule(self, request: Request) -> Schedule:
        """The chain of a request's tokens."""
        return self.model.head.schedule(request.num_sampling_steps)

    def _trace(self, request: Request, part: str) -> Trace:
        """Chains of the model's own samples; the last ones are remembered, since several fits use them."""
        traces = self._remembered(request)
        if part not in traces:
            advance = lambda share: self._advance(share * self._work(part))  # noqa: E731
            traces[part] = trace(self.model, request, self.device, self.precision, self.make_runner, part, advance)
        return traces[part]

    def _work(self, part: str) -> float:
        """The time of a part's trace, in units of the trace that the fits see."""
        length = self.model.config.seq_len
        return num_traced(length, self.device, part) / num_traced(length, self.device)

    def _remembered(self, request: Request) -> dict[str, Trace]:
        """The remembered traces of a request's settings, by part."""
        settings = self._of_chains(request)
        if self._traces[0] != settings:
            self._traces = settings, {}
        return self._traces[1]
