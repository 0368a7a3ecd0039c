"""The calibrated sampler: calls the head at some steps and predicts its outputs at the others. Approximate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

import cspd.heads.driver as driver
from cspd.device import Precision
from cspd.heads.calibration import (
    LARGEST_COEFFICIENT,
    TRACE_TOKENS,
    Trace,
    check_arrays,
    frozen,
    least_squares,
    predict,
    ratio_over_images,
)
from cspd.heads.chain import (
    Chain,
    Inputs,
    Observer,
    Prediction,
    Schedule,
    is_full_call,
    modulation_size,
    on_device,
    table_bytes,
)
from cspd.heads.net import evaluate, steering
from cspd.heads.samplers import sampler
from cspd.heads.verify import divergence
from cspd.option import option
from mar.head import TRAIN_STEPS, Head

Advance = Callable[[float], None]  # is called with each share of some work, 1 in all

# The steps at which the head is called, and the segments between two calls.
#
# A chain of T steps keeps its own noise, but calls the head at only N of its steps, S = {T - 1 = s_1 > .. > s_N = 0}.
# At every other step k the outputs are predicted from the previous call, at step a, by a fitted linear model:
#
#     eps~_k = c0 x_k + c1 eps_a + c2 x_a,    v~_k = v_a + drift.
#
# So the steps of a segment, from one call to the next, are linear in x_a, eps_a and the noise: one weighted sum.

MOST_LAGS = 128  # steps from one call to the next, at most
MOST_COST = torch.finfo(torch.float32).max  # of a step whose fit failed: a plan skips it only if it must


@dataclass(frozen=True)
class Predictor:
    """Predicts the head's outputs at a step from its last call, and knows how inaccurate each prediction is.

    Attributes:
        coefficients: float32 [T, lags, 3], (c0, c1, c2) by step and lag; the first lag is 1.
        drift: float32 [T, lags], mean change of the variance channel.
        skip_cost: float32 [T, lags], nats: mean KL(p || q) of a step's Gaussians, p by the head and q by the
            prediction, on held-out chains.
    """

    coefficients: np.ndarray
    drift: np.ndarray
    skip_cost: np.ndarray

    def check(self, num_steps: int) -> None:
        """Raises ValueError unless shapes, types and ranges are right for T = `num_steps` denoising steps."""
        lags = min(MOST_LAGS, num_steps)
        wanted = {
            "coefficients": (np.float32, (num_steps, lags, 3), -LARGEST_COEFFICIENT, LARGEST_COEFFICIENT),
            "drift": (np.float32, (num_steps, lags), -LARGEST_COEFFICIENT, LARGEST_COEFFICIENT),
            "skip_cost": (np.float32, (num_steps, lags), 0, np.inf),
        }
        check_arrays("a predictor", vars(self), wanted)


def fit_predictor(
    seen: tuple[Tensor, Tensor, Tensor], held_out: tuple[Tensor, Tensor, Tensor], s: Schedule, temperature: float
) -> Predictor:
    """Fits the prediction of every step from every earlier one, and measures its cost on held-out chains.

    Args:
        seen, held_out: (x, eps, v) [T, N, d] each, inputs, guided noise predictions and variance channels of ancestral
            chains; on the CPU, finite. s: their schedule.
        temperature: tau of the chains. There are no densities at 0; then the cost is that of temperature 1.
    """
    num_steps = len(s)
    coefficients, drift = (torch.from_numpy(values) for values in frozen(s, MOST_LAGS))
    lags = coefficients.shape[1]
    skip_cost = torch.zeros(num_steps, lags)
    for k in range(1, num_steps - 1):
        anchors = slice(k + 1, k + 1 + lags)  # by lag; near T there are fewer
        num_lags = len(seen[0][anchors])
        slope = s.log_sigma_slope[k]
        # a fit that failed becomes 0, which costs much, so that no plan uses it
        fitted = least_squares(*seen, k, anchors, slope).nan_to_num(0)
        coefficients[k, :num_lags] = fitted.clamp(-LARGEST_COEFFICIENT, LARGEST_COEFFICIENT)
        mean_change = (seen[2][k] - seen[2][anchors]).mean((1, 2))
        drift[k, :num_lags] = mean_change.clamp(-LARGEST_COEFFICIENT, LARGEST_COEFFICIENT)

        # KL(p || q) of the step's Gaussians; both means share A x_k
        _, eps, v = held_out
        eps_predicted, v_predicted = predict(*held_out, k, anchors, coefficients, drift)
        base = np.log(temperature or 1.0) + s.log_sigma_base[k]
        p = s.mean_eps[k] * eps[k], base + slope * v[k]
        q = s.mean_eps[k] * eps_predicted, base + slope * v_predicted
        skip_cost[k, :num_lags] = divergence(p, q).mean(1)
    return Predictor(coefficients.numpy(), drift.numpy(), skip_cost.nan_to_num(MOST_COST).numpy())


class Plan(NamedTuple):
    """The steps S at which the head is called, from T - 1 down to 0; the skipped steps' total cost, nats per token."""

    steps: tuple[int, ...]
    cost: float


