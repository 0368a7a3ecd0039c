"""Published shorter chains, side by side: DiSA, GtR, DDIM, DPM-Solver++ and LazyMAR's cached head."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.device import Precision, send_integers
from cspd.heads.chain import (
    ANCESTRAL_MIXED,
    ANCESTRAL_OPTIONS,
    FIRST_TIMESTEP,
    SHORT_FIRST,
    ContinuousRunner,
    Denoised,
    Outputs,
    Rows,
    Trace,
    ancestral_advice,
    by_row,
    check_ancestral,
    check_first,
    denoise_ancestral,
    denoiser,
    evaluate,
    modulated,
    on_device,
    sigma_trace,
    table_bytes,
    with_densities,
)
from cspd.option import Option, check_integer
from cspd.request import Request
from mar.head import TRAIN_STEPS, Head, Modulations, ReadyHead, Schedule, respaced, schedule

# DiSA: fewer denoising steps for tokens of later iterations (arXiv 2505.20297). Guarantee: heuristic.
#
# The more tokens are committed, the less uncertain is the next one. Each number of steps has its own respaced chain.

# in iteration k of 0 .. last, the share f of the steps between `lower` and `upper`, from 1 down to 0
SCHEDULES = {
    "linear": lambda k, last: (last - k) / last,
    "cosine": lambda k, last: (np.cos(np.pi * k / last) + 1) / 2,
    "two-stage": lambda k, last: k < last / 2,
}
ANNEALED_OPTIONS = (
    Option("upper", int, "denoising steps in the first iteration", default=50, low=2, high=TRAIN_STEPS, metavar="T"),
    Option("lower", int, "denoising steps in the last iteration", default=5, low=2, high=TRAIN_STEPS, metavar="T"),
    Option("anneal", tuple(SCHEDULES), "how the steps fall over the iterations", default="linear"),
    FIRST_TIMESTEP.but(default=SHORT_FIRST),
)


def chain_lengths(iteration: np.ndarray, num_iter: np.ndarray, upper: int, lower: int, anneal: str) -> np.ndarray:
    """T of tokens by their iterations k of K: lower + floor(f (upper - lower)), int64 [R].

    f is (K - 1 - k)/(K - 1), or (cos(pi k/(K - 1)) + 1)/2, or 1 in the first half of the iterations, k < (K - 1)/2, and
    0 in the second. The paper names these three; the formulas are from the released code. It does not define the case
    K = 1, which takes `upper` steps here.

    Args:
        iteration, num_iter: k, from 0, and K; int64 [R]. upper, lower, anneal: see the options.
    """
    last = np.maximum(num_iter - 1, 1)
    share = SCHEDULES[anneal](iteration, last)
    return lower + (share * (upper - lower)).astype(np.int64)


def check_range(request: Request, runner: ContinuousRunner) -> None:
    """Raises ValueError if `lower` is above `upper`, or `upper` above the number of timesteps up to the first."""
    check_integer("lower", request.lower, 2, request.upper, "the steps fall to it from upper")
    check_first(request, request.upper)


def by_length(
    runner: ContinuousRunner,
    model: str,
    rows: Rows,
    z: Tensor,
    lengths: np.ndarray,
    *,
    index: int = 0,
    densities: bool = False,
) -> Denoised:
    """Draws every token by an ancestral chain of its own length; rows of equal length share a batch.

    Args:
        lengths: T of each row, int64 [R] on the CPU.
    """
    shortest_first = np.argsort(lengths, kind="stable")
    order = send_integers(shortest_first, runner.device)
    rows, z = rows.at(shortest_first), z[:, order]
    parts = []
    head_calls = np.zeros(len(rows.sequences), np.int64)
    first = 0
    unique_lengths, counts = np.unique(lengths, return_counts=True)
    for num_steps, count in zip(unique_lengths.tolist(), counts.tolist()):
        own, own_z = rows.stretch(first, count), z[:, first : first + count].contiguous()
        first += count
        part = denoise_ancestral(runner, model, own, own_z, index=index, densities=densities, num_steps=num_steps)
        head_calls[np.unique(own.owner)] += part.head_calls
        parts.append(part)
    calls = np.concatenate([part.calls for part in parts])[np.argsort(shortest_first)]
    back = order.argsort()

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])[back]

    made = Denoised(joined("tokens"), calls, head_calls, evaluations=calls * len(z))
    if densities:
        made = dataclasses.replace(made, log_sigma=joined("log_sigma"), log_sigma_last=joined("log_sigma_last"))
    return made


@denoiser("annealed", options=ANNEALED_OPTIONS, mixed=ANCESTRAL_MIXED, check=check_range)
def denoise_annealed(
    runner: ContinuousRunner, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Draws every token by an ancestral chain whose length depends on the iteration; arguments as in `heads.chain`.

    The log sigmas of a token are summed over its own chain's steps. CSpD compares them between two models, whose chains
    of one token are equally long.
    """
    request = rows.sequences[0].request
    lengths = chain_lengths(rows.iteration, rows.num_iter, request.upper, request.lower, request.anneal)
    return by_length(runner, model, rows, z, lengths, index=index, densities=densities)


