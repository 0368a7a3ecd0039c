"""A head whose first denoising step is exact: at timestep 999 x_t is pure noise, and the head must predict x_t itself.

The first step multiplies the head's error by 316 at T = 100, and by 3,492 at T = 10. The layers are MAR's own. Their
weights are chosen so that at 999 the head is linear in x_t, whatever it learns for other timesteps:

* One hidden unit of the timestep's embedding fires at 999 only. It makes silu(t_embed + c_embed) vanish there, so that
  all modulations equal their biases.
* The biases of the gates stay 0, so that no block adds anything.
* A constant that is large compared with x_t is added to it, so that the last LayerNorm is linear. (Making x_t small
  instead would change how much a block contributes: early training then took five times as many steps.)

`keep` preserves these properties in training. Afterwards `finish` fits the last layer to timestep 999 by the smallest
change of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mar.head import LAYER_NORM_EPS, TRAIN_STEPS, Head, ResBlock

AMPLITUDE = 0.05  # of x_t, relative to the constant
FREE = 9  # timesteps before the last one at which the unit may fire too: no chain of T <= 100 steps visits them
OFF, ON = -10.0, 1.0  # input of the unit's SiLU
STRENGTH = 60.0  # of the unit's output
ROWS = 20_000


def prepare(head: Head) -> None:
    """Initialises a head to eps = x_t, which is right at high noise.

    A LayerNorm divides by |h|, so a head whose stream h is a multiple of x_t cannot know how large x_t is. Adding a
    much larger constant to x_t makes every LayerNorm almost linear. The blocks read x_t alone, at unit variance.
    """
    width, channels = head.width, head.channels
    # orthogonal directions of mean 0, since a LayerNorm removes the mean: one per channel, and one for the constant
    directions = torch.cat([torch.ones(width, 1), torch.randn(width, channels + 1)], dim=1)
    basis = torch.linalg.qr(directions).Q[:, 1:]
    constant = basis[:, channels] * width**0.5
    gain = (width / channels) ** 0.5 / AMPLITUDE
    with torch.no_grad():
        head.input_proj.weight.copy_(basis[:, :channels])
        head.input_proj.bias.copy_(constant / AMPLITUDE)
        for block in _blocks(head):
            block.in_ln.weight.fill_(gain)
            block.in_ln.bias.copy_(-gain * constant)
        head.final_layer.linear.weight[:channels].copy_(basis[:, :channels].T / AMPLITUDE)
    _silence(head)


def keep(head: Head) -> None:
    """Keeps the properties of `prepare` in training. Call it after the weights are loaded."""
    head.input_proj.requires_grad_(False)  # the optimizer's steps would be as large as these weights
    for block in _blocks(head):
        bias = block.adaLN_modulation[1].bias
        bias.register_hook(lambda gradient: torch.cat([gradient[: 2 * head.width], 0 * gradient[2 * head.width :]]))


@torch.no_grad()
def finish(head: Head) -> None:
    """Fits the last layer at timestep 999, after the training of a head that `prepare` initialised."""
    _silence(head)  # weight decay has shrunk these weights
    generator = torch.Generator().manual_seed(0)
    device = head.input_proj.weight.device
    x = torch.randn(ROWS, head.channels, generator=generator).to(device)
    z = torch.zeros(1, head.cond_embed.in_features, device=device)  # it has no effect at this timestep
    last = torch.full((1,), TRAIN_STEPS - 1, device=device)
    shift, scale = head.split(head.modulations(head.time_embed(last), head.cond_embed(z)))[-1]
    normed = F.layer_norm(head.input_proj(x), (head.width,), eps=LAYER_NORM_EPS)
    inputs = F.pad(torch.addcmul(shift, normed, scale).double(), (0, 1), value=1.0)

    # least squares for the error of the layer; the ridge leaves directions that do not depend on x_t unchanged
    linear, channels = head.final_layer.linear, head.channels
    weights = torch.cat([linear.weight[:channels], linear.bias[:channels, None]], dim=1).double()
    lacking = x.double() - inputs @ weights.T
    gram = inputs.T @ inputs / ROWS
    ridge = 1e-9 * torch.eye(len(gram), dtype=gram.dtype, device=device)
    change = torch.linalg.solve(gram + ridge, inputs.T @ lacking / ROWS).T.float()
    linear.weight[:channels] += change[:, :-1]
    linear.bias[:channels] += change[:, -1]


@torch.no_grad()
def _silence(head: Head) -> None:
    """Sets the first hidden unit of the timestep's embedding, and sets the gates' biases to 0."""
    first, last = head.time_embed.mlp[0], head.time_embed.mlp[2]
    fires = _indicator(head.time_embed.frequencies).float()
    first.weight[0] = (ON - OFF) * fires[:-1]
    first.bias[0] = (ON - OFF) * fires[-1] + OFF
    last.weight[:, 0] = -STRENGTH
    for block in _blocks(head):
        block.adaLN_modulation[1].bias[2 * head.width :] = 0


def _indicator(frequencies: int) -> Tensor:
    """Weights of the timestep's features, and a bias, that give about 1 at the last timestep and 0 elsewhere."""
    half = frequencies // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(TRAIN_STEPS, dtype=torch.float64).unsqueeze(1) * rates
    features = torch.cat([angles.cos(), angles.sin(), torch.ones(TRAIN_STEPS, 1, dtype=torch.float64)], dim=1)
    weight = torch.ones(TRAIN_STEPS, 1, dtype=torch.float64)
    weight[-1 - FREE : -1] = 0
    weight[-1] = 200  # one timestep against all others
    weighted = features * weight
    gram = features.T @ weighted + 0.1 * torch.eye(frequencies + 1, dtype=torch.float64)
    return torch.linalg.solve(gram, weighted[-1])


def _blocks(head: Head) -> Iterable[ResBlock]:
    return cast(Iterable[ResBlock], head.res_blocks)
