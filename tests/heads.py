"""A head of known score in place of a trained one, chains of it, and drafts of it, right and wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cspd import noise as cspd_noise
from cspd.device import Precision
from cspd.heads.calibrated import Predictor, fit_predictor
from cspd.heads.calibration import Calibration, Recorder, Trace, draft_table, fit
from cspd.heads.chain import Chain, Inputs, Observer
from cspd.heads.samplers import ancestral
from cspd.heads.speculative import Chains, Finished
from mar.head import schedule

FP32 = Precision("fp32", torch.device("cpu"))
BATCH = 1500  # chains at once: if one residual needs many candidates, every waiting chain draws as many
CHANNELS = 3


class MixtureHead(torch.nn.Module):
    """The optimal noise prediction for tokens ~ sum_j weights_j N(z + means_j, scales_j^2 I).

    With one component it is linear in the noisy token, and the distribution of its chains is a known Gaussian
    (`gaussian_moments`). The variance channel differs at every step and, by `wobble`, with the state.
    """

    res_blocks = ()
    schedule = staticmethod(schedule)

    def __init__(self, means, scales, weights=(1.0,), wobble=0.0):
        super().__init__()
        self.means = torch.as_tensor(means)
        self.scales = torch.as_tensor(scales)
        self.weights = torch.as_tensor(weights)
        self.wobble = wobble
        self.channels = self.width = self.means.shape[1]

    def ready(self):
        return self

    def cond_embed(self, z):
        return z

    def time_embed(self, timesteps):
        features = schedule(1000).alphas_cumprod[timesteps.numpy()], self.v(timesteps.numpy())
        return torch.tensor(np.stack(features, axis=-1), dtype=torch.float32)

    @staticmethod
    def v(timestep):
        return np.sin(np.asarray(timestep) * 0.7)

    def modulations(self, t_embed, c_embed):
        shape = torch.broadcast_shapes(t_embed.shape[:-1], c_embed.shape[:-1])
        return [torch.cat([part.expand(*shape, -1) for part in (t_embed, c_embed)], dim=-1)]

    def split(self, modulations):
        return [layer.split([1, 1, self.channels], dim=-1) for layer in modulations]

    def denoise(self, x, modulations):
        ((abar, v, z),) = modulations
        centred = x.unsqueeze(-2) - abar.sqrt().unsqueeze(-1) * (z.unsqueeze(-2) + self.means)
        # each component of x_t has this variance; eps is the posterior mean of what pulls x_t from its centre
        variance = abar * self.scales.square() + (1 - abar)
        log_density = self.weights.log() - 0.5 * (centred.square().sum(-1) / variance + self.channels * variance.log())
        pull = (log_density.softmax(-1) / variance).unsqueeze(-1)
        eps = (1 - abar).sqrt() * (pull * centred).sum(-2)
        return torch.cat([eps, v + self.wobble * torch.sin(3 * x.expand_as(eps).roll(1, -1))], dim=-1)


class Given:
    """Noise that was drawn before, x_T [R, d] and eps [T, R, d], as a source of noise."""

    def __init__(self, x: Tensor, eps: Tensor | None = None) -> None:
        self.x, self.eps = x, eps

    def initial(self, *names) -> Tensor:
        return self.x

    def steps(self, seed: Tensor, position: Tensor, step: Tensor, *names) -> Tensor:
        return self.eps[step]


class Watching(Observer):
    """Calls a function with t, x, eps and v of every evaluation."""

    def __init__(self, visit: Callable) -> None:
        self.visit = visit

    def evaluated(self, chain, step, x, out):
        self.visit(step.t, x, out.eps, out.v)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Chains of one head with one setting; all have the condition `z` [G, 1, d], and with G = 3 two scales."""

    head: torch.nn.Module
    z: Tensor
    num_steps: int
    scale: float | tuple[float, float] = 1.0
    temperature: float = 1.0

    @property
    def schedule(self):
        return self.head.schedule(self.num_steps)

    def inputs(self, num: int, seed: int) -> Inputs:
        """What `num` chains are given."""
        with self.z.device:
            scale = torch.tensor(self.scale).view(1, -1).repeat(num, 1)
            temperature = torch.full((num, 1), self.temperature)
            names = torch.full((num,), seed), torch.arange(num)
        return Inputs(self.z.expand(-1, num, -1), scale, temperature, *names)

    def chain(self, num: int, seed: int, *observers: Observer, precision=FP32, noise=cspd_noise) -> Chain:
        """`num` chains, as samplers are given them."""
        return Chain(self.head, self.schedule, self.inputs(num, seed), noise, precision, observers=observers)

    def ancestral(self, num: int, seed: int, *observers: Observer, precision=FP32) -> Tensor:
        """Tokens [num, d] by the full chain."""
        with precision.fast():
            return ancestral(self.chain(num, seed, *observers, precision=precision))

    def trace(self, num: int, seed: int) -> Trace:
        """Ancestral chains with everything that made them."""
        recorder = Recorder()
        tokens = self.ancestral(num, seed, recorder)
        return recorder.trace(tokens, image=torch.full((num,), seed, device=self.z.device))

    def predictor(self) -> Predictor:
        traces = self.trace(256, 2**40).chains, self.trace(256, 2**41).chains
        return fit_predictor(*traces, self.schedule, self.temperature)

    def path(self, num: int, seed: int) -> Tensor:
        """[num, d + 1]: tokens of ancestral chains, and log sigma summed over channels and steps T - 1 .. 1."""
        s, total = self.schedule, torch.zeros(num, 1, device=self.z.device)

        def add(t, x, eps, v):
            if t:
                log_sigma = s.log_sigma_base[t] + np.log(self.temperature) + s.log_sigma_slope[t] * v
                total.add_(log_sigma.sum(-1, keepdim=True))

        return torch.cat([self.ancestral(num, seed, Watching(add)), total], dim=1)

    def calibration(self, frozen: bool = False) -> Calibration:
        traced = (values.cpu() for values in self.trace(256, 2**40).chains)
        return fit(*traced, self.schedule, self.temperature, frozen)

    def chains(self, draft: Calibration, window: int, noise=cspd_noise, precision=FP32, **more) -> Chains:
        table = draft_table(draft.coefficients, draft.drift, self.schedule, window, self.temperature)
        return Chains(
            self.head,
            self.schedule,
            torch.as_tensor(table, device=self.z.device),
            precision,
            noise,
            trace_sigma=True,
            **more,
        )

    def start(self, chains: Chains, num: int, seed: int, which: slice = slice(None)) -> None:
        """Starts the chains `which` of `num`; each is owned by its index."""
        z, scale, temperature, seeds, position = self.inputs(num, seed)
        at = position[which]
        chains.start(range(num)[which], at, seeds[which], at, z[:, which], scale[which], temperature[which])

    def speculative(self, draft: Calibration, window: int, num: int, seed: int, **changes) -> Finished:
        """Finished chains, in order."""
        chains, ended = self.chains(draft, window, **changes), []
        for first in range(0, num, BATCH):
            self.start(chains, num, seed, slice(first, first + BATCH))
            ended += finish(chains)
        return merge(ended)


