"""A request's image depends on the request alone, not on batch size, neighbours or arrival order; its cost is told."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from conftest import relative_error

from cspd import Engine, MARModels, Request
from cspd.device import Precision
from cspd.masked.orders import cosine, timetable
from mar import model
from mar.checkpoint import create_vae
from mar.model import MAR, MARConfig

PIXELS = 1e-3
QUICK = {"method": "ar", "num_iter": 8, "num_sampling_steps": 10}


@pytest.fixture(scope="module")
def vae():
    """Of the small MAR's latents; random weights show differences as well as trained ones."""
    torch.manual_seed(0)
    return create_vae("kl_digits32").eval()


def mixed_requests(num):
    """Requests that differ in everything: label, K, guidance, schedule, temperature, T."""
    variants = [
        {"cfg": 3.0, "num_iter": 8},
        {"cfg": 1.0, "num_iter": 5},
        {"cfg": 2.0, "cfg_schedule": "constant", "num_iter": 3, "temperature": 0.9},
        {"cfg": 1.5, "num_iter": 12, "num_sampling_steps": 7},
        {"cfg": 4.0, "num_iter": 1, "temperature": 0.0},
    ]
    return [Request(label=i % 10, seed=100 + i, **(QUICK | variants[i % len(variants)])) for i in range(num)]


@pytest.fixture(scope="module")
def alone(small_mar, vae):
    """The images of the mixed requests, each made alone."""
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=1)
    return [engine.generate([request])[0] for request in mixed_requests(64)]


@pytest.mark.parametrize("max_batch", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 64))])
def test_images_do_not_depend_on_the_batch(max_batch, small_mar, vae, alone):
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=max_batch)
    outputs = engine.generate(mixed_requests(64))
    for output, expected in zip(outputs, alone):
        assert output.request == expected.request
        assert (output.image - expected.image).abs().max() < PIXELS
    # a wrong seed or neighbour would be seen: images of other requests are far away
    assert (outputs[0].image - outputs[5].image).abs().max() > 100 * PIXELS


def test_images_do_not_depend_on_arrival_order(small_mar, vae, alone):
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=7)
    order = list(range(64))
    random.Random(1).shuffle(order)
    requests = mixed_requests(64)
    outputs, tickets = {}, {}
    arrivals = iter(order)
    while len(outputs) < 64:  # three new ones a step, while others are on their way
        for index in itertools.islice(arrivals, 3):
            tickets[engine.add_request(requests[index])] = index
        for ticket, output in engine.step().items():
            outputs[tickets[ticket]] = output
    for index, expected in enumerate(alone):
        assert (outputs[index].image - expected.image).abs().max() < PIXELS


def test_the_seed_decides(small_mar):
    engine = Engine(MARModels(small_mar), max_batch=4)
    a, b, c = engine.generate([Request(label=3, seed=s, **QUICK) for s in (5, 5, 6)])
    assert torch.allclose(a.tokens, b.tokens, atol=1e-4)
    assert (a.tokens - c.tokens).abs().max() > 0.1
    assert a.image is None  # no autoencoder


def test_stats_count_what_ran(small_mar, vae):
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=3)
    requests = [Request(label=1, seed=1, cfg=3.0, **QUICK), Request(label=2, seed=2, cfg=1.0, **QUICK)]
    calls = {"backbone": 0, "head": 0, "rows": 0}

    def count_head(module, args, output):
        calls["head"] += 1
        calls["rows"] += output.shape[:-1].numel()

    def count_backbone(module, args, output):
        calls["backbone"] += 1

    hooks = [
        small_mar.head.final_layer.register_forward_hook(count_head),
        small_mar.register_forward_hook(count_backbone),
    ]
    try:
        for request, num_branches in zip(requests, (2, 1)):
            calls.update(dict.fromkeys(calls, 0))
            stats = engine.generate([request])[0].stats
            assert stats.iterations == stats.backbone_calls == calls["backbone"] == 8
            assert stats.head_calls == calls["head"] == 8 * 10
            assert stats.head_evaluations == calls["rows"] == 64 * 10 * num_branches
            assert stats.guarantee == "exact"
            assert all((spent > 0) == (phase != "draft") for phase, spent in stats.seconds.items())
    finally:
        for hook in hooks:
            hook.remove()


def test_wall_time_is_all_accounted_for(small_mar, vae):
    import time

    engine = Engine(MARModels(small_mar, vae=vae), max_batch=1)
    start = time.perf_counter()
    output = engine.generate([Request(label=1, seed=1, **QUICK)])[0]
    elapsed = time.perf_counter() - start
    assert elapsed / 2 < sum(output.stats.seconds.values()) <= elapsed


