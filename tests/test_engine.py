"""The engine: rounds, streams, threads, cancelled requests, and images that are decoded while rounds go on."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import multiprocessing
import pickle
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import standin
import timeline
import torch
from causals import CausalGolden
from conftest import relative_error
from graphs import replayed
from toys import toy_mar, toy_models

from cspd import Engine, MARModels, Request, VQModels, load, noise, terminal
from cspd import engine as cspd_engine
from cspd.causal.family import CausalModels
from cspd.continuous import tuning
from cspd.device import Precision
from cspd.engine import AHEAD, drained
from cspd.masked.orders import cosine
from cspd.request import Stopwatch
from cspd.tuner import Times
from mar import model
from mar.checkpoint import create_vae
from mar.model import MAR, MARConfig
from mar.vae import AutoencoderKL, KLConfig

PIXELS = 3e-3
QUICK = {"method": "ar", "num_iter": 8, "num_sampling_steps": 10}


@pytest.fixture(scope="module")
def vae():
    """For the latents of the small MAR; random weights show differences as well as trained ones."""
    torch.manual_seed(0)
    return create_vae("kl_digits32").eval()


def finish(engine):
    """Runs rounds until no request is left; the outputs by ticket."""
    outputs = {}
    while len(engine.scheduler):
        outputs |= engine.step()
    return outputs


NUM = 15
VARIANTS = [
    {"cfg": 3.0, "num_iter": 8},
    {"cfg": 1.0, "num_iter": 5},
    {"cfg": 2.0, "cfg_schedule": "constant", "num_iter": 3, "temperature": 0.9},
    {"cfg": 1.5, "num_iter": 12, "num_sampling_steps": 7},
    {"cfg": 4.0, "num_iter": 1, "temperature": 0.0},
]
MIXED = [Request(label=i % 10, seed=100 + i, **(QUICK | VARIANTS[i % len(VARIANTS)])) for i in range(NUM)]


@pytest.fixture(scope="module")
def alone(small_mar, vae):
    """The images of the mixed requests, each generated alone."""
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=1)
    return [engine.generate([request])[0] for request in MIXED]


@pytest.mark.parametrize("max_batch", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, NUM))])
def test_images_do_not_depend_on_the_batch(max_batch, small_mar, vae, alone):
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=max_batch)
    outputs = engine.generate(MIXED)
    for output, expected in zip(outputs, alone):
        assert output.request == expected.request
        assert (output.image - expected.image).abs().max() < PIXELS
    # a wrong seed or neighbour would be seen: images of other requests are far away
    assert (outputs[0].image - outputs[5].image).abs().max() > 100 * PIXELS


def test_images_do_not_depend_on_arrival_order(small_mar, vae, alone):
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=7)
    order = list(range(NUM))
    random.Random(1).shuffle(order)
    outputs, tickets = {}, {}
    arrivals = iter(order)
    while len(outputs) < NUM:
        for index in itertools.islice(arrivals, 3):  # three new ones a step, while others run
            tickets[engine.add_request(MIXED[index])] = index
        for ticket, output in engine.step().items():
            outputs[tickets[ticket]] = output
    for index, expected in enumerate(alone):
        assert (outputs[index].image - expected.image).abs().max() < PIXELS


def test_stats_count_what_ran(small_mar, vae):
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=3)
    requests = [Request(label=1, seed=1, cfg=3.0, **QUICK), Request(label=2, seed=2, cfg=1.0, **QUICK)]
    backbone, head = [], []
    final_layer = small_mar.head.final_layer
    with (
        small_mar.register_forward_hook(lambda module, args, output: backbone.append(output)),
        final_layer.register_forward_hook(lambda module, args, output: head.append(output.shape[:-1].numel())),
    ):
        for request, num_branches in zip(requests, (2, 1)):
            backbone.clear(), head.clear()
            stats = engine.generate([request])[0].stats
            assert stats.iterations == stats.backbone_calls == len(backbone) == 8
            assert stats.head_calls == len(head) == 8 * 10
            assert stats.head_evaluations == sum(head) == 64 * 10 * num_branches
            assert stats.guarantee == "exact"
            assert all((spent > 0) == (phase != "draft") for phase, spent in stats.seconds.items())


@pytest.mark.parametrize("num_iter", [1, 2, 16, 63, 64])
def test_every_iteration_predicts_and_the_last_one_ends(num_iter):
    after, left = cosine(num_iter, 64)
    counts = -np.diff(after, prepend=64)
    assert len(counts) == num_iter and counts.min() >= 1 and after[-1] == 0 and left[-1] == 1
    assert num_iter < 64 or (counts == 1).all()  # K = L: one token an iteration


def test_agrees_with_the_released_codes_sampler(small_mar):
    """The same draws through `mar.model`, a separate transcription."""
    settings = {"num_iter": 5, "cfg": 2.5, "cfg_schedule": "linear", "temperature": 0.9, "num_sampling_steps": 100}
    labels, seeds = torch.tensor([4, 7, 1]), torch.tensor([11, 12, 13])

    def draws(predicted, t):
        row, position = predicted.nonzero(as_tuple=True)
        if t == settings["num_sampling_steps"]:
            return noise.initial(seeds[row], position, 16)
        return noise.steps(seeds[row], position, torch.tensor([t]), 16)[0]

    expected = model.sample_published(small_mar, labels, order=noise.order(seeds, 64), noise=draws, **settings)
    requests = [Request(int(x), int(s), method="ar", **settings) for x, s in zip(labels, seeds)]
    actual = torch.stack([output.tokens for output in Engine(MARModels(small_mar), max_batch=2).generate(requests)])
    assert relative_error(actual, expected) < 1e-3


def test_zero_temperature_adds_no_noise(small_mar):
    """Only x_T and the order are random, so the step noise must not matter."""

    def steps(seed, position, step, channels, index):
        return torch.full((len(step), len(seed), channels), 1e3)

    request = Request(label=3, seed=1, temperature=0.0, **QUICK)
    outputs = []
    for own in (noise, SimpleNamespace(initial=noise.initial, order=noise.order, steps=steps)):
        outputs += Engine(MARModels(small_mar), max_batch=1, noise=own).generate([request])
    assert torch.equal(outputs[0].tokens, outputs[1].tokens)


def test_streams_as_they_finish_and_reads_requests_lazily(small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2)
    read = []

    def endless():
        for i in range(10**9):
            read.append(i)
            yield Request(label=0, seed=i, method="ar", num_iter=1 + 7 * (i == 0), num_sampling_steps=4)

    stream = engine.stream(endless())
    first = [next(stream)[0] for _ in range(4)]
    assert 0 not in first  # the long one is overtaken
    assert len(read) <= 7
    stream.close()
    assert len(engine.scheduler) == 0
    assert len(engine.generate([Request(label=1, **QUICK)] * 3)) == 3


def test_a_stream_finishes_what_it_read_before_a_bad_request(small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2)
    good = Request(label=1, **QUICK)
    seen = []
    with pytest.raises(ValueError, match="label"):
        for index, _ in engine.stream([good, good, good, Request(label=1000), good]):
            seen.append(index)
    assert sorted(seen) == [0, 1, 2]


def test_requests_of_any_iterable_and_a_single_one(small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2)
    one = Request(label=1, **QUICK)
    (expected,) = engine.generate(one)
    assert not expected.tokens.is_inference()  # an ordinary tensor
    for requests in (iter([one, one]), (one, one)):
        outputs = engine.generate(requests)
        assert len(outputs) == 2
        assert all(relative_error(output.tokens, expected.tokens) < 1e-2 for output in outputs)
    assert engine.generate([]) == []


def test_slots_are_allocated_once(small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2)
    before = engine.runner.tokens.data_ptr(), engine.runner.order.data_ptr()
    engine.generate([Request(1, seed, "ar", num_iter=1, num_sampling_steps=2) for seed in range(9)])
    assert (engine.runner.tokens.data_ptr(), engine.runner.order.data_ptr()) == before
    assert len(engine.runner.tokens) == 2


def test_bf16_keeps_the_first_step_in_float32(small_mar):
    """Under every policy the head's output at t = T-1 is float32's; later ones may be coarser."""
    request = Request(label=3, seed=1, method="ar", num_iter=1, num_sampling_steps=10)
    dtypes, tokens = {}, {}
    for policy in ("fp32", "bf16"):
        seen = dtypes[policy] = []
        engine = Engine(MARModels(small_mar), max_batch=1, precision=policy)
        with small_mar.head.final_layer.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out.dtype)):
            tokens[policy] = engine.generate([request])[0].tokens
    assert dtypes == {"fp32": [torch.float32] * 10, "bf16": [torch.float32] + [torch.bfloat16] * 9}
    # z comes from a bf16 backbone; the first step itself adds no rounding to speak of
    difference = tokens["bf16"] - tokens["fp32"]
    assert 0 < difference.square().mean().sqrt() < 0.2 * tokens["fp32"].std()


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_callers_autocast_changes_nothing(policy):
    precision = Precision(policy, torch.device("cpu"))
    a = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        for context in (precision.fast(), precision.full()):
            with context:
                assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16


def test_a_patch_of_several_cells_decodes(vae):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 1, "num_heads": 2, "class_num": 10, "buffer_size": 4, "diffloss_w": 32}
    config = MARConfig(img_size=32, vae_stride=4, patch_size=2, diffloss_d=1, **sizes)
    request = Request(label=0, method="ar", num_iter=4, num_sampling_steps=4)
    (output,) = Engine(MARModels(MAR(config), vae=vae)).generate([request])
    assert output.tokens.shape == (16, 64)
    assert output.image.shape == (3, 32, 32)


# ---- Several threads, streams and callbacks share an engine: everyone gets their own images, as if they were alone


SHARED = {"method": "ar", "num_iter": 4, "num_sampling_steps": 3, "first_timestep": 950}
SPECULATIVE = {"method": "speculative", "num_iter": 2, "num_sampling_steps": 12, "window": 3, "draft": "frozen"}
CLOSE = 1e-3  # rounding: the batch is another one


@pytest.fixture(scope="module")
def models():
    target = toy_mar()
    vae = AutoencoderKL(KLConfig(embed_dim=3, ch=32, ch_mult=(1, 1, 1), num_res_blocks=1, scale=1.0))
    return MARModels(target, vae=vae.eval())


def requests_of(who, num=3, settings=SHARED):
    return [Request(label=i % 4, seed=100 * who + i, **settings) for i in range(num)]


def generated_alone(models, requests):
    return Engine(models, max_batch=1, device="cpu").generate(requests)


def assert_same(outputs, expected):
    assert len(outputs) == len(expected)
    for output, one in zip(outputs, expected):
        assert output.request == one.request and (output.image - one.image).abs().max() < CLOSE


def test_a_prepared_request_is_not_checked_again(models, monkeypatch):
    """Except by another engine, whose models may differ: it checks the request as it was given."""
    engine, other = (Engine(models, max_batch=1, device="cpu") for _ in range(2))
    asked = Request(label=1, seed=5, **SHARED)
    prepared, expected = engine.prepare(asked), engine.generate(asked)
    assert prepared.asked is asked and other.prepare(prepared).runner is other.runner
    with monkeypatch.context() as patch:
        for runner in (engine.runner, other.runner):
            patch.setattr(runner, "complete", lambda request, method: 1 / 0)
        assert engine.prepare(prepared) is prepared
        assert_same(engine.generate([prepared]), expected)
        with pytest.raises(ZeroDivisionError):
            other.generate(prepared)


def test_a_window_is_chosen_for_the_images_of_the_call(monkeypatch):
    """Never for those of others in flight. By recorded costs of a device whose table has room for one image."""
    settings = {"num_iter": 16, "num_sampling_steps": 12, "cfg": 2.0, "draft": "frozen"}
    times = Times(ancestral=[[1, 64], [1.0] * 2], start=[[1, 64], [1e-3] * 2], round=[[8, 512], [1.0] * 2])
    monkeypatch.setattr(tuning, "head_times", lambda *device: times)
    monkeypatch.setattr(tuning, "table_size", lambda *head: 12)
    engine = Engine(MARModels(toy_mar()), max_batch=8, device="cpu")
    with engine:
        others = [engine.add_request(Request(2, 9, **settings)) for _ in range(2)]
        (waiting,) = {sequence.request.window for sequence in engine.scheduler.waiting}
        alone = engine.sample(3, **settings)
        (listed,) = engine.generate([Request(3, **settings)])
        three = engine.sample([3, 1, 2], **settings)
        endless = engine.stream(Request(3, seed, **settings) for seed in itertools.count())
        _, streamed = next(endless)
        assert all(engine.cancel(ticket) is False for ticket in others)  # they ran beside the first call
    assert waiting == streamed.request.window == 0  # planned for every slot
    assert alone.request.window == listed.request.window > 0
    assert {output.request.window for output in three} == {0}


@pytest.mark.parametrize("settings", [SHARED, SPECULATIVE], ids=["ar", "speculative"])
def test_four_threads_share_an_engine(settings, models):
    engine = Engine(models, max_batch=3, device="cpu")
    wanted = [requests_of(who, settings=settings) for who in range(4)]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(engine.generate, wanted))
    assert len(engine.scheduler) == 0
    for outputs, requests in zip(made, wanted):
        assert_same(outputs, generated_alone(models, requests))


def test_streams_and_steps_in_turn(models):
    """In one thread: none takes another's outputs, nor waits for another to end."""
    engine = Engine(models, max_batch=2, device="cpu")
    streams = [engine.stream(requests_of(who)) for who in range(2)]
    ticket = engine.add_request(Request(label=3, seed=7, **SHARED))
    outputs, own = ({}, {}), {}
    for _ in range(3):
        for who, stream in enumerate(streams):
            index, output = next(stream)
            outputs[who][index] = output
            own |= engine.step()
    assert [list(stream) for stream in streams] == [[], []]
    own |= finish(engine)
    assert own.keys() == {ticket}
    for who in range(2):
        assert_same([outputs[who][index] for index in range(3)], generated_alone(models, requests_of(who)))


