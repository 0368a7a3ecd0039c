"""Several threads, streams and callbacks on one engine: everyone gets their own images, as if they were alone."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toys import toy_mar, toy_models

from cspd import Engine, MARModels, Request, VQModels
from cspd.engine import Turns
from mar.vae import AutoencoderKL, KLConfig

QUICK = {"method": "ar", "num_iter": 4, "num_sampling_steps": 3, "first_timestep": 950}
SPECULATIVE = {"method": "speculative", "num_iter": 2, "num_sampling_steps": 12, "window": 3, "draft": "frozen"}
CLOSE = 1e-3  # rounding: the batch is another one


@pytest.fixture(scope="module")
def models():
    target = toy_mar()
    vae = AutoencoderKL(KLConfig(embed_dim=3, ch=32, ch_mult=(1, 1, 1), num_res_blocks=1, scale=1.0))
    return MARModels(target, vae=vae.eval())


def requests_of(who, num=3, settings=QUICK):
    return [Request(label=i % 4, seed=100 * who + i, **settings) for i in range(num)]


def alone(models, requests):
    return Engine(models, max_batch=1, device="cpu").generate(requests)


def assert_same(outputs, expected):
    assert len(outputs) == len(expected)
    for output, one in zip(outputs, expected):
        assert output.request == one.request and (output.image - one.image).abs().max() < CLOSE


@pytest.mark.parametrize("settings", [QUICK, SPECULATIVE], ids=["ar", "speculative"])
def test_four_threads_share_an_engine(settings, models):
    engine = Engine(models, max_batch=3, device="cpu")
    wanted = [requests_of(who, settings=settings) for who in range(4)]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(engine.generate, wanted))
    assert len(engine.scheduler) == 0
    for outputs, requests in zip(made, wanted):
        assert_same(outputs, alone(models, requests))


def test_streams_and_steps_in_turn(models):
    """In one thread: none takes another's outputs, nor waits for it to end."""
    engine = Engine(models, max_batch=2, device="cpu")
    first, second = (engine.stream(requests_of(who)) for who in range(2))
    ticket = engine.add_request(Request(label=3, seed=7, **QUICK))
    made, own = ([], []), {}
    for stream, outputs in itertools.islice(itertools.cycle(zip((first, second), made)), 6):
        outputs.append(next(stream))
        own |= engine.step()
    assert list(first) == list(second) == []
    while ticket not in own:
        own |= engine.step()
    for who, outputs in enumerate(made):
        assert_same(
            [output for _, output in sorted(outputs, key=lambda item: item[0])], alone(models, requests_of(who))
        )


def test_a_round_that_fails_is_told_to_all(models, monkeypatch):
    engine = Engine(models, max_batch=2, device="cpu")
    other = engine.stream(requests_of(1))
    next(other)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.runner, "admit", lambda sequences: 1 / 0)
        engine.generate(requests_of(0))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(other)
    assert len(engine.generate(requests_of(0))) == 3


def test_a_round_that_fails_keeps_what_was_finished_before(models, monkeypatch):
    """Whoever ran the round: a step tells of it, and the next one returns what was finished."""
    engine = Engine(models, max_batch=3, device="cpu")
    (soon,) = requests_of(0, 1, QUICK | {"num_iter": 1})
    (late,) = requests_of(1, 1, QUICK | {"num_iter": 8})
    for own in (False, True):
        ticket = engine.add_request(soon)
        engine.add_request(late)
        engine.generate([soon])  # by whose rounds the one of the ticket is finished too
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(engine.runner, "admit", lambda sequences: 1 / 0)
            engine.step() if own else engine.generate([soon])
        if not own:
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                engine.step()
        assert engine.step().keys() == {ticket} and engine.step() == {}


EXTREME = [
    ("MAR", {"method": "ar", "cfg": 3 * 10**38}),
    ("MAR", {**SPECULATIVE, "temperature": 1e-20}),
    ("MAR", {**SPECULATIVE, "temperature": 3 * 10**38}),
    ("MAR", {"method": "cspd", "ratio_temperature": 10**25}),
    ("VQ", {"method": "uniform-rsd", "delta": 10**25}),
    ("VQ", {"method": "lantern++", "lam": 10**25}),
]


