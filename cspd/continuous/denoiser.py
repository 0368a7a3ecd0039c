"""How a token is drawn from its condition z: what a denoiser is given, and what it gives back.

A denoiser draws by a function

    denoise(host, model, rows, z, *, index=0, densities=False) -> Denoised

of the rows to draw (`Rows`), their conditions z [G, R, D] (G = 2 where guided, the null class second), the model whose
head draws them ("target" or "draft"), and the index of their noise (`cspd.noise.initial`). Where `densities` is asked
for, it also gives the Gaussians of its chains, which CSpD compares. Under a name (`@denoiser`) any sampler of MAR can
take it, and CSpD's `chains`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.rows import Rows
from cspd.method import Host, as_it_is, nothing_more
from cspd.option import Option
from cspd.precision import Precision
from cspd.sequence import Request, Sequence

# (z [G, R, D], scale [R, 1], temperature [R, 1], seed int64 [R], position int64 [R]) -> tokens [R, d]
Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class ContinuousHost(Host, Protocol):
    """A host of models whose tokens are drawn by a diffusion head.

    Attributes:
        models: "target" and "draft", which is None if there is none; each has a `head` and a `config`.
        config: the target's. device, precision: where and how it computes.
        num_slots: sequences in flight at most.
        tuning: a `cspd.continuous.tuning.Tuning`.
        tokens: float32 [slots, L, d]. order: int64 [slots, L], positions in generation order.
        heat, audit: float32 [slots, L], what each token cost, and what an audit found of it.
        kept: what methods keep between rounds, by the sequences' key.
    """

    models: Any
    config: Any
    device: torch.device
    precision: Precision
    num_slots: int
    tuning: Any
    tokens: Tensor
    order: Tensor
    heat: Tensor
    audit: Tensor
    kept: dict[Hashable, dict]

    def next_rows(self, batch: list[Sequence], limit: int | None = None) -> Rows:
        """The rows that the next iteration of each sequence predicts; up to `limit` known tokens in all."""

    def conditions(self, batch: list[Sequence], rows: Rows, model: str = "target") -> Tensor:
        """z of the rows [G, R, D], G = 2 (null class second) if the batch is guided: one backbone call."""

    def commit(self, rows: Rows, tokens: Tensor) -> None:
        """Writes predicted tokens [R, d] to their slots."""

    def given(self, sequences: list[Sequence]) -> Tensor | None:
        """Which tokens are known from the start, bool [B, L]; None if no sequence has such tokens."""

    def num_masked(self, request: Request) -> np.ndarray:
        """How many tokens are unknown after each iteration of a resolved request, int64 [num_iter]."""


# (host, batch, rows) -> z float32 [G, R, D]
Conditions = Callable[[ContinuousHost, list[Sequence], Rows], Tensor]
# (model, num_slots, device, precision) -> a host of the model alone
MakeHost = Callable[[Any, int, torch.device, Precision], ContinuousHost]


def full_conditions(host: ContinuousHost, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows [G, R, D] by the target's whole backbone."""
    return host.conditions(batch, rows)


class Measured(NamedTuple):
    """How near tokens are to the full chain's, see `cspd.sequence.RoundStats`; `audit`: [R], where asked for."""

    difference: float
    divergence: float | None
    audit: Tensor | None = None


@dataclass(frozen=True)
class Denoised:
    """Tokens of R rows, what they cost, and the Gaussians of the chains that made them.

    Attributes:
        tokens: float32 [R, d].
        calls: int64 [R], on the host: head calls of each token's chain.
        head_calls: sequential ones; or int64 [B], on the host, those that each of the rows' sequences took part in.
        evaluations: int64 [R], on the host: how often the head was evaluated on each row, the null class included.
        measured: how near the tokens are to the full chain's; None of a denoiser that cannot tell.
        log_sigma: [R], summed over channels and all steps but the last; None where no densities were asked for.
        log_sigma_last: [R, d], of the last step, where sampling adds no noise but a sigma exists; None as above.
    """

    tokens: Tensor
    calls: np.ndarray
    head_calls: int | np.ndarray
    evaluations: np.ndarray
    log_sigma: Tensor | None = None
    log_sigma_last: Tensor | None = None
    measured: Measured | None = None

    def head_calls_by_sequence(self, num_sequences: int) -> list[int]:
        """Sequential head calls that each of the rows' sequences took part in."""
        return np.broadcast_to(self.head_calls, num_sequences).tolist()


@dataclass(frozen=True)
class Denoiser:
    """A way to draw tokens.

    Attributes:
        denoise: see above. guarantee: a key of `cspd.method.GUARANTEES`, where z is computed in full.
        options: settings of its own. needs: "calibration" or nothing ("-").
        mixed: settings that may differ between the rows of one call.
        check: raises ValueError on a bad request. resolve: decides what a checked request leaves open.
        advice: as in `cspd.method.Method`.
        run_round: a round of its own, (host, batch, stopwatch, backbone) -> those that are finished, for one whose
            sequences do not wait for each other's chains.
    """

    denoise: Callable[..., Denoised]
    guarantee: str
    options: tuple[Option, ...] = ()
    needs: str = "-"
    mixed: tuple[str, ...] = ("num_iter",)
    check: Callable[[Request, Any], None] = nothing_more
    resolve: Callable[[Request, Any], Request] = as_it_is
    advice: Callable[[Request], str | None] = lambda request: None
    run_round: Callable[..., list] | None = None


DENOISERS: dict[str, Denoiser] = {}  # by name


def denoiser(name: str, guarantee: str = "heuristic", **attributes: Any) -> Callable[[Callable], Callable]:
    """Names a function as a denoiser that a request can ask for; attributes as in `Denoiser`."""

    def named(denoise: Callable[..., Denoised]) -> Callable[..., Denoised]:
        DENOISERS[name] = Denoiser(denoise, guarantee, **attributes)
        for other in sorted(DENOISERS):  # the order does not depend on which module is imported first
            DENOISERS[other] = DENOISERS.pop(other)
        return denoise

    return named