def fail(*_):
    raise ZeroDivisionError


def test_a_round_that_fails_is_reported_to_all(models, monkeypatch):
    engine = Engine(models, max_batch=2, device="cpu")
    other = engine.stream(requests_of(1))
    next(other)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.runner, "admit", fail)
        engine.generate(requests_of(0))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(other)
    assert len(engine.generate(requests_of(0))) == 3


@pytest.mark.parametrize("own", [False, True])
def test_outputs_finished_before_a_round_that_fails_are_returned(own, models, monkeypatch):
    """Whoever ran the round: a step reports the failure, and the next step returns what was finished."""
    engine = Engine(models, max_batch=3, device="cpu")
    (soon,) = requests_of(0, 1, SHARED | {"num_iter": 1})
    (late,) = requests_of(1, 1, SHARED | {"num_iter": 8})
    ticket = engine.add_request(soon)
    engine.add_request(late)
    engine.generate([soon])  # whose rounds finish the ticket's request too
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.runner, "admit", fail)
        engine.step() if own else engine.generate([soon])
    if not own:
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            engine.step()
    assert engine.step().keys() == {ticket} and engine.step() == {}


# ---- Several models in one engine share its slots, and take turns


@pytest.fixture(scope="module")
def several(models):
    """Models of each family, and a second MAR, by name."""
    toy, sphere = toy_models(length=16), CausalGolden("sphere")
    return {
        "mar": models,
        "vq": VQModels(toy["target"], tokenizer=toy["tokenizer"]),
        "sphere": CausalModels(sphere.model, sphere.vae),
        "second": MARModels(toy_mar(depth=2), vae=models.vae),
    }


