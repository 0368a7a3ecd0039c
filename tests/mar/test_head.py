"""MAR's head, its schedule and its training loss."""

import math

import numpy as np
import pytest
import torch
from conftest import relative_error

from mar.head import guide, schedule, table, training_loss


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


def test_the_head_is_the_authors(head, mar_golden):
    x, t, c, out = (mar_golden[f"head.{name}"] for name in ("x", "t", "c", "out"))
    assert relative_error(head(x, t, c), out) < 1e-5
    x, t, c, scale, out = (mar_golden[f"head_cfg.{name}"] for name in ("x", "t", "c", "scale", "out"))
    half = len(x) // 2
    guided = guide(head(x[:half].repeat(2, 1), t, c), scale)  # the authors feed the first half of x twice
    assert relative_error(guided, out[:half]) < 1e-5


def test_modulations_computed_together_are_those_of_each_call(head, inputs):
    timesteps, x, c = inputs
    scale = torch.linspace(1, 4, len(x)).unsqueeze(-1)
    for t, modulations in zip(timesteps, by_step(head, timesteps, c)):
        out = head.denoise(x, modulations)
        by_row = head(x.repeat(2, 1), t.expand(2 * len(x)), c.flatten(0, 1))
        assert relative_error(out.flatten(0, 1), by_row) < 1e-5
        eps, v = out.chunk(2, dim=-1)
        guided = torch.cat([torch.lerp(eps[1], eps[0], scale), v[0]], dim=-1)
        assert relative_error(guided, guide(by_row, scale)) < 1e-5


def test_bf16_is_near_float32(head, inputs):
    timesteps, x, c = inputs
    exact = head.denoise(x, by_step(head, timesteps, c)[1])
    with torch.autocast("cpu", torch.bfloat16):
        out = head.denoise(x, by_step(head, timesteps, c)[1])
    assert 0 < relative_error(out.float(), exact) < 0.05


# ---- The diffusion tables and the posterior


@pytest.mark.parametrize("num_steps", [100, 25])
def test_the_tables_are_the_authors(num_steps, mar_golden):
    names = [name for name in mar_golden if name.startswith(f"schedule{num_steps}.")]
    assert len(names) == 8
    for name in names:
        values = getattr(schedule(num_steps), name.split(".")[1])
        assert values.dtype == mar_golden[name].numpy().dtype
        np.testing.assert_allclose(values, mar_golden[name].numpy(), rtol=1e-9, atol=0, err_msg=name)
    assert np.array_equal(schedule(num_steps).timestep_map, mar_golden[f"schedule{num_steps}.timestep_map"].numpy())


def test_the_posterior_is_the_authors(small_mar, mar_golden):
    step, x, c = (mar_golden[f"posterior.{name}"] for name in ("step", "x", "c"))
    s = schedule(100)
    eps, v = small_mar.head(x, torch.from_numpy(s.timestep_map)[step], c).chunk(2, dim=-1)
    actual = {
        "mean": table(s.mean_x, step) * x + table(s.mean_eps, step) * eps,
        "log_variance": 2 * (table(s.log_sigma_base, step) + table(s.log_sigma_slope, step) * v),
        "pred_x0": table(s.sqrt_recip_alphas_cumprod, step) * x - table(s.sqrt_recipm1_alphas_cumprod, step) * eps,
    }
    for name, values in actual.items():
        expected = mar_golden[f"posterior.{name}"]
        error = (values - expected).abs().amax(1) / expected.abs().amax(1)
        limit = torch.where((step == 99) & (name != "log_variance"), 1e-4, 1e-5)
        assert (error < limit).all(), (name, error)


@pytest.mark.parametrize(
    "num_steps, first_timestep, gain",
    [(100, 999, 316), (25, 999, 1327), (8, 999, 4485), (100, 950, 1.2), (25, 950, 1.8), (8, 950, 3.7)],
)
def test_the_first_step_multiplies_errors_as_documented(num_steps, first_timestep, gain):
    """See docs/methods.md."""
    s = schedule(num_steps, first_timestep)
    assert s.mean_x[-1] == pytest.approx(gain, rel=0.05)
    assert first_timestep < 999 or -s.mean_eps[-1] == pytest.approx(gain, rel=0.005)


@pytest.mark.parametrize("num_steps", [0, 1001])
def test_an_impossible_number_of_steps_is_an_error(num_steps):
    with pytest.raises(ValueError):
        schedule(num_steps)


# ---- The training loss


class Closure(torch.nn.Module):
    """A head that returns fixed eps and v."""

    def __init__(self, eps, v):
        super().__init__()
        self.eps, self.v = eps, v

    def forward(self, x, t, c):
        return torch.cat([self.eps, self.v], dim=-1)


@pytest.fixture
def data():
    """x0 [N, d], conditions, one timestep per row, and noise."""
    g = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 1024, 8, generator=g)
    return 0.5 * x0, torch.zeros(len(x0), 1), torch.tensor([50, 200, 500, 900]).repeat(256), noise


def test_the_loss_is_the_formula(data):
    """The squared error, and the KL divergence from the true posterior in bits."""
    x0, t, noise = data[0], data[2], data[3]
    s = schedule(1000)
    eps, v = 0.9 * noise + 0.1, 0.5 * torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    mse, vb = training_loss(Closure(eps, v), *data)
    torch.testing.assert_close(mse, (eps - noise).square().mean(-1))

    def column(values):
        return torch.from_numpy(values)[t].unsqueeze(-1)

    x_t = column(s.alphas_cumprod).sqrt() * x0 + (1 - column(s.alphas_cumprod)).sqrt() * noise
    predicted = column(s.sqrt_recip_alphas_cumprod) * x_t - column(s.sqrt_recipm1_alphas_cumprod) * eps
    true_mean, mean = (
        column(s.posterior_mean_coef1) * start + column(s.posterior_mean_coef2) * x_t for start in (x0, predicted)
    )
    fraction, beta_tilde = (v + 1) / 2, column(s.posterior_log_variance_clipped)
    log_variance = fraction * column(s.betas).log() + (1 - fraction) * beta_tilde
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(
        normal(true_mean, (beta_tilde / 2).exp()), normal(mean, (log_variance / 2).exp())
    )
    torch.testing.assert_close(vb, (kl.mean(-1) / math.log(2)).float(), rtol=1e-3, atol=1e-5)


def test_the_variational_bound_trains_the_variance_channel_only(data):
    eps, v = (0.9 * data[3]).requires_grad_(), torch.zeros_like(data[3], requires_grad=True)
    mse, vb = training_loss(Closure(eps, v), *data)
    of_eps, of_v = torch.autograd.grad(vb.sum(), (eps, v), retain_graph=True)
    assert not of_eps.any() and (of_v != 0).all(dim=-1).any()
    assert torch.autograd.grad(mse.sum(), eps)[0].any()
