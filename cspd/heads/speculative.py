"""Speculative denoising: many steps of the head's chain for one call. Guarantee: exact."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cspd.device import Precision, Report, send, send_integers
from cspd.graphs import Graphs, bucket
from cspd.heads.calibration import DRAFTS, WINDOWS, draft_table, frozen
from cspd.heads.chain import (
    SHORT_FIRST,
    Conditions,
    ContinuousRunner,
    Denoised,
    Rows,
    Schedule,
    ancestral_advice,
    denoise_ancestral,
    denoiser,
    full_conditions,
    run_plain_round,
)
from cspd.heads.verify import (
    FIRST_BLOCK,
    LOG_SIGMA_P,
    MAX_TRIES,
    MEAN_P,
    MOVING,
    NOBODY,
    PHASE,
    SEARCHING,
    UNRESOLVED,
    Slots,
    capacity_for,
    draw_after_block,
    draw_residual,
    first_step,
    lookup,
    move_on,
    table_size,
)
from cspd.noise import DRAFT_OFFSET
from cspd.option import Option, check_integer
from cspd.request import Request, RoundStats, Sequence, Stopwatch
from mar.head import Head, fill

# A chain that has ended: its token, and a record of its passes.


@dataclass(frozen=True)
class Finished:
    """N chains that ended in a launch.

    Attributes:
        owners, row: as given to `Chains.start`; row is int64 [N]. tokens: [N, d].
        record: int8 [N, T]: at the step where a pass began, the number of steps it decided, negative if the last of
            them was resampled; 0 elsewhere. Each is one head call; the first, ancestral one at T - 1 counts as 1 step.
        tries: residual candidates drawn for each chain; fallbacks: how often all of them were rejected.
        log_sigma: [N], if traced, log sigma_p summed over channels and steps T - 1 .. 1. log_sigma_last: [N, d], at 0.
    """

    owners: list
    row: Tensor
    tokens: Tensor
    record: Tensor
    tries: list[int]
    fallbacks: list[int]
    log_sigma: Tensor
    log_sigma_last: Tensor


def acceptance(record: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of drafted states that were verified, and accepted: int64 [2, window] by lag from 1, and [2, T] by step.

    Args:
        record: int8 [N, T] of finished chains, see `Finished`.
    """
    num_steps = record.shape[1]
    _, begin = record.nonzero()
    by_call = record[record != 0].astype(np.int64)[:, None]
    num_decided = np.abs(by_call)
    was_resampled = by_call < 0
    lag = np.arange(1, window + 1)
    step = begin[:, None] - lag + 1
    drafted = (begin < num_steps - 1)[:, None] & (step > 0)  # the first step is ancestral; step 0 is not verified
    verified = drafted & (lag <= num_decided)
    accepted = verified & ~(was_resampled & (lag == num_decided))
    by_lag = np.stack([verified.sum(0), accepted.sum(0)])
    by_step = np.stack([np.bincount(step[which], minlength=num_steps) for which in (verified, accepted)])
    return by_lag, by_step


# Speculative denoising: the head's chain in fewer head calls, with exactly the ancestral chain's distribution.
#
# `cspd.heads.verify` has the method. This part decides which chains take part in a pass, and reads their progress.

# Passes of a launch that is a CUDA graph. The CPU learns one launch late which chains ended, so that with n passes per
# launch an iteration of about ten passes wastes 1.5 n - 0.5 of them on chains that stand still. A launch takes the CPU
# about 0.1 ms, and the GPU should not wait for it: a pass of MAR-B's head takes the GPU 0.05 ms with fused kernels and
# 0.15 ms without.
PASSES = 2


@dataclass(eq=False)
class _Chain:
    """The CPU's view of a running chain.

    Attributes:
        slot: its index in `Slots`. since: the first launch whose report is up to date for it. left: the steps left, as
            last reported.
    """

    owner: Hashable
    slot: int
    since: float
    left: int


