"""A plan fitted to a model: where the head is called, how the states between are corrected, and how near that comes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cspd import noise
from cspd.continuous.calibration import LARGEST, check_arrays
from cspd.continuous.plan import Predictor, Window, windows
from cspd.continuous.tracing import Trace
from cspd.continuous.windows import Audit, Visit, sample, weighted
from cspd.precision import Precision
from cspd.telling import Advance, no_advance
from mar.head import Head

RIDGE = 1e-6  # of the mean diagonal


@dataclass(frozen=True)
class Shortcut:
    """Where the head is called, and what is known of the tokens that come out.

    Attributes:
        steps: int16 [N], S from T - 1 down to 0.
        corrections: float32 [N, 2], added to the weights of the next call's state on this call's x and eps.
        difference: float32 [1], on held-out tokens, from the same z and noise: r.m.s. difference from the full chain's,
            in standard deviations of a token's channels.
        divergence: float32 [1], there, KL(q || p) of the path from the full chain's, nats per token; infinite without
            noise.
    """

    steps: np.ndarray
    corrections: np.ndarray
    difference: np.ndarray
    divergence: np.ndarray

    def check(self, num_steps: int) -> None:
        """Raises ValueError, saying what is wrong, where it is none for T = `num_steps` denoising steps."""
        num_calls = self.steps.size
        wanted = {
            "steps": (np.int16, (num_calls,), 0, num_steps - 1),
            "corrections": (np.float32, (num_calls, 2), -LARGEST, LARGEST),
            "difference": (np.float32, (1,), 0, LARGEST),
            "divergence": (np.float32, (1,), 0, np.inf),
        }
        check_arrays("a shortcut", vars(self), wanted)
        if num_calls < 2 or self.steps[0] != num_steps - 1 or self.steps[-1] or (np.diff(self.steps) >= 0).any():
            raise ValueError(f"a shortcut's steps do not fall from {num_steps - 1} to 0")

    def windows(self, predictor: Predictor, null_every: int, device: torch.device) -> list[Window]:
        """What follows each of its calls."""
        return windows(tuple(self.steps.tolist()), predictor, self.corrections, null_every, device)


def fit_shortcut(
    head: Head,
    seen: Trace,
    held_out: Trace,
    predictor: Predictor,
    steps: tuple[int, ...],
    null_every: int,
    precision: Precision,
    advance: Advance = no_advance,
) -> Shortcut:
    """Corrects the windows of a plan on chains that really take them, and measures other tokens.

    The predictor was fitted with each call on the full chain's path. Chains that take shortcuts leave that path, so the
    state at the end of each window is fitted again, by least squares, to the full chain's of the same noise. This is
    kept where it brings other tokens nearer to the full chain's.

    Args:
        seen, held_out: on the head's device. steps: S. advance: is told of its parts, 1 in all. The others are as in
            `plan.windows`.
    """
    device = seen.x.device
    none = np.zeros((len(steps), 2), np.float32)
    plain = windows(steps, predictor, none, null_every, device)
    corrections = _corrections(head, seen, plain, precision)
    corrected = windows(steps, predictor, corrections, null_every, device)
    difference, other = (_difference(head, held_out, plan, precision) for plan in (plain, corrected))
    plan = plain
    if not difference <= other:  # it may not be finite
        difference, plan = other, corrected
    if not math.isfinite(difference):
        raise ValueError(f"head_calls={len(steps)}: these tokens leave the numbers of float32; give more head calls")
    return Shortcut(
        steps=np.array(steps, np.int16),
        corrections=none if plan is plain else corrections,
        difference=np.float32([difference]),
        divergence=np.float32([_divergence(head, held_out, plan, precision, advance)]),
    )


def _difference(head: Head, chains: Trace, plan: list[Window], precision: Precision) -> float:
    """See `Shortcut`."""
    tokens = _run(head, chains, plan, precision)
    error, width = (tokens - chains.tokens).square().mean(), chains.tokens.var(0).mean()
    return (error / width).sqrt().item()


def _divergence(
    head: Head, chains: Trace, plan: list[Window], precision: Precision, advance: Advance = no_advance
) -> float:
    """See `Shortcut`; most of the work of a fit."""
    if not (chains.temperature > 0).all():
        return math.inf
    everywhere = torch.ones(len(chains.seed), len(chains.x), dtype=torch.bool, device=chains.x.device)
    audit = Audit(head, chains.z, chains.scale, chains.temperature, plan, precision, everywhere, rate=1.0)

    def look(i: int, sources: Tensor, v: Tensor) -> None:
        audit(i, sources, v)
        advance(1 / len(plan))

    _run(head, chains, plan, precision, look)
    return audit.total.mean().nan_to_num(math.inf, posinf=math.inf).item()


def _corrections(head: Head, chains: Trace, plan: list[Window], precision: Precision) -> np.ndarray:
    """float32 [N, 2], see `Shortcut`, of a plan without any: a window is fitted on what those before it gave."""
    corrections = torch.zeros(len(plan), 2, dtype=torch.float64)

    def correct(i: int, sources: Tensor, v: Tensor) -> Tensor | None:
        """The state after the i-th window, put right; the first call's gain is too high, and no step may be skipped."""
        if i == 0 or len(plan[i].steps) == 1:
            return None
        predicted = weighted(plan[i].mix[-1], sources)
        wanted = chains.x[plan[i + 1].steps[0]]
        corrections[i] = _least_squares(sources[:2], wanted - predicted)
        return predicted + weighted(corrections[i].to(predicted), sources[:2])

    _run(head, chains, plan, precision, correct)
    return corrections.float().numpy()


def _run(head: Head, chains: Trace, plan: list[Window], precision: Precision, visit: Visit | None = None) -> Tensor:
    """Tokens of the same z and noise as a trace's."""
    channels = chains.tokens.shape[1]
    x = noise.initial(chains.seed, chains.position, channels)
    eps_of = lambda t: noise.steps(chains.seed, chains.position, t, channels)  # noqa: E731
    rows = chains.z, chains.scale, chains.temperature
    return sample(head, *rows, x, eps_of, plan, len(chains.x), precision, visit)


def _least_squares(features: Tensor, wanted: Tensor) -> Tensor:
    """float64 [2], on the CPU: the weights of features [2, N, d] whose sum is nearest to wanted [N, d]."""
    features, wanted = features.flatten(1).double().cpu(), wanted.flatten().double().cpu()
    finite = features.isfinite().all(0) & wanted.isfinite()
    features, wanted = features[:, finite], wanted[finite]
    gram = features @ features.T
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(2, dtype=torch.float64)
    return torch.linalg.lstsq(gram + ridge, features @ wanted).solution