# The cached head of LazyMAR (arXiv 2503.12450): most denoising steps reuse the updates of the head's blocks. Heuristic.
#
# A head call adds the residual blocks' updates to the projected token, and a last layer computes (eps, v) from the sum.
# After the first tenth of the steps, the blocks are evaluated only at every `reuse`-th step. The other steps add the
# same updates to their own projected token, and evaluate the last layer at their own timestep. They do not evaluate the
# unconditional branch, but reuse the difference of its output from the last step that evaluated both.
#
# The released code evaluates the blocks at the first step and at multiples of 7. At the others it reuses the updates of
# the second to the fifth block only, and of the other blocks the values inside the gate.

REUSE = Option(
    "reuse",
    int,
    "after a tenth of the denoising steps, evaluate the head's blocks only at every N-th",
    default=8,
    low=1,
    metavar="N",
)


def evaluated_calls(num_calls: int, reuse: int) -> np.ndarray:
    """Which of `num_calls` head calls, from 0, evaluate the blocks: the first tenth, then every `reuse`-th."""
    warmup = -(-num_calls // 10)
    return np.r_[0:warmup, warmup:num_calls:reuse]


def outputs(
    head: Head, z: Tensor, timesteps: Sequence[int], precision: Precision, *, reuse: int
) -> Iterator[tuple[range, Iterator[Callable[[Tensor], Tensor]]]]:
    """As `chain.every_output`, but only some calls evaluate the blocks, for both branches."""
    evaluated = evaluated_calls(len(timesteps), reuse)
    ends = np.append(evaluated[1:], len(timesteps))
    with precision.full():
        c_embed = head.cond_embed(z[:1])
    for some, own_head, by_call in modulated(head, z, [timesteps[call] for call in evaluated], precision):
        calls = range(evaluated[some[0]], ends[some[-1]])
        others = np.setdiff1d(calls, evaluated)
        last_layers = _last_layers(head, c_embed, tuple(timesteps[call] for call in others), precision)
        reusing = (itertools.islice(last_layers, ends[i] - evaluated[i] - 1) for i in some)
        yield calls, itertools.chain.from_iterable(map(_outputs, itertools.repeat(own_head), by_call, reusing))
        del by_call


@functools.cache  # the same function each time, since it is part of a graph's key
def _reusing(reuse: int) -> Outputs:
    return functools.partial(outputs, reuse=reuse)


def _last_layers(head: Head, c_embed: Tensor, timesteps: tuple[int, ...], precision: Precision) -> Iterator[tuple]:
    """The last layer's modulations of the conditional branch at each timestep, computed in chunks as in `modulated`."""
    with precision.full():
        t_embed = head.time_embed(on_device(timesteps, c_embed.device))
    head = precision.prepare(head)
    chunk = max(1, table_bytes(c_embed.device) // (4 * 2 * head.width * c_embed.shape[1]))
    for some in t_embed[:, None, None].split(chunk):
        with precision.fast():
            (last,) = head.split(head.modulations(some, c_embed, with_blocks=False))
        yield from zip(*(each.unbind(0) for each in last))


def _outputs(head: ReadyHead, modulations: Modulations, last_layers: Iterator[tuple]) -> Iterator:
    """A call's output [G, R, 2d], then outputs of the calls that reuse its updates: functions of the noisy tokens."""
    updates, distance = [], []

    def evaluate(x: Tensor) -> Tensor:
        start = head.enter(x)
        end = head.through_blocks(start, modulations)
        out = head.leave(end, *modulations[-1])
        updates.append(end[:1] - start)
        distance.append(out - out[:1])
        return out

    def reuse(last_layer: tuple, x: Tensor) -> Tensor:
        return head.leave(head.enter(x) + updates[0], *last_layer) + distance[0]

    yield evaluate
    yield from (functools.partial(reuse, last_layer) for last_layer in last_layers)


@denoiser(
    "cached",
    options=(REUSE, *ANCESTRAL_OPTIONS),
    mixed=ANCESTRAL_MIXED,
    check=check_ancestral,
    advice=ancestral_advice,
)
def denoise_cached(
    runner: ContinuousRunner, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Draws every token by the ancestral chain; arguments as in `cspd.heads.chain`.

    Only the calls that evaluate the blocks are counted.
    """
    request = rows.sequences[0].request
    made = denoise_ancestral(runner, model, rows, z, index=index, densities=densities, outputs=_reusing(request.reuse))
    head_calls = len(evaluated_calls(request.num_sampling_steps, request.reuse))
    calls = np.full(len(rows.seed), head_calls)
    return dataclasses.replace(made, calls=calls, head_calls=head_calls, evaluations=calls * len(z))


# GtR's number of denoising steps for each token: more for detail (arXiv 2510.17171). Guarantee: heuristic.
#
# The code was not released. In the paper the steps fall over the first stage. The second stage takes the fewest, but
# the tenth of its tokens with the highest high-frequency energy takes the most.

FREQUENCY_WEIGHTED_OPTIONS = (
    Option(
        "upper",
        int,
        "denoising steps in the first iteration, and for detailed tokens",
        default=50,
        low=2,
        high=TRAIN_STEPS,
        metavar="T",
    ),
    Option(
        "lower",
        int,
        "denoising steps once half of the tokens are committed",
        default=20,
        low=2,
        high=TRAIN_STEPS,
        metavar="T",
    ),
    Option(
        "detail",
        float,
        "fraction of the later half's tokens that take `upper` steps: those with the most high-frequency energy",
        default=0.1,
        high=1,
        metavar="P",
    ),
    FIRST_TIMESTEP.but(default=SHORT_FIRST),
)


def importance(z: Tensor) -> Tensor:
    """The high-frequency energy of conditions z [R, D]: [R].

    The paper's sum over n = 1 .. D/2 of (1 + n / (D/2)) |Z_n|, where Z is the discrete Fourier transform of z along
    its features.
    """
    amplitude = torch.fft.rfft(z).abs()[:, 1:]
    frequency = torch.linspace(0, 1, amplitude.shape[1] + 1, device=z.device)[1:]
    return (amplitude * (1 + frequency)).sum(1)


def highest(score: np.ndarray, owner: np.ndarray, share: float) -> np.ndarray:
    """Selects the `share` of each owner's rows with the highest scores, rounded to a whole number: bool [R].

    Args:
        score: [R]. owner: int64 [R], the sequence of each row. share: 0 .. 1.
    """
    best_first = np.lexsort((-score, owner))
    counts = np.bincount(owner)
    starts = np.cumsum(counts) - counts
    rank = np.empty_like(owner)
    rank[best_first] = np.arange(len(owner)) - starts[owner[best_first]]
    return rank < np.round(share * counts)[owner]


def num_early(num_generated: int, masked: np.ndarray, seq_len: int) -> int:
    """The number of iterations that begin with less than half of the tokens committed: a checkerboard's first colour.

    Args:
        num_generated: tokens to generate. masked: int64 [num_iter], masked tokens after each iteration.
    """
    masked_before = np.r_[num_generated, masked[:-1]]
    return int((masked_before > seq_len / 2).sum())


@denoiser(
    "frequency-weighted",
    options=FREQUENCY_WEIGHTED_OPTIONS,
    mixed=(*ANCESTRAL_MIXED, "num_sampling_steps"),
    check=check_range,
)
def denoise_frequency_weighted(
    runner: ContinuousRunner, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Draws tokens by ancestral chains of T steps, T chosen for each token; arguments as in `cspd.heads.chain`.

    T falls from upper to lower over the iterations that begin with less than half of the tokens committed. Later it is
    lower, or upper for the share `detail` of an image's tokens in an iteration. The paper does not say, and we chose,
    that the share is of an iteration, that z is the conditional one, and `first_timestep`.

    CSpD compares chains of one length and drafts tokens one by one. So with densities, no detailed tokens are chosen.
    """
    request = rows.sequences[0].request
    by_sequence = []
    for sequence in rows.sequences:
        own = sequence.request
        by_sequence.append(num_early(own.num_generated(runner.seq_len), runner.num_masked(own), runner.seq_len))
    early = np.array(by_sequence)[rows.owner]
    is_late = rows.iteration >= early
    steps = chain_lengths(rows.iteration, early, request.upper, request.lower, "linear")
    steps[is_late] = request.lower
    if is_late.any() and not densities:
        score = importance(z[0]).cpu().numpy()
        steps[is_late & highest(score, rows.owner, request.detail)] = request.upper
    return by_length(runner, model, rows, z, steps, index=index, densities=densities)


# Deterministic solvers of the head's chain, N head calls per token: DDIM and DPM-Solver++. Guarantee: heuristic.
#
# They solve the diffusion's ordinary differential equation. So only the noise that they begin with is random, and the
# temperature has no effect. They usually begin at about timestep 950 of the 1000: from 999 the first of few steps
# overshoots.

SOLVER_OPTIONS = (
    Option(
        "head_calls",
        int,
        "head calls per token; the temperature has no effect",
        default=10,
        low=2,
        high=TRAIN_STEPS,
        metavar="N",
    ),
    FIRST_TIMESTEP.but(default=SHORT_FIRST),
    Option(
        "grid",
        ("uniform", "planned"),
        "timesteps of the head calls: evenly spaced, or the ones that `calibrated` would choose",
        default="uniform",
    ),
)


class Step(NamedTuple):
    """A solver's step after a head call, which predicts x_0 = (x - sigma eps) / alpha: x becomes shrink x + grow D.

    D = x_0 + further (x_0 - x_0'), where x_0' is the previous prediction.
    """

    alpha: float
    sigma: float
    further: float
    shrink: float
    grow: float


def solver_steps(s: Schedule, order: int) -> list[Step]:
    """The steps of DPM-Solver++ (arXiv 2211.01095) of order 1, which is DDIM, or 2 (2M), from the noisiest on.

    x_t = (sigma_t / sigma_s) x_s - alpha_t (e^-h - 1) D, h = lambda_t - lambda_s, lambda = log(alpha / sigma). At order
    2, D = (1 + 1/(2r)) x_0 - 1/(2r) x_0' with r = h'/h, where h' is the previous h. The first step has no x_0'. The
    last two, to timestep 0 and to sigma = 0, are of order 1, since h is large there. (So is the last step, to timestep
    0, of the released code if there are few steps.)
    """
    alpha = np.sqrt(s.alphas_cumprod[::-1])
    sigma = np.sqrt(1 - s.alphas_cumprod[::-1])
    h = np.diff(np.log(alpha / sigma))
    further = np.zeros(len(s))
    if order == 2:
        further[1:-2] = h[1:-1] / (2 * h[:-2])
    alpha_next, sigma_next = np.append(alpha[1:], 1.0), np.append(sigma[1:], 0.0)
    shrink = sigma_next / sigma
    grow = alpha_next - alpha * shrink  # = -alpha_t (e^-h - 1), also valid for infinite h
    return [Step(*values) for values in np.stack([alpha, sigma, further, shrink, grow], axis=1).tolist()]


def solve(
    head: Head,
    z: Tensor,
    scale: Tensor,
    x: Tensor,
    s: Schedule,
    order: int,
    precision: Precision,
    trace: Trace | None = None,
) -> Tensor:
    """Tokens [R, d] by a solver of order 1 or 2, over a schedule's timesteps.

    Args:
        head, z, scale, precision, trace: as in `cspd.heads.chain`. x: pure noise [R, d].
    """
    steps = solver_steps(s, order)
    last = len(s) - 1
    before = x
    for calls, own_head, by_call in modulated(head, z, s.timestep_map[::-1], precision):  # type: ignore[arg-type]
        with precision.full() if calls[0] == 0 else precision.fast():
            for call, modulations in zip(calls, by_call):
                step = steps[call]
                eps, v = evaluate(own_head, x, modulations, scale)
                if trace:
                    trace(last - call, x, eps, v)
                x_0 = (x - step.sigma * eps) / step.alpha
                data = x_0 + step.further * (x_0 - before) if step.further else x_0
                x = step.shrink * x + step.grow * data
                before = x_0
        del by_call, modulations  # they are large
    return x


def grid_of(request: Request, runner: ContinuousRunner) -> Schedule:
    """The schedule over the timesteps of a request's chains; equal for both models, since CSpD compares their chains.

    Raises:
        ValueError: there is no plan of `head_calls` calls.
    """
    if request.grid == "uniform":
        return schedule(request.head_calls, request.first_timestep)
    plan = runner.tuning.calibrations["target"].plan(request, request.head_calls)
    planned = schedule(request.num_sampling_steps).timestep_map[list(plan.steps)]
    highest = request.first_timestep - np.arange(len(planned))  # after clipping, they still fall
    return respaced(np.minimum(planned, highest)[::-1])


def check_solver(request: Request, runner: ContinuousRunner) -> None:
    """Raises ValueError if there are more head calls than timesteps, or than steps to plan them at."""
    check_first(request, request.head_calls)
    if request.grid == "planned":
        most = request.num_sampling_steps
        check_integer("head_calls", request.head_calls, 2, most, f"a chain has {most} steps, at which they are planned")


def resolve_solver(request: Request, runner: ContinuousRunner) -> Request:
    """The unchanged request, after its grid was planned; raises ValueError if there is no such plan."""
    grid_of(request, runner)
    return request


def _denoise(
    order: int,
    runner: ContinuousRunner,
    model: str,
    rows: Rows,
    z: Tensor,
    *,
    index: int = 0,
    densities: bool = False,
) -> Denoised:
    """Draws every token by a solver of order 1 or 2; other arguments as in `cspd.heads.chain`.

    A solver has no densities. If they are asked for, they are the densities that the ancestral chain over the same
    timesteps has at the visited states.
    """
    request = rows.sequences[0].request
    kind = rows.sequences[0].key
    round_state = runner.round_state[kind]
    if "grid" not in round_state:
        round_state["grid"] = grid_of(request, runner)
    s: Schedule = round_state["grid"]
    log_sigmas: list[Tensor] = []
    trace = sigma_trace(s, rows.temperature, log_sigmas) if densities else None
    head = runner.models[model].head

    def draw(z: Tensor, scale: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        x = runner.noise.initial(seed, position, head.channels, index)
        return solve(head, z, scale, x, s, order, runner.precision, trace)

    tokens = by_row(runner, None if trace else ("solver", order, model, kind, index), draw, rows, z)
    calls = np.full(len(tokens), len(s))
    made = Denoised(tokens, calls, len(s), evaluations=calls * len(z))
    return with_densities(made, log_sigmas) if densities else made


ddim = denoiser("ddim", options=SOLVER_OPTIONS, check=check_solver, resolve=resolve_solver)(
    functools.partial(_denoise, 1)
)
dpm_solver = denoiser("dpm-solver++", options=SOLVER_OPTIONS, check=check_solver, resolve=resolve_solver)(
    functools.partial(_denoise, 2)
)
