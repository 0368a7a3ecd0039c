"""LazyMAR: what the cached backbone computes, and that it is the full one if nothing is cached."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import relative_error
from lazy import QUICK, engine, started, toy_model  # noqa: F401 - fixtures

from cspd import Request
from cspd import device as cspd_device
from cspd.masked import backbones
from cspd.masked.backbones import (
    Caches,
    _attention,
    bytes_per_slot,
    cached_conditions,
    evaluation_of,
    planned,
    until_refresh,
)
from mar.model import keys_values


def tokens_of(model, requests, max_batch=3):
    return [output.tokens for output in engine(model, max_batch).generate(requests)]


def advance(runner, batch, rows, z):
    """Ends an iteration. The tokens are parts of the conditions: how they are drawn does not matter here."""
    runner.commit(rows, z[0, :, : runner.config.token_dim])
    for sequence, count in zip(batch, rows.counts):
        sequence.iteration += 1
        sequence.num_committed += count


def tensors_of(caches):
    found = [*caches.cache, caches.distance]
    return [tensor for tensor in found if tensor is not None]


def test_the_iterations_that_are_full():
    """LazyMAR's: the first five, and every ninth after them. The cache is filled only if a lazy iteration reads it."""
    request = Request(0, num_iter=64, warmup=5, refresh=9)
    kinds = [evaluation_of(request, iteration) for iteration in range(64)]
    assert [i for i, name in enumerate(kinds) if name != "lazy"] == [0, 1, 2, 3, 4, 5, 14, 23, 32, 41, 50, 59]
    assert kinds[:6] == ["full"] * 5 + ["refresh"] and kinds[14] == "refresh"
    assert evaluation_of(request.but(num_iter=15), 14) == "full"


def test_listed_iterations_are_full(model):
    """They take the place of warm-up and interval: the same list gives the same image."""
    request = Request(0, num_iter=9, refreshes="0-2,5,8")
    kinds = [evaluation_of(request, iteration) for iteration in range(9)]
    assert kinds == ["full", "full", "refresh", "lazy", "lazy", "refresh", "lazy", "lazy", "full"]
    assert [until_refresh(request, iteration) for iteration in (0, 2, 5, 8)] == [1, 3, 3, 1]
    by_interval = Request(3, seed=5, **QUICK).but(num_iter=9)
    listed = by_interval.but(refreshes="0,1,5", warmup=None, refresh=None)
    assert torch.equal(*(tokens_of(model, [each])[0] for each in (by_interval, listed)))


@pytest.mark.parametrize("refreshes", ["1-3", "0,x", "", "0,100"])
def test_bad_lists_of_iterations(refreshes, model):
    with pytest.raises(ValueError, match="refreshes"):
        engine(model).check(Request(0, **QUICK).but(refreshes=refreshes))


def test_attention_of_new_tokens(model):
    """MARché's score, head by head and token by token."""
    block, heads = model.decoder_blocks[1], model.config.num_heads
    g = torch.Generator().manual_seed(0)
    normed = torch.randn(2, 7, model.config.embed_dim, generator=g)
    padding, new = 7, [[2, 5], [6, 7]]
    expected = torch.zeros(2, 7)
    for b, entries in enumerate(new):
        q, k, _ = block.attn.qkv(normed[b]).chunk(3, dim=-1)
        for entry in entries:
            for own_q, own_k in zip(q.chunk(heads, -1), k.chunk(heads, -1)):
                if entry != padding:
                    expected[b] += (own_q[entry] @ own_k.T / own_k.shape[1] ** 0.5).softmax(0)
    own = keys_values(block, normed)
    assert torch.allclose(_attention(block, normed, own, torch.tensor(new), padding), expected, atol=1e-5)


