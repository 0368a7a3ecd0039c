"""Traces of the model's own denoising chains, and the drafts that are fitted to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.heads.chain import Chain, Inputs, Observer, Prediction, Schedule, Step

# The drafts of speculative denoising: linear predictors of the head's output, fitted once per model and settings.
#
# A calibration changes the speed, and which image a seed gives, but never the distribution of the images.
# `cspd.continuous.calibrations` makes them and caches them on disk.

DRAFTS = {
    "calibrated": "eps~ = c0 y + c1 eps' + c2 x', least squares by step and lag",
    "frozen": "eps~ = eps', the last evaluated one: needs no fit, is accepted less often",
}
WINDOWS = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
LARGEST_COEFFICIENT = 1e6  # limit of coefficients (fits stay below 400) and of draft tables (below 21,000)
RIDGE = 1e-7  # of the mean diagonal: at the noisiest steps eps' and x' are nearly equal


def draft_table(
    coefficients: np.ndarray, drift: np.ndarray, s: Schedule, window: int, temperature: float
) -> np.ndarray:
    """What a pass drafts with, float32 [T, W, 3 + W + 5]: row t, for a pass that begins at x_t, has the columns of
    `cspd.heads.verify.Columns`.

    The drafted noise prediction is linear, eps~ = c0 y + c1 eps' + c2 x'. So every drafted state is a linear
    combination of (x_t, eps', x') and the noise. Entries beyond step 0 are zeros.

    Args:
        coefficients: (c0, c1, c2) [T, lags, 3] by step and lag, lags from 1; drift: mean change of v [T, lags].
        s: of T steps. window: W <= lags. temperature: tau > 0.
    """
    num_steps = len(s)
    base_p = s.log_sigma_base + np.log(temperature)
    table = np.zeros((num_steps, window, 3 + window + 5))  # the weights of y, and five scalars
    # y, built up step by step: its weights on (x_t, eps', x', noise); before the first step it is x_t
    y = np.zeros((num_steps, 3 + window))
    y[:, 0] = 1
    for w in range(window):
        start = np.arange(w, num_steps)  # windows that have a w-th step
        step = start - w
        c0, c1, c2 = coefficients[step, w].astype(np.float64).T
        mean_x, mean_eps = s.mean_x[step], s.mean_eps[step]
        slope = s.log_sigma_slope[step]
        y[start] *= (mean_x + mean_eps * c0)[:, None]
        y[start, 1] += mean_eps * c1
        y[start, 2] += mean_eps * c2
        y[start, 3 + w] = 1
        base_q = base_p[step] + slope * drift[step, w]
        scalars = np.stack([base_q, slope, mean_x, mean_eps, base_p[step]], axis=1)
        table[start, w] = np.concatenate([y[start], scalars], axis=1)
    return table.astype(np.float32)


@dataclass(frozen=True)
class Calibration:
    """A draft, and the head calls that it needs.

    Attributes:
        coefficients: float32 [T, lags, 3], (c0, c1, c2) by step and lag; the first lag is 1.
        drift: float32 [T, lags], mean change of the variance channel.
        calls: int16 [len(WINDOWS), N], sequential head calls of N tokens at each window, simulated on the traces.
    """

    coefficients: np.ndarray
    drift: np.ndarray
    calls: np.ndarray

    def check(self, num_steps: int) -> None:
        """Raises ValueError unless shapes, types and ranges are right for T = `num_steps` denoising steps."""
        lags = min(WINDOWS[-1], num_steps)
        wanted = {
            "coefficients": (np.float32, (num_steps, lags, 3), -LARGEST_COEFFICIENT, LARGEST_COEFFICIENT),
            "drift": (np.float32, (num_steps, lags), -LARGEST_COEFFICIENT, LARGEST_COEFFICIENT),
            "calls": (np.int16, (len(WINDOWS), max(1, self.calls.shape[-1])), 1, num_steps),
        }
        check_arrays("a calibration", vars(self), wanted)


def ratio_over_images(values: Tensor, weights: Tensor, image: Tensor) -> tuple[float, float]:
    """The sum of tokens' `values` by the sum of their `weights`, and its standard error; infinite if unknown.

    Tokens of one image have much in common, so only images count as independent: the linearised variance of a ratio of
    sums over clusters (Cochran, Sampling Techniques, 1977, section 11.8). All arguments are [N]; `image` numbers the
    images, and a single one has no error.
    """
    _, of_image = image.unique(return_inverse=True)
    num = int(of_image.max()) + 1
    sums = torch.zeros(2, num, dtype=torch.float64, device=values.device)
    sums.index_add_(1, of_image, torch.stack([values, weights]).double())
    total, weight = sums.sum(1).tolist()
    ratio = total / weight
    if not math.isfinite(ratio):
        return math.inf, math.inf
    if num == 1:
        return ratio, math.inf
    residuals = sums[0] - ratio * sums[1]
    variance = residuals.square().sum().item() * num / (num - 1)
    return ratio, variance**0.5 / weight


class Price(NamedTuple):
    """Nats per token, KL(p || q), and its standard error, see `ratio_over_images`."""

    divergence: float
    error: float

    def __add__(self, other: tuple) -> Price:  # type: ignore[override]
        """The price of two approximations together, to first order."""
        divergence, error = other
        return Price(self.divergence + divergence, float(np.hypot(self.error, error)))

    def check(self, *_: int) -> None:
        """Raises ValueError unless both are numbers from 0 on; they may be infinite."""
        if not all(value >= 0 for value in self):  # NaN is not
            raise ValueError(f"expected a price and its error from 0 on, got {self}")


def price_of(nats: Tensor, image: Tensor) -> Price:
    """The price of tokens with divergences `nats` [N], each of an `image`, int64 [N] (its seed).

    If all are of one image, the error is that of its mean, from its tokens; it is infinite for a single token.
    """
    if (image == image[0]).all():
        image = torch.arange(len(nats), device=nats.device)
    return Price(*ratio_over_images(nats, torch.ones_like(nats), image))


def check_arrays(owner: str, arrays: Mapping[str, np.ndarray], wanted: Mapping[str, tuple]) -> None:
    """Raises ValueError unless each array has the `wanted` (dtype, shape) and all values in (least, most)."""
    for name, (dtype, shape, low, high) in wanted.items():
        values = arrays[name]
        if values.dtype != dtype or values.shape != shape:
            kinds = f"{values.dtype} {list(values.shape)}, not {np.dtype(dtype)} {list(shape)}"
            raise ValueError(f"{owner}'s {name} are {kinds}")
        if not ((values >= low) & (values <= high)).all():  # NaN fails both
            raise ValueError(f"{owner}'s {name} are not all in {low:g}..{high:g}")


def frozen(s: Schedule, most_lags: int = WINDOWS[-1]) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients [T, lags, 3] and drift [T, lags] of the frozen draft, which holds what a schedule says."""
    num_steps, lags = len(s), min(most_lags, len(s))
    step = np.arange(num_steps)[:, None]
    anchor = np.minimum(step + np.arange(1, lags + 1), num_steps - 1)  # steps beyond the first are never anchors
    of_y = np.broadcast_to(-s.held_x[step], anchor.shape)
    coefficients = np.stack([of_y, s.held_eps[anchor], s.held_x[anchor]], axis=-1) / s.held_eps[step, None]
    return coefficients.astype(np.float32), np.zeros((num_steps, lags), np.float32)


