"""A denoiser of your own: guidance in the noisiest steps only, after arXiv 2404.07724.

cspd sample --plugin examples/own_denoiser.py --method early-guidance --guided-share 0.3
"""

import numpy as np
import torch

import cspd
from cspd.heads.chain import Denoised, denoiser, evaluate, modulated
from cspd.masked.family import sampling
from cspd.option import Option
from mar.head import schedule

GUIDED = Option("guided_share", float, "fraction of the steps with guidance, the noisiest first", default=0.5, high=1)


@denoiser("early-guidance", options=(GUIDED,))
def denoise(runner, model, rows, z, *, index=0, densities=False):
    """The ancestral chain. Only its first steps evaluate the unconditional branch."""
    request = rows.sequences[0].request
    head = runner.models[model].head
    s = schedule(request.num_sampling_steps)
    num_guided = round(request.guided_share * len(s))
    branches = [len(z)] * num_guided + [1] * (len(s) - num_guided)  # z: one condition per guidance branch
    x = runner.noise.initial(rows.seed, rows.position, runner.config.token_dim, index)
    steps = torch.arange(len(s), device=x.device)
    noise = rows.temperature * runner.noise.steps(rows.seed, rows.position, steps, x.shape[1], index)
    for calls, own_head, by_call in modulated(head, z, s.timestep_map[::-1], runner.precision, branches):
        for call, modulations in zip(calls, by_call):
            step = len(s) - 1 - call
            eps, v = evaluate(own_head, x, modulations, rows.scale)
            x = s.mean_x[step] * x + s.mean_eps[step] * eps
            if step > 0:
                x = x + torch.exp(s.log_sigma_base[step] + s.log_sigma_slope[step] * v) * noise[step]
    return Denoised(x, np.full(len(x), len(s)), len(s), evaluations=np.full(len(x), sum(branches)))


cspd.register(sampling("early-guidance", "guidance in the noisiest steps only", {}, denoiser="early-guidance"))
