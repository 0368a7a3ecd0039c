"""On the trained model speculation changes nothing: the distribution at a fixed z, and the images of requests."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from distributions import same_law_pvalue
from heads import Case

import cspd
from cspd import Request
from cspd.checkpoints import checkpoint_files
from cspd.continuous.rows import run_plain_round
from cspd.device import Precision
from cspd.graphs import Graphs
from cspd.masked.runner import MARRunner
from cspd.request import Sequence, Stopwatch
from mar.checkpoint import load_mar
from mar.head import Head

CPU = torch.device("cpu")
ROWS = 4500
SETTINGS = {"num_iter": 16, "cfg": 3.0, "cfg_schedule": "linear", "temperature": 1.0, "num_sampling_steps": 100}


class OneCondition(Head):
    """A head whose rows all have one condition: its modulations are computed once and not for each row."""

    def __init__(self, head):
        self.__dict__ |= head.__dict__

    def modulations(self, t_embed, c_embed):
        rows = torch.broadcast_shapes(t_embed.shape, c_embed.shape)[:-1]
        return [layer.expand(*rows, -1) for layer in super().modulations(t_embed, c_embed[:, :1])]


@pytest.fixture(scope="module")
def case(device):
    """Chains at the condition of one token, ten iterations into an image."""
    target = load_mar(checkpoint_files("digits32")["target"]).eval().requires_grad_(False).to(device)
    runner = MARRunner(target, 1, Precision("fp32", device))
    sequence = Sequence(Request(label=4, seed=9, method="ar", **SETTINGS), 0, slot=0)
    with torch.inference_mode():
        runner.admit([sequence])
        for _ in range(10):
            run_plain_round(runner, [sequence], Stopwatch(device))
        rows = runner.next_rows([sequence])
        z = runner.conditions([sequence], rows)[:, :1]
    head = OneCondition(target.head) if device == CPU else target.head  # kernels read what every row has
    return Case(head, z, num_steps=100, scale=rows.scale[0].item())


@pytest.fixture(scope="module")
def ancestral(case):
    with torch.inference_mode():
        return case.path(ROWS, seed=2).cpu()


@pytest.mark.slow
@pytest.mark.parametrize("window, frozen", [(12, False), (4, True)])
def test_the_distribution_at_a_fixed_condition(window, frozen, case, ancestral, device):
    """Tokens, and log sigma along the chain, over 40 projections, radii and moments; of other seeds."""
    settings = {} if device == CPU else {"precision": Precision("fp32", device), "graphs": Graphs(device)}
    with torch.inference_mode():
        ended = case.speculative(case.calibration(frozen), window, ROWS, seed=1, **settings)
    calls = (ended.record != 0).float().sum(1).mean()
    assert calls < (40 if frozen else 14)
    speculative = torch.cat([ended.tokens, ended.log_sigma.unsqueeze(1)], dim=1).cpu()
    assert same_law_pvalue(ancestral, speculative) > 1e-3
    noise = torch.randn(speculative.shape, generator=torch.Generator().manual_seed(0))
    assert same_law_pvalue(ancestral, speculative + 0.01 * speculative.std(0) * noise + 0.05) < 1e-4  # it has power


@pytest.mark.slow
def test_bf16_has_the_distribution_of_its_own_ancestral_chain(case, device):
    """The head, and so p, is coarse; the draft and its density are not."""
    bf16 = Precision("bf16", device)
    small = dataclasses.replace(case, num_steps=25)
    with torch.inference_mode():
        ancestral = small.ancestral(1500, seed=2, precision=bf16)
        ended = small.speculative(small.calibration(), 6, 1500, seed=1, precision=bf16)
    assert same_law_pvalue(ancestral.cpu(), ended.tokens.cpu()) > 1e-3


@pytest.fixture(scope="module")
def engine():
    return cspd.load("digits32", max_batch=1, device="cpu")


@pytest.fixture(scope="module")
def requests():
    return [Request(label=i, seed=i, window=8, **SETTINGS) for i in range(8)]


@pytest.fixture(scope="module")
def alone(engine, requests):
    return [engine.generate([request])[0] for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("max_batch, order", [(3, 1), (7, -1)])
def test_images_do_not_depend_on_the_batch(max_batch, order, engine, requests, alone):
    outputs = engine.with_slots(max_batch).generate(requests[::order])[::order]
    assert all(torch.equal(a.image, b.image) for a, b in zip(alone, outputs))
    assert (alone[0].tokens - alone[1].tokens).abs().max() > 0.1  # the seed decides


@pytest.mark.parametrize("window, cfg, iterations", [(4, 1.0, [2] * 5), (3, 3.0, [2, 5, 3, 6, 3])])
def test_few_steps_are_rounded_alike_in_every_batch(window, cfg, iterations, engine):
    """To the last bit, at T = 8, whose first step multiplies rounding by 4,500; also at different iterations."""
    settings = SETTINGS | {"cfg": cfg, "num_sampling_steps": 8, "window": window, "draft": "frozen"}
    requests = [Request(label=i, seed=i, **settings | {"num_iter": k}) for i, k in enumerate(iterations)]
    alone = [engine.generate([request])[0] for request in requests]
    for max_batch in (3, 5):
        outputs = engine.with_slots(max_batch).generate(requests)
        assert all(torch.equal(a.tokens, b.tokens) and torch.equal(a.image, b.image) for a, b in zip(alone, outputs))


@pytest.mark.slow
def test_statistics_agree_with_each_other(alone):
    for output in alone:
        stats = output.stats
        (verified, accepted), (verified_at, accepted_at) = stats.by_lag, stats.by_step
        assert all(a <= v for a, v in zip(accepted, verified)) and len(verified) == 8
        assert sum(verified) == sum(verified_at) == 64 * 98 and sum(accepted) == sum(accepted_at)
        assert stats.alpha == sum(accepted) / sum(verified) > 0.85
        assert stats.head_calls_per_token == pytest.approx(output.token_cost.mean().item())
        assert 13 < stats.head_calls_per_token < 18 and output.token_cost.shape == (64,)
        assert stats.guarantee == "exact" and stats.iterations == stats.backbone_calls == 16
        assert 16 * 14 <= stats.head_calls <= 16 * 25 and stats.fallbacks == 0


@pytest.mark.slow
def test_window_0_is_baseline_sampling(engine, requests):
    speculative = engine.generate(requests[0].but(window=0))[0]
    baseline = engine.generate(requests[0].but(window=None, method="ar"))[0]
    assert torch.equal(speculative.tokens, baseline.tokens)
