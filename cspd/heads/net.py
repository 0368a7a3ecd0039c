"""The head under guidance; any network net(x, t, c) as a head, and torch's generator as a source of noise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mar.head import Head, ReadyHead

# (x [N, *token], t [N], c [N, *condition]) -> outputs [N, ..]
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Net:
    """A network with the interface of `mar.head.Head` that chains use.

    `mar.head.Head` computes the modulations of many steps at once. A network of which nothing is known but its call
    takes timestep and condition in their place.

    Args:
        function: maps x [N, *token], t [N] and c [N, *condition] to (eps, v), or to the velocity or the clean token of
            a stochastic differential equation. It casts its inputs as it needs.
        chain: maps a number of steps to a `Schedule`, always to the same object.
        token: shape of a token, [d] or [P, d].
        variances: whether the function predicts v too, as MAR's does.

    Attributes:
        channels: numbers of a token. width, cond_dim: numbers of a condition.
    """

    NO_TABLE = 2**62  # bytes of modulations: no table is large enough
    own_type = None  # it chooses its own types, under every precision
    res_blocks = ()

    def __init__(
        self,
        function: Function,
        chain: Callable[[int], Any],
        token: Sequence[int],
        variances: bool = False,
    ) -> None:
        self.function, self.chain, self.variances = function, chain, variances
        self.token, self.channels = tuple(token), math.prod(token)

    def take(self, condition: Sequence[int]) -> None:
        """Sets the shape of a condition, which chains give as one row of numbers."""
        self.condition = tuple(condition)
        self.width = self.cond_dim = math.prod(condition)

    def schedule(self, num_steps: int, first_timestep: int | None = None) -> Any:
        """The chain of `num_steps` steps. Raises ValueError on a first timestep, which not every chain has."""
        if first_timestep is not None:
            raise ValueError(f"first_timestep={first_timestep}: this head's chain begins where it begins, omit it")
        return self.chain(num_steps)

    def ready(self) -> Net:
        return self

    def cond_embed(self, z: Tensor) -> Tensor:
        return z.float()

    def time_embed(self, timesteps: Tensor) -> Tensor:
        return timesteps.float().unsqueeze(-1)

    def modulations(self, t_embed: Tensor, c_embed: Tensor) -> list[Tensor]:
        """Timestep and condition side by side, [..., 1 + width]; their leading dimensions broadcast."""
        shape = torch.broadcast_shapes(t_embed.shape[:-1], c_embed.shape[:-1])
        return [torch.cat([part.expand(*shape, -1) for part in (t_embed, c_embed)], dim=-1)]

    def split(self, modulations: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        return [layer.split([1, self.width], dim=-1) for layer in modulations]

    def denoise(self, x: Tensor, modulations: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """(eps, v) [..., 2d] of noisy tokens x [..., d]; v is 0 if the network does not predict it."""
        ((t, c),) = modulations
        shape = t.shape[:-1]
        rows = x.expand(*shape, -1).reshape(-1, *self.token)
        out = self.function(rows, t.reshape(-1), c.reshape(-1, *self.condition)).reshape(*shape, -1).float()
        return out if self.variances else torch.cat([out, torch.zeros_like(out)], dim=-1)


# The head's evaluation under guidance.


def evaluate(
    head: Head | ReadyHead | Net, x: Tensor, modulations: Sequence[tuple[Tensor, ...]], scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Guided noise prediction and (conditional) variance channel, float32 [..., d] each, of noisy tokens x [..., d].

    Args:
        modulations: of these tokens, [G, ..., width] each, with the unconditional branch last.
        scale: [..., G - 1], see `guided`; unused at G = 1.
    """
    return guided(head.denoise(x, modulations), scale)


