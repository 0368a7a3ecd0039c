"""A denoiser of one's own: fewer denoising steps in later iterations, after DiSA (arXiv 2505.20297).

T falls from `upper` in the first iteration to `lower` in the last. Its line in cspd/methods.py: `own_denoiser.METHOD`.
"""

import numpy as np
import torch

from cspd.continuous import ancestral
from cspd.continuous.denoiser import Denoised, denoiser
from cspd.continuous.sampling import sampling
from cspd.option import Option

OPTIONS = (
    Option("upper", int, "denoising steps in the first iteration", default=50, low=2, high=1000),
    Option("lower", int, "denoising steps in the last iteration", default=25, low=2, high=1000),
)


@denoiser("annealed", options=OPTIONS)
def denoise(host, model, rows, z, *, index=0, densities=False):
    """T_k = lower + floor((K - 1 - k)/(K - 1) (upper - lower)) for the tokens of iteration k."""
    request = rows.sequences[0].request
    last = np.array([s.request.num_iter - 1 for s in rows.sequences])[rows.sequence.cpu()]
    left = (last - rows.iteration) / np.maximum(last, 1)
    steps = request.lower + (left * (request.upper - request.lower)).astype(int)
    tokens = torch.empty(len(steps), host.config.token_dim, device=z.device)
    for num_steps in np.unique(steps):  # tokens of one length of chain together
        which = np.flatnonzero(steps == num_steps)
        made = ancestral.denoise(host, model, rows.at(which), z[:, which], index=index, num_steps=int(num_steps))
        tokens[which] = made.tokens
    return Denoised(tokens, steps, int(steps.max()), evaluations=steps * len(z))


METHOD = sampling("annealed", "fewer steps later", {}, denoiser="annealed")