OWN = {"mar": SHARED, "vq": {"method": "ar"}, "sphere": {"method": "ar", "num_sampling_steps": 3}, "second": SHARED}


def added(engine, results, model, seed=0):
    return engine.add(engine.prepare(Request(1, seed, **OWN[model]), model=model), results)


def ran(engine):
    """Runs all rounds; the names of the models that ran."""
    rounds = []
    while len(engine.scheduler):
        rounds.append(engine.run_round())
        assert len(engine.scheduler.in_flight()) <= engine.num_slots
    return rounds


@pytest.mark.parametrize("with_graphs", [False, True])
def test_models_share_slots_and_turns(with_graphs, several, monkeypatch):
    """Images and statistics are those of each model alone. Two models of one family have rounds of their own."""
    if with_graphs:
        monkeypatch.setattr(cspd_engine, "Graphs", lambda device, enabled: replayed())
    engine = Engine(*several.values(), names=several, max_batch=4, device="cpu")
    results = SimpleQueue()
    begun = {added(engine, results, model): model for model in several}
    assert ran(engine)[:16] == [*several] * 4
    outputs = dict(drained(results))
    assert outputs.keys() == begun.keys()
    for sequence, output in outputs.items():
        with Engine(several[begun[sequence]], max_batch=4, device="cpu") as engine:
            (alone,) = engine.generate(sequence.asked)
        assert output.request == alone.request and torch.equal(output.image, alone.image)
        for name in ("iterations", "backbone_calls", "head_calls", "committed"):
            assert getattr(output.stats, name) == getattr(alone.stats, name)


