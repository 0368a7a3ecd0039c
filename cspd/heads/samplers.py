"""Samplers of a diffusion head, side by side, and their registry: each is a function of a chain."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

import cspd.heads.driver as driver
from cspd.device import on_device, send_integers
from cspd.heads.chain import Chain, table_bytes
from cspd.option import Option, option, options_of
from mar.head import TRAIN_STEPS, DiffusionSchedule, Modulations, ReadyHead, respaced, schedule

# The registry.

DIFFUSION, FLOW = "diffusion", "flow"  # kinds of heads: MAR's, and those of a stochastic differential equation


@dataclass(frozen=True)
class Sampler:
    """A registered sampler.

    Attributes:
        function: (chain, **settings) -> tokens [R, d]. guarantee: a key of `cspd.method.GUARANTEES`.
        options: the settings that its keyword parameters declare. of: the kind of heads that it samples; None: all.
        fit: whether it uses `Chain.fitted`. whole: whether it can run as one graph, since every row is treated alike.
    """

    name: str
    function: Callable[..., Tensor]
    guarantee: str
    options: tuple[Option, ...]
    of: str | None
    fit: bool
    whole: bool

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (self.function.__doc__ or self.name).strip().splitlines()[0].rstrip(".")


SAMPLERS: dict[str, Sampler] = {}  # by name
_WHEN_ADDED: list[Callable[[Sampler], None]] = []


def sampler(
    name: str, guarantee: str = "heuristic", *, of: str | None = None, fit: bool = False, whole: bool = True
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Registers a function of a chain as a sampler; arguments as in `Sampler`.

    From then on it is a method of `cspd sample` and a name for `cspd.accelerate`. Its settings are its keyword
    parameters: `share: Annotated[float, option("fraction of the steps", high=1)] = 0.5`.

    Raises:
        ValueError: a sampler of cspd has this name.
    """

    def named(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if name in SAMPLERS and _is_ours(SAMPLERS[name].function) and not _is_ours(function):
            raise ValueError(f"{name!r} is a sampler of cspd: give yours another name")
        SAMPLERS[name] = Sampler(name, function, guarantee, options_of(function), of, fit, whole)
        for other in sorted(SAMPLERS):  # the order does not depend on which module is imported first
            SAMPLERS[other] = SAMPLERS.pop(other)
        try:
            for added in _WHEN_ADDED:
                added(SAMPLERS[name])
        except ValueError:  # the name is that of a method
            del SAMPLERS[name]
            raise
        return function

    return named


def for_users_samplers(added: Callable[[Sampler], None]) -> None:
    """Calls a function with every sampler of users: those that are registered already, and later ones."""
    for each in [*SAMPLERS.values()]:
        if not _is_ours(each.function):
            added(each)
    _WHEN_ADDED.append(added)


def _is_ours(function: Callable) -> bool:
    return function.__module__.startswith(__package__)


# The full chain.

SHORT, SHORT_FIRST = 25, 950  # chains of fewer steps should begin there
FIRST_TIMESTEP = option(
    "the noisiest of the 1000 timesteps that a chain visits: 999 as in MAR's code, about 950 for short chains",
    low=1,
    high=TRAIN_STEPS - 1,
    metavar="N",
)


@sampler("ancestral", "exact")
def ancestral(chain: Chain, first_timestep: Annotated[int | None, FIRST_TIMESTEP] = None) -> Tensor:
    """The full chain, one head call per step (MAR, arXiv 2406.11838)."""
    if first_timestep is not None:
        chain = chain.respaced(chain.head.schedule(len(chain), first_timestep))
    x = chain.start()
    for step in chain.steps:
        x = chain.move(x, step, chain.evaluate(x, step))
    return x


def compiled_ancestral(chain: Chain, first_timestep: int | None = None) -> Tensor:
    """`ancestral` by torch.compile, a few steps at a time; the first step and the last few are eager."""
    if first_timestep is not None:
        chain = chain.respaced(chain.head.schedule(len(chain), first_timestep))
    head, precision, (z, scale, temperature, *_) = chain.head, chain.precision, chain.inputs
    constants, x = chain.constants, chain.start()
    added = chain.eps * (constants.sigma * temperature)
    with precision.full():
        c_embed = head.cond_embed(z)
        t_embed = head.time_embed(on_device(constants.timesteps, z.device))[:, None, None]
        x = driver.several_steps(
            head, x, head.modulations(t_embed[:1], c_embed), added[:1], scale, constants.numbers[:1]
        )
    own_head, run = precision.prepare(head), driver.compiled_steps()
    for begin in range(1, len(added), driver.COMPILED_STEPS):
        own = slice(begin, begin + driver.COMPILED_STEPS)
        if own.stop > len(added):  # another number of steps would be another program
            run = driver.several_steps
        layers = own_head.modulations(t_embed[own], c_embed)
        x = run(own_head, x, layers, added[own], scale, constants.numbers[own])
    chain.tally.calls += len(chain)
    chain.tally.evaluations += len(chain) * len(z)
    return x


def by_length(chain: Chain, lengths: np.ndarray, first_timestep: int) -> Tensor:
    """Draws every token by an ancestral chain of its own length T, int64 [R]; rows of equal length share a batch."""
    tokens = chain.z.new_empty(len(lengths), chain.head.channels)
    for num_steps in np.unique(lengths).tolist():
        which = np.flatnonzero(lengths == num_steps)
        part = chain.part(which, chain.head.schedule(num_steps, first_timestep))
        tokens[send_integers(which, tokens.device)] = chain.run(part, ancestral)
    return tokens


# DiSA: fewer denoising steps for tokens of later iterations.

# in iteration k of 0 .. last, the share f of the steps between `lower` and `upper`, from 1 down to 0
SCHEDULES = {
    "linear": lambda k, last: (last - k) / last,
    "cosine": lambda k, last: (np.cos(np.pi * k / last) + 1) / 2,
    "two-stage": lambda k, last: k < last / 2,
}


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


@sampler("annealed", whole=False)
def annealed(
    chain: Chain,
    upper: Annotated[int, option("denoising steps in the first iteration", low=2, high=TRAIN_STEPS, metavar="T")] = 50,
    lower: Annotated[int, option("denoising steps in the last iteration", low=2, at_most="upper", metavar="T")] = 5,
    anneal: Annotated[str, option("how the steps fall over the iterations", kind=tuple(SCHEDULES))] = "linear",
    first_timestep: Annotated[int, FIRST_TIMESTEP] = SHORT_FIRST,
) -> Tensor:
    """Ancestral chains that grow shorter over the iterations (DiSA, arXiv 2505.20297).

    The more tokens are committed, the less uncertain is the next one. Each number of steps has its own respaced chain.
    """
    place = known_place(chain, "annealed")
    return by_length(chain, chain_lengths(place.iteration, place.num_iter, upper, lower, anneal), first_timestep)


def known_place(chain: Chain, name: str) -> Any:
    """Where the tokens stand. Raises ValueError if the code that calls does not tell."""
    if chain.place is None:
        raise ValueError(f"{name} needs each token's iteration, which only cspd.load knows")
    return chain.place


# The cached head of LazyMAR (arXiv 2503.12450): most denoising steps reuse the updates of the head's blocks.
#
# A head call adds the residual blocks' updates to the projected token, and a last layer computes (eps, v) from the sum.
# After the first tenth of the steps, the blocks are evaluated only at every `reuse`-th step. The other steps add the
# same updates to their own projected token, and evaluate the last layer at their own timestep. They do not evaluate the
# unconditional branch, but reuse the difference of its output from the last step that evaluated both.
#
# The released code evaluates the blocks at the first step and at multiples of 7. At the others it reuses the updates of
# the second to the fifth block only, and of the other blocks the values inside the gate.


def evaluated_calls(num_calls: int, reuse: int) -> np.ndarray:
    """Which of `num_calls` head calls, from 0, evaluate the blocks: the first tenth, then every `reuse`-th."""
    warmup = -(-num_calls // 10)
    return np.r_[0:warmup, warmup:num_calls:reuse]


class ReusedBlocks:
    """The updates of the head's blocks and the branches' distance at the last call, for the calls that reuse them."""

    def __init__(self, last_layers: Iterator[tuple]) -> None:
        self.last_layers = last_layers

    def evaluate(self, head: ReadyHead, modulations: Modulations, x: Tensor) -> Tensor:
        """The output [G, R, 2d] of a call that evaluates the blocks."""
        start = head.enter(x)
        end = head.through_blocks(start, modulations)
        out = head.leave(end, *modulations[-1])
        self.head, self.updates, self.distance = head, end[:1] - start, out - out[:1]
        return out

    def reuse(self, x: Tensor) -> Tensor:
        """The output [G, R, 2d] of the next call that does not."""
        return self.head.leave(self.head.enter(x) + self.updates, *next(self.last_layers)) + self.distance


def _last_layers(chain: Chain, timesteps: tuple[float, ...]) -> Iterator[tuple]:
    """The last layer's modulations of the conditional branch at each timestep, computed in chunks as in `modulated`."""
    head, precision, z = chain.head, chain.precision, chain.z
    with precision.full():
        c_embed = head.cond_embed(z[:1])
        t_embed = head.time_embed(on_device(timesteps, z.device))
    head = precision.prepare(head)
    chunk = max(1, table_bytes(z.device) // (4 * 2 * head.width * c_embed.shape[1]))
    for some in t_embed[:, None, None].split(chunk):
        (last,) = head.split(head.modulations(some, c_embed, with_blocks=False))
        yield from zip(*(each.unbind(0) for each in last))


@sampler("cached", of=DIFFUSION)
def cached(
    chain: Chain,
    reuse: Annotated[
        int,
        option(
            "after a tenth of the denoising steps, evaluate the head's blocks only at every N-th", low=1, metavar="N"
        ),
    ] = 8,
    first_timestep: Annotated[int | None, FIRST_TIMESTEP] = None,
) -> Tensor:
    """The ancestral chain with the cached head of LazyMAR (arXiv 2503.12450); only evaluated blocks are counted."""
    if first_timestep is not None:
        chain = chain.respaced(chain.head.schedule(len(chain), first_timestep))
    evaluated = set(evaluated_calls(len(chain), reuse).tolist())
    chain.expect([(step, True) for step in chain.steps if step.index in evaluated])
    others = [step.timestep for step in chain.steps if step.index not in evaluated]
    blocks = ReusedBlocks(_last_layers(chain, tuple(others)))
    x = chain.start()
    for step in chain.steps:
        if step.index in evaluated:
            raw = blocks.evaluate(*chain.call(step), x)
        else:
            raw = blocks.reuse(x)
        x = chain.move(x, step, chain.predicted(x, step, raw))
    return x


# GtR's number of denoising steps for each token: more for detail (arXiv 2510.17171).
#
# The code was not released. In the paper the steps fall over the first stage. The second stage takes the fewest, but
# the tenth of its tokens with the highest high-frequency energy takes the most.


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


@sampler("frequency-weighted", of=DIFFUSION, whole=False)
def frequency_weighted(
    chain: Chain,
    upper: Annotated[
        int,
        option("denoising steps in the first iteration, and for detailed tokens", low=2, high=TRAIN_STEPS, metavar="T"),
    ] = 50,
    lower: Annotated[
        int, option("denoising steps once half of the tokens are committed", low=2, at_most="upper", metavar="T")
    ] = 20,
    detail: Annotated[
        float,
        option(
            "fraction of the later half's tokens that take `upper` steps: those with the most high-frequency energy",
            high=1,
            metavar="P",
        ),
    ] = 0.1,
    first_timestep: Annotated[int, FIRST_TIMESTEP] = SHORT_FIRST,
) -> Tensor:
    """Ancestral chains of T steps, T chosen for each token (GtR, arXiv 2510.17171).

    T falls from upper to lower over the iterations that begin with less than half of the tokens committed. Later it is
    lower, or upper for the share `detail` of an image's tokens in an iteration. The paper does not say, and we chose,
    that the share is of an iteration, that z is the conditional one, and `first_timestep`.

    CSpD compares chains of one length and drafts tokens one by one. So if densities are observed, no detailed tokens
    are chosen.
    """
    place = known_place(chain, "frequency-weighted")
    is_late = place.iteration >= place.half
    steps = chain_lengths(place.iteration, place.half, upper, lower, "linear")
    steps[is_late] = lower
    if is_late.any() and not chain.observers:
        score = importance(chain.z[0]).cpu().numpy()
        steps[is_late & highest(score, place.owner, detail)] = upper
    return by_length(chain, steps, first_timestep)


# Deterministic solvers of MAR's chain, N head calls per token: DDIM and DPM-Solver++.
#
# They solve the diffusion's ordinary differential equation. So only the noise that they begin with is random, and the
# temperature has no effect. They usually begin at about timestep 950 of the 1000: from 999 the first of few steps
# overshoots.


class SolverStep(NamedTuple):
    """A solver's step after a head call, which predicts x_0 = (x - sigma eps) / alpha: x becomes shrink x + grow D.

    D = x_0 + further (x_0 - x_0'), where x_0' is the previous prediction.
    """

    alpha: float
    sigma: float
    further: float
    shrink: float
    grow: float


def solver_steps(s: DiffusionSchedule, order: int) -> list[SolverStep]:
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
    return [SolverStep(*values) for values in np.stack([alpha, sigma, further, shrink, grow], axis=1).tolist()]


def solve(chain: Chain, order: int) -> Tensor:
    """Tokens [R, d] by a solver of order 1 or 2, over the chain's timesteps."""
    s: Any = chain.schedule
    x = before = chain.start()
    for step, own in zip(chain.steps, solver_steps(s, order)):
        out = chain.evaluate(x, step)
        x_0 = (x - own.sigma * out.eps) / own.alpha
        data = x_0 + own.further * (x_0 - before) if own.further else x_0
        x = own.shrink * x + own.grow * data
        before = x_0
    return x


HEAD_CALLS = option("head calls per token; the temperature has no effect", low=2, high=TRAIN_STEPS, metavar="N")
GRID = option("timesteps of the head calls: evenly spaced, or the ones that `calibrated` would choose")
Grid = Literal["uniform", "planned"]


def gridded(chain: Chain, head_calls: int, first_timestep: int, grid: str) -> Chain:
    """The chain over the timesteps of a solver's head calls."""
    if grid == "uniform":
        return chain.respaced(schedule(head_calls, first_timestep))
    return chain.respaced(planned_grid(chain.schedule, chain.fitted.plan(head_calls), first_timestep))


def planned_grid(s: Any, steps: Sequence[int], first_timestep: int) -> DiffusionSchedule:
    """The schedule over the timesteps of some steps of a schedule."""
    planned = s.timestep_map[list(steps)]
    highest = first_timestep - np.arange(len(planned))  # after clipping, they still fall
    return _respaced(tuple(np.minimum(planned, highest)[::-1].tolist()))


@functools.cache  # as `mar.head.schedule`
def _respaced(timesteps: tuple[int, ...]) -> DiffusionSchedule:
    return respaced(np.array(timesteps))


@sampler("ddim", of=DIFFUSION)
def ddim(
    chain: Chain,
    head_calls: Annotated[int, HEAD_CALLS] = 10,
    first_timestep: Annotated[int, FIRST_TIMESTEP] = SHORT_FIRST,
    grid: Annotated[Grid, GRID] = "uniform",
) -> Tensor:
    """Solves the head's chain deterministically, first order (DDIM, arXiv 2010.02502)."""
    return solve(gridded(chain, head_calls, first_timestep, grid), order=1)


@sampler("dpm-solver++", of=DIFFUSION)
def dpm_solver(
    chain: Chain,
    head_calls: Annotated[int, HEAD_CALLS] = 10,
    first_timestep: Annotated[int, FIRST_TIMESTEP] = SHORT_FIRST,
    grid: Annotated[Grid, GRID] = "uniform",
) -> Tensor:
    """Solves the head's chain deterministically, second order (DPM-Solver++ 2M, arXiv 2211.01095)."""
    return solve(gridded(chain, head_calls, first_timestep, grid), order=2)


# Deterministic solvers of heads that are stochastic differential equations: Euler and Heun.
#
# They solve the probability-flow equation dx / dt = v from t = 0 to 1 on a uniform grid. So only the noise that they
# begin with is random, and the temperature has no effect.

FLOW_CALLS = option("head calls per token; the temperature has no effect", low=1, high=1000, metavar="N")


@sampler("euler", of=FLOW)
def euler(chain: Chain, head_calls: Annotated[int, FLOW_CALLS] = 25) -> Tensor:
    """Solves the head's chain deterministically, first order."""
    x, dt = chain.start(), 1 / head_calls
    for call in chain.calls_at([i * dt for i in range(head_calls)]):
        x = x + dt * chain.velocity(x, call, chain.evaluate(x, call))
    return x


@sampler("heun", of=FLOW)
def heun(chain: Chain, head_calls: Annotated[int, FLOW_CALLS] = 25) -> Tensor:
    """Solves the head's chain deterministically, second order.

    It takes two calls a step, at its beginning and, to correct it, at its end. The last step has one, as the head is
    not trained at t = 1. So of an even number of calls it leaves out one.
    """
    num_steps = (head_calls + 1) // 2
    dt = 1 / num_steps
    calls = chain.calls_at([(step + end) * dt for step in range(num_steps) for end in (0, 1)][:-1])
    x = chain.start()
    for start, end in itertools.zip_longest(calls[::2], calls[1::2]):
        velocity = chain.velocity(x, start, chain.evaluate(x, start))
        ahead = x + dt * velocity
        if end is None:
            return ahead
        at_end = chain.velocity(ahead, end, chain.evaluate(ahead, end))
        x = x + dt * torch.lerp(velocity, at_end, 0.5)
    raise AssertionError("unreachable: the last step has no second call")