class Chains:
    """Chains of many tokens, each at its own step, that advance together: one batched head call per pass.

    Chains join at any time and leave when they end, so that the batch stays full. A launch is a function of fixed
    shapes that runs one or several passes; chains that have ended stand still in it. On a GPU the CPU reads the report
    of a launch after it has made the next one, so that neither waits for the other.

    Args:
        head: the diffusion head. s: its chain. table: see `draft_table`. noise: the source of randomness.
        graphs: captures and replays the launches; by default nothing is captured.
        trace_sigma: also sum log sigma_p along the chains, see `Finished`.
        drafting: the head is a draft model's; its uniform draws and candidates differ from the target's.
        by_block: judge a window's states together, see `cspd.heads.block`; only for chains of fixed variances.
        compiled: run passes through torch.compile; the results agree to rounding.

    Attributes:
        passes: passes per launch, one head call each.
    """

    def __init__(
        self,
        head: Head,
        s: Schedule,
        table: Tensor,
        precision: Precision,
        noise: Any,
        *,
        graphs: Graphs | None = None,
        trace_sigma: bool = False,
        drafting: bool = False,
        by_block: bool = False,
        compiled: bool = False,
    ) -> None:
        self.head, self.schedule, self.precision = head, s, precision
        self.noise, self.device = noise, table.device
        self._fast_head = precision.prepare(head)
        self.trace_sigma, self.drafting = trace_sigma, drafting
        self.num_steps, self.window = table.shape[:2]
        self._lookup = lookup(table, fixed=not s.log_sigma_slope.any(), by_block=by_block)
        self._move = move_on(head, self.device, compiled)
        with precision.full():
            self._t_embed = head.time_embed(send({"names": s.timestep_map}, self.device)["names"])
        self._graphs = graphs or Graphs(self.device, enabled=False)
        self.passes = PASSES if self._graphs.enabled else 1
        self._late = self._graphs.enabled or self.device.type == "cuda"  # reports are read a launch late
        self._slots = cast(Slots, None)  # until the first chains start
        self._chains: list[_Chain] = []  # running
        self._rows: Tensor | None = None  # their padded slots on the device; None after a chain joined or left
        self._launches = 0
        self._unread: deque[tuple[int, list[_Chain], Report]] = deque()

    @property
    def owners(self) -> list[Hashable]:
        """The owners of the running chains."""
        return [chain.owner for chain in self._chains]

    def clear(self) -> None:
        """Drops all chains, also those whose start failed."""
        self._let_go(self._chains)
        if self._slots is not None:
            self._slots.clear()

    def start(
        self,
        owners: Several[Hashable],
        row: Tensor,
        seed: Tensor,
        position: Tensor,
        z: Tensor,
        scale: Tensor,
        temperature: Tensor,
        index: int = 0,
    ) -> None:
        """Starts N chains: takes their first step, and adds them to the running ones.

        Args:
            owners: one for each chain, and row: int64 [N]; both come back in `Finished`.
            seed, position: int64 [N], of their noise. z: [G, N, D]. scale, temperature: [N, 1]; the temperature is the
                draft table's. index: of x_T and eps_t, see `cspd.noise.initial`.
        """
        slots = self._reserve(len(owners), num_branches=len(z))
        size = self._graphs.size(len(slots))
        here = send_integers(slots + [NOBODY] * (size - len(slots)), self.device)
        join, key = functools.partial(self._join, index), (self._slots.key, "join", index)
        self._graphs.run(key, join, here, row, seed, position, z, scale, temperature, rows=size)
        left, since = self.num_steps - 1, self._launches + 1
        self._chains = self._chains + [_Chain(owner, slot, since, left) for owner, slot in zip(owners, slots)]
        self._rows = None

    def _reserve(self, count: int, num_branches: int) -> list[int]:
        """Slots for `count` more chains; allocates if there are too few, or if a table of modulations fits again."""
        needed = 1 + len(self._chains) + count
        most = table_size(self.head, num_branches, self.precision) // self.num_steps
        old = self._slots
        if old is None or needed > old.capacity or (needed <= most and not old.tabled):
            capacity = capacity_for(needed, most)
            self._slots = Slots(self.head, self.num_steps, num_branches, capacity, capacity <= most, self.device)
            if old is not None:
                self._move_from(old)
        return self._slots.take(count)

    def _move_from(self, old: Slots) -> None:
        """Moves the running chains to the new slots."""
        slots, num_chains = self._slots, len(self._chains)
        slots.adopt(old, [chain.slot for chain in self._chains])
        for slot, chain in enumerate(self._chains, 1):
            chain.slot = slot
        if slots.tabled and not old.tabled and num_chains:
            here = torch.arange(1, num_chains + 1, device=self.device)
            slots.write_modulations(here, self._modulations(slots.c_embed[here].transpose(0, 1)))

    def _modulations(self, c_embed: Tensor) -> list[Tensor]:
        """The head's modulations at all steps for conditions [G, N, width]: by layer, [G, N, T, ..]."""
        with self.precision.fast():
            return self._fast_head.modulations(self._t_embed, c_embed.unsqueeze(2))

    def _join(
        self,
        index: int,
        here: Tensor,
        row: Tensor,
        seed: Tensor,
        position: Tensor,
        z: Tensor,
        scale: Tensor,
        temperature: Tensor,
    ) -> tuple[()]:
        """Takes the first step of chains and writes them to slots `here` [N]; other arguments as in `start`."""
        slots = self._slots
        x, eps_t, uniform = self.noise.chain(
            seed, position, self.num_steps, self.head.channels, index, int(self.drafting)
        )
        log_uniform = uniform.log()
        log_uniform[:, 0] = -math.inf  # step 0 is never rejected
        slots.draws[here] = torch.cat([eps_t, log_uniform.unsqueeze(-1)], dim=-1)
        with self.precision.full():
            c_embed = self.head.cond_embed(fill(z))
        layers = self._modulations(c_embed[:, : len(x)]) if slots.tabled else None
        if layers:
            slots.write_modulations(here, layers)
        with self.precision.full():
            if layers and self.precision.uniform:
                first = [fill(layer[:, :, -1]) for layer in layers]
            else:
                first = self.head.modulations(self._t_embed[-1], c_embed)
            state, log_sigma = first_step(self.head, x, eps_t[:, -1], first, scale, temperature, self.schedule)
        slots.state[here, :4] = state
        slots.names[here] = torch.stack([row, seed, position], dim=1)
        slots.scale[here] = scale.unsqueeze(1)
        slots.log_sigma[here] = log_sigma.sum(-1)
        slots.c_embed[here] = c_embed[:, : len(x)].transpose(0, 1)
        slots.progress[here] = slots.first_progress
        slots.progress[NOBODY] = slots.no_progress  # the rows that pad a graph were written there too
        slots.record[here] = slots.first_record
        return ()

    def advance(self) -> Finished | None:
        """Launches one or several passes of every chain; returns the chains that are known to have ended."""
        if self._rows is None:
            self._rows = self._padded(self._chains)
        slots = self._slots
        written = [slots.state, slots.progress, slots.record, slots.log_sigma]
        progress = self._graphs.run((slots.key, "passes"), self._run_passes, self._rows, state=written)
        self._launches += 1
        self._unread.append((self._launches, self._chains, Report(progress)))
        if self._late and len(self._unread) == 1:
            return None
        return self._follow(*self._unread.popleft())

    def _padded(self, chains: Several[_Chain]) -> Tensor:
        """The chains' slots, int64 on the device, padded with NOBODY to the next bucket."""
        slots = [chain.slot for chain in chains]
        num_padding = bucket(len(slots)) - len(slots)
        return send_integers(slots + [NOBODY] * num_padding, self.device)

    def _run_passes(self, rows: Tensor) -> Tensor:
        """Runs the passes of a launch for the chains in slots [R]; returns their progress [R, 4], see `Slots`."""
        slots, modulations = self._slots, self._slots.modulations(self._t_embed)
        end_indices = (rows * self.num_steps).unsqueeze(1) - self._lookup.lags
        row_starts = torch.arange(0, len(rows) * self.window, self.window, device=self.device)
        state, scale = slots.state.index_select(0, rows), slots.scale.index_select(0, rows)
        left, phase, tries, fallbacks = slots.progress.index_select(0, rows).unbind(1)
        for _ in range(self.passes):
            chains = end_indices, row_starts, scale, state, left, phase
            with self.precision.fast():
                moved = self._move(self._fast_head, self._lookup, slots.draws, modulations, *chains, self.trace_sigma)
            state, left, phase = moved.state, moved.left, moved.phase
            slots.record.view(-1).index_add_(0, moved.step_index, moved.record)
            if self.trace_sigma:
                slots.log_sigma.index_add_(0, rows, moved.log_sigma)
        progress = torch.stack([left, phase, tries, fallbacks], dim=1)
        slots.state.index_copy_(0, rows, state)
        slots.progress.index_copy_(0, rows, progress)
        return progress

    def _follow(self, launch: int, chains: list[_Chain], report: Report) -> Finished | None:
        """Acts on the report of a launch: draws residuals, and returns the chains that have ended."""
        unresolved, searching, ended = [], [], []
        for chain, (left, phase, tries, fallbacks) in zip(chains, report.tolist()):
            if launch < chain.since:  # the report is out of date
                continue
            if left >= chain.left and phase == MOVING:
                raise RuntimeError("a pass decided no step of a chain: its draft table is damaged")
            chain.left = left
            if left == 0:  # in any phase: a log-ratio of -inf rejects even step 0, whose log u is -inf
                ended.append((chain, tries, fallbacks))
            elif phase == UNRESOLVED:
                unresolved.append(chain)
            elif phase == SEARCHING:
                searching.append(chain)
        if unresolved:
            self._resolve(unresolved)
        if searching:
            self._search_on(searching)
        return self._finish(*zip(*ended)) if ended else None

    def _resolve(self, chains: list[_Chain]) -> None:
        """Draws unresolved states from the first block of candidates."""
        slots, first = self._slots, self._residual(0, FIRST_BLOCK)
        written = [slots.state, slots.progress, slots.draws]
        progress = self._graphs.run((slots.key, "residual"), first, self._padded(chains), state=written)
        self._ignore_past_launches(chains)
        if not self._late:
            phases = progress[:, PHASE].tolist()
            self._search_on([chain for chain, phase in zip(chains, phases) if phase == SEARCHING])

    def _search_on(self, chains: list[_Chain]) -> None:
        """Draws unresolved states from the later candidates, by a search that reads from the device."""
        if chains:
            rows = send_integers([chain.slot for chain in chains], self.device)
            self._residual(FIRST_BLOCK, MAX_TRIES)(rows)
            self._ignore_past_launches(chains)

    def _residual(self, first: int, max_tries: int) -> Callable[[Tensor], Tensor]:
        """`draw_residual` of candidates `first` .. `max_tries` - 1, or `draw_after_block`, as a function of slots."""
        offset = DRAFT_OFFSET if self.drafting else 0
        if self._lookup.by_block:
            return functools.partial(draw_after_block, self._slots, self.noise, offset, self.window)
        return functools.partial(draw_residual, self._slots, self.noise, offset, first, max_tries)

    def _ignore_past_launches(self, chains: list[_Chain]) -> None:
        for chain in chains:
            chain.since = self._launches + 1

    def _finish(self, chains: Several[_Chain], tries: Several[int], fallbacks: Several[int]) -> Finished:
        """Frees the slots of chains that have ended, and returns their results."""
        slots, here = self._slots, send_integers([chain.slot for chain in chains], self.device)
        state = slots.state.index_select(0, here)
        self._let_go(chains)
        slots.release([chain.slot for chain in chains])
        return Finished(
            owners=[chain.owner for chain in chains],
            row=slots.names.index_select(0, here)[:, 0],
            tokens=state[:, MEAN_P],
            record=slots.record.index_select(0, here).to(torch.int8),
            tries=[*tries],
            fallbacks=[*fallbacks],
            log_sigma=slots.log_sigma.index_select(0, here),
            log_sigma_last=state[:, LOG_SIGMA_P],
        )

    def _let_go(self, chains: Several[_Chain]) -> None:
        for chain in chains:
            chain.since = math.inf
        self._chains = [chain for chain in self._chains if chain.since < math.inf]
        self._rows = None


