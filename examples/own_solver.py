"""A head sampler of your own for SphereAR and BitDance: the midpoint rule, two head calls a step.

cspd sample --plugin examples/own_solver.py --checkpoint emoji64_sphere --method midpoint --head-steps 8
"""

from typing import Annotated

from cspd.heads import option, sampler

STEPS = option("steps from noise to token, of two head calls each", low=1, high=500)


@sampler("midpoint", of="flow")
def midpoint(chain, head_steps: Annotated[int, STEPS] = 12):
    """Solves dx / dt = velocity from t = 0 to 1, by the velocity in the middle of each step."""
    dt = 1 / head_steps
    calls = chain.calls_at([(step + half) * dt for step in range(head_steps) for half in (0, 0.5)])
    x = chain.start()
    for start, middle in zip(calls[::2], calls[1::2]):
        halfway = x + dt / 2 * chain.velocity(x, start, chain.evaluate(x, start))
        x = x + dt * chain.velocity(halfway, middle, chain.evaluate(halfway, middle))
    return x
