"""The scheduler: first come, first served; freed slots are filled at once; kinds of rounds take turns."""

from __future__ import annotations

import pytest

from cspd.engine import Scheduler
from cspd.method import METHODS, Method
from cspd.request import Request, Sequence


def sequences(num: int, method: Method = METHODS[0], **settings: object) -> list[Sequence]:
    request = Request(label=0, **{"cfg": 3.0, "num_sampling_steps": 100} | settings)
    return [Sequence(request, ticket=i, key=method.round_key(request)) for i in range(num)]


def scheduler_of(num_slots: int, queue: list[Sequence]) -> Scheduler:
    """A scheduler that these sequences have been added to, in this order."""
    scheduler = Scheduler(num_slots)
    for sequence in queue:
        scheduler.add(sequence)
    return scheduler


def test_slots_go_to_the_first_in_the_queue_and_a_freed_one_to_the_next():
    queue = sequences(4)
    scheduler = scheduler_of(2, queue)
    assert scheduler.admit() == queue[:2]
    assert sorted(sequence.slot for sequence in queue[:2]) == [0, 1]
    assert scheduler.admit() == []
    assert len(scheduler) == 4

    freed = queue[1].slot
    scheduler.release([queue[1]])
    assert scheduler.admit() == [queue[2]]
    assert queue[2].slot == freed
    assert scheduler.next() == [queue[0], queue[2]]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.family} {method.name}")
def test_kinds_of_rounds_take_turns(method):
    guided = sequences(2, method)
    unguided = sequences(1, method, cfg=1.0)
    greedy = sequences(1, method, temperature=0.0)
    scheduler = scheduler_of(4, guided + unguided + greedy)
    scheduler.admit()
    assert [scheduler.next() for _ in range(6)] == [guided, unguided, greedy] * 2
    scheduler.release(unguided)
    assert [scheduler.next() for _ in range(4)] == [guided, greedy] * 2


def test_what_methods_keep_is_of_one_kind_and_goes_with_its_last_sequence():
    first, second, third = sequences(3)
    (other,) = sequences(1, cfg=1.0)
    scheduler = scheduler_of(3, [first, other, second, third])
    scheduler.admit()
    first.shared["kept"] = 1
    assert second.shared is first.shared and not other.shared
    scheduler.release([first])
    scheduler.admit()
    assert third.shared == {"kept": 1}
    scheduler.release([second, third])
    assert first.shared == {}


def test_dropping_a_model_frees_its_slots_and_leaves_the_others():
    first, second = sequences(3), sequences(3, cfg=1.0)
    for sequence in second:
        sequence.model = "second"
    scheduler = scheduler_of(3, [first[0], *second[:2], *first[1:], second[2]])
    scheduler.admit()
    scheduler.drop(["second"])
    assert list(scheduler.waiting) == first[1:] and scheduler.in_flight() == first[:1]
    assert scheduler.admit() == first[1:]
    assert sorted(sequence.slot for sequence in first) == [0, 1, 2]
    scheduler.drop(["", "second"])
    assert len(scheduler) == 0 and scheduler.next() == []