@pytest.mark.parametrize("num_iter", [1, 2, 16, 63, 64])
def test_every_iteration_predicts_and_the_last_one_ends(num_iter):
    after, left = cosine(num_iter, 64)
    counts = -np.diff(after, prepend=64)
    assert len(counts) == num_iter and counts.min() >= 1 and after[-1] == 0 and left[-1] == 1
    assert num_iter < 64 or (counts == 1).all()  # K = L: one token an iteration


def test_guidance_of_the_last_iteration_is_as_published():
    linear = Request(0, num_iter=64, cfg=3.0, cfg_schedule="linear")
    assert timetable(linear, 64).scale[-1] == pytest.approx(1 + 2 * 63 / 64)
    assert (timetable(linear.but(cfg_schedule="constant"), 64).scale == 3.0).all()


def test_agrees_with_the_published_sampler(small_mar):
    """Same draws through `mar.model`, a separate transcription."""
    from cspd import noise

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
    """tau = 0: only x_T and the order are random, so the step noise must not matter."""

    class OtherSteps:
        from cspd.noise import initial, order

        initial, order = staticmethod(initial), staticmethod(order)

        @staticmethod
        def steps(seed, position, step, channels, index):
            return torch.full((len(step), len(seed), channels), 1e3)

    request = Request(label=3, seed=1, temperature=0.0, **QUICK)
    plain = Engine(MARModels(small_mar), max_batch=1).generate([request])[0].tokens
    other = Engine(MARModels(small_mar), max_batch=1, noise=OtherSteps()).generate([request])[0].tokens
    assert torch.equal(plain, other)


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


def test_a_stream_of_nothing_iterable_leaves_the_engine_usable(small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2)
    with pytest.raises(TypeError):
        next(engine.stream(5))
    assert len(engine.generate([Request(label=1, **QUICK)])) == 1


def test_requests_of_any_iterable_and_a_single_one(small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2)
    one = Request(label=1, **QUICK)
    expected = engine.generate(one)[0].tokens
    for requests in (iter([one, one]), (one, one), (one for _ in range(2))):
        made = engine.generate(requests)
        assert len(made) == 2 and all(relative_error(output.tokens, expected) < 1e-3 for output in made)
    assert engine.generate([]) == []


def test_outputs_are_ordinary_tensors(small_mar):
    (output,) = Engine(MARModels(small_mar), max_batch=1).generate([Request(label=1, **QUICK)])
    output.tokens.mul_(2)
    assert not output.tokens.is_inference()


def test_an_engine_survives_an_error_in_a_round(small_mar, vae, monkeypatch):
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=2)
    request = Request(label=1, method="ar", num_iter=1, num_sampling_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", lambda tokens: 1 / 0)
        engine.add_request(request)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert len(engine.generate([request, request])) == 2


def test_slots_are_allocated_once(small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2)
    before = [t.data_ptr() for t in (engine.runner.tokens, engine.runner.order)]
    settings = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2}
    engine.generate([Request(label=1, seed=i, **settings) for i in range(20)])
    assert [t.data_ptr() for t in (engine.runner.tokens, engine.runner.order)] == before
    assert engine.runner.tokens.shape[0] == 2


def test_bf16_keeps_the_first_step_in_float32(small_mar):
    """Under every policy the head's output at t = T-1 is float32's; later ones may be coarser."""
    outputs = {}
    for policy in ("fp32", "bf16"):
        seen = []
        hook = small_mar.head.final_layer.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
        request = Request(label=3, seed=1, method="ar", num_iter=1, num_sampling_steps=10)
        image = Engine(MARModels(small_mar), max_batch=1, precision=policy).generate([request])[0].tokens
        hook.remove()
        outputs[policy] = (seen, image)
    assert [out.dtype for out in outputs["bf16"][0]] == [torch.float32] + [torch.bfloat16] * 9
    assert all(out.dtype == torch.float32 for out in outputs["fp32"][0])
    # z comes from a bf16 backbone; the first step itself adds no rounding to speak of
    difference = outputs["bf16"][1] - outputs["fp32"][1]
    assert torch.isfinite(difference).all()
    assert 0 < difference.square().mean().sqrt() < 0.2 * outputs["fp32"][1].std()


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
    config = MARConfig(img_size=32, vae_stride=4, patch_size=2, embed_dim=32, depth=1, num_heads=2, class_num=10)
    config = dataclasses.replace(config, buffer_size=4, diffloss_w=32, diffloss_d=1)
    request = Request(label=0, method="ar", num_iter=4, num_sampling_steps=4)
    (output,) = Engine(MARModels(MAR(config), vae=vae)).generate([request])
    assert output.tokens.shape == (16, 64)
    assert output.image.shape == (3, 32, 32)
