"""Plain MAR: one autoregressive iteration a round, every token by the full ancestral chain. Guarantee: exact."""

from __future__ import annotations

from collections.abc import Callable

from cspd.continuous.ancestral import ancestral
from cspd.continuous.host import MARHost, Rows
from cspd.precision import Stopwatch
from cspd.sequence import Sequence


def run_round(
    host: MARHost, batch: list[Sequence], watch: Stopwatch, trace: Callable[..., None] | None = None
) -> list[Sequence]:
    """Runs the next iteration of every sequence and returns those that are finished (arXiv 2406.11838, section 3.3).

    `trace` is told every denoising step, as in `cspd.continuous.ancestral.ancestral`.
    """
    advance(host, batch, host.next_rows(batch), watch, trace)
    return [s for s in batch if s.iteration == s.request.num_iter]


def advance(
    host: MARHost, batch: list[Sequence], rows: Rows, watch: Stopwatch, trace: Callable[..., None] | None = None
) -> None:
    """Predicts some rows of every sequence with the target alone and commits them; an iteration."""
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
        trace,
    )
    watch.start("other")
    host.commit(rows, tokens)
    host.heat[rows.slot, rows.position] = num_steps
    for sequence, count in zip(batch, rows.counts):
        sequence.iteration += 1
        sequence.num_known += count
        sequence.stats.iterations += 1
        sequence.stats.backbone_calls += 1
        sequence.stats.head_calls += num_steps
        sequence.stats.head_calls_per_token += num_steps * count / host.config.seq_len
        sequence.stats.head_evaluations += count * num_steps * len(z)
