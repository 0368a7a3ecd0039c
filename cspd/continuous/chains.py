"""Speculative denoising: the head's chain in fewer head calls, with exactly the ancestral chain's distribution.

`draft_verify` has the method. Here is which chains take part in a round, what is kept between rounds, and the records.
"""

from __future__ import annotations

import os
import types
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.draft_verify import Lookup, Moved, compiled_move, evaluate_filled, move
from cspd.continuous.gaussian import MAX_TRIES, residual
from cspd.graphs import bucket
from cspd.noise import DRAFT_OFFSET
from cspd.precision import Precision
from mar.diffusion import schedule
from mar.head import Head, fill

TABLE_SHARE = 1 / 8  # of the device's memory, for precomputed modulations; beyond it they are computed in the rounds


@dataclass(frozen=True)
class Finished:
    """Chains that ended in a round, N of them.

    Attributes:
        owners: who they are, as given to `start`. position: int64 [N]. tokens: [N, d].
        record: int8 [N, T]: at the step a round began at, how many steps it decided, negative if the last of them was
            resampled; 0 elsewhere. Each is one head call; the first, ancestral one at T - 1 counts as 1 step.
        tries: of each, residual candidates looked at; fallbacks: how often none of them was kept.
        log_sigma: [N], if traced, log sigma_p summed over channels and steps T - 1 .. 1. log_sigma_last: [N, d], at 0.
    """

    owners: list[Hashable]
    position: Tensor
    tokens: Tensor
    record: Tensor
    tries: list[int]
    fallbacks: list[int]
    log_sigma: Tensor
    log_sigma_last: Tensor


