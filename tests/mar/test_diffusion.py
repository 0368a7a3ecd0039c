"""The diffusion tables and posterior are the authors'; the training loss is least where theory says."""

import math

import numpy as np
import pytest
import torch

from mar.head import schedule, table, training_loss

DATA_SCALE = 0.5


class Closure(torch.nn.Module):
    """A head that returns (eps, v) as functions of (x, t)."""

    def __init__(self, eps, v):
        super().__init__()
        self.eps, self.v = eps, v

    def forward(self, x, t, c):
        return torch.cat([self.eps(x, t), self.v(x, t)], dim=-1)


@pytest.fixture
def data():
    """x0 ~ N(0, DATA_SCALE^2 I) [N, d], conditions, one timestep a row, and noise."""
    g = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 8192, 8, generator=g)
    return DATA_SCALE * x0, torch.zeros(len(x0), 1), torch.tensor([50, 200, 500, 900]).repeat(2048), noise


def signal_and_noise(t):
    """Variances of the signal and of the noise in x_t."""
    s = schedule(1000)
    return table(s.alphas_cumprod, t) * DATA_SCALE**2, table(1 - s.alphas_cumprod, t)


def best_eps(x, t):
    """E[noise | x_t]."""
    signal, noise = signal_and_noise(t)
    return x * noise.sqrt() / (signal + noise)


def best_log_sigma(t):
    """Of x_{t-1} given x_t, x_0 integrated out: the least expected KL given the best mean."""
    s = schedule(1000)
    signal, noise = signal_and_noise(t)
    left = signal / (signal + noise)  # of the noise's variance, x_t known
    return 0.5 * (table(np.exp(s.posterior_log_variance_clipped), t) + table(s.mean_eps**2, t) * left).log()


def v_of(log_sigma, t):
    s = schedule(1000)
    return (log_sigma - table(s.log_sigma_base, t)) / table(s.log_sigma_slope, t)


def v_best(x, t, shift=0.0):
    return v_of(best_log_sigma(t) + shift, t).expand_as(x)


@pytest.mark.parametrize("num_steps", [100, 25])
def test_golden_tables(num_steps, mar_golden):
    names = [name for name in mar_golden if name.startswith(f"schedule{num_steps}.")]
    assert len(names) == 8
    for name in names:
        values = getattr(schedule(num_steps), name.split(".")[1])
        assert values.dtype == mar_golden[name].numpy().dtype
        np.testing.assert_allclose(values, mar_golden[name].numpy(), rtol=1e-9, atol=0, err_msg=name)
    assert np.array_equal(schedule(num_steps).timestep_map, mar_golden[f"schedule{num_steps}.timestep_map"].numpy())


def test_golden_posterior(small_mar, mar_golden):
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


@pytest.mark.parametrize("num_steps, gain", [(25, 1327), (50, 632), (100, 316), (250, 126)])
def test_first_step_gain(num_steps, gain):
    s = schedule(num_steps)
    assert s.mean_x[-1] == pytest.approx(gain, rel=0.005)
    assert -s.mean_eps[-1] == pytest.approx(gain, rel=0.005)


@pytest.mark.parametrize("num_steps", [-1, 0, 1, 1001])
def test_bad_number_of_steps(num_steps):
    with pytest.raises(ValueError):
        schedule(num_steps)


@pytest.mark.parametrize("factor, offset", [(0.95, 0.0), (1.05, 0.0), (1.0, 0.05)])
def test_mse_is_least_at_the_conditional_mean(factor, offset, data):
    best, _ = training_loss(Closure(best_eps, v_best), *data)
    worse, _ = training_loss(Closure(lambda x, t: factor * best_eps(x, t) + offset, v_best), *data)
    assert best.mean() < worse.mean()
    t = data[2].unique()
    signal, noise = signal_and_noise(t)
    left = torch.stack([best[data[2] == step].mean() for step in t])
    torch.testing.assert_close(left, (signal / (signal + noise)).squeeze(1), rtol=0.03, atol=0)


@pytest.mark.parametrize("shift", [-0.1, 0.1])
def test_vb_is_least_at_the_reverse_variance(shift, data):
    _, best = training_loss(Closure(best_eps, v_best), *data)
    _, worse = training_loss(Closure(best_eps, lambda x, t: v_best(x, t, shift)), *data)
    assert (best >= -1e-6).all() and (worse >= -1e-6).all()
    for t in data[2].unique():
        assert best[data[2] == t].mean() < worse[data[2] == t].mean()


def test_terms_written_out(data):
    """The squared error, and the KL divergence from the true posterior in bits."""
    x0, t, noise = data[0], data[2], data[3]
    s = schedule(1000)
    eps, v = 0.9 * noise + 0.1, 0.5 * torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    mse, vb = training_loss(Closure(lambda x, t: eps, lambda x, t: v), *data)
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


def test_vb_is_zero_at_the_true_posterior(data):
    noise = data[3]
    mse, vb = training_loss(Closure(lambda x, t: noise, lambda x, t: torch.full_like(x, -1.0)), *data)
    assert mse.max() == 0
    assert vb.abs().max() < 1e-6


def test_vb_moves_the_variance_channel_only(data):
    eps, v = (0.9 * data[3]).requires_grad_(), torch.zeros_like(data[3], requires_grad=True)
    mse, vb = training_loss(Closure(lambda x, t: eps, lambda x, t: v), *data)
    of_eps, of_v = torch.autograd.grad(vb.sum(), (eps, v), retain_graph=True)
    assert not of_eps.any() and (of_v != 0).all(dim=-1).any()
    assert torch.autograd.grad(mse.sum(), eps)[0].any()
