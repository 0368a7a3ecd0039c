"""Prices of approximations: how far a token's chain is from the exact one, in nats, on traces of exact chains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from cspd.device import Precision, on_device
from cspd.heads.calibrated import Predictor
from cspd.heads.calibration import Trace
from cspd.heads.chain import Schedule, chain_steps, modulated
from cspd.heads.net import evaluate, steering
from cspd.heads.verify import Gaussian, divergence
from mar.head import Head

# A chain is a path of Gaussian steps. At the states x_k of an exact chain, p_k is the exact step and q_k the step that
# an approximation takes from there. By the chain rule the divergence of the two paths is
#
#     KL(p || q) = sum over k of E_p KL(p_k || q_k),
#
# so every approximation has a price in nats per token, and the mean over exact chains estimates it. Approximations of
# the head change how q_k is predicted; approximations of the backbone change the condition z. A price is about the
# mean square of an error. So the prices of two approximations add up if their errors are uncorrelated.
#
# The last step, k = 0, adds no noise. Its Gaussian has the sigma that the schedule gives it, as in CSpD's ratio.


def of_conditions(head: Head, chains: Trace, z: Tensor, s: Schedule, precision: Precision, every: int = 1) -> Tensor:
    """The divergence [N], nats, of full chains under other conditions.

    Args:
        chains: exact chains, with their own conditions; on the head's device.
        z: [G, N, D], in their place. s: the schedule of the chains.
        every: the head is evaluated at one in `every` steps of each token, another one for the next token. The sum is
            multiplied by `every`, so the mean over tokens has the same expectation.
    """
    num_rows = z.shape[1]
    steps = chain_steps(s, z.device)
    total = torch.zeros(num_rows, device=z.device)
    with precision.full():
        c_embed = head.cond_embed(z)
        t_embed = head.time_embed(on_device(steps.timesteps, z.device))
    last = len(s) - 1
    for k in range(len(s)):
        rows = torch.arange(-k % every, num_rows, every, device=z.device)
        is_first = k == last  # its gain is high
        own_head = head if is_first else precision.prepare(head)
        with precision.full() if is_first else precision.fast():
            modulations = own_head.split(own_head.modulations(t_embed[last - k], c_embed[:, rows]))
            eps, v = evaluate(own_head, chains.x[k, rows], modulations, chains.scale[rows])
        x, temperature = chains.x[k, rows], chains.temperature[rows]
        p = gaussian(s, k, x, chains.eps[k, rows], chains.v[k, rows], temperature)
        q = gaussian(s, k, x, eps, v, temperature)
        total[rows] += every * divergence(p, q)
    return total


def of_calls(
    head: Head,
    chains: Trace,
    z: Tensor,
    s: Schedule,
    predictor: Predictor,
    calls: Mapping[int, bool],
    precision: Precision,
    corrections: np.ndarray | None = None,
) -> Tensor:
    """The divergence [N], nats, of `calibrated` chains: their head calls are at the exact chains' states.

    Args:
        chains, z, s: as in `of_conditions`. predictor: of the head's outputs between the calls.
        calls: the steps of the head calls, from T - 1 down to 0, and whether each evaluates the unconditional branch.
        corrections: as in `cspd.heads.calibrated.Shortcut`.
    """
    total = torch.zeros(z.shape[1], device=z.device)
    steps = [*calls]
    outputs = _outputs(head, chains, z, s, calls, precision)
    for i, (a, b, (eps_a, v_a)) in enumerate(zip(steps, [*steps[1:], -1], outputs)):
        x_a = chains.x[a]
        for k in range(a, b, -1):
            eps, v = eps_a, v_a
            if k < a:
                c0, c1, c2 = predictor.coefficients[k, a - k - 1].tolist()
                eps = c0 * chains.x[k] + c1 * eps_a + c2 * x_a
                v = v_a + float(predictor.drift[k, a - k - 1])
            p = gaussian(s, k, chains.x[k], chains.eps[k], chains.v[k], chains.temperature)
            mean, log_sigma = gaussian(s, k, chains.x[k], eps, v, chains.temperature)
            if corrections is not None and k == b + 1:
                of_x, of_eps = corrections[i].tolist()
                mean = mean + of_x * x_a + of_eps * eps_a
            total += divergence(p, (mean, log_sigma))
    return total


def _outputs(
    head: Head, chains: Trace, z: Tensor, s: Schedule, calls: Mapping[int, bool], precision: Precision
) -> Iterator[tuple[Tensor, Tensor]]:
    """(guided eps, v), [N, d] each, of the head calls at the states of exact chains; arguments as in `of_calls`."""
    steps = [*calls]
    names = chain_steps(s, z.device).timesteps  # of T - 1 .. 0
    timesteps = [names[len(s) - 1 - a] for a in steps]
    branches = [len(z) if is_full else 1 for is_full in calls.values()]
    difference = None
    for numbers, own_head, by_call in modulated(head, z, timesteps, precision, branches):
        with precision.full() if numbers[0] == 0 else precision.fast():
            for i, modulations in zip(numbers, by_call):
                eps, v = own_head.denoise(chains.x[steps[i]], modulations).float().chunk(2, dim=-1)
                if len(eps) > 1:
                    difference = steering(eps, chains.scale)
                yield (eps[0] if difference is None else eps[0] + difference), v[0]
        del by_call, modulations  # they are large


def gaussian(s: Schedule, k: int, x: Tensor, eps: Tensor, v: Tensor, temperature: Tensor) -> Gaussian:
    """Mean and log sigma [N, d] of a step from x [N, d]; without noise (temperature 0), those of temperature 1."""
    log_temperature = temperature.where(temperature > 0, 1.0).log()
    mean = float(s.mean_x[k]) * x + float(s.mean_eps[k]) * eps
    return mean, float(s.log_sigma_base[k]) + float(s.log_sigma_slope[k]) * v + log_temperature