@pytest.mark.filterwarnings("ignore:a chain of")
@pytest.mark.parametrize("family, settings", EXTREME, ids=str)
def test_numbers_at_the_ends_of_their_ranges_harm_nobody_else(family, settings):
    """Their own image may be lost. One in flight beside it is as if it were alone."""
    if family == "MAR":
        own, quick = MARModels(toy_mar(), toy_mar()), QUICK
        settings = {"num_iter": 2, "num_sampling_steps": 12} | settings
    else:
        own, quick = VQModels(**toy_models(length=16)), {"method": "ar"}
    engine = Engine(own, max_batch=2, device="cpu")
    good, extreme = Request(1, seed=5, **quick), Request(2, seed=6, **settings)
    tickets = [engine.add_request(request) for request in (good, extreme)]
    outputs = {}
    while len(engine.scheduler):
        outputs |= engine.step()
    (expected,) = Engine(own, max_batch=1, device="cpu").generate([good])
    assert torch.allclose(outputs[tickets[0]].tokens.float(), expected.tokens.float(), atol=CLOSE)
    assert outputs.keys() == {*tickets} and outputs[tickets[0]].error is None


def test_turns_are_taken_in_order_and_again():
    turns, order = Turns(), []

    def run(name):
        with turns.take():
            order.append(name)

    with turns.take(), turns.take():
        threads = [threading.Thread(target=run, args=[name]) for name in range(4)]
        for number, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) < 2 + number:
                pass
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]


def test_a_turn_that_is_not_waited_for_blocks_nobody(monkeypatch):
    turns = Turns()
    with turns.take(), monkeypatch.context() as patch, ThreadPoolExecutor(1) as other:
        patch.setattr(turns._condition, "wait_for", lambda ready: 1 / 0)  # as a signal would
        with pytest.raises(ZeroDivisionError):
            other.submit(turns.take().__enter__).result()
    with turns.take():
        pass


@pytest.mark.parametrize("settings", [QUICK, SPECULATIVE], ids=["ar", "speculative"])
def test_a_cancelled_request_leaves_the_others_as_they_are(settings, models):
    requests = requests_of(0, 3, settings)
    engine = Engine(models, max_batch=3, device="cpu")
    seen = []

    def cancel_second(request, fraction, preview):
        if request is requests[1]:
            seen.append(fraction)
            assert engine.cancel(request) and not engine.cancel(request)

    outputs = engine.generate(requests, on_progress=cancel_second)
    assert len(seen) == 1 and 0 < seen[0] < 1
    assert [output.request.seed for output in outputs] == [0, 2]
    assert_same(outputs, [alone(models, requests)[i] for i in (0, 2)])
    assert sorted(engine.scheduler._free) == [0, 1, 2]


def test_a_slot_is_not_given_away_while_chains_will_write_to_it(models):
    """One of a batch is cancelled while chains of its iteration are under way; another takes its slot."""
    engine = Engine(models, max_batch=4, device="cpu")
    first = requests_of(0, 4, SPECULATIVE | {"num_iter": 4, "num_sampling_steps": 20})
    last = Request(label=3, seed=99, **SPECULATIVE)
    tickets = [engine.add_request(request) for request in first]
    outputs, busy = {}, []
    while not busy:  # a round ends when three in four have ended their iteration
        outputs |= engine.step()
        busy = [each.ticket for each in engine.scheduler.in_flight() if each.num_under_way]
    assert len(engine.scheduler) == 4 and engine.cancel(busy[0])
    tickets.append(engine.add_request(last))
    while len(engine.scheduler):
        outputs |= engine.step()
    assert busy[0] not in outputs and len(outputs) == 4
    kept = [ticket for ticket in tickets if ticket != busy[0]]
    expected = alone(models, [*first, last])
    assert_same([outputs[ticket] for ticket in kept], [expected[tickets.index(ticket)] for ticket in kept])