def finish(chains: Chains) -> list[Finished | None]:
    """Advances until all chains have ended."""
    ended = []
    while chains.owners:
        ended.append(chains.advance())
    return ended


def merge(parts: list[Finished | None]) -> Finished:
    """Finished chains in the order of their owners."""
    joined = {}
    for field in dataclasses.fields(Finished):
        values = [getattr(part, field.name) for part in parts if part]
        is_tensor = isinstance(values[0], Tensor)
        joined[field.name] = torch.cat(values) if is_tensor else [each for part in values for each in part]
    order = torch.tensor(joined["owners"]).argsort()
    for name, values in joined.items():
        joined[name] = values[order.to(values.device)] if isinstance(values, Tensor) else [values[i] for i in order]
    return Finished(**joined)


def guided_centre(z: Tensor, scale: float | tuple[float, float]) -> Tensor:
    """The centre [d] that guidance makes of the branches' centres z [G, d]."""
    if isinstance(scale, tuple):
        return z[2] + scale[1] * (z[1] - z[2]) + scale[0] * (z[0] - z[1])
    return z[0] if len(z) == 1 else z[1] + scale * (z[0] - z[1])


def gaussian_moments(case: Case) -> tuple[Tensor, float]:
    """Mean [d] and variance of a head with one component, in float64: DDPM's posterior (arXiv 2006.11239, eq. 7)."""
    s, z = schedule(case.num_steps), case.z[:, 0].double()
    centre = case.head.means[0].double() + guided_centre(z, case.scale)
    mean, variance = torch.zeros_like(centre), 1.0
    for t in reversed(range(case.num_steps)):
        abar, before = s.alphas_cumprod[t], s.alphas_cumprod[t - 1] if t else 1.0
        beta = 1 - abar / before
        of_x0 = np.sqrt(before) * beta / (1 - abar)
        of_x = np.sqrt(1 - beta) * (1 - before) / (1 - abar)
        # eps = gain (x - sqrt(abar) centre), and x0 follows from eps
        gain = np.sqrt(1 - abar) / (abar * case.head.scales.item() ** 2 + 1 - abar)
        eps_of_mean = gain * (mean - np.sqrt(abar) * centre)
        mean = of_x0 * (mean - np.sqrt(1 - abar) * eps_of_mean) / np.sqrt(abar) + of_x * mean
        variance *= (of_x0 * (1 - np.sqrt(1 - abar) * gain) / np.sqrt(abar) + of_x) ** 2
        if t:
            share = (1 + case.head.v(s.timestep_map[t])) / 2
            log_variance = share * np.log(beta) + (1 - share) * np.log(beta * (1 - before) / (1 - abar))
            variance += case.temperature**2 * np.exp(log_variance)
    return mean, variance


CENTRES = torch.tensor([[0.9, -0.6, 0.2], [-0.4, 0.7, 1.0], [0.1, -0.2, -1.1]])
MIXTURE = MixtureHead(CENTRES, (0.05, 0.1, 0.2), (0.5, 0.3, 0.2), wobble=0.3)
LINEAR = MixtureHead(torch.zeros(1, CHANNELS), (0.5,))
GUIDED = torch.tensor([[[0.0, 0.0, 0.0]], [[0.3, -0.2, 0.1]]])  # z, the unconditional branch second
UNGUIDED = GUIDED[:1]
TWELVE = Case(MIXTURE, UNGUIDED, 12)
SIXTY = Case(MIXTURE, UNGUIDED, 60)
ONE_GAUSSIAN = torch.tensor([[[1.0, -0.5, 2.0]]])  # z for `LINEAR`


@pytest.fixture(scope="module", name="mixture")
def fitted_mixture() -> Calibration:
    return SIXTY.calibration()


def biased(case: Case, of_mean: float, of_log_sigma: float) -> Calibration:
    """A draft that errs at every step by `of_mean` standard deviations per unit of the state, and in log sigma."""
    s, draft = schedule(case.num_steps), case.calibration()
    coefficients, drift = draft.coefficients.copy(), draft.drift + (of_log_sigma / s.log_sigma_slope)[:, None]
    coefficients[..., 0] += (of_mean * np.exp(s.log_sigma_base) / np.abs(s.mean_eps))[:, None]
    return dataclasses.replace(draft, coefficients=coefficients, drift=drift.astype(np.float32))
