"""A diffusion head and its samplers, as a library: it knows no engine, request or checkpoint.

>>> from cspd.heads import option, sampler
>>> @sampler("mine")
... def mine(chain):
...     x = chain.start()
...     for step in chain.steps:
...         x = chain.move(x, step, chain.evaluate(x, step))
...     return x
"""

from cspd.heads import calibrated, speculative  # noqa: F401 - they register their samplers
from cspd.heads.chain import Chain, EulerMaruyama, Inputs, Observer, Step, euler_maruyama
from cspd.heads.net import Net
from cspd.heads.samplers import SAMPLERS, sampler
from cspd.option import option

__all__ = [
    "SAMPLERS",
    "Chain",
    "EulerMaruyama",
    "Inputs",
    "Net",
    "Observer",
    "Step",
    "euler_maruyama",
    "option",
    "sampler",
]
