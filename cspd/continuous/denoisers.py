"""All denoisers: importing them gives them their names, in this order."""

from __future__ import annotations

from cspd.continuous import ancestral, calibrated, speculative

__all__ = ["ancestral", "calibrated", "speculative"]
