"""Speculative denoising: the head's chain in fewer head calls, with exactly the ancestral chain's distribution.

`draft_verify` has the method. Here is which chains take part in a round, and what the host learns of them.
"""

from __future__ import annotations

import functools
import math
import types
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cspd.continuous import gaussian
from cspd.continuous.chain_records import Finished
from cspd.continuous.draft_verify import first_step, lookup
from cspd.continuous.residuals import draw_residual
from cspd.continuous.rounds import move_on
from cspd.continuous.slots import LOG_SIGMA_P, MEAN_P, NOBODY, WAITING, Slots, capacity_for, table_size
from cspd.graphs import Graphs, bucket
from cspd.noise import DRAFT_OFFSET
from cspd.precision import Precision
from cspd.transfer import Report, send_integers
from mar.diffusion import schedule
from mar.head import Head, fill

# Of a launch that is a graph. What a launch of n rounds ended is known one launch later, so that an iteration of about
# ten rounds wastes 1.5 n - 0.5 of them on chains that stand still. A launch takes the host about 0.1 ms, which the GPU
# is not to wait for: a round of MAR-B's head takes it 0.05 ms with its kernels fused and 0.15 ms without.
ROUNDS = 2


@dataclass(eq=False)
class _Chain:
    """A chain under way, as the host knows it.

    Attributes:
        slot: where it is. since: the first launch whose report counts for it. left: the steps left, as last reported.
    """

    owner: Hashable
    slot: int
    since: float
    left: int


