"""What a sampler of the diffusion head is; the ancestral chain; the plain round."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cspd import kernels
from cspd.device import Precision, send, send_integers
from cspd.method import ModelRunner, as_it_is, nothing_more
from cspd.option import Option, check_integer
from cspd.request import Request, Sequence, Stopwatch
from mar.head import TRAIN_STEPS, Head, Schedule, schedule

# The tokens that an iteration predicts, flat over the sequences of a batch.

PER_ROW = ("sequence", "offset", "slot", "position", "seed", "scale", "temperature")  # fields of `Rows` on the device
PER_ROW_ON_HOST = ("owner", "iteration", "num_iter")


@dataclass(frozen=True)
class Rows:
    """The tokens that a batch of sequences predicts in one iteration, flat: R rows, a sequence's own in one stretch.

    Attributes:
        sequences: the batch. known, counts: tokens known to, and rows of, each of them, on the CPU.
        contexts: int64 [2, B], their slots and `known`; the last one again where a graph takes more.
        sequence, offset: int64 [R], index into the batch, and which of that sequence's rows. slot, position, seed:
            int64 [R].
        scale, temperature: float32 [R, 1].
        owner, iteration, num_iter: int64 [R], on the CPU: `sequence`; the iteration that the timetable predicts the
            row in, from 0; and how many there are.
    """

    sequences: list[Sequence]
    known: list[int]
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
        """Some of the rows, int64 [n] on the CPU."""
        index = send_integers(which, self.slot.device)
        on_device = {name: getattr(self, name)[index] for name in PER_ROW}
        on_host = {name: getattr(self, name)[which] for name in PER_ROW_ON_HOST}
        return replace(self, **on_device, **on_host)

    def stretch(self, first: int, count: int) -> Rows:
        """`count` of the rows, one after the other."""
        return replace(self, **{name: getattr(self, name)[first : first + count] for name in PER_ROW + PER_ROW_ON_HOST})


# How a token is drawn from its condition z: what a denoiser is given, and what it gives back.
#
# A denoiser draws by a function
#
#     denoise(runner, model, rows, z, *, index=0, densities=False) -> Denoised
#
# of the rows to draw (`Rows`), their conditions z [G, R, D] (G = 2 where guided, the null class second), the model
# whose head draws them ("target" or "draft"), and the index of their noise (`cspd.noise.initial`). Where `densities`
# is asked for, it also gives the Gaussians of its chains, which CSpD compares. Under a name (`@denoiser`) any sampler
# of MAR can take it, and CSpD's `chains`.

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
        token_cost, audit: float32 [slots, L], what each token cost, and what an audit found of it.
        round_state: state that methods keep between rounds, by the key of their sequences.
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


# (runner, batch, rows) -> z float32 [G, R, D]
Conditions = Callable[[ContinuousRunner, list[Sequence], Rows], Tensor]
# (model, num_slots, device, precision) -> a model runner of the model alone
MakeRunner = Callable[[Any, int, torch.device, Precision], ContinuousRunner]


def full_conditions(runner: ContinuousRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows [G, R, D] by the target's whole backbone."""
    return runner.conditions(batch, rows)


class Measured(NamedTuple):
    """How near tokens are to the full chain's, see `cspd.request.RoundStats`; `audit`: [R], where asked for."""

    difference: float
    divergence: float | None
    audit: Tensor | None = None


@dataclass(frozen=True)
class Denoised:
    """Tokens of R rows, what they cost, and the Gaussians of the chains that made them.

    Attributes:
        tokens: float32 [R, d].
        calls: int64 [R], on the CPU: head calls of each token's chain.
        head_calls: sequential ones; or int64 [B], on the CPU, those that each of the rows' sequences took part in.
        evaluations: int64 [R], on the CPU: how often the head was evaluated on each row, the null class included.
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
        run_round: a round of its own, (runner, batch, stopwatch, backbone) -> those that are finished, for one whose
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


# Work of a batch at few sizes, so that it can be replayed: what is missing up to the next one is added, and left out.
#
# A model runner without graphs does the same work at the size that it has.


def by_row(runner: Any, key: Hashable | None, draw: Draw, rows: Any, z: Tensor) -> Tensor:
    """The tokens [R, d] that `draw` makes of rows and their conditions z.

    Args:
        key: as in `Graphs.run`; None of a function that also does something on the CPU, which is called as it is.
    """
    inputs: tuple[Tensor, ...] = (z, rows.scale, rows.temperature, rows.seed, rows.position)
    if key is None:
        return draw(*inputs)
    number = len(rows.seed)
    padding = runner.graphs.size(number) - number
    if padding:  # rows of zeros
        inputs = tuple(F.pad(each, (0, padding) if each.dim() == 1 else (0, 0, 0, padding)) for each in inputs)
    return runner.graphs.run(key, draw, *inputs)[:number]


# The head's modulations, of many timesteps at once: they do not depend on the noisy token.

MODULATION_BYTES = 16 * 2**20  # of a chain's table on a CPU, whose cache it fits; longer chains take several
TABLE_SHARE = 1 / 8  # of a device's memory: the most that a table may take


def modulation_size(head: Head) -> int:
    """Bytes of a row's modulations at one timestep."""
    return 4 * (3 * len(head.res_blocks) + 2) * head.width


