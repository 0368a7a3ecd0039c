"""The calibrated sampler: the head is evaluated at some steps and predicted at the others. Guarantee: measured."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd import kernels, noise
from cspd.device import Precision
from cspd.heads.calibration import LARGEST, Trace, check_arrays, frozen, least_squares
from cspd.heads.chain import (
    ContinuousRunner,
    Denoised,
    Draw,
    Measured,
    Rows,
    Steps,
    ancestral_advice,
    by_row,
    chain_steps,
    denoiser,
    evaluate,
    modulated,
    modulation_size,
    on_device,
    table_bytes,
)
from cspd.heads.verify import divergence
from cspd.option import Option, check_integer
from cspd.request import Request
from cspd.terminal import Advance, no_advance
from mar.head import TRAIN_STEPS, Head, schedule

# At which steps of a chain the head is called, and what lies between two calls.
#
# A chain of T steps keeps its own noise, but the head is called at N of its steps only, S = {T - 1 = s_1 > .. > s_N =
# 0}. At a step k between, a fitted linear prediction from the call before, at step a, stands in for it:
#
#     eps~_k = c0 x_k + c1 eps_a + c2 x_a,    v~_k = v_a + drift.
#
# So all that lies between two calls is linear in x_a, eps_a and the noise: a window of steps is one sum.

MOST_LAGS = 128  # steps from one call to the next, at most
MOST_COST = torch.finfo(torch.float32).max  # where float32 ends: taken only if there is no other way


@dataclass(frozen=True)
class Predictor:
    """What the head would say, predicted from its last call, and what a prediction costs.

    Attributes:
        coefficients: float32 [T, lags, 3], (c0, c1, c2) by step and lag, lags from 1.
        drift: float32 [T, lags], mean change of the variance channel.
        skip_cost: float32 [T, lags], nats: mean KL(p || q) of a step's Gaussians, p by the head and q by the
            prediction, of chains that the fit did not see.
    """

    coefficients: np.ndarray
    drift: np.ndarray
    skip_cost: np.ndarray

    def check(self, num_steps: int) -> None:
        """Raises ValueError, saying what is wrong, where it is none for T = `num_steps` denoising steps."""
        lags = min(MOST_LAGS, num_steps)
        wanted = {
            "coefficients": (np.float32, (num_steps, lags, 3), -LARGEST, LARGEST),
            "drift": (np.float32, (num_steps, lags), -LARGEST, LARGEST),
            "skip_cost": (np.float32, (num_steps, lags), 0, np.inf),
        }
        check_arrays("a predictor", vars(self), wanted)


def fit_predictor(seen: tuple[Tensor, ...], held_out: tuple[Tensor, ...], temperature: float) -> Predictor:
    """Fits the prediction of every step from every earlier one, and measures on other chains what it costs.

    Args:
        seen, held_out: (x, eps, v) [T, N, d] each, inputs, guided noise predictions and variance channels of ancestral
            chains; on the CPU, finite.
        temperature: tau the chains ran with. At 0 there are no densities: those of 1 are compared.
    """
    num_steps = len(seen[0])
    s = schedule(num_steps)
    coefficients, drift = (torch.from_numpy(values) for values in frozen(num_steps, MOST_LAGS))
    lags = coefficients.shape[1]
    skip_cost = torch.zeros(num_steps, lags)
    for k in range(1, num_steps - 1):
        anchors = slice(k + 1, k + 1 + lags)  # by lag; there are fewer near T
        num_lags = len(seen[0][anchors])
        slope = s.log_sigma_slope[k]
        # what is no good costs much, so that no plan takes it
        fitted = least_squares(*seen, k, anchors, slope).nan_to_num(0)
        coefficients[k, :num_lags] = fitted.clamp(-LARGEST, LARGEST)
        drift[k, :num_lags] = (seen[2][k] - seen[2][anchors]).mean((1, 2)).clamp(-LARGEST, LARGEST)

        x, eps, v = held_out
        c0, c1, c2 = coefficients[k, :num_lags, :, None, None].unbind(1)
        eps_predicted = c0 * x[k] + c1 * eps[anchors] + c2 * x[anchors]
        v_predicted = v[anchors] + drift[k, :num_lags, None, None]
        base = np.log(temperature or 1.0) + s.log_sigma_base[k]
        p = s.mean_eps[k] * eps[k], base + slope * v[k]  # both means share A x_k
        q = s.mean_eps[k] * eps_predicted, base + slope * v_predicted
        skip_cost[k, :num_lags] = divergence(p, q).mean(1)
    return Predictor(coefficients.numpy(), drift.numpy(), skip_cost.nan_to_num(MOST_COST).numpy())


class Plan(NamedTuple):
    """Where the head is called: S from T - 1 down to 0; the sum of the skipped steps' costs, nats per token."""

    steps: tuple[int, ...]
    cost: float


