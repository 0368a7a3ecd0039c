"""The head's evaluation, and the ancestral chain: from noise to a token, T steps of the reverse diffusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.denoiser import Denoised, denoiser
from cspd.continuous.host import MARHost, Rows
from cspd.precision import Precision
from mar.diffusion import schedule
from mar.head import Head

MODULATION_BYTES = 16 * 2**20  # of one table of modulations; longer chains take several
Trace = Callable[[int, Tensor, Tensor, Tensor], None]


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
) -> Tensor:
    """Samples a token a row by the full chain; T sequential head calls.

    The state after step t is mu_t + tau sigma_t eps_t, and mu_0 at the last. Timesteps do not depend on the state, so
    the head's modulations are computed for many steps at once. The first step, whose gain is 316 at T = 100, is in
    float32.

    Args:
        head: the diffusion head.
        z: conditions [G, R, D]: G = 1, or 2 with the null class second.
        scale: guidance scale s of each row [R, 1] (unused where G = 1).
        temperature: tau of each row [R, 1].
        x: x_T [R, d].
        noise: maps steps t [n] to eps_t [n, R, d].
        num_steps: T.
        trace: is told every step's (t, x_t, guided eps, v), the last three [R, d].

    Returns:
        Tokens [R, d], float32.
    """
    s = schedule(num_steps)
    width = (3 * len(head.res_blocks) + 2) * head.width
    chunk = max(1, MODULATION_BYTES // (4 * width * z.shape[0] * z.shape[1]))
    with precision.full():
        c_embed = head.cond_embed(z)
        t_embed = head.time_embed(torch.as_tensor(s.timestep_map, device=z.device))
    sigma = torch.as_tensor(s.log_sigma_base, dtype=torch.float32, device=z.device).exp()
    sigma[0] = 0  # the last step adds no noise
    first = num_steps - 1
    later = [range(i, max(i - chunk, -1), -1) for i in range(first - 1, -1, -chunk)]
    for steps in [range(first, first - 1, -1), *later]:
        t = torch.tensor(steps, device=z.device)
        with precision.full() if steps[0] == first else precision.fast():
            eps_t = noise(t) * (sigma[t].reshape(-1, 1, 1) * temperature)
            layers = head.split(head.modulations(t_embed[t][:, None, None], c_embed))
            by_step = zip(*(zip(*(m.unbind(0) for m in layer)) for layer in layers))
            for step, modulations, step_noise in zip(steps, by_step, eps_t):
                eps, v = evaluate(head, x, modulations, scale)
                if trace:
                    trace(step, x, eps, v)
                mean = torch.add(x * s.mean_x[step], eps, alpha=s.mean_eps[step])
                x = torch.addcmul(mean, torch.exp(v * s.log_sigma_slope[step]), step_noise)
    return x


@denoiser("ancestral")
def denoise(
    host: MARHost,
    model: str,
    rows: Rows,
    z: Tensor,
    *,
    index: int = 0,
    densities: bool = False,
    num_steps: int | None = None,
    trace: Trace | None = None,
) -> Denoised:
    """Every token by the full chain (arXiv 2406.11838), a head call a step; arguments as in `cspd.continuous.denoiser`.

    Args:
        num_steps: T; by default the requests'. trace: is told every step, as in `ancestral`.
    """
    num_steps = num_steps or rows.sequences[0].request.num_sampling_steps
    head, channels = host.models[model].head, host.config.token_dim
    s, log_sigmas = schedule(num_steps), []

    def keep_sigma(t: int, x: Tensor, eps: Tensor, v: Tensor) -> None:
        log_sigmas.append(s.log_sigma_base[t] + rows.temperature.log() + s.log_sigma_slope[t] * v)

    tokens = ancestral(
        head,
        z,
        rows.scale,
        rows.temperature,
        host.noise.initial(rows.seed, rows.position, channels, index),
        lambda t: host.noise.steps(rows.seed, rows.position, t, channels, index),
        num_steps,
        host.precision,
        keep_sigma if densities else trace,
    )
    calls = np.full(len(tokens), num_steps)
    if not densities:
        return Denoised(tokens, calls, num_steps)
    *path, last = log_sigmas
    return Denoised(tokens, calls, num_steps, log_sigma=torch.stack(path).sum((0, 2)), log_sigma_last=last)
