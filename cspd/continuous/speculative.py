"""Speculative denoising of MAR's tokens: many steps of the head's chain a call. Guarantee: exact."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from cspd.continuous import ancestral, ar
from cspd.continuous.calibration import DRAFTS, WINDOWS, frozen
from cspd.continuous.chain_records import acceptance
from cspd.continuous.chains import Chains
from cspd.continuous.denoiser import Conditions, ContinuousHost, Denoised, denoiser, full_conditions
from cspd.continuous.draft_verify import draft_table
from cspd.continuous.rows import Rows
from cspd.option import Option, check_integer
from cspd.precision import Stopwatch
from cspd.sequence import Request, RoundStats, Sequence
from cspd.transfer import Report, send, send_integers

WINDOW = Option(
    "window",
    int,
    "denoising steps drafted ahead in the head; 0: none (default: the fastest on this device)",
    high=WINDOWS[-1],
    off=0,
    metavar="W",
)
DRAFT = Option(
    "draft",
    DRAFTS,
    "how the head's next outputs are predicted: by a fitted linear model, or as equal to the last one (frozen: no"
    " calibration, lower acceptance)",
    default="calibrated",
)
# where chains are short: here they all begin at timestep 999
REMEDY = f"give num_sampling_steps=100, or ar's chains with first_timestep={ancestral.SHORT_FIRST}"


def chains_of(host: ContinuousHost, model: str, sequence: Sequence, trace_sigma: bool = False) -> Chains:
    """Speculative chains of the host's "target" or "draft" for sequences that share a round; none is under way.

    Where there are graphs, those of the last requests that asked for the same are taken again.
    """
    make = functools.partial(_make_chains, host, model, sequence.request, trace_sigma)
    chains = host.graphs.last(f"chains of {model}, {trace_sigma=}", sequence.key, make)
    chains.clear()
    return chains


def _make_chains(host: ContinuousHost, model: str, request: Request, trace_sigma: bool) -> Chains:
    if request.draft == "frozen":
        coefficients, drift = frozen(request.num_sampling_steps)
    else:
        calibration = host.tuning.calibrations[model].get(request)
        coefficients, drift = calibration.coefficients, calibration.drift
    table = draft_table(coefficients, drift, request.num_sampling_steps, request.window, request.temperature)
    head = host.models[model].head
    table = send({"table": table}, host.device)["table"]
    drafting = model == "draft"
    return Chains(
        head,
        table,
        host.precision,
        host.noise,
        graphs=host.graphs,
        trace_sigma=trace_sigma,
        drafting=drafting,
        compiled=host.tuning.compiled,
    )


class _Running:
    """What sequences of one kind share while they run: the chains of all of them, and what these cost."""

    def __init__(self, host: ContinuousHost, sequence: Sequence) -> None:
        self.chains = chains_of(host, "target", sequence)
        shape = (host.num_slots, host.config.seq_len, sequence.request.num_sampling_steps)
        self.record = torch.zeros(shape, dtype=torch.int8, device=host.device)

    def begin(self, host: ContinuousHost, sequences: list[Sequence], rows: Rows, z: Tensor) -> None:
        """Starts the chains of the sequences' next iteration, by their first step."""
        owners = [s for s, count in zip(sequences, rows.counts) for _ in range(count)]
        row = rows.slot * host.seq_len + rows.position
        self.chains.start(owners, row, rows.seed, rows.position, z, rows.scale, rows.temperature)
        for sequence, count in zip(sequences, rows.counts):
            sequence.refresh = functools.partial(self.show, host, sequence.slot)
            sequence.iteration += 1
            sequence.num_under_way = count
            sequence.stats.iterations += 1
            sequence.stats.backbone_calls += 1
            sequence.stats.head_calls += 1
            sequence.stats.head_evaluations += count * len(z)

    def show(self, host: ContinuousHost, slot: int) -> None:
        """Writes the head calls of a slot's tokens; of those that are not made yet they mean nothing."""
        host.heat[slot] = (self.record[slot] != 0).sum(-1).float()

    def advance(self, host: ContinuousHost, sequences: list[Sequence]) -> None:
        """A launch of all chains, which are these sequences', of one head call or some; commits those that end."""
        copies = 2 if sequences[0].request.guided else 1
        rounds = self.chains.rounds
        for sequence in sequences:
            sequence.stats.head_calls += rounds
            sequence.stats.head_evaluations += rounds * sequence.num_under_way * self.chains.window * copies
        finished = self.chains.advance()
        if finished:
            host.tokens.view(-1, host.config.token_dim)[finished.row] = finished.tokens
            self.record.flatten(0, 1)[finished.row] = finished.record
            for sequence, tries, fallbacks in zip(finished.owners, finished.tries, finished.fallbacks):
                sequence.stats.resample_tries += tries
                sequence.stats.fallbacks += fallbacks
                sequence.num_under_way -= 1
                sequence.num_committed += 1


