"""A denoiser of one's own: guidance in the noisiest steps only, after arXiv 2404.07724.

The null class is not evaluated in the others. Its line in cspd/methods.py: `own_denoiser.METHOD`.
"""

import numpy as np
import torch

from cspd.continuous.ancestral import evaluate, modulated
from cspd.continuous.denoiser import Denoised, denoiser
from cspd.continuous.sampling import sampling
from cspd.option import Option
from mar.diffusion import schedule

SHARE = Option("guided_share", float, "share of the steps, the noisiest, that are guided", default=0.5, high=1)


@denoiser("early-guidance", options=(SHARE,))
def denoise(host, model, rows, z, *, index=0, densities=False):
    """The ancestral chain, its first steps with the null class and the others without."""
    request, head = rows.sequences[0].request, host.models[model].head
    s = schedule(request.num_sampling_steps)
    steps, num_guided = np.arange(len(s))[::-1], round(request.guided_share * len(s))
    x = host.noise.initial(rows.seed, rows.position, host.config.token_dim, index)
    parts = [(z, steps[:num_guided]), (z[:1], steps[num_guided:])]
    for own_z, own_steps in [part for part in parts if len(part[1])]:
        for calls, by_call in modulated(head, own_z, s.timestep_map[own_steps], host.precision):
            for step, modulations in zip(own_steps[calls].tolist(), by_call):
                eps, v = evaluate(head, x, modulations, rows.scale)
                x = s.mean_x[step] * x + s.mean_eps[step] * eps
                if step > 0:
                    t = torch.tensor([step], device=x.device)
                    noise = host.noise.steps(rows.seed, rows.position, t, x.shape[1], index)[0]
                    sigma = torch.exp(s.log_sigma_base[step] + s.log_sigma_slope[step] * v)
                    x = x + rows.temperature * sigma * noise
    calls = np.full(len(x), len(s))
    return Denoised(x, calls, len(s), evaluations=calls + num_guided * (len(z) - 1))


METHOD = sampling("early-guidance", "guidance in the noisiest steps only", {}, denoiser="early-guidance")
