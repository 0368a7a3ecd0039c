"""The diffusion head is the authors'; its form for samplers (modulations apart, guidance in front) is the same map."""

import pytest
import torch
from conftest import relative_error

from mar.head import guide


@pytest.fixture
def head(small_mar):
    return small_mar.head


@pytest.fixture
def inputs(head):
    """Four timesteps, noisy tokens [R, d] and conditions [2, R, D]."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, head.channels, generator=g)
    return torch.tensor([999, 500, 10, 0]), x, torch.randn(2, 5, head.cond_embed.in_features, generator=g)


def by_step(head, t, c):
    """The modulations of every timestep, computed together, as `cspd.heads.chain` does."""
    layers = head.split(head.modulations(head.time_embed(t)[:, None, None], head.cond_embed(c)))
    return [[tuple(part[i] for part in layer) for layer in layers] for i in range(len(t))]


def test_golden(head, mar_golden):
    x, t, c, out = (mar_golden[f"head.{name}"] for name in ("x", "t", "c", "out"))
    assert relative_error(head(x, t, c), out) < 1e-5


def test_golden_guidance(head, mar_golden):
    x, t, c, scale, out = (mar_golden[f"head_cfg.{name}"] for name in ("x", "t", "c", "scale", "out"))
    half = len(x) // 2
    guided = guide(head(x[:half].repeat(2, 1), t, c), scale)  # the authors feed the first half of x twice
    assert relative_error(guided, out[:half]) < 1e-5


def test_guide_by_row():
    out = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([[0.0], [1.0], [3.0]])
    guided = guide(out, scale)
    cond, uncond = out[:3, :4], out[3:, :4]
    assert torch.equal(guided[0, :4], uncond[0])
    assert torch.allclose(guided[1, :4], cond[1], rtol=0, atol=1e-6)
    assert torch.allclose(guided[2, :4], 3 * cond[2] - 2 * uncond[2], rtol=0, atol=1e-5)
    assert torch.equal(guided[:, 4:], out[:3, 4:])


def test_modulations_apart(head, mar_golden):
    x, t, c = (mar_golden[f"head.{name}"] for name in ("x", "t", "c"))
    apart = head.denoise(x, head.split(head.modulations(head.time_embed(t), head.cond_embed(c))))
    assert relative_error(apart, head(x, t, c)) < 1e-6


def test_guidance_axis_in_front(head, inputs):
    timesteps, x, c = inputs
    scale = torch.linspace(1, 4, len(x)).unsqueeze(-1)
    for t, modulations in zip(timesteps, by_step(head, timesteps, c)):
        out = head.denoise(x, modulations)
        by_row = head(x.repeat(2, 1), t.expand(2 * len(x)), c.flatten(0, 1))
        assert relative_error(out.flatten(0, 1), by_row) < 1e-5
        eps, v = out.chunk(2, dim=-1)
        guided = torch.cat([torch.lerp(eps[1], eps[0], scale), v[0]], dim=-1)
        assert relative_error(guided, guide(by_row, scale)) < 1e-5


def test_bf16_autocast(head, inputs):
    timesteps, x, c = inputs
    exact = head.denoise(x, by_step(head, timesteps, c)[1])
    with torch.autocast("cpu", torch.bfloat16):
        out = head.denoise(x, by_step(head, timesteps, c)[1])
    assert torch.isfinite(out).all()
    assert 0 < relative_error(out.float(), exact) < 0.05
