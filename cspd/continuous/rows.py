"""Rows of tokens with a diffusion head: which ones an iteration draws, how a sampler draws them, and a round of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cspd.device import Precision, send, send_integers
from cspd.heads.calibrated import Audit
from cspd.heads.chain import Chain, Inputs, Observer, Place, Prediction, Step
from cspd.heads.samplers import SAMPLERS, Sampler, ancestral, compiled_ancestral
from cspd.heads.speculative import Finished
from cspd.method import ModelRunner, Part
from cspd.request import Request, Sequence, Stopwatch

# The tokens that an iteration predicts, flat over the sequences of a batch.

PER_ROW = ("sequence", "offset", "slot", "position", "seed", "scale", "temperature")  # fields of `Rows` on the device
PER_ROW_ON_CPU = ("owner", "iteration", "num_iter")


@dataclass(frozen=True)
class Rows:
    """The tokens that a batch of sequences predicts in one iteration, flat: R rows, each sequence's rows contiguous.

    Attributes:
        sequences: the batch. committed, counts: each sequence's committed tokens and its rows here, on the CPU.
        contexts: int64 [2, B], their slots and `committed`; the last one is repeated up to a graph's size.
        sequence, offset: int64 [R], index into the batch, and index among that sequence's rows. slot, position, seed:
            int64 [R].
        scale, temperature: float32 [R, 1].
        owner, iteration, num_iter: int64 [R], on the CPU: `sequence`; the iteration in which the timetable predicts the
            row, from 0; and the number of iterations.
    """

    sequences: list[Sequence]
    committed: list[int]
    counts: list[int]
    contexts: Tensor
    sequence: Tensor
    offset: Tensor
    slot: Tensor
    position: Tensor
    seed: Tensor
    scale: Tensor
    temperature: Tensor
    owner: np.ndarray
    iteration: np.ndarray
    num_iter: np.ndarray

    def at(self, which: np.ndarray) -> Rows:
        """The rows at indices `which`, int64 [n] on the CPU."""
        index = send_integers(which, self.slot.device)
        on_device = {name: getattr(self, name)[index] for name in PER_ROW}
        on_cpu = {name: getattr(self, name)[which] for name in PER_ROW_ON_CPU}
        return replace(self, **on_device, **on_cpu)

    def inputs(self, z: Tensor) -> Inputs:
        """What a chain is given of these rows; z: their conditions [G, R, D]."""
        return Inputs(z, self.scale, self.temperature, self.seed, self.position)


class ContinuousRunner(ModelRunner, Protocol):
    """A model runner of models whose tokens are drawn by a diffusion head.

    Attributes:
        models: "target" and "draft", which is None if there is none; each has a `head` and a `config`.
        config: the target's. device, precision: where and how it computes.
        num_slots: sequences in flight at most.
        tuning: a `cspd.continuous.tuning.HeadTuner`.
        tokens: float32 [slots, L, d]. order: int64 [slots, L], positions in generation order.
        token_cost, audit: float32 [slots, L], each token's cost, and its audited divergence.
        compiled: whether chains run through torch.compile.
    """

    models: Any
    config: Any
    device: torch.device
    precision: Precision
    num_slots: int
    tuning: Any
    tokens: Tensor
    order: Tensor
    token_cost: Tensor
    audit: Tensor
    compiled: bool

    def next_rows(self, batch: list[Sequence], limit: int | None = None) -> Rows:
        """The rows that the next iteration of each sequence predicts, until at most `limit` tokens are committed."""

    def conditions(self, batch: list[Sequence], rows: Rows, model: str = "target") -> Tensor:
        """z of the rows [G, R, D], G = 2 (unconditional branch second) if the batch is guided: one backbone call."""

    def commit(self, rows: Rows, tokens: Tensor) -> None:
        """Writes predicted tokens [R, d] to their slots."""

    def given(self, sequences: list[Sequence]) -> Tensor | None:
        """Which tokens the user gave, bool [B, L]; None if no sequence has given tokens."""

    def num_masked(self, request: Request) -> np.ndarray:
        """The number of masked tokens after each iteration of a resolved request, int64 [num_iter]."""


# (runner, batch, rows) -> z float32 [G, R, D]
Conditions = Callable[[ContinuousRunner, list[Sequence], Rows], Tensor]
# (model, num_slots, precision) -> a model runner of the model alone
MakeRunner = Callable[[Any, int, Precision], ContinuousRunner]


def full_conditions(runner: ContinuousRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows [G, R, D] by the target's whole backbone."""
    return runner.conditions(batch, rows)


