"""Plain sampling of VQ codes: one target forward, one code a round. Guarantee: exact."""

from __future__ import annotations

import torch
from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.discrete.host import VQHost
from cspd.discrete.probabilities import sample
from cspd.discrete.rounds import count_round, launch
from cspd.precision import Stopwatch
from cspd.sequence import Sequence
from cspd.vq.steps import steps


def run_round(host: VQHost, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Draws the next code of every sequence and returns those that are finished; nothing is copied to the host."""
    launch(host, sequences, watch, _sample)
    for sequence in sequences:
        count_round(sequence, committed=1)
    return [sequence for sequence in sequences if sequence.num_committed == host.seq_len]


def _sample(host: VQHost, batch: Batch) -> Tensor:
    """Draws and commits the next codes: one target forward. No draft was accepted: [B, 1]."""
    here = steps(1, host.device)
    features = host.features(batch, host.last(batch, 1)[0])
    P = host.distributions(batch, features)
    codes = sample(P, host.drawn(batch, here))
    no_draft = torch.zeros_like(codes, dtype=torch.float32)
    host.commit(batch, codes, no_draft)
    return no_draft