def plans(skip_cost: np.ndarray) -> Iterator[Plan]:
    """The cheapest plan of 2 calls, of 3, and so on to T, by dynamic programming; a cost is infinite where none is.

    By the chain rule a path's KL divergence is the sum of its steps', here with the calls on the exact path. The idea
    of choosing steps by such a bound is from Align Your Steps (arXiv 2404.14507).

    Args:
        skip_cost: [T, lags], by step and lag, see `Predictor`.
    """
    between = _costs_between(skip_cost)
    best = np.full(len(skip_cost), np.inf)  # the least cost down to each step, with a call there
    best[-1] = 0
    came_from: list[np.ndarray] = []
    for _ in range(2, len(skip_cost) + 1):
        totals = best[:, None] + between
        came_from.append(totals.argmin(0))
        best = totals.min(0)
        steps = [0]
        for sources in reversed(came_from):
            steps.append(int(sources[steps[-1]]))
        yield Plan(tuple(reversed(steps)), float(best[0]))


def _costs_between(skip_cost: np.ndarray) -> np.ndarray:
    """The cost [T, T] of skipping all steps between a call at a, the row, and the next one at b < a."""
    num_steps, lags = skip_cost.shape
    costs = np.full((num_steps, num_steps), np.inf)
    for a in range(1, num_steps):
        skipped = np.arange(a - 1, max(0, a - 1 - lags), -1)
        own = skip_cost[skipped, a - 1 - skipped].astype(np.float64)
        next_call = np.append(a - 1, skipped - 1)
        costs[a, next_call] = np.append(0, np.cumsum(own))
    return costs


def plan_of(skip_cost: np.ndarray, head_calls: int | None, most: float | None = None) -> Plan:
    """The cheapest plan of so many `head_calls`, or the shortest one that costs at `most` so many nats per token.

    Raises:
        ValueError: there is no plan of so few calls.
    """
    least = 2
    for plan in plans(skip_cost):
        if plan.cost == np.inf:
            least = len(plan.steps) + 1
        elif len(plan.steps) == head_calls or (most is not None and plan.cost <= most):
            return plan
    num_steps = len(skip_cost)
    raise ValueError(f"head_calls={head_calls} does not fit {num_steps} denoising steps: give {least}..{num_steps}")


class Window(NamedTuple):
    """From a call at x_a to the next one at x_b, over the steps k = a .. b + 1.

    Attributes:
        first: a. steps: int64 [n], the k.
        base, slope: float32 [n, 1, 1], log sigma_k = base_k + slope_k v_a, without temperature.
        mix: float32 [n + 1, 2 + n], the states that the steps begin with, and x_b: their weights on x_a, eps_a and the
            noise sigma_k eps_k of each step. Step 0 adds no noise.
        is_full: whether the call evaluates the null class too.
    """

    first: int
    steps: Tensor
    base: Tensor
    slope: Tensor
    mix: Tensor
    is_full: bool


def windows(
    steps: tuple[int, ...], predictor: Predictor, corrections: np.ndarray, null_every: int, device: torch.device
) -> list[Window]:
    """What follows each of a plan's calls.

    Args:
        steps: S. corrections: [N, 2], what is added to the weights of x_b on x_a and eps_a.
        null_every: the null class is evaluated at the first two calls, the last, and every so-manieth.
    """
    made = []
    for i, (a, b) in enumerate(zip(steps, (*steps[1:], -1))):
        k = np.arange(a, b, -1)
        mix, base, slope = _window(k, predictor)
        mix[-1, :2] += corrections[i]
        tables = (torch.as_tensor(values, dtype=torch.float32, device=device) for values in (base, slope, mix))
        base, slope, mix = tables
        is_full = i < 2 or i == len(steps) - 1 or i % null_every == 0
        column = (len(k), 1, 1)
        made.append(Window(a, torch.as_tensor(k, device=device), base.view(column), slope.view(column), mix, is_full))
    return made


