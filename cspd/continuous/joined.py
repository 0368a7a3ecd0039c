"""A round of speculative denoising in which no sequence waits for the chains of others."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cspd.continuous.rows import Conditions, ContinuousRunner, Rows, full_conditions, run_plain_round
from cspd.device import Report, send_integers
from cspd.heads.speculative import acceptance
from cspd.heads.verify import allowed_fallbacks
from cspd.request import RoundStats, Sequence, Stopwatch


class _Running:
    """The chains of all running sequences of equal settings, and the record of every slot's tokens."""

    def __init__(self, runner: ContinuousRunner, sequence: Sequence) -> None:
        self.chains = runner.tuning.fitted(runner, "target", sequence).chains_of()
        shape = (runner.num_slots, runner.config.seq_len, self.chains.num_steps)
        self.record = torch.zeros(shape, dtype=torch.int8, device=runner.device)

    def begin(self, runner: ContinuousRunner, sequences: list[Sequence], rows: Rows, z: Tensor) -> None:
        """Starts the chains of the sequences' next iteration."""
        owners = []
        for sequence, count in zip(sequences, rows.counts):
            owners += [sequence] * count
        row = rows.slot * runner.seq_len + rows.position
        self.chains.start(owners, row, rows.seed, rows.position, z, rows.scale, rows.temperature)
        for sequence, count in zip(sequences, rows.counts):
            sequence.iteration += 1
            sequence.num_under_way = count
            sequence.stats.iterations += 1
            sequence.stats.backbone_calls += 1
            sequence.stats.head_calls += 1
            sequence.stats.head_evaluations += count * len(z)

    def advance(self, runner: ContinuousRunner, sequences: list[Sequence]) -> None:
        """Launches all chains, which belong to these sequences, and commits the tokens of those that ended."""
        num_branches = 2 if sequences[0].request.guided else 1
        passes = self.chains.passes
        for sequence in sequences:
            sequence.stats.head_calls += passes
            sequence.stats.head_evaluations += passes * sequence.num_under_way * self.chains.window * num_branches
        finished = self.chains.advance()
        if finished:
            runner.tokens.view(-1, runner.config.token_dim)[finished.row] = finished.tokens
            self.record.flatten(0, 1)[finished.row] = finished.record
            for sequence, tries, fallbacks in zip(finished.owners, finished.tries, finished.fallbacks):
                sequence.stats.resample_tries += tries
                sequence.stats.fallbacks += fallbacks
                # so many come from rounding, whose effect nobody has bounded
                if sequence.stats.fallbacks > allowed_fallbacks(runner.seq_len * self.chains.num_steps):
                    sequence.stats.guarantee = "heuristic"
                sequence.num_under_way -= 1
                sequence.num_committed += 1


def run_round(
    runner: ContinuousRunner,
    batch: list[Sequence],
    watch: Stopwatch,
    backbone: Conditions = full_conditions,
) -> list[Sequence]:
    """Runs passes until three in four sequences have ended their iteration; returns the sequences that are finished.

    It computes the same as `run_plain_round` with the sampler `speculative`, but no sequence waits for the chains of
    others. Sequences that have ended their iteration begin the next one, and their chains join the running ones. So no
    head call waits for the slowest token, and a backbone call serves many sequences.
    """
    request = batch[0].request
    if request.window == 0:
        return run_plain_round(runner, batch, watch, backbone=backbone)
    shared = batch[0].shared
    if "running" not in shared:
        shared["running"] = _Running(runner, batch[0])
    running = shared["running"]
    idle = [s for s in batch if not s.num_under_way]
    if idle:
        rows = runner.next_rows(idle)
        watch.start("backbone")
        z = backbone(runner, idle, rows)
        watch.start("head")
        running.begin(runner, idle, rows, z)
    watch.start("head")
    busy = [s for s in batch if s.num_under_way]
    while 4 * len(busy) > len(batch):
        running.advance(runner, busy)
        busy = [s for s in busy if s.num_under_way]
    watch.start("other")
    finished = [s for s in batch if s.num_committed == runner.seq_len]
    if finished:
        slots = send_integers([sequence.slot for sequence in finished], runner.device)
        records = running.record[slots]
        given = runner.given(finished)
        if given is not None:  # the record there is of the slots' previous sequences
            records = records.masked_fill(given.unsqueeze(-1), 0)
        runner.token_cost[slots] = (records != 0).sum(-1).float()
        report = Report(records)
        for index, sequence in enumerate(finished):
            num_generated = sequence.request.num_generated(runner.seq_len)
            sequence.complete_stats = functools.partial(
                _count, sequence.stats, report, index, request.window, num_generated
            )
    return finished


def _count(stats: RoundStats, records: Report, index: int, window: int, num_generated: int) -> None:
    """Adds the counts of a sequence's `num_generated` chains, from the records [B, L, T]."""
    record = records.array()[index]
    stats.head_calls_per_token = float((record != 0).sum() / num_generated)
    stats.by_lag, stats.by_step = (counts.tolist() for counts in acceptance(record, window))