def show_costs(runner: ContinuousRunner, sequence: Sequence) -> None:
    """Writes the head calls of a running sequence's tokens to its slot, for a preview.

    Only `cspd.continuous.joined` counts them round by round. Those of tokens not yet generated mean nothing.
    """
    if "running" in sequence.shared:
        record = sequence.shared["running"].record[sequence.slot]
        runner.token_cost[sequence.slot] = (record != 0).sum(-1).float()


# A sampler of the head draws the tokens of rows from their conditions z. Here it meets requests.


class Drawn(NamedTuple):
    """Tokens of R rows, and their cost.

    Attributes:
        tokens: float32 [R, d].
        calls: int64 [R], on the CPU: head calls of each token's chain.
        head_calls: int64 [B], on the CPU: the sequential calls that each sequence took part in.
        evaluations: int64 [R], on the CPU: evaluations of the head on each row, the unconditional branch included.
        measured: measured differences from the full chain, by their names in `RoundStats`.
        audit: [R], audited divergences, or None.
    """

    tokens: Tensor
    calls: np.ndarray
    head_calls: np.ndarray
    evaluations: np.ndarray
    measured: dict[str, float | None]
    audit: Tensor | None = None


class Densities(Observer):
    """The Gaussians of chains of R tokens, which CSpD compares.

    Attributes:
        log_sigma: [R], summed over channels and all steps but the last.
        log_sigma_last: [R, d], of the last step, where sampling adds no noise but a sigma exists.
        log_noise: float64 [R], -|eps|^2 / 2 of all noise that a chain drew, x_T and eps_t. It is not known of
            speculative chains (0): what they resample has other noise.
    """

    def __init__(self, num_rows: int, channels: int, device: torch.device) -> None:
        self.log_sigma, self.log_sigma_last = (
            torch.zeros(num_rows, device=device),
            torch.zeros(num_rows, channels, device=device),
        )
        # a sum over more than a thousand numbers, of which CSpD takes the difference of two
        self.log_noise = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self._path: list[Tensor] = []

    def _add_noise(self, chain: Chain, noise: Tensor) -> None:
        """Adds noise [n, R, d] that the chain drew."""
        rows = slice(None) if chain.rows is None else chain.rows
        self.log_noise[rows] -= 0.5 * noise.double().square().sum((0, 2))

    def moved(self, chain: Chain, step: Step) -> None:
        if step.t > 0:
            self._add_noise(chain, chain.eps[step.index : step.index + 1])

    def evaluated(self, chain: Chain, step: Step, x: Tensor, out: Prediction) -> None:
        if step.index == 0:
            self._add_noise(chain, x[None])  # x_T
        s, tau = chain.schedule, chain.inputs.temperature
        log_sigma = s.log_sigma_base[step.t] + tau.log() + s.log_sigma_slope[step.t] * out.v
        rows = slice(None) if chain.rows is None else chain.rows
        if step.t > 0:
            self._path.append(log_sigma)
            return
        if self._path:
            self.log_sigma[rows] += torch.stack(self._path).sum((0, 2))
            self._path = []
        self.log_sigma_last[rows] = log_sigma

    def skipped(self, chain: Chain, segment: Any, sources: Tensor, v: Tensor) -> None:
        log_sigma = torch.addcmul(segment.base, segment.slope, v) + chain.inputs.temperature.log()
        self.log_sigma += log_sigma[1:].sum((0, 2))  # the first step is the call's own
        if segment.first > 0:
            begin = len(chain) - 1 - segment.first
            self._add_noise(chain, chain.eps[begin : begin + len(segment.steps)])

    def verified(self, chain: Chain, ended: Finished) -> None:
        self.log_sigma, self.log_sigma_last = ended.log_sigma, ended.log_sigma_last


