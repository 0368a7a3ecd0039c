"""Samplers of the diffusion head (denoisers), the ancestral chain, and the round of baseline sampling."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cspd import kernels
from cspd.device import Precision, all_bytes, send, send_integers
from cspd.graphs import compiled
from cspd.method import ModelRunner, as_it_is, nothing_more
from cspd.option import Option, check_integer
from cspd.request import Request, Sequence, Stopwatch
from mar.head import TRAIN_STEPS, Head, ReadyHead

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

    def stretch(self, first: int, count: int) -> Rows:
        """`count` rows from the `first` on."""
        parts = {name: getattr(self, name)[first : first + count] for name in PER_ROW + PER_ROW_ON_CPU}
        return replace(self, **parts)


# Denoisers: functions that draw tokens from their conditions z,
#
#     denoise(runner, model, rows, z, *, index=0, densities=False) -> Denoised.
#
# The arguments are the rows to draw (`Rows`), their conditions z [G, R, D] (G = 2 if guided, with the unconditional
# branch second), the model whose head draws them ("target" or "draft"), and the index of their noise
# (`cspd.noise.initial`). With `densities` it also returns the Gaussians of its chains, which CSpD compares. A denoiser
# with a name (`@denoiser`) can be chosen in any sampler of MAR, and as CSpD's `chains`.

# (z [G, R, D], scale [R, 1], temperature [R, 1], seed int64 [R], position int64 [R]) -> tokens [R, d]
Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class ContinuousRunner(ModelRunner, Protocol):
    """A model runner of models whose tokens are drawn by a diffusion head.

    Attributes:
        models: "target" and "draft", which is None if there is none; each has a `head` and a `config`.
        config: the target's. device, precision: where and how it computes.
        num_slots: sequences in flight at most.
        tuning: a `cspd.heads.tuning.Tuning`.
        tokens: float32 [slots, L, d]. order: int64 [slots, L], positions in generation order.
        token_cost, audit: float32 [slots, L], each token's cost, and its audited divergence.
        round_state: state that methods keep between rounds, by the key of their sequences.
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
    round_state: dict[Hashable, dict]
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
# (model, num_slots, device, precision) -> a model runner of the model alone
MakeRunner = Callable[[Any, int, torch.device, Precision], ContinuousRunner]


