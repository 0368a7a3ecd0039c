"""Slots: first come first served, refilled at once, kinds of round in turn, never more than there are."""

from __future__ import annotations

import pytest

from cspd.engine import Scheduler
from cspd.method import METHODS
from cspd.request import Request, Sequence


def sequences(num, method=METHODS[0], **settings):
    request = Request(label=0, **{"cfg": 3.0, "num_sampling_steps": 100} | settings)
    return [Sequence(request, ticket=i, key=method.round_key(request)) for i in range(num)]


def test_admits_in_order_of_arrival_up_to_the_slots():
    scheduler = Scheduler(3)
    queue = sequences(5)
    for sequence in queue:
        scheduler.add(sequence)
    assert scheduler.admit() == queue[:3]
    assert sorted(s.slot for s in queue[:3]) == [0, 1, 2]
    assert scheduler.admit() == []
    assert len(scheduler) == 5


def test_a_freed_slot_is_taken_at_once_by_the_next():
    scheduler = Scheduler(2)
    queue = sequences(3)
    for sequence in queue:
        scheduler.add(sequence)
    scheduler.admit()
    slot = queue[1].slot
    scheduler.release([queue[1]])
    assert scheduler.admit() == [queue[2]]
    assert queue[2].slot == slot
    assert scheduler.next() == [queue[0], queue[2]]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.family} {method.name}")
def test_kinds_take_turns(method):
    scheduler = Scheduler(4)
    kinds = {}, {"cfg": 1.0}, {"temperature": 0.0}
    guided, plain, cold = (sequences(n, method=method, **kind) for n, kind in zip((2, 1, 1), kinds))
    for sequence in guided + plain + cold:
        scheduler.add(sequence)
    scheduler.admit()
    assert [scheduler.next() for _ in range(6)] == [guided, plain, cold] * 2
    scheduler.release(plain)
    assert [scheduler.next() for _ in range(4)] == [guided, cold] * 2


def test_clear_frees_every_slot():
    scheduler = Scheduler(2)
    for sequence in sequences(5):
        scheduler.add(sequence)
    scheduler.admit()
    scheduler.clear()
    assert len(scheduler) == 0
    assert scheduler.next() == []
    late = sequences(2)
    for sequence in late:
        scheduler.add(sequence)
    assert scheduler.admit() == late