@dataclass(frozen=True)
class Denoiser(Part):
    """A sampler of the head as a choice of requests.

    Attributes:
        sampler: see `cspd.heads.samplers`.
        mixed: settings that may differ between the rows of one call.
        advice: as in `cspd.method.Method`.
        run_round: its own round, (runner, batch, stopwatch, backbone) -> finished sequences, if its sequences do not
            wait for each other's chains.
    """

    sampler: Sampler
    mixed: tuple[str, ...] = ("num_iter",)
    advice: Callable[[Request], str | None] = lambda request: None
    run_round: Callable[..., list] | None = None

    @property
    def guarantee(self) -> str:
        """Valid with the full backbone."""
        return self.sampler.guarantee

    @property
    def needs(self) -> str:
        return "calibration" if self.sampler.fit else "-"

    def settings(self, request: Request) -> dict[str, Any]:
        """The sampler's settings in a resolved request."""
        found = {option.name: getattr(request, option.name) for option in self.sampler.options}
        return {name: value for name, value in found.items() if value is not None}

    def denoise(
        self,
        runner: ContinuousRunner,
        model: str,
        rows: Rows,
        z: Tensor,
        *,
        index: int = 0,
        observers: Several[Observer] = (),
    ) -> Drawn:
        """Draws rows from their conditions z [G, R, D] (G = 2 if guided, with the unconditional branch second).

        Args:
            model: whose head draws them, "target" or "draft". index: of their noise, see `cspd.noise.initial`.
        """
        request, head = rows.sequences[0].request, runner.models[model].head
        fitted = None if runner.tuning is None else runner.tuning.fitted(runner, model, rows.sequences[0])
        s, inputs = head.schedule(request.num_sampling_steps), rows.inputs(z)
        audit = None
        if getattr(request, "audit", None) and not observers:
            uniform = runner.noise.step_accept_uniforms(rows.seed, rows.position, len(s))
            audit = Audit(head, inputs, s, runner.precision, uniform < request.audit, request.audit)
            observers = (audit,)
        settings, function = self.settings(request), self.sampler.function
        depends_on_fit = self.sampler.fit or settings.get("grid") == "planned"
        key = self.sampler.name, model, rows.sequences[0].key if depends_on_fit else tuple(settings.items())
        chain = Chain(
            head,
            s,
            inputs,
            runner.noise,
            runner.precision,
            index,
            observers,
            fitted,
            place=None if self.sampler.whole else place_of(runner, rows),
            run=functools.partial(captured, runner, key),
        )
        sample = functools.partial(function, **settings)
        with runner.precision.fast():
            tokens = captured(runner, key, chain, sample) if self.sampler.whole else sample(chain)
        calls, evaluations = chain.tally.of_rows(len(tokens))
        head_calls = chain.tally.of_owners(rows.owner, len(rows.sequences))
        measured = fitted.measured if fitted and self.guarantee == "approximate" else {}
        return Drawn(tokens, calls, head_calls, evaluations, measured, audit and audit.total)


def captured(runner: ContinuousRunner, key: Hashable, chain: Chain, function: Callable[[Chain], Tensor]) -> Tensor:
    """Runs a sampler on a chain whose rows are treated alike; as a CUDA graph, if nobody watches.

    With CUDA graphs the rows are padded to one of a few sizes, so that a graph can be replayed.
    """
    if chain.observers:
        return function(chain)
    if runner.compiled and getattr(function, "func", function) is ancestral:
        function = functools.partial(compiled_ancestral, **getattr(function, "keywords", {}))
    if not runner.graphs.enabled:
        return function(chain)
    name = key, chain.schedule, chain.noise_index, len(chain.z)

    def draw(*inputs: Tensor) -> Tensor:
        own = chain.over(Inputs(*inputs))
        tokens = function(own)
        runner.graphs.lasting["tally", name] = own.tally  # a replay counts nothing
        return tokens

    num_rows = chain.z.shape[1]
    tokens = runner.graphs.run(name, draw, *chain.inputs, rows=runner.graphs.size(num_rows))[:num_rows]
    tally = runner.graphs.lasting["tally", name]
    chain.tally.calls, chain.tally.evaluations = tally.calls, tally.evaluations
    return tokens


