"""CSpD with every denoiser: it verifies drafts by the densities of the denoiser's chains and counts their cost."""

from __future__ import annotations

import copy

import pytest
import torch

from cspd import Engine, MARModels, Request, noise
from cspd.continuous.denoisers import DENOISERS, of_kind
from cspd.continuous.rows import Densities
from cspd.heads.samplers import DIFFUSION
from cspd.masked.cspd import CSPD
from cspd.request import Sequence
from mar.head import ReadyHead
from mar.model import MAR

SMALL = {"first_timestep": 950, "upper": 6, "lower": 4, "head_calls": 4, "window": 3, "draft": "frozen"}
SETTINGS = {"method": "mar-draft", "cfg": 2.0, "num_iter": 2, "num_sampling_steps": 12, "gamma": 4, "prefill": 0.9375}
DRAFTED, ROUNDS = 4, 1  # tokens of 64
every_denoiser = pytest.mark.parametrize(
    "chains",
    [
        pytest.param(name, marks=() if each.needs == "-" else pytest.mark.slow)
        for name, each in of_kind(DIFFUSION).items()
    ],
)


def request(chains: str, **changes) -> Request:
    settings = SETTINGS | {"chains": chains} | changes
    applied = {name: SMALL[name] for name in SMALL if CSPD.option(name, Request(0, **settings))}
    return Request(3, 5, **applied | settings)


def nothing_drawn(chains: str) -> dict:
    """Settings with which a denoiser uses no other random numbers than the chains' noise, which both models share."""
    return {"window": 0, "num_sampling_steps": 25} if chains == "speculative" else {}


@pytest.fixture(scope="module")
def draft(small_mar: MAR) -> MAR:
    """The target with noise on the weights of its head: few of its tokens are accepted, if any."""
    model = copy.deepcopy(small_mar)
    generator = torch.Generator().manual_seed(0)
    for weights in model.head.parameters():
        if weights.numel() > 1:
            weights += 0.1 * weights.std() * torch.randn(weights.shape, generator=generator)
    return model


def calls(model: MAR, monkeypatch) -> list:
    """A list that gets an entry at each call of a model's head that evaluates its blocks."""
    seen = []
    through_blocks = ReadyHead.through_blocks

    def counted(ready: ReadyHead, *args: object) -> torch.Tensor:
        if ready.head is model.head:
            seen.append(1)
        return through_blocks(ready, *args)

    monkeypatch.setattr(ReadyHead, "through_blocks", counted)
    return seen


@every_denoiser
def test_drafted_tokens_are_verified(chains, small_mar, draft, monkeypatch):
    target, draft = copy.deepcopy(small_mar), copy.deepcopy(draft)
    engine = Engine(MARModels(target, draft), max_batch=1, device="cpu")
    if DENOISERS[chains].needs != "-":
        engine.generate([request(chains)])  # calibrates
    by_target, by_draft = calls(target, monkeypatch), calls(draft, monkeypatch)
    (output,) = engine.generate([request(chains)])
    stats = output.stats
    assert stats.by_lag[0] == [ROUNDS] * 4 and stats.alpha < 1 <= stats.resample_tries
    assert (stats.head_calls, stats.draft_head_calls) == (len(by_target), len(by_draft))
    assert stats.draft_backbone_calls == DRAFTED and stats.guarantee == "heuristic"


def test_chains_cannot_be_audited(small_mar):
    engine = Engine(MARModels(small_mar, small_mar), max_batch=1, device="cpu")
    with pytest.raises(ValueError, match="audit"):
        engine.check(request("calibrated", audit=0.1))


@every_denoiser
def test_a_draft_that_is_the_target_is_accepted(chains, small_mar):
    engine = Engine(MARModels(small_mar, small_mar), max_batch=1, device="cpu")
    (output,) = engine.generate([request(chains, verify="sequential", **nothing_drawn(chains))])
    assert output.stats.by_lag == [[ROUNDS] * 4] * 2
    assert output.stats.resample_tries == output.stats.fallbacks == 0


def noise_of(chains: str, seed: torch.Tensor, position: torch.Tensor, channels: int) -> torch.Tensor:
    """x_T and eps_t of all steps that add noise, float64 [n, R, channels]."""
    settings = request(chains, **nothing_drawn(chains))
    num_steps = {"annealed": 4, "frequency-weighted": 4, "ddim": 1, "dpm-solver++": 1}  # the solvers add none
    steps = torch.arange(1, num_steps.get(chains, settings.num_sampling_steps))
    x = noise.initial(seed, position, channels)[None]
    return torch.cat([x, noise.steps(seed, position, steps, channels)] if len(steps) else [x]).double()


@every_denoiser
def test_a_model_denoises_alike_as_draft_and_as_target(chains, small_mar, draft):
    """A calibration belongs to one model: the draft model's chains use its own."""
    made = []
    for name, models in (("draft", MARModels(small_mar, draft)), ("target", MARModels(draft, small_mar))):
        engine = Engine(models, max_batch=1, device="cpu")
        sequence = Sequence(engine.resolve(request(chains, **nothing_drawn(chains))), 0, slot=0)
        z = torch.randn(2, DRAFTED, small_mar.config.embed_dim, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            engine.runner.admit([sequence])
            rows = engine.runner.rows([sequence], [40], [DRAFTED])
            seen = Densities(DRAFTED, small_mar.config.token_dim, engine.runner.device)
            drawn = DENOISERS[chains].denoise(engine.runner, name, rows, z, observers=(seen,))
            made.append((drawn.tokens, seen.log_sigma, seen.log_sigma_last, seen.log_noise))
            drew = noise_of(chains, rows.seed, rows.position, small_mar.config.token_dim)
    for as_draft, as_target in zip(*made):
        assert torch.equal(as_draft, as_target)
    tokens, log_sigma, log_sigma_last, log_noise = made[0]
    assert log_noise.tolist() == pytest.approx((-0.5 * drew.square().sum((0, 2))).tolist(), rel=1e-6)
    assert log_sigma.shape == (DRAFTED,) and log_sigma_last.shape == tokens.shape
    assert log_sigma.any() and log_sigma_last.any()
