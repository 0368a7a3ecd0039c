"""A denoiser of one's own: fewer denoising steps in later iterations, after DiSA (arXiv 2505.20297).

T falls from `upper` in the first iteration to `lower` in the last. Its line in cspd/methods.py: `own_denoiser.METHOD`.
"""

import functools

import torch

from cspd.continuous import ancestral, ar
from cspd.continuous.denoiser import Denoised
from cspd.method import Method
from cspd.option import Option

OPTIONS = (
    Option("upper", int, "denoising steps in the first iteration", default=50, low=2, high=1000),
    Option("lower", int, "denoising steps in the last iteration", default=25, low=2, high=1000),
)


def denoise(host, model, rows, z):
    """T_k = lower + floor((K - 1 - k)/(K - 1) (upper - lower)) at iteration k of each sequence."""
    steps = []
    for s in rows.sequences:
        left = (s.request.num_iter - 1 - s.iteration) / max(1, s.request.num_iter - 1)
        steps.append(s.request.lower + int(left * (s.request.upper - s.request.lower)))
    of_row = torch.tensor(steps, device=z.device)[rows.sequence]
    tokens = torch.empty(len(of_row), host.config.token_dim, device=z.device)
    for num_steps in sorted(set(steps)):  # sequences of one length of chain together
        which = (of_row == num_steps).nonzero().squeeze(1)
        tokens[which] = ancestral.denoise(host, model, rows.at(which), z[:, which], num_steps=num_steps).tokens
    return Denoised(tokens, of_row.cpu().numpy(), max(steps))


run_round = functools.partial(ar.run_round, denoise=denoise)
METHOD = Method(
    "annealed", "MAR", "heuristic", "fewer steps later", {}, run_round, options=OPTIONS, mixed=ar.MIXED, heat="calls"
)