def test_no_model_keeps_another_one_waiting(several):
    """A request waits for those before it, 4 in 2 slots, and for none after it; then a round of the other model."""
    engine = Engine(*several.values(), names=several, max_batch=2, device="cpu")
    results = SimpleQueue()
    for name, seeds in (("mar", range(4)), ("vq", range(1)), ("mar", range(10, 20))):
        for seed in seeds:
            added(engine, results, name, seed)
    rounds = ran(engine)
    first = rounds.index("vq")
    assert first <= 2 * SHARED["num_iter"] + 1
    assert rounds[first : first + 31 : 2] == ["vq"] * 16 and rounds.count("vq") == 16


@pytest.mark.parametrize("part", ["admit", "decode"])
def test_an_error_of_a_model_is_its_own(part, several, monkeypatch):
    engine = Engine(*several.values(), names=several, max_batch=3, device="cpu")
    results = SimpleQueue()
    failing = [added(engine, results, "mar", seed) for seed in range(5)]
    other = added(engine, results, "vq")
    with monkeypatch.context() as patch:
        patch.setattr(engine.runners["mar"], part, fail)
        ran(engine)
    ended = dict(drained(results))
    lost = {sequence for sequence, result in ended.items() if isinstance(result, ZeroDivisionError)}
    assert lost == {*failing} and sorted(engine.scheduler._free) == [0, 1, 2]
    assert_same([ended[other]], generated_alone(several["vq"], [other.asked]))
    added(engine, results, "mar")
    ran(engine)
    ((_, again),) = drained(results)
    assert again.image is not None


