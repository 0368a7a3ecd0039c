"""cspd: fast sampling of autoregressive image models, with tested guarantees.

>>> engine = cspd.load("digits32")
>>> engine.sample("three", seed=7).save("three.png")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cspd.terminal import __version__

if TYPE_CHECKING:  # the names of HOMES, for those who check types
    from cspd.causal.family import CausalModels
    from cspd.checkpoints import load
    from cspd.discrete.family import VQModels
    from cspd.engine import Engine
    from cspd.masked.family import MARModels
    from cspd.method import register
    from cspd.pipeline import CspdPipeline
    from cspd.request import Output, Request, RoundStats, grid
    from cspd.seams import accelerate

__all__ = [
    "CausalModels",
    "CspdPipeline",
    "Engine",
    "MARModels",
    "Output",
    "Request",
    "RoundStats",
    "VQModels",
    "__version__",
    "accelerate",
    "grid",
    "load",
    "register",
]
HOMES = {  # the module of each name
    "CausalModels": "cspd.causal.family",
    "CspdPipeline": "cspd.pipeline",
    "Engine": "cspd.engine",
    "MARModels": "cspd.masked.family",
    "Output": "cspd.request",
    "Request": "cspd.request",
    "RoundStats": "cspd.request",
    "VQModels": "cspd.discrete.family",
    "accelerate": "cspd.seams",
    "grid": "cspd.request",
    "load": "cspd.checkpoints",
    "register": "cspd.method",
}


def __getattr__(name: str) -> object:
    """Imports a name on first use: torch takes seconds to import, and many commands do not need it."""
    if name == "ray":  # its library is an extra
        return importlib.import_module("cspd.ray")
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("cspd.checkpoints")  # imports every family, which registers its methods and options
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    """For completion in a notebook, before anything is imported."""
    return __all__
