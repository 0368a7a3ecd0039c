"""What `cspd tune` tries: the methods, with those of their settings that trade quality for speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cspd.comparison.study import Configuration
from cspd.comparison.study_file import expand
from cspd.lookup import guarantee_of, with_method
from cspd.sequence import Request

ITERATIONS = [8, 16, 32, 64]
SEARCHED: dict[str, list[dict]] = {  # entries as a study's file has them
    "MAR": [
        {"method": "ar"},
        {"method": "speculative"},
        {"method": "calibrated", "head_calls": [8, 10, 12, 16, 25]},
        {"method": "disa"},
        {"method": "ddim", "head_calls": 10},
        {"method": "ddim", "head_calls": [10, 16], "grid": "planned"},
        {"method": "dpm-solver++", "head_calls": 10},
        {"method": "dpm-solver++", "head_calls": 10, "grid": "planned"},
        {"method": "lazymar"},
        {"method": "lazymar", "denoiser": "calibrated"},
        {"method": "gtr"},
        {"method": "gtr", "denoiser": "calibrated"},
    ],
    "VQ": [
        {"method": "speculative"},
        {"method": "sd", "gamma": [3, 5]},
        {"method": "eagle"},
        {"method": "eagle2"},
        {"method": "sjd"},
        {"method": "mc-sjd"},
        {"method": "sjd-pac"},
        {"method": "uniform-rsd"},
        {"method": "cool-sd", "delta": [1.1, 1.5]},
        {"method": "lantern"},
        {"method": "lantern++"},
        {"method": "gsd"},
    ],
}
WINDOWS: dict[str, list[dict]] = {  # beside them, where the window is all there is to choose
    "MAR": [{"method": "speculative", "window": [4, 8, 16, 24]}],
    "VQ": [{"method": "sjd", "window": [8, 16, 32]}, {"method": "sjd-pac", "window": [16, 32]}],
}


def candidates(plain: Configuration, divergence: float | None) -> tuple[list[Configuration], dict[str, str]]:
    """Configurations that might be better than plain sampling, and the reasons for those that are left out, by name.

    Args:
        plain: plain sampling by the user's own settings, which candidates share as far as they have them.
        divergence: None, and all are tried, with other numbers of iterations too. Otherwise only those that are known
            to be near `plain`: exact ones and, unless it is 0, measured ones. No guarantee covers another number of
            iterations, so that this stays.
    """
    usual = plain.engine.check(plain.request)
    entries = SEARCHED[usual.family]
    if divergence is not None:
        entries = [*entries, *WINDOWS[usual.family]]
    elif usual.num_iter is not None:
        length = plain.engine.host.seq_len
        iterations = sorted({usual.num_iter, *(number for number in ITERATIONS if number <= length)})
        entries = [{"method": entry["method"], "num_iter": iterations, **entry} for entry in entries]

    found, left_out, there = [], {}, [usual]
    for name, settings in [each for entry in entries for each in expand(entry)]:
        try:
            row = replace(plain, name=name, request=_request(plain.request, settings))
            request = row.engine.check(row.request)
        except ValueError as error:  # such as a method that needs a draft model
            left_out[name] = str(error)
            continue
        near = divergence is None or guarantee_of(request) in (("exact", "measured") if divergence else ("exact",))
        if near and request not in there:
            found.append(row)
            there.append(request)
    return found, left_out


def _request(plain: Request, settings: Mapping[str, object]) -> Request:
    """Plain sampling's request, with a candidate's settings. Raises ValueError where these models lack the method."""
    return with_method(plain, str(settings["method"])).but(**settings)