def _window(k: np.ndarray, predictor: Predictor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mix, base, slope) of the steps k = a .. b + 1, see `Window`; float64."""
    s = schedule(len(predictor.coefficients))
    lags = np.arange(len(k)) - 1  # of a step from the call, less one
    base, slope = s.log_sigma_base[k], s.log_sigma_slope[k]
    base[1:] += slope[1:] * predictor.drift[k[1:], lags[1:]]
    mix = np.zeros((len(k) + 1, 2 + len(k)))
    mix[0, 0] = 1
    for i, step in enumerate(k):
        c0, c1, c2 = (0.0, 1.0, 0.0) if i == 0 else predictor.coefficients[step, lags[i]].astype(np.float64)
        mix[i + 1] = (s.mean_x[step] + s.mean_eps[step] * c0) * mix[i]
        mix[i + 1, 0] += s.mean_eps[step] * c2
        mix[i + 1, 1] += s.mean_eps[step] * c1
        mix[i + 1, 2 + i] = step > 0
    return mix, base, slope


# Chains that call the head at the steps of a plan only, and how far their paths are from the full chain's.

# is told (number of the window, sources [2 + n, R, d] as `Window.mix` takes them, v [R, d]); may give the next state
Visit = Callable[[int, Tensor, Tensor], Tensor | None]


def sample(
    head: Head,
    z: Tensor,
    scale: Tensor,
    temperature: Tensor,
    x: Tensor,
    noise: Callable[[Tensor], Tensor],
    plan: list[Window],
    num_steps: int,
    precision: Precision,
    visit: Visit | None = None,
) -> Tensor:
    """Tokens [R, d] by a head call a window, the first in float32; arguments as in `ancestral.ancestral`.

    Where a call leaves out the null class, the difference of the two classes' predictions is the last one seen.
    """
    steps = chain_steps(num_steps, TRAIN_STEPS - 1, z.device)
    return follow(head, z, scale, temperature, x, noise(steps.t), steps, plan, precision, visit)


def follow(
    head: Head,
    z: Tensor,
    scale: Tensor,
    temperature: Tensor,
    x: Tensor,
    eps_t: Tensor,
    steps: Steps,
    plan: list[Window],
    precision: Precision,
    visit: Visit | None,
) -> Tensor:
    """`sample` with noise eps_t [T, R, d] drawn in advance, in the order of the steps."""
    last = len(eps_t) - 1
    timesteps = [steps.timesteps[last - window.first] for window in plan]
    classes = [len(z) if window.is_full else 1 for window in plan]
    by_window = eps_t.split([len(window.steps) for window in plan])
    difference = None
    for calls, own_head, by_call in modulated(head, z, timesteps, precision, classes):
        with precision.full() if calls[0] == 0 else precision.fast():
            for i, modulations in zip(calls, by_call):
                out = own_head.denoise(x, modulations)
                if visit is None and kernels.available(x.device):
                    x, difference = _step_by_kernel(plan[i], x, out, by_window[i], scale, temperature, difference)
                    continue
                eps, v = out.float().chunk(2, dim=-1)
                if len(eps) == 2:
                    difference = (scale - 1) * (eps[0] - eps[1])
                guided = eps[0] if difference is None else eps[0] + difference
                sources = _sources(plan[i], x, guided, v[0], temperature, by_window[i])
                following = visit(i, sources, v[0]) if visit else None
                x = weighted(plan[i].mix[-1], sources) if following is None else following
        del by_call, modulations  # which are large
    return x


def drawing(
    head: Head,
    noise: types.ModuleType,
    plan: list[Window],
    num_steps: int,
    precision: Precision,
    *,
    index: int = 0,
    visit: Visit | None = None,
) -> Draw:
    """The whole chain as a function of tensors; what it takes and gives is as of `ancestral.drawing` and `sample`."""
    steps = chain_steps(num_steps, TRAIN_STEPS - 1, precision.device)

    def draw(z: Tensor, scale: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        x = noise.initial(seed, position, head.channels, index)
        eps_t = noise.steps(seed, position, steps.t, head.channels, index)
        return follow(head, z, scale, temperature, x, eps_t, steps, plan, precision, visit)

    return draw


def _step_by_kernel(
    window: Window,
    x: Tensor,
    out: Tensor,
    noise: Tensor,
    scale: Tensor,
    temperature: Tensor,
    difference: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(The state after a window, the difference of the classes' predictions): what `follow` does after a call."""
    from cspd.kernels.head import window_step

    columns = window.base, window.slope, window.mix[-1]
    return window_step(x, out, noise, scale, temperature, difference, *columns)


