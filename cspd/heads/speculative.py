"""Speculative denoising: many steps of the head's chain for one call. Guarantee: exact."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Annotated, Any, cast

import numpy as np
import torch
from torch import Tensor

import cspd.heads.driver as driver
from cspd.device import Precision, Report, send, send_integers
from cspd.graphs import Graphs, bucket
from cspd.heads.calibration import DRAFTS, WINDOWS
from cspd.heads.chain import Chain, Inputs, Schedule, modulation_size, table_bytes
from cspd.heads.samplers import ancestral, sampler
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
    draw_residual,
    first_step,
    lookup,
    move,
    move_by_kernels,
    table_size,
)
from cspd.option import option
from mar.head import Head, fill, filled

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


def joined(parts: Several[Finished]) -> Finished:
    """Finished chains of several launches, in the order of their rows."""
    order = torch.cat([part.row for part in parts]).argsort()
    on_cpu = order.tolist()
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Finished):
        of_parts = [getattr(part, field.name) for part in parts]
        if isinstance(of_parts[0], Tensor):
            values[field.name] = torch.cat(of_parts)[order]
        else:
            together = [each for part in of_parts for each in part]
            values[field.name] = [together[i] for i in on_cpu]
    return Finished(**values)


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
        compiled: bool = False,
    ) -> None:
        self.head, self.schedule, self.precision = head, s, precision
        self.noise, self.device = noise, table.device
        self._fast_head = precision.prepare(head)
        self.trace_sigma, self.drafting = trace_sigma, drafting
        self.num_steps, self.window = table.shape[:2]
        self._lookup = lookup(table, fixed=not s.log_sigma_slope.any())
        self._move = driver.passes(move, move_by_kernels, head, self.device, compiled)
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
            self._write_modulations(here, slots.c_embed[here].transpose(0, 1))

    def _write_modulations(self, here: Tensor, c_embed: Tensor) -> list[Tensor]:
        """Stores the head's modulations at all steps for conditions [G, N, width] in slots `here` [N].

        They are computed in chunks of steps. Returns those of the first step of the chain: by layer, [G, N, ..].
        """
        of_a_step = modulation_size(self.head) * c_embed.shape[0] * c_embed.shape[1]
        chunk = filled(max(1, table_bytes(self.device) // of_a_step))
        for first in range(0, self.num_steps, chunk):
            steps = slice(first, first + chunk)
            with self.precision.fast():
                layers = self._fast_head.modulations(self._t_embed[steps], c_embed.unsqueeze(2))
            self._slots.write_modulations(here, layers, steps)
        return [layer[:, :, -1] for layer in layers]

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
        layers = self._write_modulations(here, c_embed[:, : len(x)]) if slots.tabled else None
        with self.precision.full():
            if layers and self.precision.uniform:
                first = [fill(layer) for layer in layers]
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
        """`draw_residual` of candidates `first` .. `max_tries` - 1, as a function of slots."""
        offset = self.noise.DRAFT_OFFSET if self.drafting else 0
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

    def run(self, inputs: Inputs, index: int = 0) -> Finished:
        """Draws R tokens, and returns their chains in the order of the rows; `index`: of their noise."""
        z, scale, temperature, seed, position = inputs
        row = torch.arange(len(seed), device=self.device)
        self.start(range(len(seed)), row, seed, position, z, scale, temperature, index)
        ended = []
        while self._chains:
            finished = self.advance()
            if finished is not None:
                ended.append(finished)
        return joined(ended)

    def _let_go(self, chains: Several[_Chain]) -> None:
        for chain in chains:
            chain.since = math.inf
        self._chains = [chain for chain in self._chains if chain.since < math.inf]
        self._rows = None


# The sampler.


@sampler("speculative", "exact", fit=True, whole=False)
def speculative(
    chain: Chain,
    window: Annotated[
        int | None,
        option(
            "denoising steps drafted ahead in the head; 0 drafts none (default: the fastest on this device)",
            high=WINDOWS[-1],
            at_most="num_sampling_steps",
            needs_noise=True,
            off=0,
            decided=True,
            metavar="W",
        ),
    ] = None,
    draft: Annotated[
        str,
        option(
            "how the head's next outputs are predicted: by a fitted linear model (calibrated), or as equal to the last"
            " output (frozen: no calibration, lower acceptance)",
            kind=DRAFTS,
        ),
    ] = "calibrated",
) -> Tensor:
    """Speculates on the head's own denoising chain; no draft model (arXiv 2501.05370)."""
    chains = chain.fitted.chains(chain, window, draft)
    if chains is None:  # nothing is drafted
        return ancestral(chain)
    ended = chains.run(chain.inputs, chain.noise_index)
    record = ended.record.cpu().numpy()
    calls = (record != 0).sum(1)
    verified, accepted = acceptance(record, chains.window)[0].sum(1).tolist()
    chain.tally.drafted = verified, accepted
    chain.tally.by_row = np.stack([calls, (1 + (calls - 1) * chains.window) * len(chain.z)])
    for observer in chain.observers:
        observer.verified(chain, ended)
    return ended.tokens