def test_a_stream_goes_on_if_its_thread_ran_a_failing_round_of_another_model(several, monkeypatch):
    engine = Engine(*several.values(), names=several, max_batch=3, device="cpu")
    engine.add_request(Request(1, **SHARED))
    request = Request(1, method="ar", family="VQ")
    with monkeypatch.context() as patch:
        patch.setattr(engine.runners["mar"], "admit", fail)
        assert_same(engine.generate(request), generated_alone(several["vq"], [request]))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        engine.step()


def test_models_are_chosen_by_name_or_by_the_request(several):
    engine = Engine(*several.values(), names=several, max_batch=1, device="cpu")
    request = Request(1, **SHARED)
    assert engine.prepare(request).model == "mar" and engine.prepare(request, model="second").model == "second"
    assert engine.with_slots(2).prepare(request, model="second").model == "second"
    assert engine.prepare(Request(1, method="sjd-pac")).model == "vq"
    assert engine.prepare(Request(1, method="ar", family="causal")).model == "sphere"
    for name in ("other", "vq"):  # the second one has no num_iter
        with pytest.raises(ValueError):
            engine.prepare(request, model=name)
    with pytest.raises(ValueError, match="names"):
        Engine(several["mar"], several["second"])


def check_forked(engine, requests):
    """In a forked process: every call that would compute says what to do instead."""
    calls = [
        lambda: engine.generate(requests),
        lambda: next(engine.stream(requests)),
        lambda: engine.add_request(requests[0]),
        lambda: engine.decode(torch.zeros(engine.runner.seq_len, dtype=torch.int64)),
        lambda: Engine(VQModels(**toy_models())),
        load,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"get_context\('spawn'\)"):
            call()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs a copy of this process")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_is_told_how_to_start():
    """There torch's threads would never answer."""
    engine = Engine(VQModels(**toy_models()), max_batch=1, device="cpu")
    prepared = engine.prepare_all([Request(1, method="ar")])  # needs no lock when it runs
    process = multiprocessing.get_context("fork").Process(target=check_forked, args=(engine, prepared))
    process.start()
    process.join(20)
    process.kill()
    assert process.exitcode == 0


def test_a_pickled_engine_is_loaded_again():
    engine = load("emoji64_text", max_batch=3, precision="bf16", device="cpu").with_slots(2)
    again = pickle.loads(pickle.dumps(engine))
    assert repr(again) == repr(engine) and again.origins == engine.origins
    assert again.describe() == engine.describe()
    assert again.runner.target is not engine.runner.target


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_of_models_in_memory_is_not_pickled(copied):
    with pytest.raises(TypeError, match="save_pretrained"):
        copied(Engine(VQModels(**toy_models()), max_batch=1, device="cpu"))


def endless(**settings):
    return (Request(label=0, seed=seed, **SHARED | settings) for seed in itertools.count())


@pytest.fixture
def busy(models):
    """An engine of which another thread reads a stream without an end, which still runs when the test ends."""
    engine = Engine(models, max_batch=1, device="cpu")
    begun, is_over = threading.Event(), threading.Event()

    def run():
        for _ in engine.stream(endless()):
            begun.set()
            if is_over.is_set():
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    yield engine
    is_over.set()
    thread.join(60)
    assert not thread.is_alive()


def test_threads_take_turns(models, monkeypatch):
    """In the order in which they ask: one that has just run a round stands behind those that waited meanwhile."""
    engine, turns = Engine(models, max_batch=1, device="cpu"), []
    tokens = torch.zeros(engine.runner.seq_len, engine.runner.tokens.shape[-1])
    threads = [threading.Thread(target=engine.decode, args=[tokens + number]) for number in range(4)]
    really_admit, really_decode = engine.runner.admit, engine.runner.decode

    def admit(sequences):
        turns.append("round")
        if len(turns) == 1:  # all of them ask in the middle of the first round
            for number, thread in enumerate(threads):
                thread.start()
                while len(engine._line) < 2 + number:
                    pass
        really_admit(sequences)

    def decode(tokens):
        turns.append(int(tokens.mean()))
        return really_decode(tokens)

    monkeypatch.setattr(engine.runner, "admit", admit)
    monkeypatch.setattr(engine.runner, "decode", decode)
    engine.generate(requests_of(0, 1))
    for thread in threads:
        thread.join()
    assert turns[:6] == ["round", 0, 1, 2, 3, "round"]


