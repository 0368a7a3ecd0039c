"""Where chains are kept: tensors with a slot for each, allocated once, which chains join and leave by single rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.continuous.modulations import modulation_size, most_bytes
from cspd.precision import Precision
from cspd.transfer import send_integers
from mar.head import Head

LEAST = 16  # slots; more are allocated by doubling
NOBODY = 0  # the slot that fills up a batch: its chain stands still for good
LEFT, WAITING, TRIES, FALLBACKS = range(4)  # of `Slots.progress`
STATE_ROWS, MEAN_P, LOG_SIGMA_P = 8, 4, 5  # of `Slots.state`
PER_SLOT = ("state", "progress", "names", "scale", "log_sigma", "draws", "record", "c_embed")


class Table(NamedTuple):
    """The head's modulations, computed before: of all layers side by side [G, C, T, ..], and the layers' widths."""

    values: Tensor
    widths: list[int]

    def layers(self) -> Sequence[Tensor]:
        """By layer, [G, C, T, ..]; views."""
        return self.values.split_with_sizes(self.widths, dim=-1)

    def layers_at(self, head: Head, at: Tensor) -> Sequence[Tensor]:
        """By layer, [G, N, ..], at places [N] of the flat list of all slots' steps."""
        return self.values.flatten(1, 2).index_select(1, at).split_with_sizes(self.widths, dim=-1)


class Embeddings(NamedTuple):
    """What the head's modulations are computed of, where no `Table` fits: t_embed [T, width], c_embed [C, G, width]."""

    t_embed: Tensor
    c_embed: Tensor

    def layers_at(self, head: Head, at: Tensor) -> Sequence[Tensor]:
        """As that of a `Table`."""
        num_steps = len(self.t_embed)
        c_embed = self.c_embed.transpose(0, 1).index_select(1, at // num_steps)
        return head.modulations(self.t_embed[at % num_steps], c_embed)


class Slots:
    """C slots of chains of T steps. Values of free slots mean nothing.

    Args:
        copies: G, 2 with guidance. tabled: the head's modulations at all steps are kept too.

    Attributes:
        state: [C, 8, d], see `draft_verify.Moved`. scale: guidance [C, 1, 1].
        progress: int64 [C, 4]: the steps left; `Moved.waiting`; of the residual, candidates looked at, and how often
            none of them was kept.
        names: int64 [C, 3], the row it is for, and the seed and position of its noise. log_sigma: [C], the sum so far.
        draws: [C, T, d + 1], eps_t and the log of a uniform draw for each step. c_embed: [C, G, width], conditions.
        record: int64 [C, T], see `chain_records.Finished`.
        first_progress, first_record: of a chain after its first step.
        key: of graphs that were captured over these tensors.
    """

    def __init__(
        self, head: Head, num_steps: int, copies: int, capacity: int, tabled: bool, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(capacity, *shape, dtype=dtype, device=device)

        self.num_steps, self.copies, self.capacity, self.tabled = num_steps, copies, capacity, tabled
        self.state = zeros(STATE_ROWS, head.channels)
        self.progress = zeros(4, dtype=torch.int64)
        self.names = zeros(3, dtype=torch.int64)
        self.scale, self.log_sigma = zeros(1, 1), zeros()
        self.draws = zeros(num_steps, head.channels + 1)
        self.record = zeros(num_steps, dtype=torch.int64)
        self.c_embed = zeros(copies, head.width)
        self.progress[NOBODY, : WAITING + 1] = num_steps
        self.first_progress, self.first_record = self.progress.new_zeros(4), self.record.new_zeros(num_steps)
        self.first_progress[LEFT].fill_(num_steps - 1)  # to assign the number would copy it
        self.first_record[-1].fill_(1)
        self.key = object()
        self._table: Table | None = None
        self.clear()

    def clear(self) -> None:
        """Makes all slots free."""
        self._free = [*range(self.capacity - 1, NOBODY, -1)]  # the next one is the last

    def take(self, count: int) -> list[int]:
        """Free slots, the first ones first."""
        return [self._free.pop() for _ in range(count)]

    def release(self, slots: Sequence[int]) -> None:
        """Makes slots free."""
        self._free = sorted([*self._free, *slots], reverse=True)

    def adopt(self, other: Slots, live: Sequence[int]) -> None:
        """Takes over the chains in another's slots: they are in the first slots here, in their order."""
        here = send_integers(self.take(len(live)), self.state.device)
        there = send_integers(live, self.state.device)
        for name in PER_SLOT:
            getattr(self, name)[here] = getattr(other, name)[there]
        if self.tabled and other.tabled:
            self.write_modulations(here, [layer[:, there] for layer in other._table.layers()])

    def modulations(self, t_embed: Tensor) -> Table | Embeddings:
        """As rounds look them up or compute them; t_embed: [T, width], of all steps."""
        return self._table or Embeddings(t_embed, self.c_embed)

    def write_modulations(self, slots: Tensor, layers: Sequence[Tensor]) -> None:
        """Modulations by layer, [G, N, T, ..] each, of the chains in slots [N]."""
        if self._table is None:
            widths = [layer.shape[-1] for layer in layers]
            shape = self.copies, self.capacity, self.num_steps, sum(widths)
            self._table = Table(layers[0].new_empty(shape), widths)  # large, and few of its rows may be needed
        for own, layer in zip(self._table.layers(), layers):
            own[:, slots] = layer


def capacity_for(needed: int, most: int) -> int:
    """Slots to allocate where so many are needed: a power of two, but not beyond `most` while that is enough."""
    doubled = max(LEAST, 1 << (needed - 1).bit_length())
    return min(doubled, most) if needed <= most else doubled


def table_size(head: Head, copies: int, precision: Precision) -> int:
    """Chains times steps whose modulations may be held at once, of `copies` classes; beyond it rounds compute them."""
    size = modulation_size(head) // 4 * precision.dtype.itemsize  # of a chain's step and class
    return most_bytes(precision.device) // (copies * size)
