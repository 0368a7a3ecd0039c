"""CSpD's chains by any denoiser: drafted tokens are judged by its densities, on both models, and its costs counted."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from cspd import Engine, MARModels, Request
from cspd.heads.chain import DENOISERS
from cspd.masked.cspd import CSPD
from cspd.request import Sequence
from mar.model import MAR

SMALL = {"first_timestep": 950, "upper": 6, "lower": 4, "head_calls": 4, "window": 3, "draft": "frozen"}
SETTINGS = {"method": "cspd", "cfg": 2.0, "num_iter": 2, "num_sampling_steps": 12, "gamma": 4, "prefill": 0.9375}
DRAFTED, ROUNDS = 4, 1  # tokens of 64
every_denoiser = pytest.mark.parametrize(
    "chains",
    [pytest.param(name, marks=() if each.needs == "-" else pytest.mark.slow) for name, each in DENOISERS.items()],
)


def request(chains: str, **changes) -> Request:
    settings = SETTINGS | {"chains": chains} | changes
    applied = {name: SMALL[name] for name in SMALL if CSPD.option(name, Request(0, **settings))}
    return Request(3, 5, **applied | settings)


def nothing_drawn(chains: str) -> dict:
    """Settings with which a denoiser draws nothing beside the noise: the rest is each model's own."""
    return {"window": 0, "num_sampling_steps": 25} if chains == "speculative" else {}


@pytest.fixture(scope="module")
def draft(small_mar: MAR) -> MAR:
    """Right about few tokens, if any: the weights of its head are a little off."""
    model = copy.deepcopy(small_mar)
    noise = torch.Generator().manual_seed(0)
    for weights in model.head.parameters():
        weights += 0.1 * weights.std() * torch.randn(weights.shape, generator=noise) if weights.numel() > 1 else 0
    return model


def calls(model: MAR) -> list:
    """Calls of a model's head, from now on, by its first block."""
    seen = []
    model.head.res_blocks[0].register_forward_hook(lambda *call: seen.append(1))
    return seen


@every_denoiser
def test_drafted_tokens_are_judged(chains, small_mar, draft):
    target, draft = copy.deepcopy(small_mar), copy.deepcopy(draft)
    engine = Engine(MARModels(target, draft), max_batch=1, device="cpu")
    if DENOISERS[chains].needs != "-":
        engine.generate([request(chains)])  # calibrates
    by_target, by_draft = calls(target), calls(draft)
    (output,) = engine.generate([request(chains)])
    stats = output.stats
    assert stats.by_lag[0] == [ROUNDS] * 4 and stats.alpha < 1 <= stats.resample_tries
    assert (stats.head_calls, stats.draft_head_calls) == (len(by_target), len(by_draft))
    assert stats.draft_backbone_calls == DRAFTED and stats.guarantee == "heuristic"


def test_an_audit_of_chains_is_an_error(small_mar):
    """Since nobody would be told what it found."""
    engine = Engine(MARModels(small_mar, small_mar), max_batch=1, device="cpu")
    with pytest.raises(ValueError, match="audit"):
        engine.check(request("calibrated", audit=0.1))


@every_denoiser
def test_a_draft_that_is_the_target_is_accepted(chains, small_mar):
    """With the same noise, and from the same tokens."""
    engine = Engine(MARModels(small_mar, small_mar), max_batch=1, device="cpu")
    (output,) = engine.generate([request(chains, verify="sequential", **nothing_drawn(chains))])
    assert output.stats.by_lag == [[ROUNDS] * 4] * 2
    assert output.stats.resample_tries == output.stats.fallbacks == 0


@every_denoiser
def test_a_denoiser_checks_and_resolves_requests_for_its_chains(chains, small_mar, monkeypatch):
    own, seen = DENOISERS[chains], []

    def check(*args):
        seen.append("check")
        own.check(*args)

    def resolve(*args):
        seen.append("resolve")
        return own.resolve(*args)

    monkeypatch.setitem(DENOISERS, chains, dataclasses.replace(own, check=check, resolve=resolve))
    engine = Engine(MARModels(small_mar, small_mar), max_batch=1, device="cpu")
    engine.resolve(request(chains))
    assert seen == ["check", "resolve"]


@every_denoiser
def test_a_model_denoises_alike_as_draft_and_as_target(chains, small_mar, draft):
    """What a denoiser takes from a calibration is from the model's own."""
    made = []
    for name, models in (("draft", MARModels(small_mar, draft)), ("target", MARModels(draft, small_mar))):
        engine = Engine(models, max_batch=1, device="cpu")
        resolved = engine.resolve(request(chains, **nothing_drawn(chains)))
        sequence, runner = Sequence(resolved, 0, slot=0), engine.runner
        z = torch.randn(2, DRAFTED, small_mar.config.embed_dim, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            runner.admit([sequence])
            rows = runner.rows([sequence], [40], [DRAFTED])
            made.append(DENOISERS[chains].denoise(runner, name, rows, z, densities=True))
    one, other = made
    for field in ("tokens", "log_sigma", "log_sigma_last"):
        assert torch.equal(getattr(one, field), getattr(other, field))
    assert one.log_sigma.shape == (DRAFTED,) and one.log_sigma_last.shape == one.tokens.shape
