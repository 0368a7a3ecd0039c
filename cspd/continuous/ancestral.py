"""The head's evaluation, and the ancestral chain: from noise to a token, T steps of the reverse diffusion."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd import kernels
from cspd.continuous.buckets import by_row
from cspd.continuous.denoiser import ContinuousHost, Denoised, Draw, denoiser
from cspd.continuous.modulations import modulated
from cspd.continuous.rows import Rows
from cspd.option import Option, check_integer
from cspd.precision import Precision
from cspd.sequence import Request
from mar.diffusion import TRAIN_STEPS, Schedule, schedule
from mar.head import Head

MIXED = ("num_iter", "cfg", "cfg_schedule", "temperature")  # may differ between the rows of a chain
FIRST_TIMESTEP = Option(
    "first_timestep",
    int,
    "the noisiest of the 1000 timesteps that a chain visits: 999 as in MAR's code, about 950 for short chains",
    low=1,
    high=TRAIN_STEPS - 1,
    metavar="N",
)
OPTIONS = (FIRST_TIMESTEP,)
SHORT, SHORT_FIRST = 25, 950  # chains of fewer steps should begin there
Trace = Callable[[int, Tensor, Tensor, Tensor], None]
Outputs = Callable[[Head, Tensor, Sequence[int], Precision], Iterable[tuple[range, Iterator[Callable[..., Tensor]]]]]


class Steps(NamedTuple):
    """What a chain's steps take beside the head, in the order of its calls: the noisiest step first.

    Attributes:
        timesteps: of the 1000. mean_x, mean_eps, slope: of each step, on the host, see `Schedule`.
        t: int64 [T], the steps T - 1 .. 0. sigma: float32 [T, 1, 1], of their noise where v = 0 and tau = 1; 0 at last.
    """

    timesteps: tuple[int, ...]
    mean_x: list[float]
    mean_eps: list[float]
    slope: list[float]
    t: Tensor
    sigma: Tensor


@functools.cache  # for good: a graph reads them where they are
def chain_steps(num_steps: int, first_timestep: int, device: torch.device) -> Steps:
    """The steps of the schedule of T = `num_steps`."""
    s = schedule(num_steps, first_timestep)
    with torch.inference_mode(False):
        sigma = torch.as_tensor(s.log_sigma_base[::-1].copy(), dtype=torch.float32, device=device).exp()
        sigma[-1] = 0  # the last step adds no noise
        t = torch.arange(num_steps - 1, -1, -1, device=device)
    columns = (values[::-1].tolist() for values in (s.mean_x, s.mean_eps, s.log_sigma_slope))
    return Steps(tuple(s.timestep_map[::-1].tolist()), *columns, t, sigma.view(-1, 1, 1))


def evaluate(head: Head, x: Tensor, modulations: Sequence[tuple[Tensor, ...]], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Guided noise prediction and (conditional) variance channel, float32 [..., d] each, of noisy tokens x [..., d].

    Args:
        modulations: of these tokens, [G, ..., width] each, G = 2 with the null class second.
        scale: s, broadcast to [..., 1]; unused at G = 1.
    """
    return guided(head.denoise(x, modulations), scale)


