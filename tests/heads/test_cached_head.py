"""LazyMAR's cached head is its formula, and without reuse it is the ancestral chain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import relative_error
from lazy import QUICK, engine, started, toy_model  # noqa: F401 - a fixture

from cspd import Request
from cspd.continuous.denoisers import DENOISERS
from cspd.continuous.rows import Densities
from cspd.heads.chain import modulation_size
from cspd.heads.samplers import evaluated_calls
from mar.head import ReadyHead, schedule


def test_the_steps_that_evaluate_the_blocks():
    """The first tenth, rounded up, the next one, and from there on every `reuse`-th."""
    expected = [*range(10), 10, 18, 26, 34, 42, 50, 58, 66, 74, 82, 90, 98]
    assert evaluated_calls(100, 8).tolist() == expected
    assert evaluated_calls(12, 5).tolist() == [0, 1, 2, 7]
    assert evaluated_calls(2, 8).tolist() == [0, 1]


def chains(model, cfg=2.0, steps=23, **settings):
    """A model runner, rows of three sequences, and their conditions."""
    request = Request(0, **(QUICK | {"cfg": cfg, "num_sampling_steps": steps}), **settings)
    runner, batch = started(model, [request.but(label=i, seed=i) for i in range(3)])
    rows = runner.rows(batch, [5, 0, 11], [3, 1, 4])
    with torch.inference_mode():
        return runner, rows, runner.conditions(batch, rows)


def denoised(name, runner, rows, z):
    """What a sampler draws, and the densities of its chains."""
    seen = Densities(len(rows.seed), runner.config.token_dim, runner.device)
    return DENOISERS[name].denoise(runner, "target", rows, z, observers=(seen,)), seen


def through_blocks(head, h, y):
    """The residual blocks, modulated by y."""
    for block in head.res_blocks:
        shift, scale, gate = block.adaLN_modulation[1](y).chunk(3, dim=-1)
        h = h + gate * block.mlp(block.in_ln(h) * (1 + scale) + shift)
    return h


@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.parametrize("per_table", [1, 4, None])
def test_tokens_are_those_of_the_formula(cfg, per_table, model, monkeypatch):
    """Each step by the head's parts; between evaluations the updates and the unconditional difference are reused."""
    runner, rows, z = chains(model, cfg, reuse=5)
    if per_table:
        size = 4 * (3 * len(model.head.res_blocks) + 2) * model.head.width * z[..., 0].numel()
        monkeypatch.setattr("cspd.heads.chain.MODULATION_BYTES", per_table * size)
    made, seen = denoised("cached", runner, rows, z)

    head, s = model.head, schedule(23, 950)
    x = runner.noise.initial(rows.seed, rows.position, head.channels)
    log_sigma = torch.zeros(len(x))
    with torch.inference_mode():
        for call, t in enumerate(reversed(range(23))):
            is_evaluated = call in (0, 1, 2, 3, 8, 13, 18)
            t_embed = head.time_embed(torch.tensor([s.timestep_map[t]]))
            outputs = []
            for condition in z:  # the class, then the unconditional branch
                y = torch.nn.functional.silu(t_embed + head.cond_embed(condition))
                h = head.input_proj(x)
                if is_evaluated:
                    h = through_blocks(head, h, y)
                    if not outputs:
                        updates = h - head.input_proj(x)
                else:
                    h = h + updates
                shift, scale = head.final_layer.adaLN_modulation[1](y).chunk(2, dim=-1)
                normed = torch.nn.functional.layer_norm(h, h.shape[-1:], eps=1e-6)
                outputs.append(head.final_layer.linear(normed * (1 + scale) + shift))
            if is_evaluated:
                distance = (outputs[-1] - outputs[0])[:, : head.channels]
            # Guidance takes the unconditional branch to be as far away as at the last evaluation.
            eps, v = outputs[0].chunk(2, dim=-1)
            eps = eps + (1 - rows.scale) * distance
            x = s.mean_x[t] * x + s.mean_eps[t] * eps
            if t:
                log = (1 + v) / 2 * np.log(s.betas[t]) / 2 + (1 - v) / 2 * s.posterior_log_variance_clipped[t] / 2
                (noise,) = runner.noise.steps(rows.seed, rows.position, torch.tensor([t]), head.channels, 0)
                x = x + rows.temperature * log.exp() * noise
                log_sigma += (log + rows.temperature.log()).sum(-1)
    assert relative_error(made.tokens, x) < 1e-4
    assert relative_error(seen.log_sigma, log_sigma) < 1e-4
    assert made.head_calls.tolist() == [7] * 3 and made.calls.tolist() == [7] * 8
    assert made.evaluations.tolist() == [7 * len(z)] * 8


def test_tables_are_small_however_many_steps_reuse_them(model, monkeypatch):
    runner, rows, z = chains(model, steps=40, reuse=39)
    size = modulation_size(model.head) * z[..., 0].numel()  # of one call
    monkeypatch.setattr("cspd.heads.chain.MODULATION_BYTES", size)
    tables, modulations = [], model.head.modulations

    def counted(*args, **more):
        made = modulations(*args, **more)
        tables.append(sum(each.nbytes for each in made))
        return made

    monkeypatch.setattr(model.head, "modulations", counted)
    DENOISERS["cached"].denoise(runner, "target", rows, z)
    assert max(tables) <= size


@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_without_reuse_it_is_the_ancestral_chain(cfg, model):
    runner, rows, z = chains(model, cfg, reuse=1)
    (cached, seen), (full, of_full) = (denoised(name, runner, rows, z) for name in ("cached", "ancestral"))
    assert relative_error(cached.tokens, full.tokens) < 1e-4
    for name in ("log_sigma", "log_sigma_last"):
        assert relative_error(getattr(seen, name), getattr(of_full, name)) < 1e-4
    for name in ("head_calls", "calls", "evaluations"):
        assert getattr(cached, name).tolist() == getattr(full, name).tolist()


def test_blocks_are_evaluated_as_often_as_reported(model, monkeypatch):
    calls = []
    through_blocks = ReadyHead.through_blocks
    monkeypatch.setattr(ReadyHead, "through_blocks", lambda *args: calls.append(0) or through_blocks(*args))
    (output,) = engine(model).generate([Request(0, **QUICK)])
    assert len(calls) == output.stats.head_calls == 16 * len(evaluated_calls(4, 8))
    assert output.stats.guarantee == "heuristic"
