"""cspd: fast sampling of autoregressive image models, with tested guarantees.

>>> engine = cspd.load("digits32")
>>> engine.sample(["three", 7], seed=7)[0].save("three.png")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cspd.version import __version__

if TYPE_CHECKING:
    from cspd.continuous.models import MARModels
    from cspd.discrete.models import VQModels
    from cspd.engine import Engine
    from cspd.loading import load
    from cspd.methods import register
    from cspd.sequence import Output, Request, RoundStats

__all__ = ["Engine", "MARModels", "Output", "Request", "RoundStats", "VQModels", "__version__", "load", "register"]
HOMES = {
    "Engine": "cspd.engine",
    "MARModels": "cspd.continuous.models",
    "Output": "cspd.sequence",
    "Request": "cspd.sequence",
    "RoundStats": "cspd.sequence",
    "VQModels": "cspd.discrete.models",
    "load": "cspd.loading",
    "register": "cspd.methods",
}


def __getattr__(name: str) -> object:
    """Imports what is asked for, on first use: torch takes seconds, in which the command line can be stopped."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("cspd.loading")  # the families of models register their methods and options
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    """For completion in a notebook, before anything is imported."""
    return __all__