def test_an_interrupted_thread_blocks_nobody(busy):
    """In the main thread, which is interrupted while it waits or computes; the other thread goes on."""
    tokens = torch.zeros(busy.runner.seq_len, busy.runner.tokens.shape[-1])
    main = threading.main_thread().ident
    interrupting = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            busy.decode(tokens)
    for _ in range(3):
        decoding = threading.Thread(target=busy.decode, args=[tokens], daemon=True)
        decoding.start()
        decoding.join(60)
        assert not decoding.is_alive()


@pytest.mark.parametrize("own", [False, True])
def test_a_stream_that_is_left_in_the_middle_of_a_round(own, models, monkeypatch):
    """As the garbage collector may leave it: its sequences leave with the next round, and nothing waits for itself."""
    engine = Engine(models, max_batch=2, device="cpu")
    left = engine.stream(endless())
    next(left)
    advance = engine._advance

    def leave(*args):
        if own:
            left.close()
        else:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(left.close).result()
        return advance(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_advance", leave)
        engine.step()
    assert 0 < len(engine.scheduler) <= 2
    engine.step()
    assert not len(engine.scheduler) and sorted(engine.scheduler._free) == [0, 1]
    assert_same(engine.generate(requests_of(0)), generated_alone(models, requests_of(0)))


def test_a_request_whose_image_is_being_decoded_is_cancelled(models, monkeypatch):
    """Then it gives no output, to a stream nor to a step; the others are there."""
    engine = Engine(models, max_batch=3, device="cpu")
    requests = requests_of(0)
    tickets = [engine.add_request(request) for request in requests_of(1)]
    decode, cancelled = engine.runner.decode, []

    def decode_cancelled(tokens):
        cancelled.extend([engine.cancel(requests[1]), engine.cancel(tickets[2])])
        return decode(tokens)

    monkeypatch.setattr(engine.runner, "decode", decode_cancelled)
    outputs = engine.generate(requests)
    assert [output.request.seed for output in outputs] == [0, 2] and engine.step().keys() == set(tickets[:2])
    assert sum(cancelled) == 2  # each once, in the round that decoded it


def test_an_error_that_no_request_is_left_for_is_said(models, monkeypatch, capsys):
    """Both requests are cancelled in the round that fails; an error that somebody gets is not said as well."""
    engine = Engine(models, max_batch=2, device="cpu")

    def fail(rows):
        if is_cancelled:
            assert engine.cancel(tickets.pop()) and engine.cancel(tickets.pop())
        raise ZeroDivisionError("of the round")

    monkeypatch.setattr(engine.runner, "next_rows", fail)
    for is_cancelled in (False, True):
        tickets = [engine.add_request(request) for request in requests_of(0, 2)]
        with contextlib.nullcontext() if is_cancelled else pytest.raises(ZeroDivisionError):
            engine.step()
        assert ("ZeroDivisionError('of the round')" in capsys.readouterr().err) == is_cancelled


@pytest.mark.parametrize("settings", [SHARED, SPECULATIVE], ids=["ar", "speculative"])
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
    assert_same(outputs, [generated_alone(models, requests)[i] for i in (0, 2)])
    assert sorted(engine.scheduler._free) == [0, 1, 2]


def test_a_slot_is_not_given_away_while_chains_will_write_to_it(models):
    """One of a batch is cancelled in the middle of its iteration's chains; another takes its slot."""
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
    outputs |= finish(engine)
    expected = dict(zip(tickets, generated_alone(models, [*first, last])))
    del expected[busy[0]]
    assert outputs.keys() == expected.keys()
    assert_same([outputs[ticket] for ticket in expected], expected.values())


def test_a_request_cancelled_in_its_last_iteration_gives_no_output(models):
    """Its chains run on next to another's, and end all the same."""
    num, last = 12, 2
    engine = Engine(models, max_batch=num, device="cpu")
    for request in requests_of(0, num, SPECULATIVE | {"num_iter": last, "num_sampling_steps": 20}):
        engine.add_request(request)
    outputs, busy = {}, []
    while len(engine.scheduler) and len(busy) < 2:
        outputs |= engine.step()
        busy = [each for each in engine.scheduler.in_flight() if each.num_under_way and each.iteration == last]
    assert engine.cancel(busy[0].ticket) and busy[0] in engine.scheduler
    outputs |= finish(engine)
    assert len(outputs) == num - 1 and busy[0].ticket not in outputs


@pytest.mark.parametrize("by_ticket", [False, True])
def test_one_of_two_equal_requests_is_cancelled(by_ticket, models):
    engine = Engine(models, max_batch=1, device="cpu")
    requests = [Request(label=1, seed=5, **SHARED) for _ in range(2)]
    tickets = [engine.add_request(request) for request in requests]
    assert engine.cancel(tickets[1] if by_ticket else requests[1]) and not engine.cancel(99)
    assert [*finish(engine)] == tickets[:1] and not engine.cancel(tickets[0])


@pytest.mark.parametrize("family", ["MAR", "VQ"])
def test_progress_and_previews(family, models):
    settings, every = SHARED, 1
    if family == "VQ":
        toy = toy_models(length=16)
        models = VQModels(toy["target"], tokenizer=toy["tokenizer"])
        settings, every = {"method": "ar"}, 5
    engine = Engine(models, max_batch=2, device="cpu")
    request = Request(label=1, seed=0, **settings)
    fractions, images, late = [], [], []

    def watch(of, fraction, preview):
        assert of is request
        fractions.append(fraction)
        images.append(preview().tobytes())
        late.append(preview)

    (output,) = engine.generate(request, on_progress=watch, every=every)
    assert len(fractions) == 4 and fractions == sorted(set(fractions)) and fractions[-1] == 1
    assert len(set(images[:-1])) == 3 and images[-1] == output.pil().tobytes()
    assert late[0]() is None  # it does not run any more
    (unwatched,) = engine.generate(request)
    assert torch.equal(output.tokens, unwatched.tokens)


SLOWER = SPECULATIVE | {"num_iter": 8, "num_sampling_steps": 20}
DRAFTING = {"method": "mar-draft", "gamma": 8, "verify": "sequential", "num_sampling_steps": 3, "first_timestep": 950}


@pytest.mark.parametrize("settings", [SHARED, SLOWER, DRAFTING], ids=["ar", "speculative", "cspd"])
def test_progress_is_the_mean_of_the_fractions_of_iterations_and_of_tokens(settings):
    """Tokens that were begun, or drafted and rejected, do not count. A method that drafts has tokens only."""
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
                num_iter = sequence.request.num_iter
                of_iterations = (sequence.iteration - (sequence.num_under_way > 0)) / num_iter
                seen.append((request.seed, fraction, of_iterations, tokens))

    outputs = engine.generate(requests, on_progress=watch)
    for seed, fraction, of_iterations, tokens in seen:
        stays = (tokens == outputs[seed].tokens).all(-1)
        of_tokens = stays.float().mean().item()
        if settings is SHARED:
            assert fraction == pytest.approx((of_iterations + of_tokens) / 2)
        elif settings is DRAFTING:
            assert fraction == pytest.approx(of_tokens)
        else:  # chains of an iteration end one by one
            assert (
                (of_iterations + of_tokens) / 2 <= fraction <= (of_iterations + 1 / SLOWER["num_iter"] + of_tokens) / 2
            )
        assert torch.equal(tokens.any(-1), stays)
    assert len(seen) >= 12 and (under_way > 0) == (settings is SLOWER)


@pytest.mark.parametrize("family", ["MAR", "VQ"])
@pytest.mark.parametrize("drafting", [False, True])
def test_running_sequences_have_the_tokens_and_costs_so_far(family, drafting, models):
    """The slots held other images before."""
    settings = SPECULATIVE | {"num_iter": 6} if drafting else SHARED
    if family == "VQ":
        toy = toy_models(length=16)
        models = VQModels(toy["target"], toy["draft"])
        settings = {"method": "sd", "gamma": 2} if drafting else {"method": "ar"}
    engine = Engine(models, max_batch=2, device="cpu")
    engine.generate(requests_of(1, 2, settings))
    tickets = [engine.add_request(request) for request in requests_of(2, 2, settings)]
    outputs, seen = {}, {ticket: [] for ticket in tickets}
    while len(outputs) < 2:
        outputs |= engine.step()
        for sequence in engine.scheduler.in_flight():
            (tokens,), (token_cost,) = engine.runner.so_far(sequence)
            is_committed = tokens >= 0 if family == "VQ" else tokens.any(-1)
            assert torch.equal(token_cost.isfinite(), is_committed)
            seen[sequence.ticket].append(token_cost)
    for ticket, token_costs in seen.items():
        counts = [int(token_cost.isfinite().sum()) for token_cost in token_costs]
        assert len(set(counts)) > 2 and counts == sorted(counts)
        for token_cost in token_costs:
            done = token_cost.isfinite()
            assert torch.equal(token_cost[done], outputs[ticket].token_cost[done])


def test_async_for(models):
    engine = Engine(models, max_batch=2, device="cpu")

    async def collect(who):
        return [output async for _, output in engine.stream_async(requests_of(who))]

    async def both():
        return await asyncio.gather(collect(0), collect(1))

    for who, outputs in enumerate(asyncio.run(both())):
        outputs = sorted(outputs, key=lambda output: output.request.seed)
        assert_same(outputs, generated_alone(models, requests_of(who)))


def test_async_for_that_is_left_early(models):
    engine = Engine(models, max_batch=2, device="cpu")
    endless = (Request(label=0, seed=seed, **SHARED) for seed in itertools.count())

    async def read(stream, most):
        async for _ in stream:
            most -= 1
            if not most:
                return

    asyncio.run(read(engine.stream_async(requests_of(0)), 1))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(read(engine.stream_async(endless), 10**9), 0.3))
    assert len(engine.scheduler) == 0 and len(engine.generate(requests_of(1))) == 3


