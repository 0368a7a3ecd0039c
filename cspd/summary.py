"""What a run's images cost on the average, and how fast they were made."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from cspd.records import MAYBE, NUMBER
from cspd.sequence import PHASES

COUNTS = ("iterations", "backbone_calls", "head_calls", "head_evaluations", "draft_backbone_calls", "bound")
MEASURED = ("difference", "divergence", "audit", "audit_error")  # of a "measured" sampler
WORTH = 1.05  # a run that is fewer times as fast as plain sampling has no speed-up
LAZY = "lazy_backbone_calls"
MEASURES = {f"{name}?": MAYBE for name in MEASURED}  # older versions' files have none
ADDED = MEASURES | {f"{LAZY}?": NUMBER}  # the same of images
STATS = {  # what is read of them, see `misfit`
    **dict.fromkeys((*COUNTS, "head_calls_per_token"), NUMBER),
    **dict.fromkeys(("alpha", "step_compression"), MAYBE),
    **ADDED,
    "guarantee": str,
    "committed": {str: int},
    "seconds": dict.fromkeys(PHASES, NUMBER),
}


def summary_of(stats: Sequence[dict], made: int, seconds: float) -> dict:
    """Means of images' statistics (`RoundStats.to_dict`), and the speed of the `made` ones of this run."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    summary = {
        "guarantee": stats[0]["guarantee"],
        "images_made": made,
        "seconds": seconds,
        "images_per_second": made / seconds,
    }
    summary |= {f"{name}_per_image": mean([s[name] for s in stats]) for name in COUNTS}
    summary[f"{LAZY}_per_image"] = mean([s.get(LAZY, 0) for s in stats])
    compressions = [s["step_compression"] for s in stats if s["step_compression"] is not None]
    if compressions:
        summary["step_compression"] = mean(compressions)
        rounds: dict[int, int] = {}
        for n, count in (pair for s in stats for pair in s["committed"].items()):
            rounds[int(n)] = rounds.get(int(n), 0) + count
        summary["rounds_by_codes_committed"] = dict(sorted(rounds.items()))
        bounds = [s["bound"] for s in stats]
        summary["bound_standard_error"] = statistics.stdev(bounds) / len(bounds) ** 0.5 if len(bounds) > 1 else None
    alphas = [s["alpha"] for s in stats if s["alpha"] is not None]
    summary |= {"alpha": mean(alphas) if alphas else None}
    summary["head_calls_per_token"] = mean([s["head_calls_per_token"] for s in stats])
    summary |= measured(stats)
    return summary | {"seconds_by_phase": {p: mean([s["seconds"][p] for s in stats]) for p in PHASES}}


def measured(stats: Sequence[Mapping]) -> dict[str, float | None]:
    """Means over images of what was measured of their sampler, `MEASURED`; None of what was not.

    `audit_error` is the standard error of the mean audit: by the images' spread, which has all that differs between
    them, or of a single image its own.
    """
    values = {name: [each[name] for each in stats if each.get(name) is not None] for name in MEASURED}
    means = {name: statistics.fmean(found) if found else None for name, found in values.items()}
    audits = values["audit"]
    if len(audits) > 1:
        means["audit_error"] = statistics.stdev(audits) / len(audits) ** 0.5
    return means


def measured_lines(summary: Mapping) -> list[tuple[str, str, str]]:
    """What a summary says was measured of a sampler, for people: (title, value, what it is) each."""
    meanings = {
        "difference": "s.d. of a token (r.m.s.) from the full chain's of the same condition and noise, held-out",
        "divergence": "nats per token, of its chain from the full one of the same condition, held-out",
        "audit": "nats per token, the divergence estimated on these images",
    }
    if summary.get("audit_error") is not None:
        meanings["audit"] = f"+- {summary['audit_error']:.3f} {meanings['audit']}, and its standard error"
    known = [name for name in meanings if summary.get(name) is not None]
    return [(name, f"{summary[name]:.3f}", meanings[name]) for name in known]


def speed_line(summary: Mapping, at_once: int) -> str | None:
    """What a summary says of a run's speed against plain sampling, for people; None if it says nothing."""
    speedup = summary.get("speedup")
    if speedup is None:
        why = summary.get("speedup_unknown")
        return why and f"the speed-up over plain sampling (ar) is not known: {why}"
    faster = f"{speedup:.1f}x as fast as plain sampling (ar)"
    if speedup >= WORTH:
        return faster
    images = "1 image" if at_once == 1 else f"{at_once} images"
    told = f"no speed-up with {images} at once on this device"
    if speedup < 1 / WORTH:
        told = f"{faster}: {told}"
    other = summary["alternative"]
    if other is None:
        return told
    method = f"`--method {other['method']}`"
    if other["difference"] is None:
        return f"{told}; {method} may give one, once it is fitted for these settings (cspd calibrate)"
    difference = f"at a difference of {other['difference']:.2g} s.d. per token"
    if other["speedup"] is None:
        return f"{told}; {method} may give one, {difference}"
    if other["speedup"] < WORTH:
        return f"{told}, nor by {method}"
    return f"{told}; {method} is {other['speedup']:.1f}x, {difference}"