# The denoiser `speculative`, and its round.

WINDOW = Option(
    "window",
    int,
    "denoising steps drafted ahead in the head; 0 drafts none (default: the fastest on this device)",
    high=WINDOWS[-1],
    off=0,
    metavar="W",
)
DRAFT = Option(
    "draft",
    DRAFTS,
    "how the head's next outputs are predicted: by a fitted linear model (calibrated), or as equal to the last output"
    " (frozen: no calibration, lower acceptance)",
    default="calibrated",
)
VERIFICATIONS = {
    "steps": "each drafted state is accepted or rejected by itself",
    "block": "a window's states are judged together: fewer head calls, but each rejection takes more work",
}
VERIFICATION = Option(  # for heads whose variances are fixed
    "verification",
    VERIFICATIONS,
    "whether drafted states are judged one by one (steps) or a window together (block: fewer head calls, more work"
    " per rejection)",
    default="steps",
)
# for short chains, which here always begin at timestep 999
REMEDY = f"give num_sampling_steps=100, or ar's chains with first_timestep={SHORT_FIRST}"


def chains_of(runner: ContinuousRunner, model: str, sequence: Sequence, trace_sigma: bool = False) -> Chains:
    """Empty `Chains` of the "target" or "draft" model for sequences that share a round.

    With CUDA graphs, the chains of the last requests with equal settings are reused.
    """
    make = functools.partial(_make_chains, runner, model, sequence.request, trace_sigma)
    chains = runner.graphs.last(f"chains of {model}, {trace_sigma=}", sequence.key, make)
    chains.clear()
    return chains


