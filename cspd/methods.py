"""The list of methods, and how to add one's own. `cspd.lookup` answers questions on it."""

from __future__ import annotations

import cspd.discrete.ar
import cspd.discrete.speculative
from cspd.continuous import ar, cspd_method
from cspd.continuous import published as samplers
from cspd.discrete import published
from cspd.families import COMMON
from cspd.method import GUARANTEES, Method

METHODS: list[Method] = [
    ar.METHOD,
    samplers.SPECULATIVE,
    samplers.CALIBRATED,
    samplers.DISA,
    samplers.DDIM,
    samplers.DPM_SOLVER,
    samplers.GTR,
    samplers.LAZYMAR,
    cspd_method.METHOD,
    cspd.discrete.ar.METHOD,
    cspd.discrete.speculative.METHOD,
    published.SD,
    published.EAGLE,
    published.EAGLE2,
    published.UNIFORM_RSD,
    published.COOL_SD,
    published.LANTERN,
    published.LANTERN_PLUS,
    published.SJD,
    published.MC_SJD,
    published.SJD_PAC,
    published.GSD,
]
_BUILT_IN = tuple(METHODS)


def register(method: Method) -> None:
    """Adds a method of one's own: requests, studies and the command line (`--plugin`) have it from then on.

    One that was registered under the same name before is replaced, as where a notebook's cell is run twice.

    Raises:
        TypeError: it is no `Method`. ValueError: cspd has one of this name, or its family or guarantee is unknown.
    """
    if not isinstance(method, Method):
        raise TypeError(f"{method!r} is no method: give a cspd.method.Method, as sampling() or drafting() make them")
    for what, known in (("family", COMMON), ("guarantee", GUARANTEES)):
        if getattr(method, what) not in known:
            raise ValueError(
                f"method {method.name!r}: {what}={getattr(method, what)!r}: choose one of {', '.join(known)}"
            )
    same = [each for each in METHODS if (each.name, each.family) == (method.name, method.family)]
    if same and same[0] in _BUILT_IN:
        raise ValueError(f"method {method.name!r} is one of cspd's for {method.family}: give yours another name")
    METHODS[:] = [each for each in METHODS if each not in same] + [method]
