"""LazyMAR: the cached backbone does what it says, and with nothing cached it is the full one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import relative_error
from lazy import KEY, QUICK, engine, started, toy_model  # noqa: F401 - fixtures

from cspd import Request
from cspd import device as cspd_device
from cspd.masked.backbones import Caches, bytes_per_slot, conditions, kind, planned
from cspd.request import Sequence


def tokens_of(model, requests, max_batch=3):
    return [output.tokens for output in engine(model, max_batch).generate(requests)]


def advance(runner, batch, rows, z):
    """An iteration whose tokens are its conditions, more or less: their draws are no matter here."""
    runner.commit(rows, z[0, :, : runner.config.token_dim])
    for sequence, count in zip(batch, rows.counts):
        sequence.iteration += 1
        sequence.num_committed += count


def test_the_iterations_that_are_full():
    """LazyMAR's: the first five, and every ninth from there on. Only what is followed by a lazy one keeps anything."""
    sequence = Sequence(Request(0, num_iter=64, warmup=5, refresh=9), 0)
    kinds = [kind(sequence) for sequence.iteration in range(64)]
    assert [i for i, name in enumerate(kinds) if name != "lazy"] == [0, 1, 2, 3, 4, 5, 14, 23, 32, 41, 50, 59]
    assert kinds[:6] == ["full"] * 5 + ["refresh"] and kinds[14] == "refresh"
    sequence.request = sequence.request.but(num_iter=15)
    assert kind(Sequence(sequence.request, 0, iteration=14)) == "full"


@pytest.mark.parametrize("settings", [{"refresh": 1}, {"warmup": 16}, {"num_iter": 1}, {"num_iter": 2}])
def test_nothing_lazy_is_the_full_backbone(settings, model):
    request = Request(3, seed=5, **QUICK).but(denoiser="ancestral", **settings)
    plain = Request(3, seed=5, method="ar", num_iter=request.num_iter)
    plain = plain.but(**{name: QUICK[name] for name in ("cfg", "num_sampling_steps", "first_timestep")})
    (cached,), (full,) = (tokens_of(model, [each]) for each in (request, plain))
    assert relative_error(cached, full) < 1e-4


@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.parametrize("reuse_null", [True, False])
def test_refreshes_are_full_and_lazy_ones_near(cfg, reuse_null, model):
    """Each kind of iteration against the full backbone of the same tokens; the sequences begin one after the other."""
    settings = QUICK | {"cfg": cfg, "reuse_null": reuse_null}
    runner, everyone = started(model, [Request(i, seed=i, **settings).but(num_iter=8 + 4 * i) for i in range(3)])
    kinds_together = set()
    with torch.inference_mode():
        for step in range(8):
            batch = everyone[: step + 1]
            rows = runner.next_rows(batch)
            kinds = [kind(sequence) for sequence in batch]
            kinds_together.add(len(set(kinds)))
            z, full = conditions(runner, batch, rows), runner.conditions(batch, rows)
            assert z.shape == full.shape and z.dtype == torch.float32
            for row, name in enumerate(np.repeat(kinds, rows.counts)):
                error = relative_error(z[:, row], full[:, row])
                assert 1e-4 < error < 1 if name == "lazy" else error < 1e-4
            if "refresh" in kinds or "lazy" in kinds:
                known = runner.round_state[KEY]["caches"].committed
                assert all(known[s.slot] == s.num_committed for s, name in zip(batch, kinds) if name != "full")
            advance(runner, batch, rows, full)
    assert kinds_together == {1, 2, 3}


def test_the_null_class_keeps_its_distance(model):
    """What goes into the decoder's last norm: of the null class, the class's plus the difference at the refresh."""
    runner, batch = started(model, [Request(i, seed=i, **QUICK).but(warmup=0) for i in range(2)])
    hidden = []
    hook = model.decoder_norm.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    try:
        with torch.inference_mode():
            rows = runner.next_rows(batch)
            embedding = torch.cat([model.class_emb(runner.label), model.fake_latent.expand(2, -1)])
            model(runner.tokens.repeat(2, 1, 1), runner.order.repeat(2, 1), [0] * 4, embedding)
            class_then, null_then = hidden.pop()[:, runner.config.buffer_size :].chunk(2)
            advance(runner, batch, rows, conditions(runner, batch, rows))
            hidden.clear()
            for _ in range(3):
                rows = runner.next_rows(batch)
                assert {kind(sequence) for sequence in batch} == {"lazy"}
                z = conditions(runner, batch, rows)
                class_now, null_now = hidden.pop()[:, rows.sequence, rows.offset]
                distance = (null_then - class_then)[rows.sequence, rows.position]
                assert relative_error(null_now - class_now, distance) < 1e-4
                advance(runner, batch, rows, z)
    finally:
        hook.remove()