class Chains:
    """Chains of many tokens, each at its own step, that move on together: one batched head call a round.

    Chains may join at any time and leave when they end, so that the call stays full. They are moved on by launches:
    functions of fixed shape of their slots, of a round or some, in which a chain that has ended stands still. On a GPU
    the host reads what came of a launch when it has made the next one, so that neither waits for the other.

    Args:
        head: the diffusion head. table: of the draft, see `draft_table`. noise: the source of randomness.
        graphs: what runs the launches; by default nothing is captured.
        trace_sigma: also sum log sigma_p along the chains, see `Finished`.
        drafting: the head is a draft model's, whose uniform draws and candidates are apart from the target's.
        compiled: run rounds through torch.compile; the results agree to rounding.

    Attributes:
        rounds: of a launch, one head call each.
    """

    def __init__(
        self,
        head: Head,
        table: Tensor,
        precision: Precision,
        noise: types.ModuleType,
        *,
        graphs: Graphs | None = None,
        trace_sigma: bool = False,
        drafting: bool = False,
        compiled: bool = False,
    ) -> None:
        self.head, self.precision, self.noise, self.device = head, precision, noise, table.device
        self._fast_head = precision.prepare(head)
        self.trace_sigma, self.drafting = trace_sigma, drafting
        self.num_steps, self.window = table.shape[:2]
        self._lookup = lookup(table)
        self._move = move_on(self.device, compiled)
        with precision.full():
            self._t_embed = head.time_embed(send_integers(schedule(self.num_steps).timestep_map, self.device))
        self._graphs = graphs or Graphs(self.device, enabled=False)
        self.rounds = ROUNDS if self._graphs.enabled else 1
        self._late = self._graphs.enabled or self.device.type == "cuda"  # reports are read a launch late
        self._slots: Slots | None = None
        self._chains: list[_Chain] = []  # under way
        self._rows: Tensor | None = None  # their slots on the device, until one joins or leaves
        self._launches = 0
        self._unread: deque[tuple[int, list[_Chain], Report]] = deque()

    @property
    def owners(self) -> list[Hashable]:
        """Of the chains under way."""
        return [chain.owner for chain in self._chains]

    def clear(self) -> None:
        """Drops the chains under way, also those of a start that failed."""
        self._let_go(self._chains)
        if self._slots is not None:
            self._slots.clear()

    def start(
        self,
        owners: Sequence[Hashable],
        row: Tensor,
        seed: Tensor,
        position: Tensor,
        z: Tensor,
        scale: Tensor,
        temperature: Tensor,
        index: int = 0,
    ) -> None:
        """Starts N chains with their first step, which joins them to those under way.

        Args:
            owners: who they are. row: int64 [N], what they are for: both come back in `Finished`.
            seed, position: int64 [N], of their noise. z: [G, N, D]. scale, temperature: [N, 1], the temperature that
                of the draft's table. index: of x_T and eps_t, see `cspd.noise.initial`.
        """
        slots = self._reserve(len(owners), copies=len(z))
        names = torch.stack([row, seed, position], dim=1)
        self._join(send_integers(slots, self.device), names, z, scale, temperature, index)
        left, since = self.num_steps - 1, self._launches + 1
        self._chains = self._chains + [_Chain(owner, slot, since, left) for owner, slot in zip(owners, slots)]
        self._rows = None

    def _reserve(self, count: int, copies: int) -> list[int]:
        """Slots for so many more chains; allocates more where needed, or where a table of modulations fits again."""
        needed = 1 + len(self._chains) + count
        most = table_size(self.head, copies, self.precision) // self.num_steps
        old = self._slots
        if old is None or needed > old.capacity or (needed <= most and not old.tabled):
            capacity = capacity_for(needed, most)
            self._slots = Slots(self.head, self.num_steps, copies, capacity, capacity <= most, self.device)
            if old is not None:
                self._move_from(old)
        return self._slots.take(count)

    def _move_from(self, old: Slots) -> None:
        """Moves the chains under way from slots that were too few."""
        slots, num_chains = self._slots, len(self._chains)
        slots.adopt(old, [chain.slot for chain in self._chains])
        for slot, chain in enumerate(self._chains, 1):
            chain.slot = slot
        if slots.tabled and not old.tabled and num_chains:
            here = torch.arange(1, num_chains + 1, device=self.device)
            slots.write_modulations(here, self._modulations(slots.c_embed[here].transpose(0, 1)))

    def _modulations(self, c_embed: Tensor) -> list[Tensor]:
        """The head's modulations by layer at all steps for conditions [G, N, width]: [G, N, T, ..]."""
        with self.precision.fast():
            return self._fast_head.modulations(self._t_embed, c_embed.unsqueeze(2))

    def _join(self, here: Tensor, names: Tensor, z: Tensor, scale: Tensor, temperature: Tensor, index: int) -> None:
        """Writes chains to their slots [N], after their first step; names: (row, seed, position) [N, 3]."""
        slots, (_, seed, position) = self._slots, names.unbind(1)
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
            state, log_sigma = first_step(self.head, x, eps_t[:, -1], first, scale, temperature, self.num_steps)
        slots.state[here, :4] = state
        slots.names[here] = names
        slots.scale[here] = scale.unsqueeze(1)
        slots.log_sigma[here] = log_sigma.sum(-1)
        slots.c_embed[here] = c_embed[:, : len(x)].transpose(0, 1)
        slots.progress[here] = slots.first_progress
        slots.record[here] = slots.first_record

    def advance(self) -> Finished | None:
        """Launches rounds of every chain, of a step at least each; returns the chains that are known to have ended."""
        if self._rows is None:
            self._rows = self._padded(self._chains)
        slots = self._slots
        written = [slots.state, slots.progress, slots.record, slots.log_sigma]
        progress = self._graphs.run((slots.key, "rounds"), self._run_rounds, self._rows, state=written)
        self._launches += 1
        self._unread.append((self._launches, self._chains, Report(progress)))
        if self._late and len(self._unread) == 1:
            return None
        return self._follow(*self._unread.popleft())

    def _padded(self, chains: Sequence[_Chain]) -> Tensor:
        """The chains' slots, int64 on the device, and nobody's up to the next bucket."""
        slots = [chain.slot for chain in chains]
        return send_integers(slots + [NOBODY] * (bucket(len(slots)) - len(slots)), self.device)

    def _run_rounds(self, rows: Tensor) -> Tensor:
        """A launch of the chains in slots [R]; returns their progress [R, 4], see `Slots`."""
        slots, modulations = self._slots, self._slots.modulations(self._t_embed)
        windows = (rows * self.num_steps).unsqueeze(1) - self._lookup.lags
        begin = torch.arange(0, len(rows) * self.window, self.window, device=self.device)
        state, scale = slots.state.index_select(0, rows), slots.scale.index_select(0, rows)
        left, waiting, tries, fallbacks = slots.progress.index_select(0, rows).unbind(1)
        for _ in range(self.rounds):
            chains = windows, begin, scale, state, left, waiting
            with self.precision.fast():
                moved = self._move(self._fast_head, self._lookup, slots.draws, modulations, *chains, self.trace_sigma)
            state, left, waiting = moved.state, moved.left, moved.waiting
            slots.record.view(-1).index_add_(0, moved.place, moved.record)
            if self.trace_sigma:
                slots.log_sigma.index_add_(0, rows, moved.log_sigma)
        progress = torch.stack([left, waiting, tries, fallbacks], dim=1)
        slots.state.index_copy_(0, rows, state)
        slots.progress.index_copy_(0, rows, progress)
        return progress

    def _follow(self, launch: int, chains: list[_Chain], report: Report) -> Finished | None:
        """Does what a launch of these chains asks for: draws residuals, and lets those go that have ended."""
        unresolved, searching, ended = [], [], []
        for chain, (left, waiting, tries, fallbacks) in zip(chains, report.tolist()):
            if launch < chain.since:  # the report is out of date
                continue
            if left >= chain.left and not waiting:
                raise RuntimeError("a round decided no step of a chain: its draft's table is damaged")
            chain.left = left
            if left == 0:  # though it may wait: step 0 is rejected where its log-ratio is -inf, as its uniform draw
                ended.append((chain, tries, fallbacks))
            elif waiting:
                (unresolved if waiting < 2 * self.num_steps else searching).append(chain)
        if unresolved:
            self._resolve(unresolved)
        if searching:
            self._search_on(searching)
        return self._finish(*zip(*ended)) if ended else None

    def _resolve(self, chains: list[_Chain]) -> None:
        """Draws the states that `gaussian.resample` left open, where the first candidates suffice."""
        slots, first = self._slots, self._residual(0, gaussian.FIRST_BLOCK)
        written = [slots.state, slots.progress]
        progress = self._graphs.run((slots.key, "residual"), first, self._padded(chains), state=written)
        self._answered(chains)
        if not self._late:
            waiting = progress[:, WAITING].tolist()
            self._search_on([chain for chain, wanted in zip(chains, waiting) if wanted])

    def _search_on(self, chains: list[_Chain]) -> None:
        """Draws them from the candidates after the first ones, by a search that reads from the device."""
        if chains:
            rows = send_integers([chain.slot for chain in chains], self.device)
            self._residual(gaussian.FIRST_BLOCK, gaussian.MAX_TRIES)(rows)
            self._answered(chains)

    def _residual(self, first: int, max_tries: int) -> Callable[[Tensor], Tensor]:
        """`draw_residual` of so many candidates, as a function of slots."""
        offset = DRAFT_OFFSET if self.drafting else 0
        return functools.partial(draw_residual, self._slots, self.noise, offset, first, max_tries)

    def _answered(self, chains: list[_Chain]) -> None:
        """What launches so far say of these chains is out of date."""
        for chain in chains:
            chain.since = self._launches + 1

    def _finish(self, chains: Sequence[_Chain], tries: Sequence[int], fallbacks: Sequence[int]) -> Finished:
        """Takes these chains, which have ended, out of their slots."""
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

    def _let_go(self, chains: Sequence[_Chain]) -> None:
        """Leaves these chains out from now on."""
        for chain in chains:
            chain.since = math.inf
        self._chains = [chain for chain in self._chains if chain.since < math.inf]
        self._rows = None