def most_bytes(device: torch.device) -> int:
    """The most bytes that a table of modulations may take."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(TABLE_SHARE * memory)


def table_bytes(device: torch.device) -> int:
    """Bytes of a table of modulations that a chain takes step by step."""
    return MODULATION_BYTES if device.type == "cpu" else most_bytes(device)


def modulated(
    head: Head, z: Tensor, timesteps: Several[int], precision: Precision, classes: Several[int] | None = None
) -> Iterator[tuple[range, Head, Iterator]]:
    """The head's modulations at one timestep after another, many at once, since they do not depend on the noisy token.

    Args:
        z: conditions [G, R, D]. timesteps: N of the 1000, in the order of the calls.
        classes: of each call, how many of z's G classes it evaluates, the first ones; by default all.

    Yields:
        (which calls, the head that evaluates them, the modulations of each as `evaluate` takes them). The first call,
        where errors grow most, is alone and in float32; its evaluation should be so too.
    """
    num_calls, classes = len(timesteps), tuple(classes or [len(z)] * len(timesteps))
    chunk = max(1, table_bytes(z.device) // (modulation_size(head) * z.shape[0] * z.shape[1]))
    call, of_class = _evaluations(classes, z.device)
    end = [*itertools.accumulate(classes)]
    with precision.full():
        c_embed = head.cond_embed(z)
        t_embed = head.time_embed(on_device(tuple(map(int, timesteps)), z.device))
    for calls in [range(1), *(range(i, min(i + chunk, num_calls)) for i in range(1, num_calls, chunk))]:
        own = list(classes[calls.start : calls.stop])
        which = slice(end[calls.stop - 1] - sum(own), end[calls.stop - 1])
        own_head = head if calls[0] == 0 else precision.prepare(head)
        with precision.full() if calls[0] == 0 else precision.fast():
            layers = own_head.split(own_head.modulations(t_embed[call[which]].unsqueeze(1), c_embed[of_class[which]]))
        by_call = zip(*(zip(*(modulation.split(own) for modulation in layer)) for layer in layers))
        del layers
        yield calls, own_head, by_call
        del by_call  # who took them has let go of them too: the next are as large


@functools.cache
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Integers that stay the same, int64 [N]; for good, as `chain_steps`."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


@functools.cache
def _evaluations(classes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(call, class) of each of the head's evaluations, int64 [sum of classes] each."""
    pairs = [(call, of_class) for call, num in enumerate(classes) for of_class in range(num)]
    calls, classes = zip(*pairs)
    return on_device(calls, device), on_device(classes, device)


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
Trace = Callable[[int, Tensor, Tensor, Tensor], None]
Outputs = Callable[[Head, Tensor, Several[int], Precision], Iterable[tuple[range, Iterator[Callable[..., Tensor]]]]]


class Steps(NamedTuple):
    """What a chain's steps take beside the head, in the order of its calls: the noisiest step first.

    Attributes:
        timesteps: of the 1000. mean_x, mean_eps, slope: of each step, on the CPU, see `Schedule`.
        t: int64 [T], the steps T - 1 .. 0. sigma: float32 [T, 1, 1], of their noise where v = 0 and tau = 1; 0 at last.
    """

    timesteps: tuple[int, ...]
    mean_x: list[float]
    mean_eps: list[float]
    slope: list[float]
    t: Tensor
    sigma: Tensor