def test_one_cancelled_in_its_last_iteration_gives_no_output(models):
    """Though its chains are under way beside another's, and end it all the same."""
    num, last = 12, 2
    engine = Engine(models, max_batch=num, device="cpu")
    for request in requests_of(0, num, SPECULATIVE | {"num_iter": last, "num_sampling_steps": 20}):
        engine.add_request(request)
    outputs, busy = {}, []
    while len(engine.scheduler) and len(busy) < 2:
        outputs |= engine.step()
        busy = [each for each in engine.scheduler.in_flight() if each.num_under_way and each.iteration == last]
    assert engine.cancel(busy[0].ticket) and busy[0] in engine.scheduler
    while len(engine.scheduler):
        outputs |= engine.step()
    assert len(outputs) == num - 1 and busy[0].ticket not in outputs


def test_one_that_waits_can_be_cancelled_by_its_ticket(models):
    engine = Engine(models, max_batch=1, device="cpu")
    tickets = [engine.add_request(request) for request in requests_of(0, 2)]
    assert engine.cancel(tickets[1]) and not engine.cancel(99)
    outputs = engine.step()
    while len(engine.scheduler):
        outputs |= engine.step()
    assert [*outputs] == tickets[:1] and not engine.cancel(tickets[0])


def test_one_of_two_equal_requests_is_cancelled(models):
    engine = Engine(models, max_batch=2, device="cpu")
    first, second = (Request(label=1, seed=5, **QUICK) for _ in range(2))
    tickets = [engine.add_request(request) for request in (first, second)]
    assert engine.cancel(first)
    outputs = {}
    while len(engine.scheduler):
        outputs |= engine.step()
    assert [*outputs] == tickets[1:]


@pytest.mark.parametrize("family", ["MAR", "VQ"])
def test_progress_and_previews(family, models):
    settings = QUICK if family == "MAR" else {"method": "ar"}
    vq = toy_models(length=16)
    engine = Engine(models if family == "MAR" else VQModels(vq["target"], tokenizer=vq["tokenizer"]), device="cpu")
    seen, late = {0: [], 1: []}, []

    def watch(request, fraction, preview):
        picture = preview()
        assert request is requests[request.seed]
        seen[request.seed].append((fraction, picture))
        late.append(preview)

    requests = [Request(label=1, seed=seed, **settings) for seed in range(2)]
    outputs = engine.generate(requests, on_progress=watch, every=1 if family == "MAR" else 5)
    for output, (*early, last) in zip(outputs, seen.values()):
        fractions = [fraction for fraction, _ in early]
        assert len(early) == 3 and fractions == sorted(set(fractions)) and last[0] == 1
        assert last[1].tobytes() == output.pil().tobytes()
        pictures = [picture.tobytes() for _, picture in early]
        assert len(set(pictures)) == len(early)  # it changes as it grows
    assert late[0]() is None  # it runs no more
    plain = engine.generate(requests)
    assert all(torch.equal(output.tokens, other.tokens) for output, other in zip(outputs, plain))


SLOWER = SPECULATIVE | {"num_iter": 8, "num_sampling_steps": 20}
DRAFTING = {"method": "cspd", "gamma": 8, "verify": "sequential", "num_sampling_steps": 3, "first_timestep": 950}


@pytest.mark.filterwarnings("ignore:a chain of")
@pytest.mark.parametrize("settings", [QUICK, SLOWER, DRAFTING], ids=["ar", "speculative", "cspd"])
def test_progress_is_what_is_committed(settings):
    """Not what has begun, or was drafted and rejected: at every call it is the share of the tokens that stay."""
    engine = Engine(MARModels(toy_mar(), toy_mar(depth=2)), max_batch=4, device="cpu")
    requests = requests_of(0, 4, settings)
    seen, under_way = [], 0

    def watch(request, fraction, preview):
        nonlocal under_way
        for sequence in engine.scheduler.in_flight():
            if sequence.asked is request:
                (tokens,), _ = engine.runner.so_far(sequence)
                under_way += sequence.num_under_way
                assert sequence.num_started - sequence.num_under_way == sequence.num_committed
                seen.append((request.seed, fraction, tokens))

    outputs = engine.generate(requests, on_progress=watch)
    for seed, fraction, tokens in seen:
        stays = (tokens == outputs[seed].tokens).all(-1)
        assert fraction == stays.float().mean() and torch.equal(tokens.any(-1), stays)
    assert len(seen) >= 12 and (under_way > 0) == (settings is SLOWER)


