"""All denoisers: importing them gives them their names, in this order."""

from __future__ import annotations

from cspd.continuous import ancestral, annealed, cached_head, calibrated, frequency_weighted, solvers, speculative

__all__ = ["ancestral", "annealed", "cached_head", "calibrated", "frequency_weighted", "solvers", "speculative"]