def guided(out: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Guided eps and v, see `evaluate`, from the head's outputs [G, ..., 2d].

    At G = 2, eps_u + s (eps_c - eps_u). With a third branch, eps_u2 + s2 (eps_u1 - eps_u2) + s (eps_c - eps_u1), where
    `scale` has s and s2.
    """
    eps, v = out.float().chunk(2, dim=-1)
    if len(eps) == 1:
        return eps[0], v[0]
    made = torch.lerp(eps[-1], eps[-2], scale[..., -1:])
    for i in range(len(eps) - 2):
        made = made + scale[..., i : i + 1] * (eps[i] - eps[i + 1])
    return made, v[0]


def steering(eps: Tensor, scale: Tensor) -> Tensor:
    """What guidance adds to the conditional prediction, [..., d], from those of all branches, [G, ..., d], G > 1."""
    parts = [(scale[..., i : i + 1] - 1) * (eps[i] - eps[i + 1]) for i in range(len(eps) - 1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


class Prediction:
    """The head's outputs for R rows; they are computed when they are first read.

    Attributes:
        raw: [G, R, 2d] of all evaluated branches.
        eps, v: guided noise prediction (or velocity, or clean token) and variance channel, float32 [R, d].
        pending: the head, x and modulations of a call that was not made yet; None after it.
    """

    def __init__(self, scale: Tensor, raw: Tensor | None = None, pending: tuple | None = None) -> None:
        self.scale, self._raw = scale, raw
        self.pending = pending

    @property
    def raw(self) -> Tensor:
        if self._raw is None:
            head, x, modulations = self.pending  # type: ignore[misc]
            self._raw, self.pending = head.denoise(x, modulations), None  # modulations are large
        return self._raw

    @functools.cached_property
    def _guided(self) -> tuple[Tensor, Tensor]:
        return guided(self.raw, self.scale)

    @property
    def eps(self) -> Tensor:
        return self._guided[0]

    @property
    def v(self) -> Tensor:
        return self._guided[1]


class TorchNoise:
    """Random numbers from torch's generator, with the functions of `cspd.noise` that chains use.

    Args:
        begin, step: (rows, channels) -> standard normals [rows, channels] on the device, as the code that calls draws
            them for the beginning of a chain and for each step. generator: of the other draws; by default torch's own.
        repeat: the draws of as many rows are repeated for all; 0: every row has its own.
        last: whether the code draws for a chain's last step too, which adds no noise.
    """

    DRAFT_OFFSET = 0

    def __init__(
        self,
        device: torch.device,
        begin: Callable[[int, int], Tensor] | None = None,
        step: Callable[[int, int], Tensor] | None = None,
        *,
        generator: torch.Generator | None = None,
        repeat: int = 0,
        last: bool = True,
    ) -> None:
        self.device, self.generator, self.repeat, self.last = device, generator, repeat, last
        self.begin = begin or self._rows
        self.step = step or self.begin

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator)

    def _uniform(self, *shape: int) -> Tensor:
        """Inside (0, 1), so that its logarithm is finite."""
        tiny = torch.finfo(torch.float32).tiny
        return torch.rand(*shape, device=self.device, generator=self.generator).clamp(min=tiny)

    def _rows(self, num: int, *shape: int) -> Tensor:
        return self._repeated(self._normal(self.repeat or num, *shape), num)

    def _repeated(self, values: Tensor, num: int) -> Tensor:
        return values.repeat(num // len(values), *[1] * (values.dim() - 1))

    def initial(self, seed: Tensor, position: Tensor, channels: int, index: int = 0) -> Tensor:
        """x_T [R, channels], see `cspd.noise.initial`."""
        return self.begin(len(seed), channels)

    def steps(self, seed: Tensor, position: Tensor, step: Tensor, channels: int, index: int = 0) -> Tensor:
        """eps_t [n, R, channels] of steps [n], see `cspd.noise.steps`."""
        drawn = [self.step(len(seed), channels) for _ in range(len(step) - (not self.last))]
        return torch.stack(drawn if self.last else [*drawn, torch.zeros(len(seed), channels, device=self.device)])

    def chain(
        self, seed: Tensor, position: Tensor, num_steps: int, channels: int, index: int = 0, accept_index: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x_T [R, channels], eps_t [R, T, channels] and uniform draws [R, T], see `cspd.noise.chain`."""
        num = len(seed)
        x, eps = self.begin(num, channels), self._rows(num, num_steps, channels)
        return x, eps, self._repeated(self._uniform(self.repeat or num, num_steps), num)

    def candidates(
        self, seed: Tensor, position: Tensor, step: Tensor, first: int, num: int, channels: int, offset: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Residual candidates: normals [R, num, channels], uniform draws [R, num], see `cspd.noise.candidates`."""
        return self._normal(len(seed), num, channels), self._uniform(len(seed), num)
