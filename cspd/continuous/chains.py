"""Speculative denoising: the head's chain, many steps a head call, with exactly the ancestral chain's law.

`draft_verify` has the method; here is who takes part in a round, what is kept between rounds, and the records.
"""

from __future__ import annotations

import os
import types
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.ancestral import evaluate
from cspd.continuous.draft_verify import Moved, compiled_move, move
from cspd.continuous.gaussian import MAX_TRIES, residual
from cspd.noise import DRAFT_OFFSET
from cspd.precision import Precision
from mar.diffusion import schedule
from mar.head import Head

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


def bucket(rows: int) -> int:
    """Rows after padding, so that shapes repeat: up to 16 as they are, then 8 sizes an octave."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def table_size(head: Head, copies: int, device: torch.device) -> int:
    """Chains times steps whose modulations may be held at once; copies are 2 with guidance."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(TABLE_SHARE * memory / (4 * (3 * len(head.res_blocks) + 2) * head.width * copies))


def acceptance(record: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """How often drafts were judged and accepted: int64 [2, window] by lag, from 1, and [2, T] by step.

    Args:
        record: int8 [N, T] of finished chains, see `Finished`.
    """
    _, start = record.nonzero()
    decided = record[record != 0].astype(np.int64)
    lag = np.arange(1, window + 1)
    k = start[:, None] - lag + 1
    judged = (lag <= np.abs(decided)[:, None]) & (k > 0) & (start < record.shape[1] - 1)[:, None]
    accepted = judged & (lag != -decided[:, None])
    by_step = [np.bincount(k[which], minlength=record.shape[1]) for which in (judged, accepted)]
    return np.stack([judged.sum(0), accepted.sum(0)]), np.stack(by_step)


class Chains:
    """Chains of many tokens, each at its own step, moved on together: one batched head call a round.

    Chains may join at any time and leave as they end, so that the call stays full.

    Args:
        head: the diffusion head. table: of the draft, see `draft_table`. noise: the source of randomness.
        trace_sigma: also sum log sigma_p along the chains, see `Finished`.
        drafting: the head is a draft model's, whose coins and candidates are apart from the target's.
        compiled: run rounds through torch.compile; they agree to rounding.
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
        self.head, self.table, self.precision, self.noise = head, table, precision, noise
        self.trace_sigma, self.drafting = trace_sigma, drafting
        self.num_steps, self.window = table.shape[:2]
        steps = torch.arange(self.num_steps).unsqueeze(1) - torch.arange(self.window)
        self._table = table, steps.clamp(min=0).to(table.device)
        self._move = compiled_move() if compiled else move
        with precision.full():
            timesteps = torch.as_tensor(schedule(self.num_steps).timestep_map, device=table.device)
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
        """Starts a chain a row with its first step, ancestral and in float32 (its gain is 316 at T = 100).

        Args:
            owners: who the rows are. seed, position: int64 [R], of their noise. z: [G, R, D]. scale, temperature: [R,
                1], the temperature that of the draft's table. index: of x_T and eps_t, see `cspd.noise.initial`.
        """
        s, last = schedule(self.num_steps), self.num_steps - 1
        x, eps_t, coins = self.noise.chain(
            seed, position, self.num_steps, self.head.channels, index, int(self.drafting)
        )
        log_coin = coins.log()
        with self.precision.full():
            c_embed = self.head.cond_embed(z)
        row = self._join(torch.cat([eps_t, log_coin.unsqueeze(-1)], dim=-1), c_embed)

        with self.precision.full():
            if self._modulations and self.precision.uniform:
                modulations = [layer[:, row, last] for layer in self._modulations]
            else:
                modulations = self.head.modulations(self._t_embed[last], c_embed)
            eps, v = evaluate(self.head, x, self.head.split(modulations), scale)
        log_sigma = s.log_sigma_base[last] + temperature.log() + s.log_sigma_slope[last] * v
        mean = x * s.mean_x[last] + eps * s.mean_eps[last]
        self._record[row, last] = 1
        new = {
            "state": torch.stack([torch.addcmul(mean, log_sigma.exp(), eps_t[:, last]), eps, x, v], dim=1),
            "t": torch.full_like(seed, last - 1),
            "row": row,
            "seed": seed,
            "position": position,
            "scale": scale.unsqueeze(1),
            "log_sigma": log_sigma.sum(-1),
        }
        under_way = len(self.owners)
        if under_way:
            new = {name: torch.cat([self._state[name][:under_way], values]) for name, values in new.items()}
        self._state = new
        self.owners += owners
        self._tries += [0] * len(owners)
        self._fallbacks += [0] * len(owners)
        self._select(range(len(self.owners)))

    def _select(self, rows: Sequence[int]) -> None:
        """Keeps the state of some rows, the last one repeated up to the bucket: its copies compute for nothing."""
        rows = [*rows, *[rows[-1]] * (bucket(len(rows)) - len(rows))]
        if rows != list(range(len(self._state["t"]))):
            index = torch.tensor(rows, device=self.table.device)
            self._state = {name: values[index] for name, values in self._state.items()}
        self._first = torch.arange(len(rows), device=self.table.device) * self.window - 1

    def _join(self, draws: Tensor, c_embed: Tensor) -> Tensor:
        """Adds chains to the tables, which are looked up by row: too large to move whenever a chain ends.

        Returns:
            int64 [R], the rows of the new chains.
        """
        record = torch.zeros(draws.shape[:2], dtype=torch.int8, device=draws.device)
        kept, total = None, len(draws)
        if self.owners:
            kept = self._state["row"][: len(self.owners)]
            total += len(kept)
            draws, record = torch.cat([self._draws[kept], draws]), torch.cat([self._record[kept], record])
            self._state["row"] = torch.arange(len(kept), device=draws.device)
        self._draws, self._record = draws, record
        new = torch.arange(total - c_embed.shape[1], total, device=draws.device)

        old = self._modulations if self.owners else None
        self._c_embed = c_embed if kept is None else torch.cat([self._c_embed[:, kept], c_embed], dim=1)
        if total * self.num_steps > table_size(self.head, len(c_embed), draws.device):
            self._modulations = None
            return new
        missing = self._c_embed if old is None else c_embed
        with self.precision.fast():
            self._modulations = self.head.modulations(self._t_embed, missing.unsqueeze(2))
        if old:
            self._modulations = [torch.cat([a[:, kept], b], dim=1) for a, b in zip(old, self._modulations)]
        return new

    def advance(self) -> Finished | None:
        """Moves every chain on by at least one step, with one head call; returns the chains that end."""
        s, real = self._state, len(self.owners)
        modulations = self._modulations or (self._t_embed, self._c_embed)
        with self.precision.fast():
            state = (s["state"], s["t"], s["row"], s["scale"], self._first)
            moved = self._move(self.head, self._table, self._draws, modulations, *state, self.trace_sigma)
        at = (s["row"] * self.num_steps + s["t"])[:real]
        self._record.view(-1)[at] = moved.signed[:real].to(torch.int8)
        if self.trace_sigma:
            s["log_sigma"] += moved.log_sigma
        steps, unresolved = torch.stack([moved.left, moved.unresolved])[:, :real].tolist()  # the one copy to the host
        if any(unresolved):
            self._residual(moved, [i for i, wanted in enumerate(unresolved) if wanted])
        s["state"], s["t"] = moved.state, moved.left.clamp(min=0)
        ended = [i for i, step in enumerate(steps) if step < 0]
        return self._leave(ended, moved.p[1]) if ended else None

    def _residual(self, moved: Moved, which: list[int]) -> None:
        """Draws what `resample` could not, for a few rows."""
        s, d = self._state, self.head.channels
        index = torch.tensor(which, device=self.table.device)
        seed, position, step = (s[name][index] for name in ("seed", "position", "t"))

        def draws(first: int, num: int) -> tuple[Tensor, Tensor]:
            offset = DRAFT_OFFSET if self.drafting else 0
            normals, coins = self.noise.candidates(seed, position, step, first, num, d, offset)
            return normals, coins.log()

        p, q = (tuple(parameter[index] for parameter in gaussian) for gaussian in (moved.p, moved.q))
        moved.state[index, 0], tries = residual(p, q, draws)
        for i, count in zip(which, tries.tolist()):
            self._tries[i] += min(count, MAX_TRIES)
            self._fallbacks[i] += count > MAX_TRIES

    def _leave(self, ended: list[int], log_sigma_last: Tensor) -> Finished:
        s = self._state
        index = torch.tensor(ended, device=self.table.device)
        finished = Finished(
            owners=[self.owners[i] for i in ended],
            position=s["position"][index],
            tokens=s["state"][index, 0],
            record=self._record[s["row"][index]],
            tries=[self._tries[i] for i in ended],
            fallbacks=[self._fallbacks[i] for i in ended],
            log_sigma=s["log_sigma"][index],
            log_sigma_last=log_sigma_last[index],
        )
        gone = set(ended)
        stay = [i for i in range(len(self.owners)) if i not in gone]
        self.owners, self._tries, self._fallbacks = (
            [values[i] for i in stay] for values in (self.owners, self._tries, self._fallbacks)
        )
        if stay:
            self._select(stay)
        return finished