# ---- Images that are decoded while rounds go on: no output is lost or swapped


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
    """(index, output) of all requests in the order in which steps return them, and their number after each step."""
    index_of = {engine.add_request(request): index for index, request in enumerate(REQUESTS)}
    outputs, counts = [], []
    while len(engine.scheduler):
        outputs += [(index_of[ticket], output) for ticket, output in engine.step().items()]
        counts.append(len(outputs))
        assert len(REQUESTS) - len(outputs) - len(engine.scheduler) <= AHEAD * engine.num_slots
    return outputs, counts


def test_images_come_later_and_none_is_lost(engine, monkeypatch):
    soon, at_once = run(engine)
    monkeypatch.setattr(Stopwatch, "is_past", lambda self: False)
    late, later = run(engine)
    assert len(at_once) == len(later)  # rounds: none waited
    assert later[-1] == len(REQUESTS) and all(a >= b for a, b in zip(at_once, later))
    assert max(a - b for a, b in zip(at_once, later)) >= AHEAD
    for (index, output), (expected_index, expected) in zip(late, soon):
        assert index == expected_index
        assert torch.equal(output.image, expected.image) and torch.equal(output.tokens, expected.tokens)
        assert output.stats.seconds["decode"] > 0


def test_rounds_of_a_stream_do_not_wait_for_images(engine, slow, monkeypatch):
    """All slots finish together: their images are decoded while the next requests run."""
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
    assert engine.step() == {} and len(engine.scheduler) == 5  # an image is being decoded
    with monkeypatch.context() as patch:
        patch.setattr(Stopwatch if failing == "seconds" else engine.runner, failing, fail)
        with pytest.raises(ZeroDivisionError):
            finish(engine)
    assert len(engine.scheduler) == 0 and engine.step() == {}
    assert len(engine.generate(REQUESTS[:3])) == 3


