"""The ancestral chain has the distribution that its head defines: exactly known where the head is linear."""

import numpy as np
import pytest
import torch
from conftest import relative_error

from cspd.device import Precision
from cspd.heads.chain import ancestral, modulation_size
from mar.head import schedule

FP32 = Precision("fp32", torch.device("cpu"))
ROWS, CHANNELS = 25_000, 8
MEANS = torch.tensor([[1.0], [-0.5]]) * torch.linspace(0.5, 1.5, CHANNELS)  # of the class, of the null class


class GaussianHead(torch.nn.Module):
    """The optimal noise prediction for tokens ~ N(z, scale^2 I), with a variance channel that differs at every step.

    It is linear in the noisy token, so the chain's distribution is Gaussian and known; z are the means.
    """

    width = CHANNELS
    res_blocks = ()

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def coefficients(self, timestep):
        """(gain, slope, v) in eps = gain x + slope z, float64, at timesteps of the 1000."""
        abar = schedule(1000).alphas_cumprod[timestep]
        gain = np.sqrt(1 - abar) / (abar * self.scale**2 + 1 - abar)
        return gain, -gain * np.sqrt(abar), np.sin(np.asarray(timestep) * 0.7)

    def ready(self):
        return self

    def cond_embed(self, z):
        return z

    def time_embed(self, timesteps):
        return torch.tensor(np.stack(self.coefficients(timesteps.numpy()), axis=-1), dtype=torch.float32)

    def modulations(self, t_embed, c_embed):
        gain, slope, v = t_embed.split(1, dim=-1)
        return [(gain, slope * c_embed, v)]

    def split(self, modulations):
        return modulations

    def denoise(self, x, modulations):
        ((gain, offset, v),) = modulations
        eps = gain * x + offset
        return torch.cat([eps, v.expand_as(eps)], dim=-1)


def exact_moments(head, means, guidance, tau, num_steps):
    """Mean [d] and variance of the tokens, propagated in float64 (DDPM's posterior, written out)."""
    s = schedule(num_steps)
    mean, var = np.zeros(CHANNELS), 1.0
    for t in reversed(range(num_steps)):
        abar, before = s.alphas_cumprod[t], s.alphas_cumprod[t - 1] if t else 1.0
        beta = 1 - abar / before
        gain, slope, v = head.coefficients(s.timestep_map[t])
        z = means[0] if len(means) == 1 else means[1] + guidance * (means[0] - means[1])
        of_x0, of_x = np.sqrt(before) * beta / (1 - abar), np.sqrt(1 - beta) * (1 - before) / (1 - abar)
        mean, var = (
            of_x0 * (mean - np.sqrt(1 - abar) * (gain * mean + slope * z)) / np.sqrt(abar) + of_x * mean,
            (of_x0 * (1 - np.sqrt(1 - abar) * gain) / np.sqrt(abar) + of_x) ** 2 * var,
        )
        if t:
            log_var = (1 + v) / 2 * np.log(beta) + (1 - v) / 2 * np.log(beta * (1 - before) / (1 - abar))
            var += tau**2 * np.exp(log_var)
    return mean, var


@pytest.mark.parametrize("guidance", [None, 2.5])
@pytest.mark.parametrize("tau", [0.7, 1.0])
@pytest.mark.parametrize("scale, num_steps", [(0.01, 100), (0.5, 100), (0.5, 25)])
def test_moments_are_the_exact_ones(scale, num_steps, tau, guidance):
    g = torch.Generator().manual_seed(0)
    head, means = GaussianHead(scale), MEANS[: 1 if guidance is None else 2]
    tokens = ancestral(
        head,
        means[:, None].expand(-1, ROWS, -1),
        torch.full((ROWS, 1), guidance or 1.0),
        torch.full((ROWS, 1), tau),
        torch.randn(ROWS, CHANNELS, generator=g),
        lambda t: torch.randn(len(t), ROWS, CHANNELS, generator=g),
        num_steps,
        FP32,
    ).double()
    mean, var = exact_moments(head, means.double().numpy(), guidance, tau, num_steps)
    mean = torch.from_numpy(mean)
    assert ((tokens.mean(0) - mean).abs() < 4 * (var / ROWS) ** 0.5).all()
    measured = (tokens - mean).square().mean().item()
    assert measured == pytest.approx(var, rel=4 * (2 / tokens.numel()) ** 0.5)


@pytest.fixture
def chain(small_mar, mar_golden):
    """Runs a chain of the golden head over six rows, guided; keywords replace its settings."""
    g = torch.Generator().manual_seed(0)
    unknown = mar_golden["backbone.mask"][0].nonzero().squeeze(1)[:6]
    settings = {
        "z": torch.stack([mar_golden[f"backbone.{name}"][0, unknown] for name in ("z", "z_uncond")]),
        "scale": torch.linspace(1, 4, 6).unsqueeze(1),
        "temperature": torch.linspace(0, 1, 6).unsqueeze(1),
        "x": torch.randn(6, small_mar.config.token_dim, generator=g),
        "num_steps": 100,
        "precision": FP32,
    }
    eps = torch.randn(settings["num_steps"], *settings["x"].shape, generator=g)

    def run(noise=lambda t: eps[t], **changes):
        return ancestral(small_mar.head, noise=noise, **{**settings, **changes})

    return run, settings, eps


def test_guidance_is_the_formula(chain, small_mar):
    run, settings, eps = chain
    s, x = schedule(settings["num_steps"]), settings["x"]
    for t in reversed(range(len(s))):
        timestep = torch.full((6,), int(s.timestep_map[t]))
        (eps_c, v), (eps_u, _) = (small_mar.head(x, timestep, z).chunk(2, dim=-1) for z in settings["z"])
        guided = eps_u + settings["scale"] * (eps_c - eps_u)
        x0 = s.sqrt_recip_alphas_cumprod[t] * x - s.sqrt_recipm1_alphas_cumprod[t] * guided
        x = s.posterior_mean_coef1[t] * x0 + s.posterior_mean_coef2[t] * x
        log_var = (1 + v) / 2 * np.log(s.betas[t]) + (1 - v) / 2 * s.posterior_log_variance_clipped[t]
        x = x + (t > 0) * settings["temperature"] * (log_var / 2).exp() * eps[t]
    assert relative_error(run(), x) < 1e-4


def test_guidance_one_is_the_condition_alone(chain):
    run, settings, _ = chain
    assert relative_error(run(scale=torch.ones(6, 1)), run(z=settings["z"][:1])) < 1e-4
    assert relative_error(run(scale=torch.full((6, 1), 2.0)), run(z=settings["z"][:1])) > 1e-2


@pytest.mark.parametrize("per_table", [1, 7])
def test_split_tables_change_nothing(per_table, chain, small_mar, monkeypatch):
    run, settings, _ = chain
    whole, parts = run(), []
    num_rows = settings["z"][..., 0].numel()
    step_bytes = modulation_size(small_mar.head) * num_rows
    monkeypatch.setattr("cspd.heads.chain.MODULATION_BYTES", per_table * step_bytes)
    layer = small_mar.head.final_layer.adaLN_modulation[1]
    hook = layer.register_forward_hook(lambda layer, inputs, made: parts.append(made[..., 0].numel() // num_rows))
    split = run()
    hook.remove()
    assert max(parts) == per_table and sum(parts) == settings["num_steps"]
    assert relative_error(split, whole) < 1e-4


def test_bf16_keeps_the_first_step_in_float32(chain):
    run, _, _ = chain
    assert 0 < relative_error(run(precision=Precision("bf16", torch.device("cpu"))), run()) < 0.02
