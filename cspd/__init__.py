"""cspd: fast autoregressive image generation that does not change what is generated.

>>> engine = cspd.load("digits32")
>>> output = engine.generate([cspd.Request(label=3, seed=7)])[0]
"""

from cspd.continuous.host import MARModels
from cspd.discrete.host import VQModels
from cspd.engine import Engine
from cspd.loading import load
from cspd.sequence import Output, Request, RoundStats

__version__ = "0.1.0"
__all__ = ["Engine", "MARModels", "Output", "Request", "RoundStats", "VQModels", "load"]