def plans(skip_cost: np.ndarray) -> Iterator[Plan]:
    """The cheapest plan of 2 calls, of 3, and so on to T, by dynamic programming; its cost is infinite if impossible.

    By the chain rule the KL divergence of two paths is the sum over their steps, here with every call on the exact
    path. The idea of choosing steps by such a bound is from Align Your Steps (arXiv 2404.14507).

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
    """costs[a, b], the cost of skipping all steps between a call at step a and the next call at step b < a: [T, T]."""
    num_steps, lags = skip_cost.shape
    costs = np.full((num_steps, num_steps), np.inf)
    for a in range(1, num_steps):
        costs[a, a - 1] = 0  # nothing is skipped
        skipped = np.arange(a - 1, max(0, a - 1 - lags), -1)
        by_step = skip_cost[skipped, a - 1 - skipped].astype(np.float64)
        costs[a, skipped - 1] = np.cumsum(by_step)
    return costs


def plan_of(skip_cost: np.ndarray, head_calls: int | None, most: float | None = None) -> Plan:
    """The cheapest plan of `head_calls` calls, or the shortest one that costs at `most` that many nats per token.

    Raises:
        ValueError: `head_calls` calls are too few or too many.
    """
    least = 2
    for plan in plans(skip_cost):
        if plan.cost == np.inf:
            least = len(plan.steps) + 1
        elif len(plan.steps) == head_calls or (most is not None and plan.cost <= most):
            return plan
    num_steps = len(skip_cost)
    raise ValueError(f"head_calls={head_calls} does not fit {num_steps} denoising steps: give {least}..{num_steps}")


class Segment(NamedTuple):
    """The steps k = a .. b + 1 from a head call at x_a to the next call at x_b.

    Attributes:
        call: counts the calls from 0. first: a. steps: int64 [n], the k.
        base, slope: float32 [n, 1, 1], log sigma_k = base_k + slope_k v_a, without temperature.
        mix: float32 [n + 1, 2 + n], the weights on x_a, eps_a and the noise sigma_k eps_k of each step that give the
            state before each step and, last, x_b. Step 0 adds no noise.
        is_full: whether the call evaluates the unconditional branch too.
    """

    call: int
    first: int
    steps: Tensor
    base: Tensor
    slope: Tensor
    mix: Tensor
    is_full: bool


def make_segments(
    steps: tuple[int, ...],
    s: Schedule,
    predictor: Predictor,
    corrections: np.ndarray,
    null_every: int,
    device: torch.device,
) -> list[Segment]:
    """The segment after each of a plan's head calls.

    Args:
        steps: S. s: the chain's schedule. corrections: [N, 2], added to the weights of x_b on x_a and eps_a.
        null_every: the unconditional branch is evaluated at the first two calls, the last, and every `null_every`-th.
    """
    segments = []
    ends = (*steps[1:], -1)
    for i, (a, b) in enumerate(zip(steps, ends)):
        k = np.arange(a, b, -1)
        mix, base, slope = _tables(k, s, predictor)
        mix[-1, :2] += corrections[i]
        segment = Segment(
            call=i,
            first=a,
            steps=torch.as_tensor(k, device=device),
            base=torch.as_tensor(base, dtype=torch.float32, device=device).view(-1, 1, 1),
            slope=torch.as_tensor(slope, dtype=torch.float32, device=device).view(-1, 1, 1),
            mix=torch.as_tensor(mix, dtype=torch.float32, device=device),
            is_full=is_full_call(i, len(steps), null_every),
        )
        segments.append(segment)
    return segments


def _tables(k: np.ndarray, s: Schedule, predictor: Predictor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mix, base, slope) of the steps k = a .. b + 1, see `Segment`; float64."""
    lags = np.arange(len(k)) - 1  # index into the tables: a step's distance from the call, minus one
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


