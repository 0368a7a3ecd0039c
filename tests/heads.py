"""A head whose score is known, in place of the trained one, and what runs chains of it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import torch
from torch import Tensor

from cspd import noise as cspd_noise
from cspd.device import Precision
from cspd.heads.calibrated import Predictor, fit_predictor
from cspd.heads.calibration import Calibration, Trace, draft_table, fit
from cspd.heads.chain import ancestral
from cspd.heads.speculative import Chains, Finished
from mar.head import schedule

FP32 = Precision("fp32", torch.device("cpu"))
BATCH = 1500  # chains at once: where one residual needs many candidates, all that wait draw as many


class MixtureHead(torch.nn.Module):
    """The optimal noise prediction for tokens ~ sum_j weights_j N(z + means_j, scales_j^2 I).

    With one component it is linear in the noisy token, and the distribution of its chains is Gaussian and known. The
    variance channel differs at every step and, by `wobble`, with the state.
    """

    res_blocks = ()

    def __init__(self, means, scales, weights=(1.0,), wobble=0.0):
        super().__init__()
        self.means, self.scales, self.weights = (torch.as_tensor(values) for values in (means, scales, weights))
        self.channels = self.means.shape[1]
        self.width, self.wobble = self.channels, wobble

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
        variance = abar * self.scales.square() + (1 - abar)
        log_density = self.weights.log() - 0.5 * (centred.square().sum(-1) / variance + self.channels * variance.log())
        pull = (log_density.softmax(-1) / variance).unsqueeze(-1)
        eps = (1 - abar).sqrt() * (pull * centred).sum(-2)
        return torch.cat([eps, v + self.wobble * torch.sin(3 * x.expand_as(eps).roll(1, -1))], dim=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Chains of one head with one setting; `z` [G, 1, d] is that of all of them."""

    head: torch.nn.Module
    z: Tensor
    num_steps: int
    scale: float = 1.0
    temperature: float = 1.0

    def _rows(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        settings = (torch.full((rows, 1), value) for value in (self.scale, self.temperature))
        return torch.full((rows,), seed), torch.arange(rows), self.z.expand(-1, rows, -1), *settings

    def ancestral(self, rows: int, seed: int, trace=None, precision=FP32) -> Tensor:
        """Tokens [rows, d] by the full chain, with the noise that `speculative` has."""
        seeds, position, *inputs = self._rows(rows, seed)
        x, channels = cspd_noise.initial(seeds, position, self.head.channels), self.head.channels
        eps = lambda t: cspd_noise.steps(seeds, position, t, channels)  # noqa: E731
        return ancestral(self.head, *inputs, x, eps, self.num_steps, precision, trace)

    def traces(self, rows: int, seed: int) -> Tensor:
        """(x, eps, v) [3, T, rows, d] of ancestral chains."""
        steps = []
        self.ancestral(rows, seed, lambda t, *values: steps.append(torch.stack(values)))
        return torch.stack(steps[::-1], dim=1)

    def trace(self, rows: int, seed: int) -> Trace:
        """Ancestral chains with all that made them."""
        seeds, position, z, scale, temperature = self._rows(rows, seed)
        tokens = self.ancestral(rows, seed)
        return Trace(*self.traces(rows, seed), tokens, z, seeds, position, scale, temperature)

    def predictor(self) -> Predictor:
        return fit_predictor(self.trace(256, 2**40).chains, self.trace(256, 2**41).chains, self.temperature)

    def path(self, rows: int, seed: int) -> Tensor:
        """[rows, d + 1]: tokens of ancestral chains, and log sigma summed over channels and steps T - 1 .. 1."""
        s, total = schedule(self.num_steps), torch.zeros(rows, 1)

        def add(t, x, eps, v):
            if t:
                log_sigma = s.log_sigma_base[t] + np.log(self.temperature) + s.log_sigma_slope[t] * v
                total.add_(log_sigma.sum(-1, keepdim=True))

        return torch.cat([self.ancestral(rows, seed, add), total], dim=1)

    def calibration(self, frozen: bool = False) -> Calibration:
        return fit(*self.traces(256, 2**40), self.temperature, frozen)

    def chains(self, draft: Calibration, window: int, noise=cspd_noise, precision=FP32, graphs=None) -> Chains:
        table = draft_table(draft.coefficients, draft.drift, self.num_steps, window, self.temperature)
        return Chains(self.head, torch.as_tensor(table), precision, noise, graphs=graphs, trace_sigma=True)

    def start(self, chains: Chains, rows: int, seed: int, which: slice = slice(None)) -> None:
        """Starts `which` of so many chains; they are owned by their numbers."""
        seeds, position, z, *settings = self._rows(rows, seed)
        chains.start(
            range(rows)[which],
            position[which],
            seeds[which],
            position[which],
            z[:, which],
            *(s[which] for s in settings),
        )

    def speculative(self, draft: Calibration, window: int, rows: int, seed: int, **changes) -> Finished:
        """Chains run to their end; in order."""
        chains, ended = self.chains(draft, window, **changes), []
        for first in range(0, rows, BATCH):
            self.start(chains, rows, seed, slice(first, first + BATCH))
            ended += finish(chains)
        return merge(ended)


def finish(chains: Chains) -> list[Finished]:
    """Rounds until all chains have ended."""
    ended = []
    while chains.owners:
        ended += filter(None, [chains.advance()])
    return ended


def merge(parts: list[Finished]) -> Finished:
    """Finished chains in the order of their owners."""
    joined = {
        field.name: torch.cat(values) if isinstance(values[0], Tensor) else [*itertools.chain(*values)]
        for field in dataclasses.fields(Finished)
        for values in [[getattr(part, field.name) for part in parts]]
    }
    order = torch.tensor(joined["owners"]).argsort()
    return Finished(**{k: v[order] if isinstance(v, Tensor) else [v[i] for i in order] for k, v in joined.items()})
