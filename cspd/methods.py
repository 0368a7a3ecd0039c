"""The list of methods. `cspd.lookup` answers questions on it."""

from __future__ import annotations

import cspd.discrete.ar
from cspd.continuous import ar, cspd_method
from cspd.continuous import published as samplers
from cspd.continuous.host import MAR_OPTIONS
from cspd.discrete import jacobi, published
from cspd.discrete.options import VQ_OPTIONS
from cspd.method import Method
from cspd.option import Option

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
    published.SD,
    published.EAGLE,
    published.EAGLE2,
    published.UNIFORM_RSD,
    published.COOL_SD,
    published.LANTERN,
    published.LANTERN_PLUS,
    jacobi.SJD,
    jacobi.SJD_PAC,
]
COMMON: dict[str, tuple[Option, ...]] = {"MAR": MAR_OPTIONS, "VQ": VQ_OPTIONS}  # options of all methods of a family
EMBEDDED = {"MAR": "digits32", "VQ": "digits32_vq"}  # the checkpoint of each family that comes with cspd
DEFAULTS = {"MAR": "speculative", "VQ": "sjd-pac"}