@functools.cache  # for good: a graph reads them where they are
def chain_steps(num_steps: int, first_timestep: int, device: torch.device) -> Steps:
    """The steps of the schedule of T = `num_steps`."""
    s = schedule(num_steps, first_timestep)
    with torch.inference_mode(False):
        sigma = torch.as_tensor(s.log_sigma_base[::-1].copy(), dtype=torch.float32, device=device).exp()
        sigma[-1] = 0  # the last step adds no noise
        t = torch.arange(num_steps - 1, -1, -1, device=device)
    columns = (values[::-1].tolist() for values in (s.mean_x, s.mean_eps, s.log_sigma_slope))
    return Steps(tuple(s.timestep_map[::-1].tolist()), *columns, t, sigma.view(-1, 1, 1))  # type: ignore[call-arg]


def evaluate(head: Head, x: Tensor, modulations: Several[tuple[Tensor, ...]], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Guided noise prediction and (conditional) variance channel, float32 [..., d] each, of noisy tokens x [..., d].

    Args:
        modulations: of these tokens, [G, ..., width] each, G = 2 with the null class second.
        scale: s, broadcast to [..., 1]; unused at G = 1.
    """
    return guided(head.denoise(x, modulations), scale)


def guided(out: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """What `evaluate` returns, of the head's outputs [G, ..., 2d]."""
    eps, v = out.float().chunk(2, dim=-1)
    return (eps[0] if len(eps) == 1 else torch.lerp(eps[1], eps[0], scale)), v[0]


def every_output(
    head: Head, z: Tensor, timesteps: Several[int], precision: Precision
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
    num_steps: int,
    precision: Precision,
    trace: Trace | None = None,
    first_timestep: int = TRAIN_STEPS - 1,
    outputs: Outputs = every_output,
) -> Tensor:
    """Samples a token a row by the full chain; T sequential head calls.

    The state after step t is mu_t + tau sigma_t eps_t, and mu_0 at the last. The first step, whose gain is 316 at
    T = 100, is in float32.

    Args:
        head: the diffusion head.
        z: conditions [G, R, D]: G = 1, or 2 with the null class second.
        scale: guidance scale s of each row [R, 1] (unused where G = 1).
        temperature: tau of each row [R, 1].
        x: x_T [R, d].
        noise: maps steps t [n] to eps_t [n, R, d].
        num_steps: T.
        trace: is told every step's (t, x_t, guided eps, v), the last three [R, d].
        first_timestep: of the 1000, where the chain begins.
        outputs: how the head's outputs are computed.

    Returns:
        Tokens [R, d], float32.
    """
    steps = chain_steps(num_steps, first_timestep, z.device)
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
) -> Tensor:
    """`ancestral` with noise eps_t [T, R, d] drawn in advance, in the order of the steps."""
    added = eps_t * (steps.sigma * temperature)
    if trace is None and outputs is every_output and kernels.available(x.device):
        return _follow_by_kernels(head, z, scale, x, added, steps, precision)
    for calls, by_call in outputs(head, z, steps.timesteps, precision):
        with precision.full() if calls[0] == 0 else precision.fast():
            for call, output in zip(calls, by_call):
                out = output(x)
                if trace:
                    trace(len(added) - 1 - call, x, *guided(out, scale))
                x = take_step(x, out, added[call], scale, steps.mean_x[call], steps.mean_eps[call], steps.slope[call])
        del by_call, output  # which hold the modulations, and those are large
    return x


def _follow_by_kernels(
    head: Head, z: Tensor, scale: Tensor, x: Tensor, added: Tensor, steps: Steps, precision: Precision
) -> Tensor:
    """`follow` where a step's last launch has both the head's last layer and `take_step`."""
    from cspd.kernels.head import ancestral_step

    for calls, own_head, by_call in modulated(head, z, steps.timesteps, precision):
        with precision.full() if calls[0] == 0 else precision.fast():
            for call, modulations in zip(calls, by_call):
                numbers = steps.mean_x[call], steps.mean_eps[call], steps.slope[call]
                x = ancestral_step(own_head, x, modulations, added[call], scale, *numbers)
        del by_call, modulations
    return x