def run_round(
    host: ContinuousHost,
    batch: list[Sequence],
    watch: Stopwatch,
    backbone: Conditions = full_conditions,
) -> list[Sequence]:
    """Runs head calls until three in four sequences have ended their iteration, and returns those that are finished.

    This is plain autoregression with the denoiser `denoise` below, but that no sequence waits for the others' chains.

    Those go on to their next iteration, and their rows join the chains still under way: no call waits for the slowest
    token, and the backbone is called for many at once.
    """
    request = batch[0].request
    if request.window == 0:
        return ar.run_round(host, batch, watch, backbone=backbone)
    kept = host.kept[batch[0].key]
    if "running" not in kept:
        kept["running"] = _Running(host, batch[0])
    running = kept["running"]
    idle = [s for s in batch if not s.num_under_way]
    if idle:
        rows = host.next_rows(idle)
        watch.start("backbone")
        z = backbone(host, idle, rows)
        watch.start("head")
        running.begin(host, idle, rows, z)
    watch.start("head")
    busy = [s for s in batch if s.num_under_way]
    while 4 * len(busy) > len(batch):
        running.advance(host, busy)
        busy = [s for s in busy if s.num_under_way]
    watch.start("other")
    finished = [s for s in batch if s.iteration == s.request.num_iter and not s.num_under_way]
    if finished:
        slots = send_integers([sequence.slot for sequence in finished], host.device)
        records = running.record[slots]
        known = host.given(finished)
        if known is not None:  # the record of these is of the slots' last sequences
            records = records.masked_fill(known.unsqueeze(-1), 0)
        host.heat[slots] = (records != 0).sum(-1).float()
        report = Report(records)
        for index, sequence in enumerate(finished):
            num_made = sequence.request.num_made(host.seq_len)
            sequence.complete_stats = functools.partial(_count, sequence.stats, report, index, request.window, num_made)
    return finished


def _count(stats: RoundStats, records: Report, index: int, window: int, num_made: int) -> None:
    """Adds what the records [B, L, T] say of a sequence's chains, of which so many were run."""
    record = records.array()[index]
    stats.head_calls_per_token = float((record != 0).sum() / num_made)
    stats.by_lag, stats.by_step = (counts.tolist() for counts in acceptance(record, window))


def check(request: Request, host: ContinuousHost) -> None:
    """Raises ValueError where a window does not fit the denoising steps, or there is no noise to speculate on."""
    if request.window is not None:
        most = min(WINDOWS[-1], request.num_sampling_steps)
        check_integer("window", request.window, 0, most, "it is how many denoising steps are drafted ahead")
        if request.window and request.temperature == 0:
            raise ValueError(f"window={request.window} needs temperature > 0: without noise there are no densities")


def resolve(request: Request, host: ContinuousHost) -> Request:
    """The request with the window that is fastest for it on this device, where it leaves that open."""
    if request.window is not None:
        return request
    return request.but(**host.tuning.choice(request, host.num_slots).way)


@denoiser(
    "speculative",
    "exact",
    options=(WINDOW, DRAFT),
    needs="calibration",
    check=check,
    resolve=resolve,
    advice=functools.partial(ancestral.advice, remedy=REMEDY),
    run_round=run_round,
)
def denoise(
    host: ContinuousHost, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Speculative chains of all rows, run until the last one has ended; arguments as in `cspd.continuous.denoiser`."""
    request = rows.sequences[0].request
    if request.window == 0:
        return ancestral.denoise(host, model, rows, z, index=index, densities=densities)
    kept = host.kept[rows.sequences[0].key]
    if (model, densities) not in kept:  # their table is made once
        kept[model, densities] = chains_of(host, model, rows.sequences[0], trace_sigma=densities)
    chains = kept[model, densities]
    num = len(rows.seed)
    row = torch.arange(num, device=z.device)
    chains.start(range(num), row, rows.seed, rows.position, z, rows.scale, rows.temperature, index)
    tokens, log_sigma_last = z.new_empty(2, num, host.config.token_dim)
    record = torch.empty(num, request.num_sampling_steps, dtype=torch.int8, device=z.device)
    log_sigma = z.new_empty(num)
    while chains.owners:
        finished = chains.advance()
        if finished:
            tokens[finished.row], record[finished.row] = finished.tokens, finished.record
            log_sigma[finished.row], log_sigma_last[finished.row] = finished.log_sigma, finished.log_sigma_last
    own_calls = (record != 0).sum(1).cpu().numpy()
    evaluations = (1 + (own_calls - 1) * chains.window) * len(z)
    head_calls = np.zeros(len(rows.sequences), np.int64)
    np.maximum.at(head_calls, rows.owner, own_calls)
    return Denoised(tokens, own_calls, head_calls, evaluations, log_sigma, log_sigma_last)
