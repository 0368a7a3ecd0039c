"""Images that take their time: rounds go on meanwhile, and no output is lost or another's."""

from __future__ import annotations

import copy
import itertools
from typing import ClassVar

import pytest
import standin
import timeline
import torch

from cspd import Engine, MARModels, Request
from cspd import engine as cspd_engine
from cspd.engine import AHEAD
from cspd.request import Stopwatch
from mar.checkpoint import create_vae

REQUESTS = [Request(label=i % 10, seed=i, method="ar", num_iter=1 + i % 5, num_sampling_steps=2) for i in range(14)]


@pytest.fixture
def engine(small_mar):
    torch.manual_seed(0)
    return Engine(MARModels(small_mar, vae=create_vae("kl_digits32")), max_batch=2, device="cpu")


@pytest.fixture
def slow(monkeypatch):
    """A device that never has an image before one waits for it."""
    monkeypatch.setattr(Stopwatch, "is_past", lambda self: False)


def run(engine):
    """(request, output) of all requests as they are handed out, and how many there were after each step."""
    index_of = {engine.add_request(request): index for index, request in enumerate(REQUESTS)}
    made, counts = [], []
    while len(engine.scheduler):
        made += [(index_of[ticket], output) for ticket, output in engine.step().items()]
        counts.append(len(made))
    return made, counts


def test_images_come_later_and_none_is_lost(engine, monkeypatch):
    prompt, at_once = run(engine)
    monkeypatch.setattr(Stopwatch, "is_past", lambda self: False)
    late, later = run(engine)
    assert len(at_once) == len(later)  # rounds: none waited
    assert later[-1] == len(REQUESTS) and all(a >= b for a, b in zip(at_once, later))
    assert max(a - b for a, b in zip(at_once, later)) >= AHEAD
    for (index, output), (expected_index, expected) in zip(late, prompt):
        assert index == expected_index
        assert torch.equal(output.image, expected.image) and torch.equal(output.tokens, expected.tokens)
        assert output.stats.seconds["decode"] > 0


def test_rounds_of_a_stream_do_not_wait_for_images(engine, slow, monkeypatch):
    """All slots finish together: what they made is decoded while the next requests are under way."""
    requests = [Request(label=1, seed=i, method="ar", num_iter=2, num_sampling_steps=2) for i in range(8)]
    rounds, finisher = [], engine._finisher
    ready = finisher.ready
    monkeypatch.setattr(finisher, "ready", lambda wait: rounds.append(ready(wait)) or rounds[-1])
    assert len(list(engine.stream(requests))) == 8
    assert [len(outputs) for outputs in rounds] == [0] * 7 + [8]


@pytest.mark.parametrize("failing", ["admit", "decode", "seconds"])
def test_an_error_leaves_nothing_behind(engine, slow, failing, monkeypatch):
    for request in REQUESTS[:6]:
        engine.add_request(request)
    engine.step()
    assert len(engine._finisher) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Stopwatch if failing == "seconds" else engine.runner, failing, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            while len(engine.scheduler):
                engine.step()
    assert len(engine.scheduler) == len(engine._finisher) == 0 and engine.step() == {}
    assert len(engine.generate(REQUESTS[:3])) == 3


def test_few_are_under_way(engine, slow):
    for request in REQUESTS:
        engine.add_request(request)
    while len(engine.scheduler):
        engine.step()
        assert len(engine._finisher) <= AHEAD * engine.num_slots


def test_a_stream_that_is_left_leaves_nothing(engine, slow):
    stream = engine.stream(REQUESTS)
    next(stream)
    stream.close()
    assert sorted(index for index, _ in engine.stream(REQUESTS[:3])) == [0, 1, 2]


def test_on_a_gpu_only_the_end_is_waited_for(small_mar):
    """Rounds and images that are past are read while later ones run; on the stand-in a phase takes 1 ms."""
    models = MARModels(small_mar, vae=create_vae("kl_digits32"))
    expected = Engine(models, max_batch=2, device="cpu").generate(REQUESTS[:4])
    outputs = {}
    with standin.cuda() as gpu:
        engine = Engine(copy.deepcopy(models), max_batch=2, device="cuda:0")
        for request in REQUESTS[:4]:
            engine.add_request(request)
        while len(engine.scheduler):
            assert not gpu.reads and len(engine._finisher._work) <= timeline.LAG
            early, outputs = len(outputs), outputs | engine.step()
    assert 0 < early < len(outputs) and {place.what for place in gpu.reads} == {"event.synchronize"}
    for ticket, on_cpu in enumerate(expected):
        made, rounds = outputs[ticket], on_cpu.stats.iterations
        assert torch.equal(made.tokens, on_cpu.tokens) and torch.equal(made.image, on_cpu.image)
        phases = {"backbone": rounds, "head": rounds, "draft": 0, "decode": 1, "other": 2 * rounds + 1}
        assert made.stats.seconds == pytest.approx({phase: count / 1000 for phase, count in phases.items()})


class FakeStream:
    """A stream of a GPU that never gets anywhere by itself."""

    reached = False


class FakeEvent:
    """An event of a GPU, as torch's: its time cannot be had before its stream was there."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.stream.reached

    def synchronize(self):
        self.stream.reached = True

    def elapsed_time(self, later):
        if not (self.query() and later.query()):
            raise RuntimeError("device not ready")
        return 2000.0


def test_a_stopwatch_waits_for_the_stream_it_was_made_on(monkeypatch):
    main, side = FakeStream(), FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    watch = Stopwatch(torch.device("cuda"))
    watch.start("decode")
    watch.stop()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    assert not watch.is_past()
    assert watch.seconds()["decode"] == 2.0 and side.reached and not main.reached


class Watched(cspd_engine.tqdm):
    """A bar that keeps what it showed."""

    shown: ClassVar[list[float]] = []

    def update(self, n=1):
        super().update(n)
        self.shown.append(self.n)


@pytest.mark.parametrize("num", [1, 7])
def test_the_bar_moves_while_images_are_decoded(small_mar, monkeypatch, num):
    """All finish in one round, and a CPU decodes a few of them at a time."""
    engine = Engine(MARModels(small_mar, vae=create_vae("kl_digits32")), max_batch=num, device="cpu")
    monkeypatch.setattr(cspd_engine, "tqdm", Watched)
    monkeypatch.setattr(Watched, "shown", [])
    engine.generate([Request(1, i, "ar", num_iter=2, num_sampling_steps=2) for i in range(num)], progress=True)
    shown = Watched.shown
    assert shown == sorted(shown)
    if num == 1:
        assert shown[-1] == engine.runner.seq_len  # tokens
    else:
        steps = [after - before for before, after in itertools.pairwise(shown)]
        assert steps.count(pytest.approx(2 * cspd_engine.DECODING)) == 2 and shown[-1] == num  # 3, 2 and 2 images


def test_a_bar_of_endless_requests_counts_on(small_mar):
    """Of an iterator nobody knows the total, with which tqdm has no truth value."""
    engine = Engine(MARModels(small_mar), max_batch=2, device="cpu")
    requests = (Request(1, seed, "ar", num_iter=2, num_sampling_steps=2) for seed in range(3))
    assert len(list(engine.stream(requests, progress=True))) == 3