def acceptance(record: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """How many drafted states were judged, and how many accepted: int64 [2, window] by lag, from 1, and [2, T] by step.

    Args:
        record: int8 [N, T] of finished chains, see `Finished`.
    """
    num_steps = record.shape[1]
    _, begin = record.nonzero()
    signed = record[record != 0].astype(np.int64)[:, None]  # a row for each head call
    lag = np.arange(1, window + 1)
    step = begin[:, None] - lag + 1
    drafted = (begin < num_steps - 1)[:, None] & (step > 0)  # the first step is ancestral, and step 0 is never judged
    judged = drafted & (lag <= np.abs(signed))
    accepted = judged & (lag != -signed)
    by_lag = np.stack([judged.sum(0), accepted.sum(0)])
    by_step = np.stack([np.bincount(step[which], minlength=num_steps) for which in (judged, accepted)])
    return by_lag, by_step


def table_size(head: Head, copies: int, device: torch.device) -> int:
    """Chains times steps whose modulations may be held at once; copies are 2 with guidance."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    floats = (3 * len(head.res_blocks) + 2) * head.width * copies  # of a chain's step
    return int(TABLE_SHARE * memory / (4 * floats))


class _Batch(NamedTuple):
    """What moves on in a round, a row for each chain under way and then padding.

    Attributes:
        state: [R, 4, d], the chain's state and its anchor's eps', x', v'. t: int64 [R], its step.
        entry: int64 [R], where the chain is in the tables. seed, position: int64 [R], of its noise.
        scale: [R, 1, 1], guidance. log_sigma: [R], the sum so far, see `Finished`.
    """

    state: Tensor
    t: Tensor
    entry: Tensor
    seed: Tensor
    position: Tensor
    scale: Tensor
    log_sigma: Tensor


class Chains:
    """Chains of many tokens, each at its own step, that move on together: one batched head call a round.

    Chains may join at any time and leave when they end, so that the call stays full. What is large (draws, conditions,
    modulations, records) is in tables with an entry for each chain. The tables are compacted only when chains join.

    Args:
        head: the diffusion head. table: of the draft, see `draft_table`. noise: the source of randomness.
        trace_sigma: also sum log sigma_p along the chains, see `Finished`.
        drafting: the head is a draft model's, whose uniform draws and candidates are apart from the target's.
        compiled: run rounds through torch.compile; the results agree to rounding.
    """

    def __init__(
        self,
        head: Head,
        table: Tensor,
        precision: Precision,
        noise: types.ModuleType,
        *,
        trace_sigma: bool = False,
        drafting: bool = False,
        compiled: bool = False,
    ) -> None:
        self.head, self.precision, self.noise, self.device = head, precision, noise, table.device
        self._fast_head = precision.prepare(head)
        self.trace_sigma, self.drafting = trace_sigma, drafting
        self.num_steps, self.window = table.shape[:2]
        steps = torch.arange(self.num_steps).unsqueeze(1) - torch.arange(self.window)
        self._lookup = Lookup(table, steps.clamp(min=0).to(self.device))
        self._move = compiled_move() if compiled else move
        with precision.full():
            timesteps = torch.as_tensor(schedule(self.num_steps).timestep_map, device=self.device)
            self._t_embed = head.time_embed(timesteps)
        self.owners: list[Hashable] = []  # of the chains under way
        self._tries: list[int] = []
        self._fallbacks: list[int] = []

    def start(
        self,
        owners: Sequence[Hashable],
        seed: Tensor,
        position: Tensor,
        z: Tensor,
        scale: Tensor,
        temperature: Tensor,
        index: int = 0,
    ) -> None:
        """Starts N chains with their first step, which joins them to those under way.

        Args:
            owners: who they are. seed, position: int64 [N], of their noise. z: [G, N, D]. scale, temperature: [N, 1],
                the temperature that of the draft's table. index: of x_T and eps_t, see `cspd.noise.initial`.
        """
        x, eps_t, uniform = self.noise.chain(
            seed, position, self.num_steps, self.head.channels, index, int(self.drafting)
        )
        draws = torch.cat([eps_t, uniform.log().unsqueeze(-1)], dim=-1)
        with self.precision.full():
            c_embed = self.head.cond_embed(fill(z))
        entry = self._join_tables(draws, c_embed[:, : len(x)])
        state, log_sigma = self._first_step(x, eps_t[:, -1], c_embed, entry, scale, temperature)
        self._record[entry, -1] = 1
        batch = _Batch(
            state=state,
            t=torch.full_like(seed, self.num_steps - 2),
            entry=entry,
            seed=seed,
            position=position,
            scale=scale.unsqueeze(1),
            log_sigma=log_sigma.sum(-1),
        )
        if self.owners:
            under_way = len(self.owners)
            both = [torch.cat([old[:under_way], new]) for old, new in zip(self._batch, batch)]
            batch = _Batch(*both)
        self._batch = batch
        self.owners += owners
        self._tries += [0] * len(owners)
        self._fallbacks += [0] * len(owners)
        self._keep_rows(range(len(self.owners)))

    def _first_step(
        self, x: Tensor, eps_t: Tensor, c_embed: Tensor, entry: Tensor, scale: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """State [N, 4, d] and log sigma [N, d] of step T - 1, ancestral, in float32; c_embed is of rows filled up."""
        s, last = schedule(self.num_steps), self.num_steps - 1
        with self.precision.full():
            if self._modulations and self.precision.uniform:
                layers = [fill(layer[:, entry, last]) for layer in self._modulations]
            else:
                layers = self.head.modulations(self._t_embed[last], c_embed)
            eps, v = evaluate_filled(self.head, x, self.head.split(layers), scale)
        mean = x * s.mean_x[last] + eps * s.mean_eps[last]
        log_sigma = s.log_sigma_base[last] + temperature.log() + s.log_sigma_slope[last] * v
        after = torch.addcmul(mean, log_sigma.exp(), eps_t)
        return torch.stack([after, eps, x, v], dim=1), log_sigma

    def _join_tables(self, draws: Tensor, c_embed: Tensor) -> Tensor:
        """Adds N chains with draws [N, T, d + 1] and conditions [G, N, width]; returns their entries, int64 [N].

        The entries of chains that have left are dropped, which moves those of the others.
        """
        num_new = len(draws)
        record = torch.zeros(num_new, self.num_steps, dtype=torch.int8, device=self.device)
        if not self.owners:
            self._draws, self._record, self._c_embed = draws, record, c_embed
            self._modulations = self._modulations_of(c_embed, num_new)
            return torch.arange(num_new, device=self.device)

        num_kept = len(self.owners)
        kept = self._batch.entry[:num_kept]
        self._draws = torch.cat([self._draws[kept], draws])
        self._record = torch.cat([self._record[kept], record])
        self._c_embed = torch.cat([self._c_embed[:, kept], c_embed], dim=1)
        known = self._modulations
        self._modulations = self._modulations_of(c_embed if known else self._c_embed, num_kept + num_new)
        if known and self._modulations:
            layers = zip(known, self._modulations)
            self._modulations = [torch.cat([old[:, kept], new], dim=1) for old, new in layers]
        entries = torch.arange(num_kept + num_new, device=self.device)
        self._batch = self._batch._replace(entry=entries[:num_kept])
        return entries[num_kept:]

    def _modulations_of(self, c_embed: Tensor, num_chains: int) -> list[Tensor] | None:
        """The head's modulations at all steps for conditions [G, N, width]; None if a table of so many is too large."""
        if num_chains * self.num_steps > table_size(self.head, len(c_embed), self.device):
            return None
        with self.precision.fast():
            return self._fast_head.modulations(self._t_embed, c_embed.unsqueeze(2))

    def _keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all other rows of the batch, and repeats the last one as padding up to the next bucket."""
        padding = bucket(len(rows)) - len(rows)
        rows = [*rows] + [rows[-1]] * padding
        if rows != list(range(len(self._batch.t))):
            index = torch.tensor(rows, device=self.device)
            self._batch = _Batch(*(values[index] for values in self._batch))
        self._begin = torch.arange(len(rows), device=self.device) * self.window

    def advance(self) -> Finished | None:
        """Moves every chain on by at least one step, with one head call; returns the chains that end."""
        batch, under_way = self._batch, len(self.owners)
        tables = self._draws, self._modulations or (self._t_embed, self._c_embed)
        rows = batch.state, batch.t, batch.entry, batch.scale, self._begin
        with self.precision.fast():
            moved = self._move(self._fast_head, self._lookup, *tables, *rows, self.trace_sigma)
        where = (batch.entry * self.num_steps + batch.t)[:under_way]
        self._record.view(-1)[where] = moved.record[:under_way].to(torch.int8)
        if self.trace_sigma:
            batch.log_sigma.add_(moved.log_sigma)
        outcome = torch.stack([moved.left, moved.unresolved, moved.decided])  # the one copy to the host
        left, unresolved, decided = outcome[:, :under_way].tolist()
        if min(decided) < 1:
            raise RuntimeError("a round decided no step of a chain: its draft's table is damaged")
        if any(unresolved):
            self._draw_residual(moved, [row for row, wanted in enumerate(unresolved) if wanted])
        self._batch = batch._replace(state=moved.state, t=moved.left.clamp(min=0))
        ended = [row for row, steps in enumerate(left) if steps < 0]
        return self._leave(ended, moved.p[1]) if ended else None

    def _draw_residual(self, moved: Moved, rows: list[int]) -> None:
        """Draws the states that `gaussian.resample` left open, which are few, into moved.state."""
        index = torch.tensor(rows, device=self.device)
        seed, position, step = (values[index] for values in (self._batch.seed, self._batch.position, self._batch.t))
        offset = DRAFT_OFFSET if self.drafting else 0

        def draws(first: int, num: int) -> tuple[Tensor, Tensor]:
            normals, uniform = self.noise.candidates(seed, position, step, first, num, self.head.channels, offset)
            return normals, uniform.log()

        p, q = (tuple(parameter[index] for parameter in gaussian) for gaussian in (moved.p, moved.q))
        moved.state[index, 0], tries = residual(p, q, draws)
        for row, count in zip(rows, tries.tolist()):
            self._tries[row] += min(count, MAX_TRIES)
            self._fallbacks[row] += count > MAX_TRIES

    def _leave(self, ended: list[int], log_sigma_last: Tensor) -> Finished:
        """Takes the chains of these rows out of the batch; their entries stay in the tables until others join."""
        batch, index = self._batch, torch.tensor(ended, device=self.device)
        finished = Finished(
            owners=[self.owners[row] for row in ended],
            position=batch.position[index],
            tokens=batch.state[index, 0],
            record=self._record[batch.entry[index]],
            tries=[self._tries[row] for row in ended],
            fallbacks=[self._fallbacks[row] for row in ended],
            log_sigma=batch.log_sigma[index],
            log_sigma_last=log_sigma_last[index],
        )
        gone = set(ended)
        staying = [row for row in range(len(self.owners)) if row not in gone]
        self.owners = [self.owners[row] for row in staying]
        self._tries = [self._tries[row] for row in staying]
        self._fallbacks = [self._fallbacks[row] for row in staying]
        if staying:
            self._keep_rows(staying)
        return finished
