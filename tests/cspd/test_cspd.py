"""CSpD is what its paper says (arXiv 2411.11925): every image is made again by hand, with its noise and guidance."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from cspd_by_hand import (  # noqa: F401 - fixtures
    GAMMA,
    LEFT,
    LENGTH,
    TOKEN,
    by_hand,
    generate,
    known_draft,
    known_target,
    order_of,
    plain,
    request,
    scales,
)

import cspd
from cspd import Engine, MARModels, Request, noise
from cspd.heads import chain
from cspd.masked import cspd as masked_cspd
from cspd.request import Sequence


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill": 0.05},
        {"prefill": 0.5, "num_iter": 8, "gamma": 12},
        {"prefill": 0.6, "verify": "sequential", "gamma": 6},
        {"prefill": 0.7, "verify": "sequential", "num_iter": 8, "cfg_schedule": "constant", "gamma": 3},
        {"prefill": 0.7, "align": False, "ratio_temperature": 200.0},
        {"prefill": 0.7, "ratio_temperature": 25.0, "cfg": 1.0, "temperature": 1.1},
        {"prefill": 0.7, "sigma": "published"},
    ],
    ids=str,
)
def test_agrees_with_algorithm_1_done_by_hand(changes, target, draft):
    r = request(**changes)
    (output,) = generate(target, draft, r)
    expected = by_hand(target, draft, r)
    token_cost = [None if math.isnan(h) else bool(h) for h in output.token_cost[order_of(r)].tolist()]
    assert token_cost == expected.accepted
    assert 0 < token_cost.count(True) < LENGTH - token_cost.count(None), "the case decides nothing"
    assert (output.tokens - expected.tokens).abs().max() < TOKEN
    stats = output.stats
    assert (stats.iterations, stats.backbone_calls, stats.draft_backbone_calls, stats.resample_tries) == (
        expected.rounds,
        expected.rounds,
        expected.drafted,
        expected.tries,
    )


# ---- the draft is the target


@pytest.mark.parametrize(
    "changes",
    [
        {"verify": "sequential"},
        {"verify": "sequential", "gamma": LENGTH, "prefill": 0.05},
        {"verify": "parallel", "gamma": 1},
        {"prefill": 1.0},
    ],
    ids=str,
)
def test_a_draft_that_is_the_target_makes_plain_mar(changes, target):
    """At K = L, one token an iteration, the contexts are the same: every token is right, and `ar`'s own."""
    (output,), (expected,) = generate(target, target, request(**changes)), generate(target, None, plain())
    assert (output.tokens - expected.tokens).abs().max() < TOKEN
    assert output.stats.alpha == (None if changes.get("prefill") == 1 else 1)
    assert output.stats.resample_tries == output.stats.fallbacks == 0


def test_a_draft_that_is_the_target_is_judged_in_another_context_in_parallel(target):
    """What sets the modes apart: from the verified prefix alone, tokens drafted after others look wrong."""
    outputs = generate(target, target, request(), max_batch=1)
    judged, accepted = np.array(outputs[0].stats.by_lag)
    assert accepted[0] == judged[0] == LENGTH // GAMMA
    assert (accepted[1:] < judged[1:]).any()


# ---- noise and guidance


def recording(monkeypatch) -> tuple[set, dict]:
    """(model, function, index and the like) of every draw of noise inside a chain, and functions that record them."""
    seen, drawing, real = set(), [], masked_cspd._denoise

    def follow(runner, model: str, *args, **kwargs) -> tuple:
        drawing.append(model)
        made = real(runner, model, *args, **kwargs)
        drawing.pop()
        return made

    def record(name: str, *arguments: str):
        function = getattr(noise, name)

        def call(*args, **kwargs):
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            if drawing:
                seen.add((drawing[-1], name, *(bound.arguments[argument] for argument in arguments)))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(masked_cspd, "_denoise", follow)
    functions = {
        "initial": record("initial", "index"),
        "steps": record("steps", "index"),
        "chain": record("chain", "index", "accept_index"),
        "candidates": record("candidates", "offset"),
    }
    return seen, functions


@pytest.mark.parametrize("align", [True, False])
def test_only_x_and_eps_are_shared_and_only_if_aligned(align, target, draft, monkeypatch):
    seen, functions = recording(monkeypatch)
    generate(target, draft, request(align=align, prefill=0.5, num_sampling_steps=3), **functions)
    own = 0 if align else 1
    assert seen == {(model, name, i) for model, i in (("draft", 0), ("target", own)) for name in ("initial", "steps")}

    seen.clear()
    speculative = {"chains": "speculative", "window": 6, "prefill": 0.8}
    generate(target, draft, request(align=align, **speculative), **functions)
    offsets = {"draft": noise.DRAFT_OFFSET, "target": 0}
    assert {("draft", "chain", 0, 1), ("target", "chain", own, 0)} <= seen
    rest = {entry for entry in seen if entry[1] != "chain"}
    assert rest <= {(model, "candidates", offset) for model, offset in offsets.items()}
    assert len(seen) == 2 + len(rest)


