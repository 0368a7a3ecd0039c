"""Plain MAR: one autoregressive iteration a round. It has three axes, and a method is a choice on each of them.

* schedule: which tokens when, `cspd.continuous.schedule`.
* backbone: how their conditions z are computed; `MARHost.conditions` evaluates the whole transformer.
* denoiser: how a token is drawn from z, `cspd.continuous.denoiser`.

`ar` itself, by the full ancestral chain of every token, is what all others are measured against. Guarantee: exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cspd.continuous import ancestral
from cspd.continuous.denoiser import Denoiser
from cspd.continuous.host import MARHost, Rows
from cspd.continuous.schedule import Schedule, cosine
from cspd.method import Method
from cspd.precision import Stopwatch
from cspd.sequence import Sequence

Backbone = Callable[[MARHost, list[Sequence], Rows], Tensor]
MIXED = ("num_iter", "cfg", "cfg_schedule", "temperature")  # may differ between the rows of an ancestral chain


def run_round(
    host: MARHost,
    batch: list[Sequence],
    watch: Stopwatch,
    *,
    schedule: Schedule = cosine,
    backbone: Backbone = MARHost.conditions,
    denoise: Denoiser = ancestral.denoise,
) -> list[Sequence]:
    """Runs the next iteration of every sequence and returns those that are finished (arXiv 2406.11838, section 3.3)."""
    advance(host, batch, host.next_rows(batch, schedule), watch, backbone, denoise)
    return [s for s in batch if s.num_known == host.seq_len]


def advance(
    host: MARHost,
    batch: list[Sequence],
    rows: Rows,
    watch: Stopwatch,
    backbone: Backbone = MARHost.conditions,
    denoise: Denoiser = ancestral.denoise,
) -> None:
    """Predicts some rows of every sequence with the target alone and commits them; an iteration."""
    watch.start("backbone")
    z = backbone(host, batch, rows)
    watch.start("head")
    made = denoise(host, "target", rows, z)
    watch.start("other")
    host.commit(rows, made.tokens)
    host.heat[rows.slot, rows.position] = torch.as_tensor(made.calls, dtype=torch.float32, device=host.device)

    first = 0
    for sequence, count in zip(batch, rows.counts):
        own = slice(first, first + count)
        first += count
        sequence.iteration += 1
        sequence.num_known += count
        stats = sequence.stats
        stats.iterations += 1
        stats.backbone_calls += 1
        stats.head_calls += made.head_calls
        stats.head_calls_per_token += made.calls[own].sum().item() / host.seq_len
        stats.head_evaluations += made.evaluations[own].sum().item() * len(z)


METHOD = Method(
    name="ar",
    family="MAR",
    guarantee="exact",
    summary="plain sampling: every token by the full denoising chain",
    papers={"2406.11838": "Autoregressive Image Generation without Vector Quantization"},
    run_round=run_round,
    mixed=MIXED,
    heat="calls",
)