def full_conditions(runner: ContinuousRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows [G, R, D] by the target's whole backbone."""
    return runner.conditions(batch, rows)


class Measured(NamedTuple):
    """Differences from the full chain, by their names in `RoundStats`; `audit`: [R], or None without an audit."""

    values: Mapping[str, float | None]
    audit: Tensor | None = None


@dataclass(frozen=True)
class Denoised:
    """Tokens of R rows, their cost, and the Gaussians of their chains.

    Attributes:
        tokens: float32 [R, d].
        calls: int64 [R], on the CPU: head calls of each token's chain.
        head_calls: sequential head calls; or int64 [B], on the CPU, the calls that each sequence took part in.
        evaluations: int64 [R], on the CPU: evaluations of the head on each row, the unconditional branch included.
        measured: measured differences from the full chain, or None.
        log_sigma: [R], summed over channels and all steps but the last; None without `densities`.
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
        """The sequential head calls that each of the rows' sequences took part in."""
        return np.broadcast_to(self.head_calls, num_sequences).tolist()


@dataclass(frozen=True)
class Denoiser:
    """A registered sampler of the head.

    Attributes:
        denoise: see above. guarantee: a key of `cspd.method.GUARANTEES`, valid with the full backbone.
        options: its own settings. needs: "calibration" or nothing ("-").
        mixed: settings that may differ between the rows of one call.
        check: raises ValueError on a bad request. resolve: fills in the settings that a checked request leaves open.
        advice: as in `cspd.method.Method`.
        run_round: its own round, (runner, batch, stopwatch, backbone) -> finished sequences, if its sequences do not
            wait for each other's chains.
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
    """Registers a function as a denoiser under a name; attributes as in `Denoiser`."""

    def named(denoise: Callable[..., Denoised]) -> Callable[..., Denoised]:
        DENOISERS[name] = Denoiser(denoise, guarantee, **attributes)
        for other in sorted(DENOISERS):  # the order does not depend on which module is imported first
            DENOISERS[other] = DENOISERS.pop(other)
        return denoise

    return named


def by_row(runner: Any, key: Hashable | None, draw: Draw, rows: Rows, z: Tensor) -> Tensor:
    """The tokens [R, d] that `draw` makes of rows and their conditions z.

    With CUDA graphs the rows are padded to one of a few sizes, so that a graph can be replayed.

    Args:
        key: as in `Graphs.run`; None if `draw` also does something on the CPU, so that it cannot be captured.
    """
    inputs: tuple[Tensor, ...] = (z, rows.scale, rows.temperature, rows.seed, rows.position)
    if key is None:
        return draw(*inputs)
    num_rows = len(rows.seed)
    return runner.graphs.run(key, draw, *inputs, rows=runner.graphs.size(num_rows))[:num_rows]


# The head's modulations. They do not depend on the noisy token, so many timesteps are computed at once.

MODULATION_BYTES = 16 * 2**20  # of a chain's table on a CPU, so that it fits the cache; longer chains use several
TABLE_SHARE = 1 / 8  # of a device's memory: the most that a table may take


def modulation_size(head: Head) -> int:
    """Bytes of a row's modulations at one timestep."""
    return 4 * (3 * len(head.res_blocks) + 2) * head.width


def most_bytes(device: torch.device) -> int:
    """The most bytes that a table of modulations may take."""
    return int(TABLE_SHARE * all_bytes(device))


def table_bytes(device: torch.device) -> int:
    """The most bytes of a table of modulations that a chain reads step by step."""
    return MODULATION_BYTES if device.type == "cpu" else most_bytes(device)


def is_full_call(i: int, num_calls: int, null_every: int) -> bool:
    """Whether call i of a chain of `num_calls` head calls, from 0, evaluates the unconditional branch too."""
    return i < 2 or i == num_calls - 1 or i % null_every == 0


def modulated(
    head: Head, z: Tensor, timesteps: Several[float], precision: Precision, branches: Several[int] | None = None
) -> Iterator[tuple[range, ReadyHead, Iterator]]:
    """The head's modulations at one timestep after another, computed for many calls at once.

    Args:
        z: conditions [G, R, D]. timesteps: N names of steps, in the order of the calls.
        branches: for each call, how many of z's G branches it evaluates, from the first; by default all.

    Yields:
        (range of calls, the head that evaluates them, the modulations of each call as `evaluate` takes them). The first
        call, where errors grow most, is alone and in float32; it should also be evaluated in float32.
    """
    num_calls, branches = len(timesteps), tuple(branches or [len(z)] * len(timesteps))
    chunk = max(1, table_bytes(z.device) // (modulation_size(head) * z.shape[0] * z.shape[1]))
    call, branch = _evaluations(branches, z.device)
    end = [*itertools.accumulate(branches)]
    with precision.full():
        c_embed = head.cond_embed(z)
        t_embed = head.time_embed(on_device(tuple(np.asarray(timesteps).tolist()), z.device))
    for calls in [range(1), *(range(i, min(i + chunk, num_calls)) for i in range(1, num_calls, chunk))]:
        own = list(branches[calls.start : calls.stop])
        which = slice(end[calls.stop - 1] - sum(own), end[calls.stop - 1])
        own_head = head if calls[0] == 0 else precision.prepare(head)
        with precision.full() if calls[0] == 0 else precision.fast():
            layers = own_head.split(own_head.modulations(t_embed[call[which]].unsqueeze(1), c_embed[branch[which]]))
        # from tensors over all calls to tuples of each call: views, made once for the chain
        split = [zip(*(modulation.split(own) for modulation in layer)) for layer in layers]
        by_call = zip(*split)
        del layers, split
        yield calls, own_head.ready(), by_call
        del by_call  # the caller has dropped them too: the next ones are as large


@functools.cache
def on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Constants on a device, int64 or float32 [N]; cached forever, as `chain_steps`."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


@functools.cache
def _evaluations(num_branches: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(call, branch) of each of the head's evaluations, int64 [sum of num_branches] each."""
    # Python numbers: torch.compile would trace NumPy's as unknown
    pairs = [(call, branch) for call, num in enumerate(num_branches) for branch in range(num)]
    calls, branches = zip(*pairs)
    return on_device(calls, device), on_device(branches, device)


# The head's evaluation, and the ancestral chain: from noise to a token, T steps of the reverse diffusion.

ANCESTRAL_MIXED = ("num_iter", "cfg", "cfg_schedule", "temperature")  # may differ between the rows of a chain
FIRST_TIMESTEP = Option(
    "first_timestep",
    int,
    "the noisiest of the 1000 timesteps that a chain visits: 999 as in MAR's code, about 950 for short chains",
    low=1,
    high=TRAIN_STEPS - 1,
    metavar="N",
)
ANCESTRAL_OPTIONS = (FIRST_TIMESTEP,)
SHORT, SHORT_FIRST = 25, 950  # chains of fewer steps should begin there
# Each call of a compiled function takes the time of a step or so: a function of one step would be slower than eager
# PyTorch. Compiling takes longer the more steps it has.
COMPILED_STEPS = 5
Trace = Callable[[int, Tensor, Tensor, Tensor], None]
Outputs = Callable[[Head, Tensor, Several[float], Precision], Iterable[tuple[range, Iterator[Callable[..., Tensor]]]]]


class Schedule(Protocol):
    """A chain of T Gaussian steps, the noisiest at T - 1, each described by float64 arrays [T].

    With the head's outputs (eps, v) at x, a step has the mean  A x + B eps  and  log sigma = a + b v, without
    temperature. Step 0 adds no noise. `mar.head.Schedule` is MAR's; there eps is the predicted noise. The head of a
    stochastic differential equation predicts a velocity or the clean token, and b is 0.

    Attributes:
        timestep_map: the head's own names of the steps, integers or floats.
        mean_x, mean_eps: A, B. log_sigma_base, log_sigma_slope: a, b.
        held_x, held_eps: weights of x and eps in the quantity that changes little from step to step, so that a frozen
            draft holds it.
    """

    @property
    def timestep_map(self) -> np.ndarray: ...
    @property
    def mean_x(self) -> np.ndarray: ...
    @property
    def mean_eps(self) -> np.ndarray: ...
    @property
    def log_sigma_base(self) -> np.ndarray: ...
    @property
    def log_sigma_slope(self) -> np.ndarray: ...
    @property
    def held_x(self) -> np.ndarray: ...
    @property
    def held_eps(self) -> np.ndarray: ...
    def __len__(self) -> int: ...
    def __hash__(self) -> int: ...


class Steps(NamedTuple):
    """Constants of a chain's steps, in the order of its calls: the noisiest step first.

    Attributes:
        timesteps: the head's names of the steps. mean_x, mean_eps, slope: of each step, on the CPU, see `Schedule`.
        numbers: float32 [T, 3], the last three on the device.
        t: int64 [T], the steps T - 1 .. 0. sigma: float32 [T, 1, 1], of their noise if v = 0 and tau = 1; the last
            is 0.
    """

    timesteps: tuple[float, ...]
    mean_x: list[float]
    mean_eps: list[float]
    slope: list[float]
    numbers: Tensor
    t: Tensor
    sigma: Tensor


@functools.cache  # forever: a graph reads them at a fixed address
def chain_steps(s: Schedule, device: torch.device) -> Steps:
    """The steps of a schedule."""
    with torch.inference_mode(False):
        sigma = torch.as_tensor(s.log_sigma_base[::-1].copy(), dtype=torch.float32, device=device).exp()
        sigma[-1] = 0  # the last step adds no noise
        t = torch.arange(len(s) - 1, -1, -1, device=device)
        columns = [values[::-1].tolist() for values in (s.mean_x, s.mean_eps, s.log_sigma_slope)]
        numbers = torch.tensor(columns, device=device).t().contiguous()
    timesteps = tuple(s.timestep_map[::-1].tolist())
    mean_x, mean_eps, slope = columns
    return Steps(timesteps, mean_x, mean_eps, slope, numbers, t, sigma.view(-1, 1, 1))


def evaluate(
    head: Head | ReadyHead, x: Tensor, modulations: Several[tuple[Tensor, ...]], scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Guided noise prediction and (conditional) variance channel, float32 [..., d] each, of noisy tokens x [..., d].

    Args:
        modulations: of these tokens, [G, ..., width] each, G = 2 with the unconditional branch second.
        scale: s, broadcast to [..., 1]; unused at G = 1.
    """
    return guided(head.denoise(x, modulations), scale)


def guided(out: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Guided eps and v, see `evaluate`, from the head's outputs [G, ..., 2d]."""
    eps, v = out.float().chunk(2, dim=-1)
    return (eps[0] if len(eps) == 1 else torch.lerp(eps[1], eps[0], scale)), v[0]


def every_output(
    head: Head, z: Tensor, timesteps: Several[float], precision: Precision
) -> Iterator[tuple[range, Iterator[Callable[[Tensor], Tensor]]]]:
    """The head's outputs at one timestep after another, as functions of the noisy tokens; otherwise as `modulated`."""
    for calls, own_head, by_call in modulated(head, z, timesteps, precision):
        yield calls, (functools.partial(own_head.denoise, modulations=modulations) for modulations in by_call)
        del by_call


def ancestral(
    head: Head,
    z: Tensor,
    scale: Tensor,
    temperature: Tensor,
    x: Tensor,
    noise: Callable[[Tensor], Tensor],
    s: Schedule,
    precision: Precision,
    trace: Trace | None = None,
    outputs: Outputs = every_output,
) -> Tensor:
    """Samples one token per row by the full chain; T sequential head calls.

    The state after step t is mu_t + tau sigma_t eps_t, and mu_0 after the last. The first step, whose gain is 316 at
    T = 100, is in float32.

    Args:
        head: the diffusion head.
        z: conditions [G, R, D]: G = 1, or 2 with the unconditional branch second.
        scale: guidance scale s of each row [R, 1] (unused if G = 1).
        temperature: tau of each row [R, 1].
        x: x_T [R, d].
        noise: maps steps t [n] to eps_t [n, R, d].
        s: the chain's schedule.
        trace: called at every step with (t, x_t, guided eps, v), the last three [R, d].
        outputs: computes the head's outputs.

    Returns:
        Tokens [R, d], float32.
    """
    steps = chain_steps(s, z.device)
    return follow(head, z, scale, temperature, x, noise(steps.t), steps, precision, trace, outputs)


def follow(
    head: Head,
    z: Tensor,
    scale: Tensor,
    temperature: Tensor,
    x: Tensor,
    eps_t: Tensor,
    steps: Steps,
    precision: Precision,
    trace: Trace | None,
    outputs: Outputs,
    is_compiled: bool = False,
) -> Tensor:
    """`ancestral` with noise eps_t [T, R, d] drawn in advance, in the order of the steps."""
    added = eps_t * (steps.sigma * temperature)
    if trace is None and outputs is every_output and isinstance(head, Head):  # other heads have neither
        if kernels.available(x.device):
            return _follow_by_kernels(head, z, scale, x, added, steps, precision)
        if is_compiled:
            return _follow_compiled(head, z, scale, x, added, steps, precision)
    for calls, by_call in outputs(head, z, steps.timesteps, precision):
        with precision.full() if calls[0] == 0 else precision.fast():
            for call, output in zip(calls, by_call):
                out = output(x)
                if trace:
                    trace(len(added) - 1 - call, x, *guided(out, scale))
                x = take_step(x, out, added[call], scale, steps.mean_x[call], steps.mean_eps[call], steps.slope[call])
        del by_call, output  # they hold the modulations, which are large
    return x


def _follow_by_kernels(
    head: Head, z: Tensor, scale: Tensor, x: Tensor, added: Tensor, steps: Steps, precision: Precision
) -> Tensor:
    """`follow` with the head's last layer and `take_step` in one kernel launch."""
    from cspd.kernels.head import ancestral_step

    for calls, own_head, by_call in modulated(head, z, steps.timesteps, precision):
        with precision.full() if calls[0] == 0 else precision.fast():
            for call, modulations in zip(calls, by_call):
                numbers = steps.mean_x[call], steps.mean_eps[call], steps.slope[call]
                x = ancestral_step(own_head.head, x, modulations, added[call], scale, *numbers)
        del by_call, modulations
    return x


def _follow_compiled(
    head: Head, z: Tensor, scale: Tensor, x: Tensor, added: Tensor, steps: Steps, precision: Precision
) -> Tensor:
    """`follow` with `COMPILED_STEPS` steps at a time by torch.compile; the first step and the last few are eager."""
    with precision.full():
        c_embed = head.cond_embed(z)
        t_embed = head.time_embed(on_device(steps.timesteps, z.device))[:, None, None]
        x = several_steps(head, x, head.modulations(t_embed[:1], c_embed), added[:1], scale, steps.numbers[:1])
    own_head, run = precision.prepare(head), compiled(several_steps, "denoising steps")
    with precision.fast():
        for first in range(1, len(added), COMPILED_STEPS):
            own = slice(first, first + COMPILED_STEPS)
            if own.stop > len(added):  # another number of steps would be another program
                run = several_steps
            layers = own_head.modulations(t_embed[own], c_embed)
            x = run(own_head, x, layers, added[own], scale, steps.numbers[own])
    return x


def several_steps(
    head: Head, x: Tensor, layers: Several[Tensor], added: Tensor, scale: Tensor, numbers: Tensor
) -> Tensor:
    """The state [R, d] after n steps from x [R, d].

    Args:
        layers: the head's modulations at these steps [n, G, R, ..]. added: tau sigma_t eps_t [n, R, d].
        numbers: [n, 3], see `Steps`.
    """
    ready = head.ready()
    split = head.split(layers)
    for step in range(len(numbers)):
        mean_x, mean_eps, slope = numbers[step].unbind()
        out = ready.denoise(x, [tuple(part[step] for part in layer) for layer in split])
        eps, v = guided(out, scale)
        x = torch.addcmul(x * mean_x + eps * mean_eps, torch.exp(v * slope), added[step])
    return x


def take_step(
    x: Tensor, out: Tensor, noise: Tensor, scale: Tensor, mean_x: float, mean_eps: float, slope: float
) -> Tensor:
    """The state [R, d] after a step from x, given the head's outputs `out` [G, R, 2d].

    Args:
        noise: tau sigma_t eps_t [R, d], without the head's factor of sigma_t. mean_x, mean_eps, slope: of the step.
    """
    if kernels.available(x.device):
        from cspd.kernels.head import ancestral_step_kernel

        return ancestral_step_kernel(x, out, noise, scale, mean_x, mean_eps, slope)
    eps, v = guided(out, scale)
    mean = torch.add(x * mean_x, eps, alpha=mean_eps)
    return torch.addcmul(mean, torch.exp(v * slope), noise)


def drawing(
    head: Head,
    noise: types.ModuleType,
    s: Schedule,
    precision: Precision,
    *,
    index: int = 0,
    trace: Trace | None = None,
    outputs: Outputs = every_output,
    is_compiled: bool = False,
) -> Draw:
    """The whole chain as a function of tensors; it can be captured as a graph, unless it is traced.

    Args:
        noise: its source, see `cspd.noise`. index: of the noise. is_compiled: take steps by torch.compile. The others
            are as in `ancestral`.
    """
    steps = chain_steps(s, precision.device)

    def draw(z: Tensor, scale: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        x = noise.initial(seed, position, head.channels, index)
        eps_t = noise.steps(seed, position, steps.t, head.channels, index)
        return follow(head, z, scale, temperature, x, eps_t, steps, precision, trace, outputs, is_compiled)

    return draw


def sigma_trace(s: Schedule, temperature: Tensor, log_sigmas: list[Tensor]) -> Trace:
    """A trace that appends the log sigma [R, d] of every step of a schedule."""

    def keep(t: int, x: Tensor, eps: Tensor, v: Tensor) -> None:
        log_sigmas.append(s.log_sigma_base[t] + temperature.log() + s.log_sigma_slope[t] * v)

    return keep


def with_densities(made: Denoised, log_sigmas: list[Tensor]) -> Denoised:
    """Adds the Gaussians of the chains, from the log sigmas of steps T - 1 .. 0."""
    *path, last = log_sigmas
    return dataclasses.replace(made, log_sigma=torch.stack(path).sum((0, 2)), log_sigma_last=last)


def check_first(request: Request, num_steps: int) -> None:
    """Raises ValueError if a chain of `num_steps` has more steps than timesteps up to its first."""
    if request.first_timestep is not None:
        why = f"it begins a chain of {num_steps} steps"
        check_integer("first_timestep", request.first_timestep, num_steps - 1, TRAIN_STEPS - 1, why)


def check_ancestral(request: Request, runner: ContinuousRunner) -> None:
    """Raises ValueError if a chain has more steps than timesteps up to its first."""
    check_first(request, request.num_sampling_steps)


LEAST_TEMPERATURE = 1e-12  # float32 loses smaller noise beside a state, and ratios of its densities overflow


def without_lost_noise(request: Request) -> Request:
    """The request, at temperature 0 if its temperature is below `LEAST_TEMPERATURE`."""
    return request.but(temperature=0.0) if request.temperature < LEAST_TEMPERATURE else request


def ancestral_advice(request: Request, remedy: str = f"give first_timestep={SHORT_FIRST}") -> str | None:
    """Advice for short chains, whose first step from timestep 999 multiplies errors by thousands; None for others."""
    num_steps = request.num_sampling_steps
    if num_steps >= SHORT or request.first_timestep is not None:
        return None
    return f"a chain of {num_steps} denoising steps overshoots in its first one: {remedy}"


@denoiser(
    "ancestral",
    "exact",
    options=ANCESTRAL_OPTIONS,
    mixed=ANCESTRAL_MIXED,
    check=check_ancestral,
    advice=ancestral_advice,
)
def denoise_ancestral(
    runner: ContinuousRunner,
    model: str,
    rows: Rows,
    z: Tensor,
    *,
    index: int = 0,
    densities: bool = False,
    num_steps: int | None = None,
    trace: Trace | None = None,
    outputs: Outputs = every_output,
) -> Denoised:
    """Draws every token by the full chain (arXiv 2406.11838), one head call per step; arguments as described above.

    Args:
        num_steps: by default the requests' `num_sampling_steps`. trace, outputs: as in `ancestral`.
    """
    request = rows.sequences[0].request
    head = runner.models[model].head
    num_steps = num_steps or request.num_sampling_steps
    first_timestep = request.first_timestep or TRAIN_STEPS - 1
    s = head.schedule(num_steps, first_timestep)
    log_sigmas: list[Tensor] = []
    if densities:
        trace = sigma_trace(s, rows.temperature, log_sigmas)
    draw = drawing(
        head,
        runner.noise,
        s,
        runner.precision,
        index=index,
        trace=trace,
        outputs=outputs,
        is_compiled=runner.compiled,
    )
    key = None if trace else ("ancestral", model, num_steps, first_timestep, index, outputs)
    tokens = by_row(runner, key, draw, rows, z)
    calls = np.full(len(tokens), len(s))
    made = Denoised(tokens, calls, len(s), evaluations=calls * len(z))
    return with_densities(made, log_sigmas) if densities else made


# A round of one autoregressive iteration, with any backbone and denoiser.
#
# With the full ancestral chain it is `ar`, the baseline of all other methods. Guarantee: exact.


def run_plain_round(
    runner: ContinuousRunner,
    batch: list[Sequence],
    watch: Stopwatch,
    *,
    backbone: Conditions = full_conditions,
    denoise: Callable[..., Denoised] = denoise_ancestral,
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
    denoise: Callable[..., Denoised] = denoise_ancestral,
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
    if made.measured and made.measured.audit is not None:
        runner.audit[rows.slot, rows.position] = made.measured.audit

    first = 0
    head_calls = made.head_calls_by_sequence(len(batch))
    for sequence, count, own_calls in zip(batch, rows.counts, head_calls):
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
        if made.measured:
            for name, value in made.measured.values.items():
                setattr(stats, name, value)
            if made.measured.audit is not None and sequence.num_committed == runner.seq_len:
                made_at = runner.order[sequence.slot, -num_generated:].sort().values
                audit = runner.audit[sequence.slot, made_at]
                estimate = audit.mean().item(), (audit.std() / num_generated**0.5).item()
                if all(map(math.isfinite, estimate)):
                    stats.audit, stats.audit_error = estimate