def place_of(runner: ContinuousRunner, rows: Rows) -> Place:
    """Where rows stand in their images."""
    half = []
    for sequence in rows.sequences:
        own = sequence.request
        half.append(num_early(own.num_generated(runner.seq_len), runner.num_masked(own), runner.seq_len))
    return Place(rows.iteration, rows.num_iter, np.array(half)[rows.owner], rows.owner)


def num_early(num_generated: int, masked: np.ndarray, seq_len: int) -> int:
    """The number of iterations that begin with less than half of the tokens committed: a checkerboard's first colour.

    Args:
        num_generated: tokens to generate. masked: int64 [num_iter], masked tokens after each iteration.
    """
    masked_before = np.r_[num_generated, masked[:-1]]
    return int((masked_before > seq_len / 2).sum())


LEAST_TEMPERATURE = 1e-12  # float32 loses smaller noise beside a state, and ratios of its densities overflow


def without_lost_noise(request: Request) -> Request:
    """The request, at temperature 0 if it asks for one below `LEAST_TEMPERATURE`."""
    asked = request.temperature
    is_lost = isinstance(asked, (int, float)) and 0 < asked < LEAST_TEMPERATURE
    return request.but(temperature=0.0) if is_lost else request


BASELINE = Denoiser(SAMPLERS["ancestral"])  # draws tokens as `ar` does

# A round of one autoregressive iteration, with any backbone and sampler of the head.
#
# With the full ancestral chain it is `ar`, the baseline of all other methods. Guarantee: exact.


def run_plain_round(
    runner: ContinuousRunner,
    batch: list[Sequence],
    watch: Stopwatch,
    *,
    backbone: Conditions = full_conditions,
    denoise: Callable[..., Drawn] = BASELINE.denoise,
) -> list[Sequence]:
    """Runs the next iteration of every sequence; returns the finished sequences (arXiv 2406.11838, section 3.3)."""
    advance(runner, batch, runner.next_rows(batch), watch, backbone, denoise)
    return [s for s in batch if s.num_committed == runner.seq_len]


def advance(
    runner: ContinuousRunner,
    batch: list[Sequence],
    rows: Rows,
    watch: Stopwatch,
    backbone: Conditions = full_conditions,
    denoise: Callable[..., Drawn] = BASELINE.denoise,
) -> None:
    """Runs an iteration: predicts rows of every sequence with the target alone, and commits them."""
    watch.start("backbone")
    z = backbone(runner, batch, rows)
    watch.start("head")
    made = denoise(runner, "target", rows, z)
    watch.start("other")
    runner.commit(rows, made.tokens)
    sent = send({"calls": made.calls.astype(np.float32)}, runner.device)
    runner.token_cost[rows.slot, rows.position] = sent["calls"]
    if made.audit is not None:
        runner.audit[rows.slot, rows.position] = made.audit

    first = 0
    for sequence, count, own_calls in zip(batch, rows.counts, made.head_calls.tolist()):
        own = slice(first, first + count)
        first += count
        sequence.iteration += 1
        sequence.num_committed += count
        num_generated = sequence.request.num_generated(runner.seq_len)
        stats = sequence.stats
        stats.iterations += 1
        stats.backbone_calls += 1
        stats.head_calls += own_calls
        stats.head_calls_per_token += made.calls[own].sum().item() / num_generated
        stats.head_evaluations += made.evaluations[own].sum().item()
        for name, value in made.measured.items():
            setattr(stats, name, value)
        if made.audit is not None and sequence.num_committed == runner.seq_len:
            made_at = runner.order[sequence.slot, -num_generated:].sort().values
            audit = runner.audit[sequence.slot, made_at]
            estimate = audit.mean().item(), (audit.std() / num_generated**0.5).item()
            if all(map(math.isfinite, estimate)):
                stats.audit, stats.audit_error = estimate
