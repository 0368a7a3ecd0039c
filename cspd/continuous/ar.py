"""Plain MAR: one autoregressive iteration a round, every token by the full ancestral chain. Guarantee: exact."""

from __future__ import annotations

from cspd.continuous.host import MARHost
from cspd.denoise import ancestral
from cspd.precision import Stopwatch
from cspd.sequence import Sequence


def round(host: MARHost, batch: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Runs the next iteration of every sequence and returns those that are finished (arXiv 2406.11838, section 3.3)."""
    rows = host.next_rows(batch)
    watch.start("backbone")
    z = host.conditions(batch, rows)
    watch.start("head")
    channels, num_steps = host.config.token_dim, batch[0].request.num_sampling_steps
    tokens = ancestral(
        host.target.head,
        z,
        rows.scale,
        rows.temperature,
        host.noise.initial(rows.seed, rows.position, channels),
        lambda t: host.noise.steps(rows.seed, rows.position, t, channels),
        num_steps,
        host.precision,
    )
    watch.start("other")
    host.commit(rows, tokens)
    for sequence, count in zip(batch, rows.counts):
        sequence.iteration += 1
        sequence.num_known += count
        sequence.stats.iterations += 1
        sequence.stats.backbone_calls += 1
        sequence.stats.head_calls += num_steps
        sequence.stats.head_evaluations += count * num_steps * len(z)
    return [s for s in batch if s.iteration == s.request.num_iter]
