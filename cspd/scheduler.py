"""Who runs next: waiting -> running -> finished, over slots that are allocated once."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from cspd.sequence import Sequence


class Scheduler:
    """First come, first served into `num_slots` slots; the kinds of round in flight take turns.

    Sequences with equal `Sequence.key` share a round. Where several kinds are in flight, each gets a round in
    turn, so none waits longer than the number of kinds.
    """

    def __init__(self, num_slots: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Hashable, list[Sequence]] = {}  # by round key, in the order of their turns
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    def __len__(self) -> int:
        """Sequences not finished. Any thread may ask."""
        return len(self.waiting) + sum(map(len, list(self.running.values())))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.waiting or sequence in self.running.get(sequence.key, ())

    def in_flight(self) -> list[Sequence]:
        """The running sequences."""
        return [sequence for batch in self.running.values() for sequence in batch]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences into free slots and returns them."""
        admitted = []
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            sequence.slot = self._free.pop()
            self.running.setdefault(sequence.key, []).append(sequence)
            admitted.append(sequence)
        return admitted

    def next(self) -> list[Sequence]:
        """The sequences of the kind whose turn it is; empty when nothing runs."""
        if not self.running:
            return []
        key = next(iter(self.running))
        batch = self.running.pop(key)
        self.running[key] = batch
        return list(batch)

    def release(self, finished: list[Sequence]) -> None:
        """Frees the slots of finished sequences."""
        for sequence in finished:
            key = sequence.key
            self.running[key].remove(sequence)
            if not self.running[key]:
                del self.running[key]
            self._free.append(sequence.slot)

    def cancel(self, sequence: Sequence) -> None:
        """Takes a sequence out, waiting or running."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.release([sequence])

    def clear(self) -> None:
        """Drops everything, finished or not."""
        self.waiting.clear()
        for batch in list(self.running.values()):
            self.release(list(batch))
