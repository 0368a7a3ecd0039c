"""Plain MAR: one autoregressive iteration a round, by any backbone and denoiser.

`ar` itself, by the full ancestral chain of every token, is what all others are measured against. Guarantee: exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cspd.continuous import ancestral
from cspd.continuous.denoiser import Conditions, ContinuousHost, Denoised, full_conditions
from cspd.continuous.rows import Rows
from cspd.precision import Stopwatch
from cspd.sequence import Sequence
from cspd.transfer import send


def run_round(
    host: ContinuousHost,
    batch: list[Sequence],
    watch: Stopwatch,
    *,
    backbone: Conditions = full_conditions,
    denoise: Callable[..., Denoised] = ancestral.denoise,
) -> list[Sequence]:
    """Runs the next iteration of every sequence and returns those that are finished (arXiv 2406.11838, section 3.3)."""
    advance(host, batch, host.next_rows(batch), watch, backbone, denoise)
    return [s for s in batch if s.num_committed == host.seq_len]


def advance(
    host: ContinuousHost,
    batch: list[Sequence],
    rows: Rows,
    watch: Stopwatch,
    backbone: Conditions = full_conditions,
    denoise: Callable[..., Denoised] = ancestral.denoise,
) -> None:
    """Predicts some rows of every sequence with the target alone and commits them; an iteration."""
    watch.start("backbone")
    z = backbone(host, batch, rows)
    watch.start("head")
    made = denoise(host, "target", rows, z)
    watch.start("other")
    host.commit(rows, made.tokens)
    sent = send({"calls": made.calls.astype(np.float32)}, host.device)
    host.heat[rows.slot, rows.position] = sent["calls"]
    if made.measured and made.measured.audit is not None:
        host.audit[rows.slot, rows.position] = made.measured.audit

    first = 0
    head_calls = made.head_calls_by_sequence(len(batch))
    for sequence, count, own_calls in zip(batch, rows.counts, head_calls):
        own = slice(first, first + count)
        first += count
        sequence.iteration += 1
        sequence.num_committed += count
        num_made = sequence.request.num_made(host.seq_len)
        stats = sequence.stats
        stats.iterations += 1
        stats.backbone_calls += 1
        stats.head_calls += own_calls
        stats.head_calls_per_token += made.calls[own].sum().item() / num_made
        stats.head_evaluations += made.evaluations[own].sum().item()
        if made.measured:
            stats.difference, stats.divergence = made.measured.difference, made.measured.divergence
            if made.measured.audit is not None and sequence.num_committed == host.seq_len:
                made_at = host.order[sequence.slot, -num_made:].sort().values
                audit = host.audit[sequence.slot, made_at]
                estimate = audit.mean().item(), (audit.std() / num_made**0.5).item()
                if all(map(math.isfinite, estimate)):
                    stats.audit, stats.audit_error = estimate
