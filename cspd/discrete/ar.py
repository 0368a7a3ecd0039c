"""Plain sampling of VQ codes: one target forward, one code a round. Guarantee: exact."""

from __future__ import annotations

import torch
from torch import Tensor

from cspd.discrete.batch import Batch, count_round
from cspd.discrete.host import MIXED, VQHost
from cspd.discrete.probabilities import sample
from cspd.method import Method
from cspd.precision import Stopwatch
from cspd.sequence import Sequence
from cspd.vq.steps import steps


def run_round(host: VQHost, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Draws the next code of every sequence and returns those that are finished; nothing is copied to the host."""
    host.run(sequences, watch, _sample)
    for sequence in sequences:
        count_round(sequence, committed=1)
    return [sequence for sequence in sequences if sequence.num_known == host.seq_len]


def _sample(host: VQHost, batch: Batch) -> Tensor:
    """Draws and commits the next codes [B, 1]: one target forward."""
    here = steps(1, host.device)
    features = host.features(batch, host.last(batch, 1)[0])
    P = host.distributions(batch, features)
    codes = sample(P, host.drawn(batch, here))
    host.commit(batch, codes, torch.zeros_like(codes, dtype=torch.float32))
    return codes


METHOD = Method(
    name="ar",
    family="VQ",
    guarantee="exact",
    summary="plain sampling: one code a forward",
    papers={"2406.06525": "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation"},
    run_round=run_round,
    mixed=lambda request: MIXED,
)