def take_step(
    x: Tensor, out: Tensor, noise: Tensor, scale: Tensor, mean_x: float, mean_eps: float, slope: float
) -> Tensor:
    """The state [R, d] after a step from x, where the head gives out [G, R, 2d].

    Args:
        noise: tau sigma_t eps_t [R, d], but for the head's share in sigma_t. The last three are of the step.
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
    num_steps: int,
    precision: Precision,
    first_timestep: int = TRAIN_STEPS - 1,
    *,
    index: int = 0,
    trace: Trace | None = None,
    outputs: Outputs = every_output,
) -> Draw:
    """The whole chain as a function of tensors that can be captured as a graph, unless it is traced.

    Args:
        noise: its source, see `cspd.noise`. index: of the noise. The others are as in `ancestral`.

    """
    steps = chain_steps(num_steps, first_timestep, precision.device)

    def draw(z: Tensor, scale: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        x = noise.initial(seed, position, head.channels, index)
        eps_t = noise.steps(seed, position, steps.t, head.channels, index)
        return follow(head, z, scale, temperature, x, eps_t, steps, precision, trace, outputs)

    return draw


def sigma_trace(s: Schedule, temperature: Tensor, log_sigmas: list[Tensor]) -> Trace:
    """A trace that appends the log sigma [R, d] of every step of a schedule."""

    def keep(t: int, x: Tensor, eps: Tensor, v: Tensor) -> None:
        log_sigmas.append(s.log_sigma_base[t] + temperature.log() + s.log_sigma_slope[t] * v)

    return keep


def with_densities(made: Denoised, log_sigmas: list[Tensor]) -> Denoised:
    """Tokens with the Gaussians of their chains, of the log sigma of every step, T - 1 .. 0."""
    *path, last = log_sigmas
    return dataclasses.replace(made, log_sigma=torch.stack(path).sum((0, 2)), log_sigma_last=last)


def check_first(request: Request, num_steps: int) -> None:
    """Raises ValueError where a chain has more steps than timesteps to visit."""
    if request.first_timestep is not None:
        why = f"it begins a chain of {num_steps} steps"
        check_integer("first_timestep", request.first_timestep, num_steps - 1, TRAIN_STEPS - 1, why)


def check_ancestral(request: Request, runner: ContinuousRunner) -> None:
    """Raises ValueError where a chain has more steps than timesteps to visit."""
    check_first(request, request.num_sampling_steps)


def ancestral_advice(request: Request, remedy: str = f"give first_timestep={SHORT_FIRST}") -> str | None:
    """That a short chain should begin later: from timestep 999 its first step multiplies errors by thousands."""
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
    """Every token by the full chain (arXiv 2406.11838), a head call a step; arguments as in `cspd.heads.chain`.

    Args:
        num_steps: T; by default the requests'. trace: is told every step, and outputs: how the head's are computed, as
            in `ancestral`.
    """
    request = rows.sequences[0].request
    num_steps = num_steps or request.num_sampling_steps
    first_timestep = request.first_timestep or TRAIN_STEPS - 1
    log_sigmas: list[Tensor] = []
    if densities:
        trace = sigma_trace(schedule(num_steps, first_timestep), rows.temperature, log_sigmas)
    draw = drawing(
        runner.models[model].head,
        runner.noise,
        num_steps,
        runner.precision,
        first_timestep,
        index=index,
        trace=trace,
        outputs=outputs,
    )
    key = None if trace else ("ancestral", model, num_steps, first_timestep, index, outputs)
    tokens = by_row(runner, key, draw, rows, z)
    calls = np.full(len(tokens), num_steps)
    made = Denoised(tokens, calls, num_steps, evaluations=calls * len(z))
    return with_densities(made, log_sigmas) if densities else made


# Plain MAR: one autoregressive iteration a round, by any backbone and denoiser.
#
# `ar` itself, by the full ancestral chain of every token, is what all others are measured against. Guarantee: exact.


def run_plain_round(
    runner: ContinuousRunner,
    batch: list[Sequence],
    watch: Stopwatch,
    *,
    backbone: Conditions = full_conditions,
    denoise: Callable[..., Denoised] = denoise_ancestral,
) -> list[Sequence]:
    """Runs the next iteration of every sequence and returns those that are finished (arXiv 2406.11838, section 3.3)."""
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
    """Predicts some rows of every sequence with the target alone and commits them; an iteration."""
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
        num_made = sequence.request.num_made(runner.seq_len)
        stats = sequence.stats
        stats.iterations += 1
        stats.backbone_calls += 1
        stats.head_calls += own_calls
        stats.head_calls_per_token += made.calls[own].sum().item() / num_made
        stats.head_evaluations += made.evaluations[own].sum().item()
        if made.measured:
            stats.difference, stats.divergence = made.measured.difference, made.measured.divergence
            if made.measured.audit is not None and sequence.num_committed == runner.seq_len:
                made_at = runner.order[sequence.slot, -num_made:].sort().values
                audit = runner.audit[sequence.slot, made_at]
                estimate = audit.mean().item(), (audit.std() / num_made**0.5).item()
                if all(map(math.isfinite, estimate)):
                    stats.audit, stats.audit_error = estimate