def test_other_draws_are_of_other_streams():
    """Uniform draws of tokens and of chains, candidates of tokens and of states, the draft's and the target's."""
    seed, position, step = torch.arange(4000), torch.full((4000,), 9), torch.zeros(4000, dtype=torch.int64)
    target, draft = (noise.chain(seed, position, 1, 1, 0, i) for i in (0, 1))
    states = [noise.candidates(seed, position, step, 0, 1, 1, offset) for offset in (0, noise.DRAFT_OFFSET)]
    tokens = noise.token_candidates(seed, position, 0, 1, 1)
    assert torch.equal(target[0], draft[0]) and torch.equal(target[1], draft[1])  # aligned
    streams = [
        noise.token_accept_uniforms(seed, position),
        target[2],
        draft[2],
        tokens[1],
        *(uniform for _, uniform in states),
    ]
    streams += [tokens[0], *(normals for normals, _ in states)]
    for index in (0, 1):
        streams += [noise.initial(seed, position, 1, index), noise.steps(seed, position, step[:1], 1, index)]
    correlation = np.corrcoef(torch.stack([stream.flatten() for stream in streams]).numpy()) - np.eye(len(streams))
    assert np.abs(correlation).max() < 0.08  # 5 standard errors


@pytest.mark.parametrize("num_iter", [8, 64])
def test_guidance_is_that_of_the_iteration_a_rank_belongs_to(num_iter, target, draft, monkeypatch):
    """MAR's own: s rises with the tokens known after the iteration, 1 .. 64 of 64."""
    engine = Engine(MARModels(target, draft), max_batch=2, device="cpu")
    resolved = [engine.resolve(request(seed=i, num_iter=num_iter)) for i in (1, 2)]
    batch = [Sequence(r, i, slot=i) for i, r in enumerate(resolved)]
    with torch.inference_mode():
        engine.runner.admit(batch)
    expected = torch.tensor(scales(resolved[0]))
    assert len(expected) == LENGTH and len(expected.unique()) == num_iter - (num_iter == 64)
    assert expected[0] == 1 + 2 * (LENGTH - LEFT[num_iter][0]) / 64 and expected[-1] == 1 + 2 * 63 / 64
    rows = engine.runner.rows(batch, [0, 10], [64, 7])
    assert torch.allclose(rows.scale.squeeze(1), torch.cat([expected, expected[10:17]]))

    used, real = {"draft": [], "target": []}, chain.follow
    heads = {draft.head: "draft", target.head: "target"}

    def follow(head, z, scale, *args):
        used[heads[head]].append(scale.squeeze(1))
        return real(head, z, scale, *args)

    monkeypatch.setattr(chain, "follow", follow)
    engine.generate([request(num_iter=num_iter, num_sampling_steps=2)])
    for parts in used.values():
        assert torch.allclose(torch.cat(parts), expected)


# ---- what is not accepted


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"gamma": 0}, "gamma"),
        ({"gamma": 65}, "gamma"),
        ({"gamma": 1.5}, "gamma"),
        ({"verify": "serial"}, "verify"),
        ({"chains": "fast"}, "chains"),
        ({"ratio_temperature": 0}, "ratio_temperature"),
        ({"ratio_temperature": -1.0}, "ratio_temperature"),
        ({"ratio_temperature": math.nan}, "ratio_temperature"),
        ({"prefill": -1}, "prefill"),
        ({"prefill": 2}, "prefill"),
        ({"align": "yes"}, "align"),
        ({"temperature": 0.0}, "temperature"),
        ({"window": 8}, "window"),
        ({"window": 13, "chains": "speculative"}, "window"),
        ({"method": "ar"}, "ar"),
        ({"method": "speculative", "gamma": None}, "speculative"),
    ],
    ids=str,
)
def test_bad_options_raise_one_line_that_names_the_fix(changes, error, target, draft):
    engine = Engine(MARModels(target, draft), max_batch=1, device="cpu")
    with pytest.raises(ValueError, match=error) as raised:
        engine.generate([request(**changes)])
    assert "\n" not in str(raised.value)


def test_a_draft_model_is_asked_for(target):
    with pytest.raises(ValueError, match="draft"):
        generate(target, None, request())


# ---- the bundled pair


@pytest.mark.slow
def test_alpha_of_the_bundled_pair():
    """About 0.3, and nothing without aligned noise, or with the paper's formula taken literally."""
    engine = cspd.load("digits32", max_batch=10, device="cpu")

    def alpha(**changes) -> float:
        settings = {"method": "cspd", "gamma": GAMMA, "num_iter": 8, "cfg": 1.0, "prefill": 0.75}
        outputs = engine.generate([Request(i, i, **settings, **changes) for i in range(10)])
        judged, accepted = np.sum([o.stats.by_lag for o in outputs], axis=(0, 2))
        assert judged == 160
        return accepted / judged

    assert 0.2 < alpha() < 0.6
    assert alpha(align=False, num_sampling_steps=50) < 0.1
    assert alpha(ratio_temperature=1.0, num_sampling_steps=50) < 0.02