def test_each_class_has_caches_of_its_own(model):
    """The class's conditions are those without guidance; the null class's, where it has caches, those of a model that
    knows no other class."""
    null_model = copy.deepcopy(model)
    null_model.class_emb.weight.copy_(model.fake_latent.expand_as(model.class_emb.weight))
    runs = [(model, {"reuse_null": False}), (model, {}), (model, {"cfg": 1.0}), (null_model, {"cfg": 1.0})]
    runs = [started(each, [Request(i, seed=i, **(QUICK | own)) for i in range(2)]) for each, own in runs]
    with torch.inference_mode():
        for _ in range(8):
            both, reused, alone, null = (conditions(*run, run[0].next_rows(run[1])) for run in runs)
            assert relative_error(both, torch.cat([alone, null])) < 1e-4
            assert relative_error(reused[:1], alone) < 1e-4
            for runner, batch in runs:
                advance(runner, batch, runner.next_rows(batch), alone)


@pytest.mark.parametrize(
    "iteration, retain, others",
    [  # of 72 places: at least the 2 new ones and 4, which are 15/320
        (19, 1.0, 69),
        (20, 1.0, 40),  # 0.6 x 72 = 43.2, 3 of which are predicted
        (21, 1.0, 33),
        (25, 1.0, 25),
        (30, 1.0, 7),
        (35, 1.0, 6),
        (63, 1.0, 6),
        (20, 0.5, 18),
        (6, 0.0, 6),
    ],
)
def test_the_positions_that_are_computed(iteration, retain, others, small_mar):
    request = Request(0, method="lazymar", num_iter=64, retain=retain)
    runner, (sequence,) = started(small_mar, [request])
    sequence.iteration = iteration
    rows = runner.rows([sequence], [20], [3])
    assert planned(runner, [sequence], rows, np.array([18])).tolist() == [[20, 2, 3, others]]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"cfg": 1.0},
        {"cfg": 1.0, "temperature": 0.0, "num_iter": 16},
        {"reuse_null": False},
        {"num_iter": 1},
        {"retain": 0.0, "refresh": 16, "warmup": 0},
    ],
    ids=str,
)
def test_an_image_does_not_depend_on_the_batch(changes, model):
    """Three requests of unequal iterations in two slots, one of which is used again."""
    requests = [Request(i, seed=i, **({"num_iter": 6 + 2 * i} | QUICK | changes)) for i in range(3)]
    together = tokens_of(model, requests, max_batch=2)
    assert all(tokens.isfinite().all() for tokens in together)
    assert relative_error(tokens_of(model, requests[2:], max_batch=1)[0], together[2]) < 1e-3


def test_seeds_reproduce(model):
    requests = [Request(i, seed=seed, num_iter=6, **QUICK) for i, seed in enumerate((3, 4))]
    first, again, other = (tokens_of(model, each) for each in (requests, requests, [requests[0].but(seed=4)]))
    assert all(map(torch.equal, first, again))
    assert relative_error(first[0], other[0]) > 1e-2


def test_a_slot_keeps_nothing_of_the_sequence_before(model):
    """Caches that a damaged sequence left full of NaN change nothing."""
    requests = [Request(i, seed=i, **QUICK) for i in range(2)]
    outcomes = []
    for damage in (False, True):
        runner, batch = started(model, requests)
        caches = runner.round_state[KEY]["caches"] = Caches(runner, batch[0].request)
        if damage:
            for tensor in (caches.cache.encoder, caches.cache.decoder, caches.cache.inputs, caches.distance):
                tensor.fill_(torch.nan)
        with torch.inference_mode():
            for _ in range(12):
                rows = runner.next_rows(batch)
                advance(runner, batch, rows, conditions(runner, batch, rows))
        outcomes.append(runner.tokens)
    assert torch.equal(*outcomes)


