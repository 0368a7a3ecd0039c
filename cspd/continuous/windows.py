"""Chains that call the head at the steps of a plan only, and how far their paths are from the full chain's."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from cspd import kernels
from cspd.continuous.ancestral import Steps, chain_steps, evaluate
from cspd.continuous.denoiser import Draw
from cspd.continuous.gaussian import divergence
from cspd.continuous.modulations import modulated, modulation_size, on_device, table_bytes
from cspd.continuous.plan import Window
from cspd.precision import Precision
from mar.diffusion import TRAIN_STEPS, schedule
from mar.head import Head

# is told (number of the window, sources [2 + n, R, d] as `Window.mix` takes them, v [R, d]); may give the next state
Visit = Callable[[int, Tensor, Tensor], Tensor | None]


def sample(
    head: Head,
    z: Tensor,
    scale: Tensor,
    temperature: Tensor,
    x: Tensor,
    noise: Callable[[Tensor], Tensor],
    plan: list[Window],
    num_steps: int,
    precision: Precision,
    visit: Visit | None = None,
) -> Tensor:
    """Tokens [R, d] by a head call a window, the first in float32; arguments as in `ancestral.ancestral`.

    Where a call leaves out the null class, the difference of the two classes' predictions is the last one seen.
    """
    steps = chain_steps(num_steps, TRAIN_STEPS - 1, z.device)
    return follow(head, z, scale, temperature, x, noise(steps.t), steps, plan, precision, visit)


def follow(
    head: Head,
    z: Tensor,
    scale: Tensor,
    temperature: Tensor,
    x: Tensor,
    eps_t: Tensor,
    steps: Steps,
    plan: list[Window],
    precision: Precision,
    visit: Visit | None,
) -> Tensor:
    """`sample` with noise eps_t [T, R, d] drawn in advance, in the order of the steps."""
    last = len(eps_t) - 1
    timesteps = [steps.timesteps[last - window.first] for window in plan]
    classes = [len(z) if window.is_full else 1 for window in plan]
    by_window = eps_t.split([len(window.steps) for window in plan])
    difference = None
    for calls, own_head, by_call in modulated(head, z, timesteps, precision, classes):
        with precision.full() if calls[0] == 0 else precision.fast():
            for i, modulations in zip(calls, by_call):
                out = own_head.denoise(x, modulations)
                if visit is None and kernels.available(x.device):
                    x, difference = _step_by_kernel(plan[i], x, out, by_window[i], scale, temperature, difference)
                    continue
                eps, v = out.float().chunk(2, dim=-1)
                if len(eps) == 2:
                    difference = (scale - 1) * (eps[0] - eps[1])
                guided = eps[0] if difference is None else eps[0] + difference
                sources = _sources(plan[i], x, guided, v[0], temperature, by_window[i])
                following = visit(i, sources, v[0]) if visit else None
                x = weighted(plan[i].mix[-1], sources) if following is None else following
        del by_call, modulations  # which are large
    return x


def drawing(
    head: Head,
    noise: types.ModuleType,
    plan: list[Window],
    num_steps: int,
    precision: Precision,
    *,
    index: int = 0,
    visit: Visit | None = None,
) -> Draw:
    """The whole chain as a function of tensors; what it takes and gives is as of `ancestral.drawing` and `sample`."""
    steps = chain_steps(num_steps, TRAIN_STEPS - 1, precision.device)

    def draw(z: Tensor, scale: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        x = noise.initial(seed, position, head.channels, index)
        eps_t = noise.steps(seed, position, steps.t, head.channels, index)
        return follow(head, z, scale, temperature, x, eps_t, steps, plan, precision, visit)

    return draw


def _step_by_kernel(
    window: Window,
    x: Tensor,
    out: Tensor,
    noise: Tensor,
    scale: Tensor,
    temperature: Tensor,
    difference: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(The state after a window, the difference of the classes' predictions): what `follow` does after a call."""
    from cspd.kernels.steps import window_step

    columns = window.base, window.slope, window.mix[-1]
    return window_step(x, out, noise, scale, temperature, difference, *columns)


