"""The methods by name, each with the guarantee it gives; `cspd methods` prints this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cspd.continuous import ar


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        family: "MAR" or "VQ", the models it decodes.
        guarantee: "exact" (the output has the target sampler's distribution, to floating point), "bounded" (a stated
            bound on the total variation from it is reported) or "heuristic" (no proof).
        summary: what it does, in a few words. paper: where it comes from.
        round: runs one batched round, (host, batch, stopwatch) -> finished sequences; None while planned.
    """

    name: str
    family: str
    guarantee: str
    summary: str
    paper: str
    round: Callable | None = None


_TABLE = [
    Method("ar", "MAR", "exact", "plain MAR: every token by the full denoising chain", "arXiv 2406.11838", ar.round),
    Method("speculative", "MAR", "exact", "speculation inside the diffusion head, no draft model", "arXiv 2501.05370"),
    Method("cspd", "MAR", "heuristic", "continuous speculative decoding with a draft MAR", "arXiv 2411.11925"),
    Method("sd", "VQ", "exact", "speculative sampling, chain or tree, with a draft model or EAGLE", "arXiv 2401.15077"),
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


def format_table() -> str:
    """The table of methods as text, planned ones marked."""
    lines = [f"{'method':<12} {'models':<7} {'guarantee':<10} {'status':<8} what it does (source)"]
    for method in _TABLE:
        status = "ready" if method.round else "planned"
        lines.append(
            f"{method.name:<12} {method.family:<7} {method.guarantee:<10} {status:<8} {method.summary} ({method.paper})"
        )
    return "\n".join(lines)