def test_caches_are_allocated_once(model):
    for settings in ({}, {"cfg": 1.0}, {"reuse_null": False}):
        request = Request(0, **(QUICK | settings))
        runner, batch = started(model, [request] * 3)
        places = set()
        with torch.inference_mode():
            for _ in range(12):
                rows = runner.next_rows(batch)
                advance(runner, batch, rows, conditions(runner, batch, rows))
                if "caches" in runner.round_state[KEY]:
                    caches = runner.round_state[KEY]["caches"]
                    tensors = [caches.cache.encoder, caches.cache.decoder, caches.cache.inputs, caches.distance]
                    tensors = [tensor for tensor in tensors if tensor is not None]
                    places.add(tuple(tensor.data_ptr() for tensor in tensors))
        assert len(places) == 1
        assert sum(tensor.nbytes for tensor in tensors) == 3 * bytes_per_slot(runner, batch[0].request)


@pytest.mark.parametrize("denoiser", ["cached", "ancestral", "speculative"])
def test_lazy_calls_are_counted(denoiser, model):
    window = {"window": 2, "draft": "frozen", "first_timestep": None} if denoiser == "speculative" else {}
    requests = [Request(0, num_iter=k, **(QUICK | window), denoiser=denoiser) for k in (1, 6, 9)]
    stats = [output.stats for output in engine(model).generate(requests)]
    assert [each.backbone_calls for each in stats] == [1, 6, 9]
    assert [each.lazy_backbone_calls for each in stats] == [0, 3, 6]  # full: 0, 1, 5


def test_kinds_share_caches(model, monkeypatch):
    """Requests that cannot share a round keep their work in the same caches; those that keep more get their own."""
    requests = [Request(i, seed=i, num_iter=6, **(QUICK | {"num_sampling_steps": 4 + i})) for i in range(3)]
    served = engine(model, max_batch=2)
    tickets = [served.add_request(request) for request in requests]
    outputs = {}
    for _ in range(8):  # a round of each of two kinds in turn, until both have caches
        outputs |= served.step()
    first, second = (kept["caches"] for kept in served.runner.round_state.values())
    assert first is second
    unguided = requests[0].but(cfg=1.0)
    with monkeypatch.context() as small:
        small.setattr(cspd_device, "free_bytes", lambda device: 2 * bytes_per_slot(served.runner, unguided) - 1)
        served.resolve(requests[1])
        with pytest.raises(ValueError, match="backbone"):
            served.resolve(unguided)
    while len(outputs) < len(requests):
        outputs |= served.step()
    assert not served.runner.round_state
    for ticket, alone in zip(tickets, requests):
        assert relative_error(tokens_of(model, [alone], max_batch=1)[0], outputs[ticket].tokens) < 1e-3


def test_caches_that_do_not_fit_are_an_error(model, monkeypatch):
    served = engine(model)
    free = 1.5 * bytes_per_slot(served.runner, served.resolve(Request(0, **QUICK)))
    monkeypatch.setattr(cspd_device, "free_bytes", lambda device: int(free))
    with pytest.raises(ValueError, match="max_batch"):
        served.resolve(Request(0, **QUICK))
    assert served.resolve(Request(0, **QUICK).but(method="ar", warmup=None, refresh=None)).method == "ar"


@pytest.mark.parametrize(
    "name, value", [("refresh", 0), ("warmup", -1), ("retain", 1.5), ("reuse", 0), ("reuse", 10**23)]
)
def test_bad_settings(name, value, model):
    with pytest.raises(ValueError, match=name):
        engine(model).resolve(Request(0, **QUICK).but(**{name: value}))


def test_options_need_what_they_are_of(model):
    with pytest.raises(ValueError, match="backbone"):
        engine(model).resolve(Request(0, method="lazymar", backbone="full", refresh=9))
    with pytest.raises(ValueError, match="denoiser"):
        engine(model).resolve(Request(0, method="lazymar", denoiser="ancestral", reuse=8))


def test_bf16(model):
    """Caches are of what keys and values are computed in; a first step in float32 keeps the tokens near."""
    request = Request(0, **QUICK)
    halved, whole = (engine(model, precision=precision).generate([request])[0].tokens for precision in ("bf16", "fp32"))
    assert 0 < relative_error(halved, whole) < 0.2
