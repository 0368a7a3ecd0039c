"""The means of a run's statistics, and its speed, for records and for people."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from cspd.files import NUMBER
from cspd.request import PHASES

COUNTS = ("iterations", "backbone_calls", "head_calls", "head_evaluations", "draft_backbone_calls", "bound")
MEASURED = (  # of a method whose guarantee is "approximate"
    "difference",
    "difference_error",
    "difference_worst_percent",
    "difference_worst",
    "divergence",
    "divergence_error",
    "audit",
    "audit_error",
)
WORTH = 1.05  # times as fast as baseline sampling: below, there is no speed-up
SPEED = ("speedup", "speedup_range", "speedup_unknown", "plain_seconds_per_image", "alternative")  # of a summary
LAZY = "lazy_backbone_calls"


OPTIONAL = (*NUMBER, type(None))
STATS = {  # the parts of an image's statistics that summaries read
    "guarantee": str,
    "head_calls_per_token": NUMBER,
    "seconds": {str: NUMBER},
    "committed?": {str: int},
    **{f"{name}?": NUMBER for name in (*COUNTS, LAZY)},
    **{f"{name}?": OPTIONAL for name in ("step_compression", "alpha", *MEASURED)},
    "largest_token?": OPTIONAL,
}


SUMMARY = {  # the parts of a `summary_of` that reports read
    "guarantee": str,
    "images_made": int,
    **{name: NUMBER for name in ("seconds", "images_per_second", *[f"{name}_per_image" for name in COUNTS])},
    "head_calls_per_token": NUMBER,
}


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean of independent values, or None if there is only one."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / len(values) ** 0.5


def summary_of(stats: Sequence[dict], generated: int, seconds: float) -> dict:
    """Means of images' statistics (`RoundStats.to_dict`), and the speed of the `generated` images of this run.

    Statistics of older versions may lack `LAZY` and `MEASURED`.
    """
    guarantees = [each["guarantee"] for each in stats]
    summary = {
        # an image may have a weaker one than its settings promise
        "guarantee": next((own for own in guarantees if own != guarantees[0]), guarantees[0]),
        "images_made": generated,
        "seconds": seconds,
        "images_per_second": generated / seconds,
    }
    for name in (*COUNTS, LAZY):
        total = sum(image.get(name, 0) for image in stats)
        summary[f"{name}_per_image"] = total / len(stats)
    # VQ models only: tokens per forward pass, and the bound, which is a mean over images
    compression = _mean_of(stats, "step_compression")
    if compression is not None:
        summary["step_compression"] = compression
        summary["rounds_by_codes_committed"] = _rounds_by_tokens(stats)
        summary["bound_standard_error"] = standard_error([image.get("bound", 0) for image in stats])
    summary["alpha"] = _mean_of(stats, "alpha")
    summary["head_calls_per_token"] = _mean_of(stats, "head_calls_per_token")
    summary |= measured(stats)
    phases = [image["seconds"] for image in stats]
    summary["seconds_by_phase"] = {phase: _mean_of(phases, phase) for phase in PHASES}
    return summary


def _mean_of(stats: Sequence[Mapping], name: str) -> float | None:
    """The mean over the images that have a value, or None if no image has one."""
    values = [image[name] for image in stats if image.get(name) is not None]
    return statistics.fmean(values) if values else None


def _rounds_by_tokens(stats: Sequence[dict]) -> dict[int, int]:
    """The number of rounds, by how many tokens a round committed."""
    rounds: Counter[int] = Counter()
    for image in stats:
        for tokens, count in image.get("committed", {}).items():
            rounds[int(tokens)] += count  # JSON has strings as keys
    return dict(sorted(rounds.items()))


def measured(stats: Sequence[Mapping]) -> dict[str, float | None]:
    """Means over images of the values in `MEASURED`; None for values that were not measured.

    `audit_error` is the standard error of the mean audit. With several images it comes from their spread, which covers
    all differences between them; a single image has its own estimate.
    """
    means = {name: _mean_of(stats, name) for name in MEASURED}
    # the error that a single image has for its own tokens misses how images differ
    audits = [image["audit"] for image in stats if image.get("audit") is not None]
    if len(audits) > 1:
        means["audit_error"] = standard_error(audits)
    return means


def measured_lines(summary: Mapping) -> list[tuple[str, str, str]]:
    """The measured values of a summary, for people: (title, value, meaning) each."""

    def error_of(name: str) -> str:
        error = summary.get(f"{name}_error")
        return "" if error is None else f"+- {error:.3f} "

    lines = []
    if summary.get("difference") is not None:
        meaning = "s.d. of a token (r.m.s.) from the full chain's of the same condition and noise, held-out"
        lines.append(("difference", f"{summary['difference']:.3f}", error_of("difference") + meaning))
    if summary.get("difference_worst") is not None:
        meaning = f"s.d. or more for 1 % of these tokens, and {summary['difference_worst']:.3f} for the worst one"
        lines.append(("worst tokens", f"{summary['difference_worst_percent']:.3f}", meaning))
    if summary.get("audit") is not None:
        meaning = f"{error_of('audit')}nats per token, the divergence from baseline sampling, estimated on these images"
        lines.append(("audit", f"{summary['audit']:.3f}", meaning))
    if summary.get("audit_difference") is not None:
        meaning = "s.d. of a token (r.m.s.) from an exact one of the same noise, on these images"
        lines.append(("audit difference", f"{summary['audit_difference']:.3f}", meaning))
    return lines


def speed_line(summary: Mapping, at_once: int) -> str | None:
    """The speed of a run relative to baseline sampling, for people, or None if the summary lacks it."""
    speedup = summary.get("speedup")
    if speedup is None:
        why = summary.get("speedup_unknown")
        return why and f"the speed-up over baseline sampling (ar) is not known: {why}"
    low, high = summary.get("speedup_range") or (speedup, speedup)  # older versions measured no range
    line = f"{speedup:.1f}x"
    if f"{low:.1f}" != f"{high:.1f}":
        line += f" ({low:.1f} to {high:.1f})"
    line += " as fast as baseline sampling (ar)"
    if speedup >= WORTH and low > 1:
        return line
    noun = "image" if at_once == 1 else "images"
    nothing = f"no speed-up with {at_once} {noun} at once on this device"
    line = nothing if low == high == 1 else f"{line}: {nothing}"
    if summary.get("alternative") == "calibrated":
        line += "; `--method calibrated` may give one, with a measured error"
    return line
