"""What a run's images cost on the average, and how fast they were made."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cspd.records import MAYBE, NUMBER
from cspd.sequence import PHASES

COUNTS = ("iterations", "backbone_calls", "head_calls", "head_evaluations", "draft_backbone_calls", "bound")
STATS = {  # what is read of them, see `misfit`
    **dict.fromkeys((*COUNTS, "head_calls_per_token"), NUMBER),
    **dict.fromkeys(("alpha", "step_compression"), MAYBE),
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
    return summary | {"seconds_by_phase": {p: mean([s["seconds"][p] for s in stats]) for p in PHASES}}