def fit(x: Tensor, eps: Tensor, v: Tensor, s: Schedule, temperature: float, is_frozen: bool = False) -> Calibration:
    """Fits the draft to ancestral chains and simulates on them how often it is accepted.

    For each step k and lag w it solves the least squares of eps_k on (x_k, eps_{k+w}, x_{k+w}), weights 1/sigma_k^2.
    Chains that are not finite are left out, and count as never accepted. If a fit fails, the draft is frozen.

    Args:
        x, eps, v: [T, N, d], inputs, guided noise predictions and variance channels of N chains; on the CPU.
        s: their schedule.
        temperature: tau > 0 of the chains. is_frozen: take the frozen draft instead of fitting one.
    """
    num_steps, num_chains = x.shape[:2]
    generator = torch.Generator().manual_seed(0)
    coefficients, drift = (torch.from_numpy(values) for values in frozen(s))
    lags = coefficients.shape[1]
    accepted = torch.zeros(num_steps, lags, num_chains, dtype=torch.bool)
    accepted[0] = True  # step 0 is never rejected
    finite = (x.isfinite() & eps.isfinite() & v.isfinite()).all(2).all(0)
    fitted_x, fitted_eps, fitted_v = (values[:, finite] for values in (x, eps, v))
    is_frozen = is_frozen or not finite.any()
    for k in range(1, num_steps - 1):
        anchors = slice(k + 1, k + 1 + lags)  # by lag; near T there are fewer
        num_lags = len(x[anchors])
        slope = s.log_sigma_slope[k]
        if not is_frozen:
            coefficients[k, :num_lags] = least_squares(fitted_x, fitted_eps, fitted_v, k, anchors, slope)
            drift[k, :num_lags] = (fitted_v[k] - fitted_v[anchors]).mean((1, 2))

        # are these drafts accepted on the chains that they are fitted to?
        eps_drafted, v_drafted = predict(x, eps, v, k, anchors, coefficients, drift)
        mean_error = s.mean_eps[k] * (eps_drafted - eps[k])
        log_sigma_p = np.log(temperature) + s.log_sigma_base[k] + slope * v[k]
        log_sigma_q = log_sigma_p + slope * (v_drafted - v[k])
        accepted[k, :num_lags] = _draw_and_verify(mean_error, log_sigma_p, log_sigma_q, generator)

    calls = [_simulate(accepted[:, :window]) for window in WINDOWS]
    made = Calibration(
        coefficients=coefficients.numpy(),
        drift=drift.numpy(),
        calls=torch.stack(calls).to(torch.int16).numpy(),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        table = draft_table(made.coefficients, made.drift, s, lags, temperature=1.0)
    if not is_frozen and not np.abs(table).max() <= LARGEST_COEFFICIENT:  # NaN too
        return fit(x, eps, v, s, temperature, is_frozen=True)
    return made


def least_squares(x: Tensor, eps: Tensor, v: Tensor, k: int, anchors: slice, slope: float) -> Tensor:
    """c [lags, 3] for eps_k on (x_k, eps and x of the anchors), weighted by 1/variance; x, eps, v [T, N, d]."""
    anchor_x, anchor_eps, x, eps, v = x[anchors], eps[anchors], x[k], eps[k], v[k]
    features = torch.stack([x.expand_as(anchor_x), anchor_eps, anchor_x], dim=1)
    features = features.flatten(2).double()  # [lags, 3, N d]
    weights = torch.exp(-2 * slope * (v - v.mean()))
    weighted = features * weights.flatten().double()
    gram = weighted @ features.transpose(1, 2)
    moments = weighted @ eps.flatten().double()
    mean_diagonal = gram.diagonal(dim1=1, dim2=2).mean(-1)
    ridge = RIDGE * mean_diagonal[:, None, None] * torch.eye(3, dtype=torch.float64)
    return torch.linalg.solve_ex(gram + ridge, moments).result.float()


def predict(
    x: Tensor, eps: Tensor, v: Tensor, k: int, anchors: slice, coefficients: Tensor, drift: Tensor
) -> tuple[Tensor, Tensor]:
    """The head's outputs at step k as predicted from each anchor: eps~ = c0 x_k + c1 eps' + c2 x' and v~ = v' + drift.

    Args:
        x, eps, v: [T, N, d]. anchors: the steps k + 1, k + 2, .. coefficients, drift: see `Calibration`.

    Returns:
        (eps~, v~), [lags, N, d] each.
    """
    num_lags = len(x[anchors])
    c0, c1, c2 = coefficients[k, :num_lags, :, None, None].unbind(1)
    predicted_eps = c0 * x[k] + c1 * eps[anchors] + c2 * x[anchors]
    return predicted_eps, v[anchors] + drift[k, :num_lags, None, None]


def _draw_and_verify(
    mean_error: Tensor, log_sigma_p: Tensor, log_sigma_q: Tensor, generator: torch.Generator
) -> Tensor:
    """Whether a draw of q is accepted as a draw of p, bool [lags, N].

    Args:
        mean_error: q's mean minus p's, [lags, N, d]. log_sigma_p: [N, d]. log_sigma_q: [lags, N, d].
    """
    num_chains = len(log_sigma_p)
    z_q = torch.randn(log_sigma_p.shape, generator=generator)
    z_p = (mean_error + log_sigma_q.exp() * z_q) * torch.exp(-log_sigma_p)
    log_ratio = log_sigma_q - log_sigma_p + 0.5 * (z_q - z_p) * (z_q + z_p)
    uniform = torch.rand(num_chains, generator=generator)
    return uniform.log() < log_ratio.sum(-1)


def _simulate(accepted: Tensor) -> Tensor:
    """Head calls per token [N], the first included; accepted: [T, W, N], by step and lag."""
    num_steps, window, num_chains = accepted.shape
    t = torch.full((num_chains,), num_steps - 2)
    calls = torch.ones(num_chains)
    chain = torch.arange(num_chains)
    index = torch.arange(window).unsqueeze(1)
    while (t >= 0).any():
        calls += t >= 0
        steps = (t - index).clamp(min=0)
        prefix = accepted[steps, index, chain].cumprod(0).sum(0)
        steps_left = (t + 1).clamp(0, window)
        t = t - torch.minimum(prefix + 1, steps_left)
    return calls


# Traces: exact chains. Predictions of the head are fitted to them and measured on them.

TRACE_TOKENS = 256


class Trace(NamedTuple):
    """Ancestral chains of N tokens, on the CPU.

    Attributes:
        x, eps, v: [T, N, d], the inputs, guided noise predictions and variance channels of each step. tokens: [N, d].
        z: [G, N, D]. scale: [N, G - 1] or [N, 1]. temperature: [N, 1]. noise: eps_t [T, N, d] of the steps t.
        image: int64 [N], the images that they belong to.
    """

    x: Tensor
    eps: Tensor
    v: Tensor
    tokens: Tensor
    z: Tensor
    scale: Tensor
    temperature: Tensor
    noise: Tensor
    image: Tensor

    @property
    def inputs(self) -> Inputs:
        """The tokens, to be drawn again: with the trace as the source of noise, from the same noise."""
        return Inputs(self.z, self.scale, self.temperature, self.image, torch.zeros_like(self.image))

    def initial(self, *names: Any) -> Tensor:
        """x_T, see `cspd.noise.initial`."""
        return self.x[-1]

    def steps(self, seed: Tensor, position: Tensor, step: Tensor, *names: Any) -> Tensor:
        """eps_t [n, N, d] of steps [n], see `cspd.noise.steps`."""
        return self.noise[step]

    @property
    def chains(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.eps, self.v

    def to(self, device: torch.device) -> Trace:
        return Trace(*(values.to(device) for values in self))

    def finite(self) -> Trace:
        """The tokens whose chains are finite throughout. Raises ValueError if there is no such token."""
        is_finite = torch.stack([values.isfinite().all(2).all(0) for values in self.chains]).all(0)
        which = (is_finite & self.tokens.isfinite().all(1)).nonzero().squeeze(1)
        if not len(which):
            raise ValueError(
                f"none of {len(is_finite)} chains is finite in float32, so there is nothing to fit: check cfg,"
                f" temperature, num_sampling_steps={len(self.x)} and the weights"
            )
        return Trace(*(_of_tokens(values, which) for values in self))

    def some(self, num: int) -> Trace:
        """At most `num` of the tokens, at random: every n-th one would always be of the same few images."""
        which = torch.randperm(len(self.image), generator=torch.Generator().manual_seed(0))[:num].sort().values
        which = which.to(self.image.device)
        return Trace(*(_of_tokens(values, which) for values in self))


def _of_tokens(values: Tensor, which: Tensor) -> Tensor:
    """The tokens `which` of a field of `Trace`, along its last dimension but one, or its only one."""
    return values.index_select(max(0, values.dim() - 2), which)


class Recorder(Observer):
    """Records chains that are evaluated at every step; `rows`: only those of some rows, int64 [n]."""

    def __init__(self, rows: Tensor | None = None) -> None:
        self.rows: Tensor | slice = slice(None) if rows is None else rows
        self.states: list[Tensor] = []

    def evaluated(self, chain: Chain, step: Step, x: Tensor, out: Prediction) -> None:
        self.chain = chain
        self.states.append(torch.stack([values[self.rows] for values in (x, out.eps, out.v)]))

    def trace(self, tokens: Tensor, image: Tensor) -> Trace:
        """The trace, on the CPU, of the chain that has ended; tokens: [R, d]. image: int64 [R]."""
        x, eps, v = torch.stack(self.states[::-1], dim=1)  # they ran from T - 1 down to 0
        z, *others = self.chain.inputs
        scale, temperature, tokens, image = (values[self.rows] for values in (*others[:2], tokens, image))
        noise = self.chain.eps.flip(0)[:, self.rows]
        whole = Trace(x, eps, v, tokens, z[:, self.rows], scale, temperature, noise, image)
        return whole.to(torch.device("cpu"))


def joined(parts: Several[Trace]) -> Trace:
    """One trace of the tokens of several."""
    return Trace(*(torch.cat(of_all, dim=max(0, of_all[0].dim() - 2)) for of_all in zip(*parts)))  # over the tokens
