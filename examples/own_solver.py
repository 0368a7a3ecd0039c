"""A head sampler of your own for SphereAR and BitDance: the midpoint rule, two head calls a step.

cspd sample --plugin examples/own_solver.py --checkpoint emoji64_sphere --method midpoint --head-steps 8
"""

import numpy as np

import cspd
from cspd.causal.family import drawing
from cspd.causal.models import TIME_FACTOR
from cspd.heads.chain import Denoised, Denoiser, evaluate, modulated
from cspd.option import Option

STEPS = Option("head_steps", int, "steps from noise to token, of two head calls each", default=12, low=1, high=500)


def denoise(runner, model, rows, z, *, index=0, densities=False):
    """Solves dx / dt = velocity from t = 0 to 1, by the velocity in the middle of each step."""
    head = runner.models[model].head
    num_steps = rows.sequences[0].request.head_steps
    dt = 1 / num_steps
    times = [(step + half) * dt for step in range(num_steps) for half in (0, 0.5)]
    x = start = runner.noise.initial(rows.seed, rows.position, head.channels, index)
    for calls, own_head, by_call in modulated(head, z, [TIME_FACTOR * t for t in times], runner.precision):
        for call, modulations in zip(calls, by_call):
            out, _ = evaluate(own_head, x, modulations, rows.scale)
            velocity = (out - x) / (1 - times[call]) if head.binary else out  # BitDance predicts the clean token
            if call % 2 == 0:  # at the step's start: go to its middle
                start, x = x, x + dt / 2 * velocity
            else:
                x = start + dt * velocity
    calls = np.full(len(x), len(times))
    return Denoised(x, calls, len(times), evaluations=calls * len(z))


DENOISER = Denoiser(denoise, "heuristic", options=(STEPS,), mixed=("cfg", "cfg_schedule", "temperature"))
cspd.register(drawing("midpoint", "solves the head's chain by the midpoint rule", {}, DENOISER))