def test_a_preview_has_what_is_known_and_nothing_else(models):
    """The slot held another image's codes before."""
    vq = toy_models(length=16)
    engine = Engine(VQModels(vq["target"], tokenizer=vq["tokenizer"]), max_batch=1, device="cpu")
    engine.generate(Request(1, seed=5, method="ar"))
    engine.add_request(Request(1, seed=6, method="ar"))
    for _ in range(5):
        engine.step()
    (sequence,) = engine.scheduler.in_flight()
    (codes,), (token_cost,) = engine.runner.so_far(sequence)
    assert sequence.num_committed == 5 and (codes[:5] >= 0).all() and (codes[5:] == -1).all()
    assert token_cost[:5].isfinite().all() and token_cost[5:].isnan().all()


@pytest.mark.parametrize("settings", [QUICK, SPECULATIVE | {"num_iter": 6}], ids=["ar", "speculative"])
def test_what_tokens_cost_is_known_as_they_are_made(settings, models):
    """The slots held other images before."""
    engine = Engine(models, max_batch=2, device="cpu")
    engine.generate(requests_of(1, 2, settings))
    tickets = [engine.add_request(request) for request in requests_of(2, 2, settings)]
    outputs, seen = {}, {ticket: [] for ticket in tickets}
    while len(outputs) < 2:
        outputs |= engine.step()
        for sequence in engine.scheduler.in_flight():
            (tokens,), (token_cost,) = engine.runner.so_far(sequence)
            assert torch.equal(token_cost.isfinite(), tokens.any(-1))
            seen[sequence.ticket].append(token_cost)
    for ticket, token_costs in seen.items():
        counts = [int(token_cost.isfinite().sum()) for token_cost in token_costs]
        assert len(set(counts)) > 2 and counts == sorted(counts)
        for token_cost in token_costs:
            made = token_cost.isfinite()
            assert torch.equal(token_cost[made], outputs[ticket].token_cost[made])


def test_requests_are_read_as_slots_become_free(models):
    engine, read = Engine(models, max_batch=2, device="cpu"), []

    def lazily():
        for request in requests_of(0, 9):
            read.append(request.seed)
            yield request

    at_end = []
    outputs = engine.generate(lazily(), on_progress=lambda request, fraction, _: at_end.append((len(read), fraction)))
    assert [output.request.seed for output in outputs] == list(range(9))
    assert at_end[0][0] == 3  # one more than there are slots


def test_async_for(models):
    engine = Engine(models, max_batch=2, device="cpu")

    async def collect(who):
        return [output async for _, output in engine.stream_async(requests_of(who))]

    async def both():
        return await asyncio.gather(collect(0), collect(1))

    for who, outputs in enumerate(asyncio.run(both())):
        outputs = sorted(outputs, key=lambda output: output.request.seed)
        assert_same(outputs, alone(models, requests_of(who)))


def test_async_for_that_is_left_early(models):
    engine = Engine(models, max_batch=2, device="cpu")
    endless = (Request(label=0, seed=seed, **QUICK) for seed in itertools.count())

    async def leave(stream):
        async for _ in stream:
            return

    async def time_out():
        await asyncio.wait_for(forever(engine.stream_async(endless)), 0.3)

    async def forever(stream):
        async for _ in stream:
            pass

    asyncio.run(leave(engine.stream_async(requests_of(0))))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(time_out())
    assert len(engine.scheduler) == 0 and len(engine.generate(requests_of(1))) == 3