def _make_chains(runner: ContinuousRunner, model: str, request: Request, trace_sigma: bool) -> Chains:
    head = runner.models[model].head
    s = head.schedule(request.num_sampling_steps)
    if request.draft == "frozen":
        coefficients, drift = frozen(s)
    else:
        calibration = runner.tuning.calibrations[model].get(request)
        coefficients, drift = calibration.coefficients, calibration.drift
    table = draft_table(coefficients, drift, s, request.window, request.temperature)
    return Chains(
        head,
        s,
        send({"table": table}, runner.device)["table"],
        runner.precision,
        runner.noise,
        graphs=runner.graphs,
        trace_sigma=trace_sigma,
        drafting=model == "draft",
        by_block=request.verification == "block",
        compiled=runner.tuning.compiled,
    )


class _Running:
    """The chains of all running sequences of equal settings, and the record of every slot's tokens."""

    def __init__(self, runner: ContinuousRunner, sequence: Sequence) -> None:
        self.chains = chains_of(runner, "target", sequence)
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
            sequence.refresh = functools.partial(self.show, runner, sequence.slot)
            sequence.iteration += 1
            sequence.num_under_way = count
            sequence.stats.iterations += 1
            sequence.stats.backbone_calls += 1
            sequence.stats.head_calls += 1
            sequence.stats.head_evaluations += count * len(z)

    def show(self, runner: ContinuousRunner, slot: int) -> None:
        """Writes the head calls of a slot's tokens for a preview; those of tokens not yet generated mean nothing."""
        runner.token_cost[slot] = (self.record[slot] != 0).sum(-1).float()

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
                sequence.num_under_way -= 1
                sequence.num_committed += 1


