"""The methods by name, each with the guarantee it gives; `cspd methods` prints this table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cspd.continuous import ar, cspd, speculative
from cspd.sequence import Request


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        family: "MAR" or "VQ", the models it decodes.
        guarantee: "exact" (the output has the target sampler's distribution, to floating point), "bounded" (a stated
            bound on the total variation from it is reported) or "heuristic" (no proof).
        summary: what it does, in a few words. paper: where it comes from.
        needs: beside the target: "draft model", "calibration", or nothing.
        options: the request's fields that only some methods have, with their defaults.
        round: runs one batched round, (host, batch, stopwatch) -> finished sequences; None while planned.
    """

    name: str
    family: str
    guarantee: str
    summary: str
    paper: str
    needs: str = "-"
    options: Mapping[str, object] = field(default_factory=dict)
    round: Callable | None = None


_TABLE = [
    Method(
        "ar", "MAR", "exact", "plain MAR: every token by the full denoising chain", "arXiv 2406.11838", round=ar.round
    ),
    Method(
        "speculative",
        "MAR",
        "exact",
        "speculation inside the diffusion head, no draft model",
        "arXiv 2501.05370",
        needs="calibration",
        options={"window": None, "draft": "calibrated"},
        round=speculative.round,
    ),
    Method(
        "cspd",
        "MAR",
        "heuristic",
        "a draft MAR proposes tokens, the target accepts or resamples",
        "arXiv 2411.11925",
        needs="draft model",
        options={
            "gamma": 8,
            "verify": "parallel",
            "ratio_temperature": 42.0,
            "align": True,
            "prefill": 0.05,
            "chains": "ancestral",
            "window": None,
            "draft": "calibrated",
        },
        round=cspd.round,
    ),
    Method(
        "sd",
        "VQ",
        "exact",
        "speculative sampling, chain or tree, with a draft model or EAGLE",
        "arXiv 2401.15077",
        needs="draft model",
    ),
    Method("sjd", "VQ", "exact", "speculative Jacobi decoding, no draft model", "arXiv 2410.01699"),
    Method("sjd-pac", "VQ", "exact", "Jacobi with proactive drafting and adaptive continuation", "SJD-PAC"),
    Method("uniform-rsd", "VQ", "bounded", "acceptance relaxed by a constant", "COOL-SD"),
    Method("cool-sd", "VQ", "bounded", "acceptance relaxed by a decaying schedule", "COOL-SD"),
    Method(
        "lantern", "VQ", "bounded", "acceptance pooled over near codebook entries (and LANTERN++)", "arXiv 2410.03355"
    ),
]

TABLE: dict[str, Method] = {method.name: method for method in _TABLE}
METHODS: dict[str, Method] = {name: method for name, method in TABLE.items() if method.round}
DEFAULT = "speculative"


def with_method(request: Request, name: str) -> Request:
    """The request by another method, without the options that this one does not have."""
    others = {option for method in _TABLE for option in method.options} - set(TABLE[name].options)
    if name == "cspd" and request.chains != "speculative":
        others |= {"window"}
    return dataclasses.replace(request, method=name, **dict.fromkeys(others))


def format_table() -> str:
    """The table of methods as text, planned ones marked."""
    lines = [f"{'method':<12} {'models':<7} {'guarantee':<10} {'needs':<12} {'status':<8} what it does (source)"]
    for method in _TABLE:
        status = "ready" if method.round else "planned"
        lines.append(
            f"{method.name:<12} {method.family:<7} {method.guarantee:<10} {method.needs:<12} {status:<8}"
            f" {method.summary} ({method.paper})"
        )
    return "\n".join(lines)