def _sources(window: Window, x: Tensor, eps: Tensor, v: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """[2 + n, R, d]: x_a, eps_a, and the noise sigma_k eps_k of each of a window's steps."""
    sigma = torch.addcmul(window.base, window.slope, v).exp_().mul_(temperature)
    return torch.cat([x[None], eps[None], sigma.mul_(noise)])


def weighted(weights: Tensor, sources: Tensor) -> Tensor:
    """[R, d], the sum of sources [m, R, d] by weights [m]; no matrix product, which low precision would round."""
    return (weights[:, None, None] * sources).sum(0)


class Audit:
    """Measures a chain's path: KL(q || p), nats, q being the path measure of `sample` and p the full chain's.

    By the chain rule it is the sum over the steps of the divergence of their Gaussians at the states that q visits. The
    head is evaluated at those that are `chosen`, each with a probability of `rate`, so that the sum over `rate` is
    unbiased. Steps whose call evaluated both classes are p's own. Each window waits for the device once.

    Args:
        chosen: bool [R, T], which steps of which rows. The others are as in `sample`.

    Attributes:
        total: float32 [R], the sums over `rate`.
    """

    def __init__(
        self,
        head: Head,
        z: Tensor,
        scale: Tensor,
        temperature: Tensor,
        plan: list[Window],
        precision: Precision,
        chosen: Tensor,
        rate: float,
    ) -> None:
        self.head, self.scale, self.log_temperature, self.plan = head, scale, temperature.log(), plan
        self.precision, self.chosen, self.rate = precision, chosen, rate
        num_steps = chosen.shape[1]
        self._columns = _columns(num_steps, z.device)
        with precision.full():
            self._c_embed = head.cond_embed(z)
            timesteps = tuple(schedule(num_steps).timestep_map.tolist())
            self._t_embed = head.time_embed(on_device(timesteps, z.device))
        self.total = torch.zeros(len(chosen), device=z.device)

    def __call__(self, i: int, sources: Tensor, v: Tensor) -> None:
        """Adds a window's steps."""
        window = self.plan[i]
        is_skipped = window.steps > 0
        is_skipped[0] &= not window.is_full
        rows, places = (self.chosen[:, window.steps] & is_skipped).nonzero().unbind(1)
        if not len(rows):
            return
        for some_rows, some_places in zip(self._chunks(rows), self._chunks(places)):
            q, x = self._of_window(window, sources, v, some_rows, some_places)
            p = self._of_head(window.steps[some_places], x, some_rows)
            self.total.index_add_(0, some_rows, divergence(q, p) / self.rate)

    def _chunks(self, which: Tensor) -> Iterator[Tensor]:
        """Parts of some rows that modulations are made for at once."""
        most = table_bytes(which.device) // (modulation_size(self.head) * len(self._c_embed))
        return iter(which.split(max(1, most)))

    def _of_window(self, window: Window, sources: Tensor, v: Tensor, rows: Tensor, places: Tensor) -> tuple:
        """q of some rows at some places of a window, and the states [m, d] there."""
        own = sources[:, rows].transpose(0, 1)
        x = (window.mix[places].unsqueeze(-1) * own).sum(1)
        weights = window.mix[places + 1].clone()
        weights.scatter_(1, (2 + places).unsqueeze(1), 0)  # the mean is the state after the step, without its noise
        mean = (weights.unsqueeze(-1) * own).sum(1)
        log_sigma = torch.addcmul(window.base[places, 0], window.slope[places, 0], v[rows])
        return (mean, log_sigma + self.log_temperature[rows]), x

    def _of_head(self, steps: Tensor, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """p at states x [m, d] of some rows before steps [m]."""
        head = self.precision.prepare(self.head)
        with self.precision.fast():
            modulations = head.split(head.modulations(self._t_embed[steps], self._c_embed[:, rows]))
            eps, v = evaluate(head, x, modulations, self.scale[rows])
        mean_x, mean_eps, base, slope = self._columns[steps].unbind(-1)
        return mean_x * x + mean_eps * eps, base + slope * v + self.log_temperature[rows]


@functools.cache
def _columns(num_steps: int, device: torch.device) -> Tensor:
    """float32 [T, 1, 4]: A and B of p's mean, a and b of its log sigma, see `Schedule`."""
    s = schedule(num_steps)
    columns = np.stack([s.mean_x, s.mean_eps, s.log_sigma_base, s.log_sigma_slope], axis=-1)[:, None]
    with torch.inference_mode(False):
        return torch.as_tensor(columns, dtype=torch.float32, device=device)


# A plan fitted to a model: where the head is called, how the states between are corrected, and how near that comes.

RIDGE = 1e-6  # of the mean diagonal


@dataclass(frozen=True)
class Shortcut:
    """Where the head is called, and what is known of the tokens that come out.

    Attributes:
        steps: int16 [N], S from T - 1 down to 0.
        corrections: float32 [N, 2], added to the weights of the next call's state on this call's x and eps.
        difference: float32 [1], on held-out tokens, from the same z and noise: r.m.s. difference from the full chain's,
            in standard deviations of a token's channels.
        divergence: float32 [1], there, KL(q || p) of the path from the full chain's, nats per token; infinite without
            noise.
    """

    steps: np.ndarray
    corrections: np.ndarray
    difference: np.ndarray
    divergence: np.ndarray

    def check(self, num_steps: int) -> None:
        """Raises ValueError, saying what is wrong, where it is none for T = `num_steps` denoising steps."""
        num_calls = self.steps.size
        wanted = {
            "steps": (np.int16, (num_calls,), 0, num_steps - 1),
            "corrections": (np.float32, (num_calls, 2), -LARGEST, LARGEST),
            "difference": (np.float32, (1,), 0, LARGEST),
            "divergence": (np.float32, (1,), 0, np.inf),
        }
        check_arrays("a shortcut", vars(self), wanted)
        if num_calls < 2 or self.steps[0] != num_steps - 1 or self.steps[-1] or (np.diff(self.steps) >= 0).any():
            raise ValueError(f"a shortcut's steps do not fall from {num_steps - 1} to 0")

    def windows(self, predictor: Predictor, null_every: int, device: torch.device) -> list[Window]:
        """What follows each of its calls."""
        return windows(tuple(self.steps.tolist()), predictor, self.corrections, null_every, device)


def fit_shortcut(
    head: Head,
    seen: Trace,
    held_out: Trace,
    predictor: Predictor,
    steps: tuple[int, ...],
    null_every: int,
    precision: Precision,
    advance: Advance = no_advance,
) -> Shortcut:
    """Corrects the windows of a plan on chains that really take them, and measures other tokens.

    The predictor was fitted with each call on the full chain's path. Chains that take shortcuts leave that path, so the
    state at the end of each window is fitted again, by least squares, to the full chain's of the same noise. This is
    kept where it brings other tokens nearer to the full chain's.

    Args:
        seen, held_out: on the head's device. steps: S. advance: is told of its parts, 1 in all. The others are as in
            `plan.windows`.
    """
    device = seen.x.device
    none = np.zeros((len(steps), 2), np.float32)
    plain = windows(steps, predictor, none, null_every, device)
    corrections = _corrections(head, seen, plain, precision)
    corrected = windows(steps, predictor, corrections, null_every, device)
    difference, other = (_difference(head, held_out, plan, precision) for plan in (plain, corrected))
    plan = plain
    if not difference <= other:  # it may not be finite
        difference, plan = other, corrected
    if not math.isfinite(difference):
        raise ValueError(f"head_calls={len(steps)}: these tokens leave the numbers of float32; give more head calls")
    return Shortcut(
        steps=np.array(steps, np.int16),
        corrections=none if plan is plain else corrections,
        difference=np.float32([difference]),
        divergence=np.float32([_divergence(head, held_out, plan, precision, advance)]),
    )


def _difference(head: Head, chains: Trace, plan: list[Window], precision: Precision) -> float:
    """See `Shortcut`."""
    tokens = _run(head, chains, plan, precision)
    error, width = (tokens - chains.tokens).square().mean(), chains.tokens.var(0).mean()
    return (error / width).sqrt().item()


def _divergence(
    head: Head, chains: Trace, plan: list[Window], precision: Precision, advance: Advance = no_advance
) -> float:
    """See `Shortcut`; most of the work of a fit."""
    if not (chains.temperature > 0).all():
        return math.inf
    everywhere = torch.ones(len(chains.seed), len(chains.x), dtype=torch.bool, device=chains.x.device)
    audit = Audit(head, chains.z, chains.scale, chains.temperature, plan, precision, everywhere, rate=1.0)

    def look(i: int, sources: Tensor, v: Tensor) -> None:
        audit(i, sources, v)
        advance(1 / len(plan))

    _run(head, chains, plan, precision, look)
    return audit.total.mean().nan_to_num(math.inf, posinf=math.inf).item()


def _corrections(head: Head, chains: Trace, plan: list[Window], precision: Precision) -> np.ndarray:
    """float32 [N, 2], see `Shortcut`, of a plan without any: a window is fitted on what those before it gave."""
    corrections = torch.zeros(len(plan), 2, dtype=torch.float64)

    def correct(i: int, sources: Tensor, v: Tensor) -> Tensor | None:
        """The state after the i-th window, put right; the first call's gain is too high, and no step may be skipped."""
        if i == 0 or len(plan[i].steps) == 1:
            return None
        predicted = weighted(plan[i].mix[-1], sources)
        wanted = chains.x[plan[i + 1].steps[0]]
        corrections[i] = _least_squares(sources[:2], wanted - predicted)
        return predicted + weighted(corrections[i].to(predicted), sources[:2])

    _run(head, chains, plan, precision, correct)
    return corrections.float().numpy()


def _run(head: Head, chains: Trace, plan: list[Window], precision: Precision, visit: Visit | None = None) -> Tensor:
    """Tokens of the same z and noise as a trace's."""
    channels = chains.tokens.shape[1]
    x = noise.initial(chains.seed, chains.position, channels)
    eps_of = lambda t: noise.steps(chains.seed, chains.position, t, channels)  # noqa: E731
    rows = chains.z, chains.scale, chains.temperature
    return sample(head, *rows, x, eps_of, plan, len(chains.x), precision, visit)


def _least_squares(features: Tensor, wanted: Tensor) -> Tensor:
    """float64 [2], on the CPU: the weights of features [2, N, d] whose sum is nearest to wanted [N, d]."""
    features, wanted = features.flatten(1).double().cpu(), wanted.flatten().double().cpu()
    finite = features.isfinite().all(0) & wanted.isfinite()
    features, wanted = features[:, finite], wanted[finite]
    gram = features @ features.T
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(2, dtype=torch.float64)
    return torch.linalg.lstsq(gram + ridge, features @ wanted).solution


# The calibrated sampler: N head calls per token, and predictions between them. Guarantee: measured.
#
# It keeps the chain's T steps and its noise. Where `speculative` drafts with a fitted prediction of the head and
# judges it, this takes the prediction as it is: a token is nearly the one that `ar` makes of the same noise. How
# nearly is measured when the prediction is fitted, on other tokens, and if asked for on the tokens of the run itself
# (`audit`).

HEAD_CALLS = 10
LEAST_AUDIT = 1e-4  # with less, most images have no step to look at, and seem to be without error
REMEDY = "give num_sampling_steps=100, which takes no more head calls"  # where the chain itself is short
OPTIONS = (
    Option(
        "head_calls",
        int,
        f"head calls per token; fewer are faster and less exact; {HEAD_CALLS} where nothing else is asked for",
        low=2,
        high=TRAIN_STEPS,
        metavar="N",
    ),
    Option(
        "divergence",
        float,
        "in place of head_calls: as few as are predicted to diverge by at most D nats per token",
        above=0,
        metavar="D",
    ),
    Option(
        "null_every",
        int,
        "the null class is evaluated at every N-th head call only; between, its last difference is taken again",
        default=2,
        low=1,
        high=TRAIN_STEPS,
        metavar="N",
    ),
    Option(
        "audit",
        float,
        "share of the skipped steps at which the head is evaluated all the same, to measure this run's divergence",
        default=0.0,
        implied=True,
        high=1,
        metavar="SHARE",
    ),
)


def check(request: Request, runner: ContinuousRunner) -> None:
    """Raises ValueError where the calls do not fit the steps, or what is asked for needs noise."""
    if request.head_calls is not None:
        most = request.num_sampling_steps
        check_integer("head_calls", request.head_calls, 2, most, f"a chain has {most} steps")
    if 0 < (request.audit or 0) < LEAST_AUDIT:
        raise ValueError(f"audit={request.audit} looks at too few steps to tell anything: give 0, or {LEAST_AUDIT}..1")
    for name in ("divergence", "audit"):
        if getattr(request, name) and request.temperature == 0:
            raise ValueError(f"{name}={getattr(request, name)} needs temperature > 0: without noise nothing diverges")


def resolve(request: Request, runner: ContinuousRunner) -> Request:
    """The request with its number of head calls.

    Raises ValueError where there is no plan of so few, it is predicted to diverge by more than `divergence`, or chains
    are not finite.
    """
    calls, most = request.head_calls, request.divergence
    if calls is None and most is None:
        calls = min(HEAD_CALLS, request.num_sampling_steps)
    calibrations = runner.tuning.calibrations["target"]
    with calibrations.fitting(request.but(head_calls=calls), Predictor, Shortcut):
        plan = calibrations.plan(request, calls, most if calls is None else None)
        if most is not None and plan.cost > most:
            predicted = f"head_calls={calls} is predicted to diverge by {plan.cost:.3g} nats per token"
            raise ValueError(f"{predicted}, more than divergence={most}: give one of the two")
        request = request.but(head_calls=len(plan.steps))
        calibrations.shortcut(request)  # so that no round has to wait for the fit
    if request.chains:  # of CSpD, those of both models
        runner.tuning.calibrations["draft"].shortcut(request)
    return request


def at_hand(request: Request, runner: ContinuousRunner) -> tuple[Request, float] | None:
    """A checked request with the usual number of head calls, and its `Shortcut.difference`; None if it needs a fit."""
    calibrations = runner.tuning.calibrations["target"]
    usual = request.but(head_calls=min(HEAD_CALLS, request.num_sampling_steps))
    shortcut = calibrations.find(usual, Shortcut) if calibrations.find(usual, Predictor) else None
    return None if shortcut is None else (usual, shortcut.difference.item())


class _Running:
    """What the sequences of one kind share while they run: a model's windows, and what is known of their tokens."""

    def __init__(self, runner: ContinuousRunner, model: str, request: Request) -> None:
        calibrations = runner.tuning.calibrations[model]
        shortcut = calibrations.shortcut(request)
        self.plan = calibrations.windows(request)
        self.difference = shortcut.difference.item()
        divergence = shortcut.divergence.item()
        self.divergence = divergence if math.isfinite(divergence) else None  # as it is without noise
        self.num_full = sum(window.is_full for window in self.plan)


@denoiser(
    "calibrated",
    "measured",
    options=OPTIONS,
    needs="calibration",
    check=check,
    resolve=resolve,
    advice=functools.partial(ancestral_advice, remedy=REMEDY),
)
def denoise(
    runner: ContinuousRunner, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Every token by N head calls; arguments as in `cspd.heads.chain`. An audit's calls are not counted."""
    request = rows.sequences[0].request
    kind = rows.sequences[0].key
    kept = runner.kept[kind]
    if ("calibrated", model) not in kept:
        kept["calibrated", model] = _Running(runner, model, request)
    running: _Running = kept["calibrated", model]
    head, plan = runner.models[model].head, running.plan
    num_steps = request.num_sampling_steps
    log_sigmas: list[Tensor] = []

    def keep_sigma(i: int, sources: Tensor, v: Tensor) -> None:
        log_sigma = torch.addcmul(plan[i].base, plan[i].slope, v) + rows.temperature.log()
        log_sigmas.append(log_sigma if i == len(plan) - 1 else log_sigma.sum((0, 2)))

    audit = None
    if request.audit:
        accept_uniforms = runner.noise.step_accept_uniforms(rows.seed, rows.position, num_steps)
        chosen = accept_uniforms < request.audit
        audit = Audit(head, z, rows.scale, rows.temperature, plan, runner.precision, chosen, request.audit)
    visit = keep_sigma if densities else audit
    draw = drawing(head, runner.noise, plan, num_steps, runner.precision, index=index, visit=visit)
    tokens = by_row(runner, None if visit else ("calibrated", model, kind, index), draw, rows, z)
    calls = np.full(len(tokens), len(plan))
    evaluations = calls + running.num_full * (len(z) - 1)
    measured = Measured(running.difference, running.divergence, audit and audit.total)
    made = Denoised(tokens, calls, len(plan), evaluations, measured=measured)
    if not densities:
        return made
    *path, last = log_sigmas
    return dataclasses.replace(made, log_sigma=torch.stack(path).sum(0), log_sigma_last=last.squeeze(0))