def test_rules_of_selection(model, monkeypatch):
    """Few positions are selected by attention: those that new tokens attend to most have the lowest score."""
    scores = []
    lowest = backbones._lowest
    monkeypatch.setattr(backbones, "_lowest", lambda score, *others: scores.append(score) or lowest(score, *others))
    images = {}
    for retain in (0.0, 1.0):
        for select in ("change", "attention"):
            request = Request(3, seed=5, **QUICK).but(num_iter=9, retain=retain, select=select)
            (images[retain, select],) = tokens_of(model, [request])
    assert relative_error(images[0.0, "change"], images[0.0, "attention"]) > 1e-4
    assert not torch.equal(images[0.0, "change"], images[1.0, "change"])
    assert all((score <= 0).all() and score.min() < -0.01 for score in scores[len(scores) // 4 : len(scores) // 2])


@pytest.mark.parametrize("settings", [{"refresh": 1}, {"warmup": 16}, {"num_iter": 2}])
def test_without_lazy_iterations_it_is_the_full_backbone(settings, model):
    request = Request(3, seed=5, **QUICK).but(denoiser="ancestral", **settings)
    same = {name: QUICK[name] for name in ("cfg", "num_sampling_steps", "first_timestep")}
    baseline = Request(3, seed=5, method="ar", num_iter=request.num_iter, **same)
    assert relative_error(tokens_of(model, [request])[0], tokens_of(model, [baseline])[0]) < 1e-4


@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.parametrize("reuse_null", [True, False])
def test_refreshes_are_full_and_lazy_ones_near(cfg, reuse_null, model):
    """Each kind of iteration against the full backbone on the same tokens; sequences begin one after the other."""
    settings = QUICK | {"cfg": cfg, "reuse_null": reuse_null}
    runner, everyone = started(model, [Request(i, seed=i, **settings).but(num_iter=8 + 4 * i) for i in range(3)])
    kinds_together = set()
    with torch.inference_mode():
        for step in range(8):
            batch = everyone[: step + 1]
            rows = runner.next_rows(batch)
            kinds = [evaluation_of(sequence.request, sequence.iteration) for sequence in batch]
            kinds_together.add(len(set(kinds)))
            z, full = cached_conditions(runner, batch, rows), runner.conditions(batch, rows)
            assert z.shape == full.shape and z.dtype == torch.float32
            for row, name in enumerate(np.repeat(kinds, rows.counts)):
                error = relative_error(z[:, row], full[:, row])
                assert 1e-4 < error < 1 if name == "lazy" else error < 1e-4
            for sequence, name in zip(batch, kinds):
                if name != "full":
                    committed = everyone[0].shared["caches"].committed[sequence.slot]
                    assert committed == sequence.num_committed
            advance(runner, batch, rows, full)
    assert kinds_together == {1, 2, 3}


def test_the_distance_of_the_unconditional_branch_is_reused(model):
    """Its last hidden state, the decoder norm's input, is the conditional one plus the difference at the refresh."""
    runner, batch = started(model, [Request(i, seed=i, **QUICK).but(warmup=0) for i in range(2)])
    hidden = []
    hook = model.decoder_norm.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    try:
        with torch.inference_mode():
            rows = runner.next_rows(batch)
            embedding = torch.cat([model.class_emb(runner.label), model.fake_latent.expand(2, -1)])
            model(runner.tokens.repeat(2, 1, 1), runner.order.repeat(2, 1), [0] * 4, embedding)
            conditional, unconditional = hidden.pop()[:, runner.config.buffer_size :].chunk(2)
            expected = unconditional - conditional
            advance(runner, batch, rows, cached_conditions(runner, batch, rows))
            hidden.clear()
            for _ in range(3):
                rows = runner.next_rows(batch)
                assert {evaluation_of(sequence.request, sequence.iteration) for sequence in batch} == {"lazy"}
                z = cached_conditions(runner, batch, rows)
                conditional, unconditional = hidden.pop()[:, rows.sequence, rows.offset]
                assert relative_error(unconditional - conditional, expected[rows.sequence, rows.position]) < 1e-4
                advance(runner, batch, rows, z)
    finally:
        hook.remove()


def test_each_branch_has_its_own_caches(model):
    """The conditional branch is as without guidance; the unconditional one, if it has caches, is as that of a model
    all of whose classes are the null class."""
    null_model = copy.deepcopy(model)
    null_model.class_emb.weight.copy_(model.fake_latent.expand_as(model.class_emb.weight))
    cases = [(model, {"reuse_null": False}), (model, {}), (model, {"cfg": 1.0}), (null_model, {"cfg": 1.0})]
    runs = [started(each, [Request(i, seed=i, **(QUICK | own)) for i in range(2)]) for each, own in cases]
    with torch.inference_mode():
        for _ in range(8):
            both, reused, alone, null = (cached_conditions(*run, run[0].next_rows(run[1])) for run in runs)
            assert relative_error(both, torch.cat([alone, null])) < 1e-4
            assert relative_error(reused[:1], alone) < 1e-4
            for runner, batch in runs:
                advance(runner, batch, runner.next_rows(batch), alone)


@pytest.mark.parametrize(
    "iteration, retain, others",
    [  # of 72 positions: at least the 2 new ones and 4, which are 15/320
        (19, 1.0, 69),
        (20, 1.0, 40),  # 0.6 x 72 = 43.2, 3 of which are predicted
        (21, 1.0, 33),
        (25, 1.0, 25),
        (30, 1.0, 7),
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
    [{}, {"cfg": 1.0, "temperature": 0.0, "num_iter": 16}, {"reuse_null": False}, {"retain": 0.0, "refresh": 16}],
    ids=str,
)
def test_an_image_does_not_depend_on_the_batch(changes, model):
    """Three requests with different numbers of iterations in two slots, one of which is used again."""
    requests = [Request(i, seed=i, **({"num_iter": 6 + 2 * i} | QUICK | changes)) for i in range(3)]
    together = tokens_of(model, requests, max_batch=2)
    assert all(tokens.isfinite().all() for tokens in together)
    assert relative_error(tokens_of(model, requests[2:], max_batch=1)[0], together[2]) < 1e-3


def test_nothing_is_left_of_an_earlier_sequence(model):
    """Caches that a damaged sequence left full of NaN change nothing."""
    outcomes = []
    for damage in (False, True):
        runner, batch = started(model, [Request(i, seed=i, **QUICK) for i in range(2)])
        caches = batch[0].shared["caches"] = Caches(runner, batch[0].request)
        if damage:
            for tensor in tensors_of(caches):
                tensor.fill_(torch.nan)
        with torch.inference_mode():
            for _ in range(12):
                rows = runner.next_rows(batch)
                advance(runner, batch, rows, cached_conditions(runner, batch, rows))
        outcomes.append(runner.tokens)
    assert torch.equal(*outcomes)


def test_keys_and_values_in_half_precision(model):
    """Nearly the same image from about half of the memory; the small rest stays in float32."""
    request = Request(3, seed=5, **QUICK)
    full, half = tokens_of(model, [request])[0], tokens_of(model, [request.but(kept="half")])[0]
    assert 0 < relative_error(half, full) < 0.1
    runner, (sequence,) = started(model, [request])
    most, least = (bytes_per_slot(runner, sequence.request.but(kept=kept)) for kept in ("full", "half"))
    assert least < 0.65 * most


@pytest.mark.parametrize("settings", [{}, {"cfg": 1.0}, {"reuse_null": False}, {"kept": "half"}])
def test_bytes_of_the_caches(settings, model):
    runner, batch = started(model, [Request(0, **(QUICK | settings))] * 3)
    tensors = tensors_of(Caches(runner, batch[0].request))
    assert sum(tensor.nbytes for tensor in tensors) == 3 * bytes_per_slot(runner, batch[0].request)


@pytest.mark.parametrize(
    "own",
    [{"denoiser": "ancestral"}, {"denoiser": "speculative", "window": 2, "draft": "frozen", "first_timestep": None}],
)
def test_lazy_calls_are_counted(own, model):
    requests = [Request(0, num_iter=k, **(QUICK | own)) for k in (1, 6, 9)]
    stats = [output.stats for output in engine(model).generate(requests)]
    assert [each.backbone_calls for each in stats] == [1, 6, 9]
    assert [each.lazy_backbone_calls for each in stats] == [0, 3, 6]  # full: 0, 1, 5


def test_requests_share_caches(model, monkeypatch):
    """Requests that cannot share a round use the same caches if these have the same shape."""
    requests = [Request(i, seed=i, num_iter=6, **(QUICK | {"num_sampling_steps": 4 + i})) for i in range(3)]
    served = engine(model, max_batch=2)
    tickets = [served.add_request(request) for request in requests]
    outputs = {}
    for _ in range(8):  # a round of each of two keys in turn, until both have caches
        outputs |= served.step()
    first, second = (batch[0].shared["caches"] for batch in served.scheduler.running.values())
    assert first is second
    del first, second
    unguided = requests[0].but(cfg=1.0)  # without guidance, caches have another shape
    with monkeypatch.context() as small:
        small.setattr(cspd_device, "free_bytes", lambda device: 2 * bytes_per_slot(served.runner, unguided) - 1)
        served.resolve(requests[1])
        with pytest.raises(ValueError, match="backbone"):
            served.resolve(unguided)
        assert served.resolve(Request(0, method="ar")).method == "ar"
    while len(outputs) < len(requests):
        outputs |= served.step()
    assert not served.runner.caches  # they are freed with the last one
    for ticket, request in zip(tickets, requests):
        assert relative_error(tokens_of(model, [request], max_batch=1)[0], outputs[ticket].tokens) < 1e-3


@pytest.mark.parametrize(
    "name, changes",
    [
        ("retain", {"retain": 1.5}),
        ("backbone", {"backbone": "full"}),
        ("denoiser", {"denoiser": "ancestral", "reuse": 8}),
    ],
)
def test_bad_settings(name, changes, model):
    with pytest.raises(ValueError, match=name):
        engine(model).resolve(Request(0, **QUICK).but(**changes))


def test_bf16(model):
    """Caches have the type of keys and values; the first denoising step in float32 keeps the tokens near."""
    request = Request(0, **QUICK)
    bf16, fp32 = (engine(model, precision=precision).generate([request])[0].tokens for precision in ("bf16", "fp32"))
    assert 0 < relative_error(bf16, fp32) < 0.2