def guided(out: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """What `evaluate` returns, of the head's outputs [G, ..., 2d]."""
    eps, v = out.float().chunk(2, dim=-1)
    return (eps[0] if len(eps) == 1 else torch.lerp(eps[1], eps[0], scale)), v[0]


def every_output(
    head: Head, z: Tensor, timesteps: Sequence[int], precision: Precision
) -> Iterator[tuple[range, Iterator[Callable[[Tensor], Tensor]]]]:
    """The head's outputs at one timestep after another, as functions of the noisy tokens; otherwise as `modulated`."""
    for calls, own_head, by_call in modulated(head, z, timesteps, precision):
        yield calls, (functools.partial(own_head.denoise, modulations=modulations) for modulations in by_call)
        del by_call


def ancestral(
    head: Head,
    z: Tensor,
    scale: Tensor,
    temperature: Tensor,
    x: Tensor,
    noise: Callable[[Tensor], Tensor],
    num_steps: int,
    precision: Precision,
    trace: Trace | None = None,
    first_timestep: int = TRAIN_STEPS - 1,
    outputs: Outputs = every_output,
) -> Tensor:
    """Samples a token a row by the full chain; T sequential head calls.

    The state after step t is mu_t + tau sigma_t eps_t, and mu_0 at the last. The first step, whose gain is 316 at
    T = 100, is in float32.

    Args:
        head: the diffusion head.
        z: conditions [G, R, D]: G = 1, or 2 with the null class second.
        scale: guidance scale s of each row [R, 1] (unused where G = 1).
        temperature: tau of each row [R, 1].
        x: x_T [R, d].
        noise: maps steps t [n] to eps_t [n, R, d].
        num_steps: T.
        trace: is told every step's (t, x_t, guided eps, v), the last three [R, d].
        first_timestep: of the 1000, where the chain begins.
        outputs: how the head's outputs are computed.

    Returns:
        Tokens [R, d], float32.
    """
    steps = chain_steps(num_steps, first_timestep, z.device)
    return follow(head, z, scale, temperature, x, noise(steps.t), steps, precision, trace, outputs)


def follow(
    head: Head,
    z: Tensor,
    scale: Tensor,
    temperature: Tensor,
    x: Tensor,
    eps_t: Tensor,
    steps: Steps,
    precision: Precision,
    trace: Trace | None,
    outputs: Outputs,
) -> Tensor:
    """`ancestral` with noise eps_t [T, R, d] drawn in advance, in the order of the steps."""
    added = eps_t * (steps.sigma * temperature)
    if trace is None and outputs is every_output and kernels.available(x.device):
        return _follow_by_kernels(head, z, scale, x, added, steps, precision)
    for calls, by_call in outputs(head, z, steps.timesteps, precision):
        with precision.full() if calls[0] == 0 else precision.fast():
            for call, output in zip(calls, by_call):
                out = output(x)
                if trace:
                    trace(len(added) - 1 - call, x, *guided(out, scale))
                x = take_step(x, out, added[call], scale, steps.mean_x[call], steps.mean_eps[call], steps.slope[call])
        del by_call, output  # which hold the modulations, and those are large
    return x


def _follow_by_kernels(
    head: Head, z: Tensor, scale: Tensor, x: Tensor, added: Tensor, steps: Steps, precision: Precision
) -> Tensor:
    """`follow` where a step's last launch has both the head's last layer and `take_step`."""
    from cspd.kernels.head import ancestral_step

    for calls, own_head, by_call in modulated(head, z, steps.timesteps, precision):
        with precision.full() if calls[0] == 0 else precision.fast():
            for call, modulations in zip(calls, by_call):
                numbers = steps.mean_x[call], steps.mean_eps[call], steps.slope[call]
                x = ancestral_step(own_head, x, modulations, added[call], scale, *numbers)
        del by_call, modulations
    return x


def take_step(
    x: Tensor, out: Tensor, noise: Tensor, scale: Tensor, mean_x: float, mean_eps: float, slope: float
) -> Tensor:
    """The state [R, d] after a step from x, where the head gives out [G, R, 2d].

    Args:
        noise: tau sigma_t eps_t [R, d], but for the head's share in sigma_t. The last three are of the step.
    """
    if kernels.available(x.device):
        from cspd.kernels.steps import ancestral_step

        return ancestral_step(x, out, noise, scale, mean_x, mean_eps, slope)
    eps, v = guided(out, scale)
    mean = torch.add(x * mean_x, eps, alpha=mean_eps)
    return torch.addcmul(mean, torch.exp(v * slope), noise)


def drawing(
    head: Head,
    noise: types.ModuleType,
    num_steps: int,
    precision: Precision,
    first_timestep: int = TRAIN_STEPS - 1,
    *,
    index: int = 0,
    trace: Trace | None = None,
    outputs: Outputs = every_output,
) -> Draw:
    """The whole chain as a function of tensors that can be captured as a graph, unless it is traced.

    Args:
        noise: its source, see `cspd.noise`. index: of the noise. The others are as in `ancestral`.

    """
    steps = chain_steps(num_steps, first_timestep, precision.device)

    def draw(z: Tensor, scale: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        x = noise.initial(seed, position, head.channels, index)
        eps_t = noise.steps(seed, position, steps.t, head.channels, index)
        return follow(head, z, scale, temperature, x, eps_t, steps, precision, trace, outputs)

    return draw


def sigma_trace(s: Schedule, temperature: Tensor, log_sigmas: list[Tensor]) -> Trace:
    """A trace that appends the log sigma [R, d] of every step of a schedule."""

    def keep(t: int, x: Tensor, eps: Tensor, v: Tensor) -> None:
        log_sigmas.append(s.log_sigma_base[t] + temperature.log() + s.log_sigma_slope[t] * v)

    return keep


def with_densities(made: Denoised, log_sigmas: list[Tensor]) -> Denoised:
    """Tokens with the Gaussians of their chains, of the log sigma of every step, T - 1 .. 0."""
    *path, last = log_sigmas
    return dataclasses.replace(made, log_sigma=torch.stack(path).sum((0, 2)), log_sigma_last=last)


def check_first(request: Request, num_steps: int) -> None:
    """Raises ValueError where a chain has more steps than timesteps to visit."""
    if request.first_timestep is not None:
        why = f"it begins a chain of {num_steps} steps"
        check_integer("first_timestep", request.first_timestep, num_steps - 1, TRAIN_STEPS - 1, why)


def check(request: Request, host: ContinuousHost) -> None:
    """Raises ValueError where a chain has more steps than timesteps to visit."""
    check_first(request, request.num_sampling_steps)


def advice(request: Request, remedy: str = f"give first_timestep={SHORT_FIRST}") -> str | None:
    """That a short chain should begin later: from timestep 999 its first step multiplies errors by thousands."""
    num_steps = request.num_sampling_steps
    if num_steps >= SHORT or request.first_timestep is not None:
        return None
    return f"a chain of {num_steps} denoising steps overshoots in its first one: {remedy}"


@denoiser("ancestral", "exact", options=OPTIONS, mixed=MIXED, check=check, advice=advice)
def denoise(
    host: ContinuousHost,
    model: str,
    rows: Rows,
    z: Tensor,
    *,
    index: int = 0,
    densities: bool = False,
    num_steps: int | None = None,
    trace: Trace | None = None,
    outputs: Outputs = every_output,
) -> Denoised:
    """Every token by the full chain (arXiv 2406.11838), a head call a step; arguments as in `cspd.continuous.denoiser`.

    Args:
        num_steps: T; by default the requests'. trace: is told every step, and outputs: how the head's are computed, as
            in `ancestral`.
    """
    request = rows.sequences[0].request
    num_steps = num_steps or request.num_sampling_steps
    first_timestep = request.first_timestep or TRAIN_STEPS - 1
    log_sigmas: list[Tensor] = []
    if densities:
        trace = sigma_trace(schedule(num_steps, first_timestep), rows.temperature, log_sigmas)
    draw = drawing(
        host.models[model].head,
        host.noise,
        num_steps,
        host.precision,
        first_timestep,
        index=index,
        trace=trace,
        outputs=outputs,
    )
    key = None if trace else ("ancestral", model, num_steps, first_timestep, index, outputs)
    tokens = by_row(host, key, draw, rows, z)
    calls = np.full(len(tokens), num_steps)
    made = Denoised(tokens, calls, num_steps, evaluations=calls * len(z))
    return with_densities(made, log_sigmas) if densities else made