# Chains that call the head only at the steps of a plan, and how far their paths are from the full chain's.


def follow(chain: Chain, segments: Sequence[Segment]) -> Tensor:
    """Tokens [R, d] by one head call per segment, with the chain's own noise.

    A call without the unconditional branch reuses the last difference between the branches' predictions.
    """
    first = len(chain) - 1
    calls = [(chain.steps[first - segment.first], segment.is_full) for segment in segments]
    chain.expect(calls)
    x, difference = chain.start(), None
    by_segment = chain.eps.split([len(segment.steps) for segment in segments])
    for (step, is_full), segment, noise in zip(calls, segments, by_segment):
        out = chain.evaluate(x, step, guided=is_full)
        x, difference = skip(chain, segment, x, out, noise, difference)
    return x


def skip(
    chain: Chain, segment: Segment, x: Tensor, out: Prediction, noise: Tensor, difference: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The state after a segment that begins at x, and the difference that guidance makes to the prediction.

    Args:
        noise: [n, R, d], of the segment's steps. difference: at the last call that evaluated all branches.
    """
    _, scale, temperature, *_ = chain.inputs
    if not chain.observers:
        columns = segment.base, segment.slope, segment.mix[-1]
        fused = driver.segment(x, out, noise, temperature, difference, *columns)
        if fused is not None:
            return fused
    eps, v = out.raw.float().chunk(2, dim=-1)
    if len(eps) > 1:
        difference = steering(eps, scale)
    guided = eps[0] if difference is None else eps[0] + difference
    sources = _sources(segment, x, guided, v[0], temperature, noise)
    following = None
    for observer in chain.observers:
        following = observer.skipped(chain, segment, sources, v[0])
    return (weighted(segment.mix[-1], sources) if following is None else following), difference


def _sources(segment: Segment, x: Tensor, eps: Tensor, v: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """[2 + n, R, d]: x_a, eps_a, and the noise sigma_k eps_k of each of a segment's steps."""
    sigma = torch.addcmul(segment.base, segment.slope, v).exp_().mul_(temperature)
    return torch.cat([x[None], eps[None], sigma.mul_(noise)])


def weighted(weights: Tensor, sources: Tensor) -> Tensor:
    """The weighted sum [R, d] of sources [m, R, d]; a matrix product would round in low precision."""
    return (weights[:, None, None] * sources).sum(0)


@final
class Audit(Observer):
    """Measures KL(q || p) in nats, where q is the path distribution of `follow` and p the full chain's.

    By the chain rule it is the sum over the steps of the divergence of their Gaussians at the states that q visits. The
    head is evaluated at the `chosen` states, each chosen with probability `rate`, so the sum divided by `rate` is
    unbiased. Steps whose call evaluated both branches are p's own. Each segment waits for the device once.

    Args:
        head, inputs, s, precision: of the chain. chosen: bool [R, T], the chosen steps of each row.
        after_each: called after each segment.

    Attributes:
        total: float32 [R], the sums divided by `rate`.
    """

    def __init__(
        self,
        head: Head,
        inputs: Inputs,
        s: Schedule,
        precision: Precision,
        chosen: Tensor,
        rate: float,
        after_each: Callable[[], None] = lambda: None,
    ) -> None:
        z, self.scale, temperature, *_ = inputs
        self.head, self.precision, self.log_temperature = head, precision, temperature.log()
        self.chosen, self.rate, self.after_each = chosen, rate, after_each
        self._columns = _columns(s, z.device)
        with precision.full():
            self._c_embed = head.cond_embed(z)
            timesteps = tuple(s.timestep_map.tolist())
            self._t_embed = head.time_embed(on_device(timesteps, z.device))
        self.total = torch.zeros(len(chosen), device=z.device)

    def skipped(self, chain: Chain, segment: Segment, sources: Tensor, v: Tensor) -> None:
        """Adds the divergence of a segment's chosen steps."""
        is_skipped = segment.steps > 0
        is_skipped[0] &= not segment.is_full
        rows, indices = (self.chosen[:, segment.steps] & is_skipped).nonzero().unbind(1)
        # as many rows at once as the head's modulations have room for
        most = table_bytes(rows.device) // (modulation_size(self.head) * len(self._c_embed))
        chunk_size = max(1, most)
        for some_rows, some_indices in zip(rows.split(chunk_size), indices.split(chunk_size)):
            if not len(some_rows):
                continue
            q, x = self._predicted(segment, sources, v, some_rows, some_indices)
            p = self._evaluated(segment.steps[some_indices], x, some_rows)
            self.total.index_add_(0, some_rows, divergence(q, p) / self.rate)
        self.after_each()

    def _predicted(self, segment: Segment, sources: Tensor, v: Tensor, rows: Tensor, indices: Tensor) -> tuple:
        """The predicted Gaussians q of rows [m] at step indices [m] of a segment, and the states [m, d] before them."""
        own = sources[:, rows].transpose(0, 1)
        x = (segment.mix[indices].unsqueeze(-1) * own).sum(1)
        weights = segment.mix[indices + 1].clone()
        weights.scatter_(1, (2 + indices).unsqueeze(1), 0)  # the mean is the state after the step, without its noise
        mean = (weights.unsqueeze(-1) * own).sum(1)
        log_sigma = torch.addcmul(segment.base[indices, 0], segment.slope[indices, 0], v[rows])
        return (mean, log_sigma + self.log_temperature[rows]), x

    def _evaluated(self, steps: Tensor, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The head's Gaussians p of steps [m] at states x [m, d] of rows [m]."""
        head = self.precision.prepare(self.head)
        with self.precision.fast():
            modulations = head.split(head.modulations(self._t_embed[steps], self._c_embed[:, rows]))
            eps, v = evaluate(head, x, modulations, self.scale[rows])
        mean_x, mean_eps, base, slope = self._columns[steps].unbind(-1)
        return mean_x * x + mean_eps * eps, base + slope * v + self.log_temperature[rows]


@functools.cache
def _columns(s: Schedule, device: torch.device) -> Tensor:
    """float32 [T, 1, 4]: A and B of p's mean, a and b of its log sigma, see `Schedule`."""
    columns = np.stack([s.mean_x, s.mean_eps, s.log_sigma_base, s.log_sigma_slope], axis=-1)[:, None]
    with torch.inference_mode(False):
        return torch.as_tensor(columns, dtype=torch.float32, device=device)


# A plan fitted to a model: the steps with a head call, corrections of the states, and a measured difference.

RIDGE = 1e-6  # of the mean diagonal


@dataclass(frozen=True)
class Shortcut:
    """The steps at which the head is called, and how much the tokens differ from the full chain's.

    Attributes:
        steps: int16 [N], S from T - 1 down to 0.
        corrections: float32 [N, 2], added to the weights of the next call's state on this call's x and eps.
        difference: float32 [1], root mean square difference of held-out tokens from the full chain's with the same z
            and noise, in standard deviations of a token's channels. difference_error: float32 [1], its standard error,
            by the differences between images.
        difference_worst: float32 [2], the same of single tokens: what 1 % of them reach, and the largest.
        divergence, divergence_error: float32 [1], KL(q || p) of some of these tokens' paths from the full chain's,
            nats per token, and its standard error; infinite without noise.
    """

    steps: np.ndarray
    corrections: np.ndarray
    difference: np.ndarray
    difference_error: np.ndarray
    difference_worst: np.ndarray
    divergence: np.ndarray
    divergence_error: np.ndarray

    def check(self, num_steps: int) -> None:
        """Raises ValueError unless shapes, types and ranges are right for T = `num_steps` denoising steps."""
        num_calls = self.steps.size
        wanted = {
            "steps": (np.int16, (num_calls,), 0, num_steps - 1),
            "corrections": (np.float32, (num_calls, 2), -LARGEST_COEFFICIENT, LARGEST_COEFFICIENT),
            "difference": (np.float32, (1,), 0, LARGEST_COEFFICIENT),
            "difference_error": (np.float32, (1,), 0, np.inf),
            "difference_worst": (np.float32, (2,), 0, LARGEST_COEFFICIENT),
            "divergence": (np.float32, (1,), 0, np.inf),
            "divergence_error": (np.float32, (1,), 0, np.inf),
        }
        check_arrays("a shortcut", vars(self), wanted)
        if num_calls < 2 or self.steps[0] != num_steps - 1 or self.steps[-1] or (np.diff(self.steps) >= 0).any():
            raise ValueError(f"a shortcut's steps do not fall from {num_steps - 1} to 0")

    def segments(self, s: Schedule, predictor: Predictor, null_every: int, device: torch.device) -> list[Segment]:
        """The segment after each of its calls."""
        return make_segments(tuple(self.steps.tolist()), s, predictor, self.corrections, null_every, device)

    def measured(self) -> dict[str, float | None]:
        """The measured values, by their names in `RoundStats`; None if not finite."""
        worst_percent, worst = self.difference_worst.tolist()
        found = {
            "difference": self.difference.item(),
            "difference_error": self.difference_error.item(),
            "difference_worst_percent": worst_percent,
            "difference_worst": worst,
            "divergence": self.divergence.item(),
            "divergence_error": self.divergence_error.item(),
        }
        return {name: value if math.isfinite(value) else None for name, value in found.items()}


def fit_shortcut(
    head: Head,
    traces: tuple[Trace, Trace, Trace],
    s: Schedule,
    predictor: Predictor,
    steps: tuple[int, ...],
    null_every: int,
    precision: Precision,
    advance: Advance = lambda share: None,
) -> Shortcut:
    """Corrects the segments of a plan on chains that follow them, and measures held-out tokens.

    The predictor was fitted with each call on the full chain's path. Chains that skip head calls leave that path. So
    the state at the end of each segment is fitted again, by least squares, to the full chain's of the same noise. The
    corrections are used only if they bring other tokens nearer to the full chain's.

    Args:
        traces: those that corrections are fitted to, kept or dropped by, and measured on; on the head's device.
        steps: S. advance: called with each share of the work, 1 in all. The others are as in `make_segments`.
    """
    seen, choosing, reported = traces
    device = seen.x.device
    corrections = np.zeros((len(steps), 2), np.float32)
    segments = make_segments(steps, s, predictor, corrections, null_every, device)
    error = _squares(head, choosing, segments, s, precision).mean()

    fitted = _corrections(head, seen, segments, s, precision)
    corrected = make_segments(steps, s, predictor, fitted, null_every, device)
    corrected_error = _squares(head, choosing, corrected, s, precision).mean()
    if not error <= corrected_error:  # `error` may be NaN
        corrections, segments = fitted, corrected

    squares = _squares(head, reported, segments, s, precision)
    if not squares.isfinite().all():
        raise ValueError(f"head_calls={len(steps)}: these tokens are not finite; give more head calls")
    variances = (reported.tokens - reported.tokens.mean(0)).square().mean(1)
    squared, squared_error = ratio_over_images(squares, variances, reported.image)
    difference = squared**0.5
    of_token = (squares / variances.mean()).sqrt()
    worst = torch.stack([of_token.quantile(0.99).squeeze(), of_token.max()])
    audited = reported.some(TRACE_TOKENS)  # an audit of all steps takes most of the time
    divergences = _divergences(head, audited, segments, s, precision, advance)
    divergence, divergence_error = ratio_over_images(divergences, torch.ones_like(divergences), audited.image)
    return Shortcut(
        steps=np.array(steps, np.int16),
        corrections=corrections,
        difference=np.array([difference], np.float32),
        # the error of a square root (delta method)
        difference_error=np.array([squared_error / (2 * difference) if difference else 0.0], np.float32),
        difference_worst=worst.cpu().numpy(),
        divergence=np.array([divergence], np.float32),
        divergence_error=np.array([divergence_error], np.float32),
    )


def _squares(head: Head, chains: Trace, segments: list[Segment], s: Schedule, precision: Precision) -> Tensor:
    """Mean square difference [N] of each token's channels from the full chain's."""
    tokens = _run(head, chains, segments, s, precision)
    return (tokens - chains.tokens).square().mean(1)


def _divergences(
    head: Head,
    chains: Trace,
    segments: list[Segment],
    s: Schedule,
    precision: Precision,
    advance: Advance = lambda share: None,
) -> Tensor:
    """KL(q || p) [N] of each token's path; most of the work of a fit. Infinite without noise."""
    if not (chains.temperature > 0).all():
        return torch.full_like(chains.temperature[:, 0], math.inf)
    everywhere = torch.ones(len(chains.image), len(chains.x), dtype=torch.bool, device=chains.x.device)
    after_each = functools.partial(advance, 1 / len(segments))
    audit = Audit(head, chains.inputs, s, precision, everywhere, 1.0, after_each)
    _run(head, chains, segments, s, precision, audit)
    return audit.total.nan_to_num(math.inf, posinf=math.inf)


class _Correct(Observer):
    """Fits corrections float64 [N, 2], see `Shortcut`, each on chains that use the corrections before it."""

    def __init__(self, chains: Trace, segments: list[Segment]) -> None:
        self.chains, self.segments = chains, segments
        self.corrections = torch.zeros(len(segments), 2, dtype=torch.float64)

    def skipped(self, chain: Chain, segment: Segment, sources: Tensor, v: Tensor) -> Tensor | None:
        # not after the first call, whose gain is too high, nor after a segment that skips no step
        i = segment.call
        if i == 0 or len(segment.steps) == 1:
            return None
        predicted = weighted(segment.mix[-1], sources)
        wanted = self.chains.x[self.segments[i + 1].steps[0]]
        self.corrections[i] = _least_squares(sources[:2], wanted - predicted)
        return predicted + weighted(self.corrections[i].to(predicted), sources[:2])


def _corrections(head: Head, chains: Trace, segments: list[Segment], s: Schedule, precision: Precision) -> np.ndarray:
    """Corrections float32 [N, 2], see `Shortcut`."""
    correct = _Correct(chains, segments)
    _run(head, chains, segments, s, precision, correct)
    return correct.corrections.float().numpy()


def _run(
    head: Head, chains: Trace, segments: list[Segment], s: Schedule, precision: Precision, *observers: Observer
) -> Tensor:
    """Tokens from the z and the noise of a trace."""
    with precision.fast():
        return follow(Chain(head, s, chains.inputs, chains, precision, observers=observers), segments)


def _least_squares(features: Tensor, wanted: Tensor) -> Tensor:
    """The weights of features [2, N, d] whose sum is nearest to wanted [N, d]: float64 [2], on the CPU."""
    features, wanted = features.flatten(1).double().cpu(), wanted.flatten().double().cpu()
    finite = features.isfinite().all(0) & wanted.isfinite()
    features, wanted = features[:, finite], wanted[finite]
    gram = features @ features.T
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(2, dtype=torch.float64)
    return torch.linalg.lstsq(gram + ridge, features @ wanted).solution


# The calibrated sampler: N head calls per token, and predictions between them. Guarantee: approximate.
#
# It keeps the chain's T steps and its noise. `speculative` verifies the fitted predictions of the head; this sampler
# uses them as they are. So a token is nearly the one that `ar` draws from the same noise. The difference is measured
# on held-out tokens when the prediction is fitted, and with `audit` on the tokens of the run itself.

HEAD_CALLS = 10


@sampler("calibrated", "approximate", fit=True)
def calibrated(
    chain: Chain,
    head_calls: Annotated[
        int | None,
        option(
            f"head calls per token; fewer are faster and less exact (default: {HEAD_CALLS})",
            low=2,
            high=TRAIN_STEPS,
            at_most="num_sampling_steps",
            decided=True,
            metavar="N",
        ),
    ] = None,
    divergence: Annotated[
        float | None,
        option(
            "in place of head_calls: the fewest calls with a predicted divergence of at most D nats per token",
            above=0,
            needs_noise=True,
            metavar="D",
        ),
    ] = None,
    null_every: Annotated[
        int,
        option(
            "evaluate the unconditional branch only at every N-th head call; the calls between reuse its last"
            " difference",
            low=1,
            high=TRAIN_STEPS,
            decided=True,
            metavar="N",
        ),
    ] = 2,
    corrected: Annotated[
        bool,
        option(
            "fit the state after skipped steps again to the full chain's: nearer tokens, but a larger divergence",
            implied=True,
            decided=True,
        ),
    ] = True,
) -> Tensor:
    """Evaluates the head at N of the T steps and predicts the others with a fitted linear model; same noise as ar."""
    return follow(chain, chain.fitted.segments(head_calls, divergence, null_every, corrected))
