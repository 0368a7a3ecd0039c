"""cspd: fast sampling of autoregressive image models, with tested guarantees.

>>> engine = cspd.load("digits32")
>>> output = engine.generate([cspd.Request(label=3, seed=7)])[0]
"""

from cspd.continuous.models import MARModels
from cspd.discrete.models import VQModels
from cspd.engine import Engine
from cspd.loading import load
from cspd.sequence import Output, Request, RoundStats
from cspd.version import __version__

__all__ = ["Engine", "MARModels", "Output", "Request", "RoundStats", "VQModels", "__version__", "load"]