def _sources(window: Window, x: Tensor, eps: Tensor, v: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """[2 + n, R, d]: x_a, eps_a, and the noise sigma_k eps_k of each of a window's steps."""
    sigma = torch.addcmul(window.base, window.slope, v).exp_().mul_(temperature)
    return torch.cat([x[None], eps[None], sigma.mul_(noise)])


def weighted(weights: Tensor, sources: Tensor) -> Tensor:
    """[R, d], the sum of sources [m, R, d] by weights [m]; no matrix product, which low precision would round."""
    return (weights[:, None, None] * sources).sum(0)


class Audit:
    """Measures a chain's path: KL(q || p), nats, q being the path measure of `sample` and p the full chain's.

    By the chain rule it is the sum over the steps of the divergence of their Gaussians at the states that q visits. The
    head is evaluated at those that are `chosen`, each with a probability of `rate`, so that the sum over `rate` is
    unbiased. Steps whose call evaluated both classes are p's own. Each window waits for the device once.

    Args:
        chosen: bool [R, T], which steps of which rows. The others are as in `sample`.

    Attributes:
        total: float32 [R], the sums over `rate`.
    """

    def __init__(
        self,
        head: Head,
        z: Tensor,
        scale: Tensor,
        temperature: Tensor,
        plan: list[Window],
        precision: Precision,
        chosen: Tensor,
        rate: float,
    ) -> None:
        self.head, self.scale, self.log_temperature, self.plan = head, scale, temperature.log(), plan
        self.precision, self.chosen, self.rate = precision, chosen, rate
        num_steps = chosen.shape[1]
        self._columns = _columns(num_steps, z.device)
        with precision.full():
            self._c_embed = head.cond_embed(z)
            timesteps = tuple(schedule(num_steps).timestep_map.tolist())
            self._t_embed = head.time_embed(on_device(timesteps, z.device))
        self.total = torch.zeros(len(chosen), device=z.device)

    def __call__(self, i: int, sources: Tensor, v: Tensor) -> None:
        """Adds a window's steps."""
        window = self.plan[i]
        is_skipped = window.steps > 0
        is_skipped[0] &= not window.is_full
        rows, places = (self.chosen[:, window.steps] & is_skipped).nonzero().unbind(1)
        if not len(rows):
            return
        for some_rows, some_places in zip(self._chunks(rows), self._chunks(places)):
            q, x = self._of_window(window, sources, v, some_rows, some_places)
            p = self._of_head(window.steps[some_places], x, some_rows)
            self.total.index_add_(0, some_rows, divergence(q, p) / self.rate)

    def _chunks(self, which: Tensor) -> Iterator[Tensor]:
        """Parts of some rows that modulations are made for at once."""
        most = table_bytes(which.device) // (modulation_size(self.head) * len(self._c_embed))
        return iter(which.split(max(1, most)))

    def _of_window(self, window: Window, sources: Tensor, v: Tensor, rows: Tensor, places: Tensor) -> tuple:
        """q of some rows at some places of a window, and the states [m, d] there."""
        own = sources[:, rows].transpose(0, 1)
        x = (window.mix[places].unsqueeze(-1) * own).sum(1)
        weights = window.mix[places + 1].clone()
        weights.scatter_(1, (2 + places).unsqueeze(1), 0)  # the mean is the state after the step, without its noise
        mean = (weights.unsqueeze(-1) * own).sum(1)
        log_sigma = torch.addcmul(window.base[places, 0], window.slope[places, 0], v[rows])
        return (mean, log_sigma + self.log_temperature[rows]), x

    def _of_head(self, steps: Tensor, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """p at states x [m, d] of some rows before steps [m]."""
        head = self.precision.prepare(self.head)
        with self.precision.fast():
            modulations = head.split(head.modulations(self._t_embed[steps], self._c_embed[:, rows]))
            eps, v = evaluate(head, x, modulations, self.scale[rows])
        mean_x, mean_eps, base, slope = self._columns[steps].unbind(-1)
        return mean_x * x + mean_eps * eps, base + slope * v + self.log_temperature[rows]


@functools.cache
def _columns(num_steps: int, device: torch.device) -> Tensor:
    """float32 [T, 1, 4]: A and B of p's mean, a and b of its log sigma, see `Schedule`."""
    s = schedule(num_steps)
    columns = np.stack([s.mean_x, s.mean_eps, s.log_sigma_base, s.log_sigma_slope], axis=-1)[:, None]
    with torch.inference_mode(False):
        return torch.as_tensor(columns, dtype=torch.float32, device=device)