def run_round(
    runner: ContinuousRunner,
    batch: list[Sequence],
    watch: Stopwatch,
    backbone: Conditions = full_conditions,
) -> list[Sequence]:
    """Runs passes until three in four sequences have ended their iteration; returns the sequences that are finished.

    It computes the same as `run_plain_round` with `denoise` below, but no sequence waits for the chains of others.
    Sequences that have ended their iteration begin the next one, and their chains join the running ones. So no head
    call waits for the slowest token, and a backbone call serves many sequences.
    """
    request = batch[0].request
    if request.window == 0:
        return run_plain_round(runner, batch, watch, backbone=backbone)
    round_state = runner.round_state[batch[0].key]
    if "running" not in round_state:
        round_state["running"] = _Running(runner, batch[0])
    running = round_state["running"]
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


def check(request: Request, runner: ContinuousRunner) -> None:
    """Raises ValueError if the window does not fit the denoising steps, or temperature is 0."""
    if request.window is not None:
        most = min(WINDOWS[-1], request.num_sampling_steps)
        check_integer("window", request.window, 0, most, "it is how many denoising steps are drafted ahead")
        if request.window and request.temperature == 0:
            raise ValueError(f"window={request.window} needs temperature > 0: without noise there are no densities")


def resolve(request: Request, runner: ContinuousRunner) -> Request:
    """The request with the fastest window for it on this device, if it does not have a window."""
    if request.window is not None:
        return request
    return request.but(**runner.tuning.choice(request, runner.at_once).config)


@denoiser(
    "speculative",
    "exact",
    options=(WINDOW, DRAFT),
    needs="calibration",
    check=check,
    resolve=resolve,
    advice=functools.partial(ancestral_advice, remedy=REMEDY),
    run_round=run_round,
)
def denoise(
    runner: ContinuousRunner, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Runs speculative chains of all rows until the last one has ended; arguments as in `cspd.heads.chain`."""
    request = rows.sequences[0].request
    if request.window == 0:
        return denoise_ancestral(runner, model, rows, z, index=index, densities=densities)
    round_state = runner.round_state[rows.sequences[0].key]
    if (model, densities) not in round_state:
        round_state[model, densities] = chains_of(runner, model, rows.sequences[0], trace_sigma=densities)
    chains = round_state[model, densities]
    num = len(rows.seed)
    row = torch.arange(num, device=z.device)
    chains.start(range(num), row, rows.seed, rows.position, z, rows.scale, rows.temperature, index)
    tokens, log_sigma_last = z.new_empty(2, num, runner.config.token_dim)
    record = torch.empty(num, chains.num_steps, dtype=torch.int8, device=z.device)
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
