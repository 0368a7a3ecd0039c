"""A head of known score whose chain is a stochastic differential equation's."""

from __future__ import annotations

import torch

from cspd.causal.head import TIME_FACTOR, head_chain


class VelocityHead(torch.nn.Module):
    """The optimal output for tokens ~ sum_j weights_j N(z + means_j, scales_j^2 I): v, or x_1 if `binary`."""

    res_blocks = ()

    def __init__(self, means, scales, weights=(1.0,), binary=False):
        super().__init__()
        self.means, self.scales, self.weights = map(torch.as_tensor, (means, scales, weights))
        self.binary = binary
        self.channels = self.width = self.cond_dim = self.means.shape[1]

    def schedule(self, num_steps):
        return head_chain(num_steps, self.binary)

    def ready(self):
        return self

    def cond_embed(self, z):
        return z

    def time_embed(self, names):
        return names.float().unsqueeze(-1) / TIME_FACTOR

    def modulations(self, t_embed, c_embed):
        shape = torch.broadcast_shapes(t_embed.shape[:-1], c_embed.shape[:-1])
        return [torch.cat([part.expand(*shape, -1) for part in (t_embed, c_embed)], dim=-1)]

    def split(self, modulations):
        return [layer.split([1, self.channels], dim=-1) for layer in modulations]

    def denoise(self, x, modulations):
        ((t, z),) = modulations
        centre = z.unsqueeze(-2) + self.means
        centred = x.unsqueeze(-2) - t.unsqueeze(-1) * centre
        variance = (t * self.scales) ** 2 + (1 - t) ** 2
        log_density = self.weights.log() - 0.5 * (centred.square().sum(-1) / variance + self.channels * variance.log())
        of_component = centre + (t * self.scales**2 / variance).unsqueeze(-1) * centred
        clean = (log_density.softmax(-1).unsqueeze(-1) * of_component).sum(-2)
        out = clean if self.binary else (clean - x) / (1 - t)
        return torch.cat([out, torch.zeros_like(out)], dim=-1)