def test_on_a_gpu_only_the_end_is_waited_for(models):
    """Finished rounds and images are read while later ones run; on the stand-in a phase takes 1 ms."""
    expected = Engine(models, max_batch=2, device="cpu").generate(REQUESTS[:4])
    outputs = {}
    with standin.cuda() as gpu:
        engine = Engine(copy.deepcopy(models), max_batch=2, device=standin.DEVICE)
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


class Watched(terminal.tqdm):
    """A bar that records the numbers it showed."""

    shown: ClassVar[list[float]] = []

    def update(self, n=1):
        super().update(n)
        self.shown.append(self.n)


@pytest.mark.parametrize("num", [1, 7])
def test_the_bar_moves_while_images_are_decoded(small_mar, monkeypatch, num):
    """All images finish in one round, and a CPU decodes a few of them at a time."""
    engine = Engine(MARModels(small_mar, vae=create_vae("kl_digits32")), max_batch=num, device="cpu")
    monkeypatch.setattr(terminal, "tqdm", Watched)
    monkeypatch.setattr(Watched, "shown", [])
    engine.generate([Request(1, i, "ar", num_iter=2, num_sampling_steps=2) for i in range(num)], progress=True)
    shown = Watched.shown
    assert shown == sorted(shown)
    steps = [after - before for before, after in itertools.pairwise(shown)]
    # of 7 images: 3, 2 and 2
    assert steps.count(pytest.approx(2 * cspd_engine.DECODING)) == (2 if num == 7 else 0) and shown[-1] == num


def test_a_bar_of_endless_requests_counts_on(small_mar):
    """The total is not known: a tqdm without a total has no truth value."""
    engine = Engine(MARModels(small_mar), max_batch=2, device="cpu")
    requests = (Request(1, seed, "ar", num_iter=2, num_sampling_steps=2) for seed in range(3))
    assert len(list(engine.stream(requests, progress=True))) == 3
