"""A chain of Gaussian steps from noise to a token, as its samplers see it, and the diffusion head along it."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

import cspd.heads.driver as driver
from cspd.device import Precision, all_bytes, on_device, send_integers
from cspd.heads.net import Net, Prediction
from mar.head import Head, ReadyHead

# Chains as data. Two kinds are known: the reverse diffusion of MAR's head (`mar.head.schedule`), and the
# Euler-Maruyama scheme of heads that are stochastic differential equations.


class Schedule(Protocol):
    """A chain of T Gaussian steps, the noisiest at T - 1, each described by float64 arrays [T].

    With the head's outputs (eps, v) at x, a step has the mean  A x + B eps  and  log sigma = a + b v, without
    temperature. Step 0 adds no noise. `mar.head.DiffusionSchedule` is MAR's; there eps is the predicted noise. The head
    of a stochastic differential equation predicts a velocity or the clean token, and b is 0.

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


LEAST_TO_GO = 0.05  # of 1 - t, by which the velocity of a head that predicts the clean token is divided


@dataclass(frozen=True, eq=False)
class EulerMaruyama:
    """The chain of a stochastic differential equation, as `Schedule` describes it.

    Attributes:
        clean: whether the head predicts the clean token x_1; otherwise it predicts the velocity.
        time_factor: `timestep_map` has the times 0..1 times this.
        end_sigma: s.d. of the noise that is added to the chain's end; 0 unless all steps are noisy.
    """

    timestep_map: np.ndarray
    mean_x: np.ndarray
    mean_eps: np.ndarray
    log_sigma_base: np.ndarray
    log_sigma_slope: np.ndarray
    held_x: np.ndarray
    held_eps: np.ndarray
    clean: bool
    time_factor: float
    end_sigma: float

    def __len__(self) -> int:
        return len(self.timestep_map)


def euler_maruyama(
    t: np.ndarray, dt: np.ndarray, *, clean: bool, time_factor: float = 1.0, noisy_end: bool = False
) -> EulerMaruyama:
    """The chain with a step of dt at each time t.

    x = t x_1 + (1 - t) noise, from t = 0 to 1. With the velocity v the score is (t v - x) / (1 - t), so a step has

        mean = x + ((1 + t) v - x) dt,    sigma = sqrt(2 (1 - t) dt).

    The last step is x + v dt and adds no noise. A head that predicts x_1 has v = (x_1 - x) / max(1 - t, 0.05). Either
    way the mean is linear in x and in the head's output. Sources: SphereAR (arXiv 2509.24335), BitDance (2602.14041),
    NextStep-1 (2508.10711), with their released code.

    Args:
        t, dt: [T] each, from noise to token. clean: see `EulerMaruyama`.
        noisy_end: the last step is a noisy one too, as in NextStep-1.1. Its noise is added to the chain's end.
    """
    t, dt = t[::-1].astype(np.float64), dt[::-1].astype(np.float64)
    of_x, of_v = 1 - dt, (1 + t) * dt
    if not noisy_end:
        of_x[0], of_v[0] = 1.0, dt[0]
    ones = np.ones(len(t))
    if clean:
        to_go = np.maximum(1 - t, LEAST_TO_GO)
        mean_x, mean_out, held = of_x - of_v / to_go, of_v / to_go, (0 * ones, ones)
    else:
        mean_x, mean_out, held = of_x, of_v, (ones, 1 - t)  # x_1 = x + (1 - t) v
    log_sigma = 0.5 * np.log(2 * (1 - t) * dt)
    return EulerMaruyama(
        timestep_map=time_factor * t,
        mean_x=mean_x,
        mean_eps=mean_out,
        log_sigma_base=log_sigma,
        log_sigma_slope=0 * ones,
        held_x=held[0],
        held_eps=held[1],
        clean=clean,
        time_factor=time_factor,
        end_sigma=float(np.exp(log_sigma[0])) if noisy_end else 0.0,
    )


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


# The head's modulations. They do not depend on the noisy token, so many timesteps are computed at once.

MODULATION_BYTES = 16 * 2**20  # computed at once on a CPU, so that they fit the cache
# and on a GPU, where products of this size are fast: a CUDA graph holds as much memory, and all graphs share little
GPU_BYTES, GPU_SHARE = 2**30, 1 / 64
TABLE_SHARE = 1 / 8  # of a device's memory: the most that a table of all steps may take


def modulation_size(head: Head) -> int:
    """Bytes of a row's modulations at one timestep."""
    if isinstance(head, Net):
        return Net.NO_TABLE
    return 4 * (3 * len(head.res_blocks) + 2) * head.width


def most_bytes(device: torch.device) -> int:
    """The most bytes that a table of modulations may take."""
    return int(TABLE_SHARE * all_bytes(device))


def table_bytes(device: torch.device) -> int:
    """The most bytes of modulations that are computed at once; longer chains compute them in chunks."""
    if device.type == "cpu":
        return MODULATION_BYTES
    return int(min(GPU_BYTES, GPU_SHARE * all_bytes(device)))


def is_full_call(i: int, num_calls: int, null_every: int) -> bool:
    """Whether call i of a chain of `num_calls` head calls, from 0, evaluates the unconditional branch too."""
    return i < 2 or i == num_calls - 1 or i % null_every == 0


def modulated(
    head: Head,
    z: Tensor,
    timesteps: Sequence[float],
    precision: Precision,
    branches: Sequence[int] | None = None,
    from_start: bool = True,
) -> Iterator[tuple[range, ReadyHead, Iterator]]:
    """The head's modulations at one timestep after another, computed for many calls at once.

    Args:
        z: conditions [G, R, D]. timesteps: N names of steps, in the order of the calls.
        branches: for each call, how many of z's G branches it evaluates, from the first; by default all.
        from_start: the first call is the chain's first, where errors grow most. It is alone and in float32, and should
            also be evaluated in float32.

    Yields:
        (range of calls, the head that evaluates them, the modulations of each call as `evaluate` takes them).
    """
    num_calls, branches = len(timesteps), tuple(branches or [len(z)] * len(timesteps))
    chunk = max(1, table_bytes(z.device) // (modulation_size(head) * z.shape[0] * z.shape[1]))
    call, branch = _evaluations(branches, z.device)
    end = [*itertools.accumulate(branches)]
    with precision.full():
        c_embed = head.cond_embed(z)
        t_embed = head.time_embed(on_device(tuple(np.asarray(timesteps).tolist()), z.device))
    begin = int(from_start)
    chunks = [range(i, min(i + chunk, num_calls)) for i in range(begin, num_calls, chunk)]
    for calls in [range(begin), *chunks] if from_start else chunks:
        is_first = from_start and calls[0] == 0
        own = list(branches[calls.start : calls.stop])
        which = slice(end[calls.stop - 1] - sum(own), end[calls.stop - 1])
        own_head = head if is_first else precision.prepare(head)
        with precision.full() if is_first else precision.fast():
            layers = own_head.split(own_head.modulations(t_embed[call[which]].unsqueeze(1), c_embed[branch[which]]))
        # from tensors over all calls to tuples of each call: views, made once for the chain
        split = [zip(*(modulation.split(own) for modulation in layer)) for layer in layers]
        by_call = zip(*split)
        del layers, split
        yield calls, own_head.ready(), by_call
        del by_call  # the caller has dropped them too: the next ones are as large


@functools.cache
def _evaluations(num_branches: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(call, branch) of each of the head's evaluations, int64 [sum of num_branches] each."""
    # Python numbers: torch.compile would trace NumPy's as unknown
    pairs = [(call, branch) for call, num in enumerate(num_branches) for branch in range(num)]
    calls, branches = zip(*pairs)
    return on_device(calls, device), on_device(branches, device)


# The chain as a sampler sees it.


class Inputs(NamedTuple):
    """R tokens to draw.

    Attributes:
        z: their conditions [G, R, D]: G = 1, or with guidance more, the unconditional branch last.
        scale: guidance [R, G - 1], see `guided`; [R, 1] and unused if G = 1. temperature: tau [R, 1].
        seed, position: int64 [R], the names of their noise.
    """

    z: Tensor
    scale: Tensor
    temperature: Tensor
    seed: Tensor
    position: Tensor


class Place(NamedTuple):
    """Where R tokens stand in their images; arrays int64 [R] on the CPU.

    Attributes:
        iteration, num_iter: the iteration that predicts the token, from 0, and the number of iterations.
        half: iterations that begin with less than half of the image's tokens. owner: the index of the image.
    """

    iteration: np.ndarray
    num_iter: np.ndarray
    half: np.ndarray
    owner: np.ndarray

    def at(self, which: np.ndarray) -> Place:
        return Place(*(values[which] for values in self))


@dataclass(frozen=True)
class Step:
    """A head call of a chain.

    Attributes:
        index: counts from 0, the noisiest. t: the step, T - 1 - index. timestep: the head's name of it.
    """

    index: int
    t: int
    timestep: float


class Observer:
    """Watches chains: audits, densities, traces. By default it does nothing."""

    def evaluated(self, chain: Chain, step: Step, x: Tensor, out: Prediction) -> None:
        """The head was evaluated at a state x [R, d] before a step."""

    def moved(self, chain: Chain, step: Step) -> None:
        """The chain took a step with its own noise eps_t; the last step adds none."""

    def skipped(self, chain: Chain, segment: Any, sources: Tensor, v: Tensor) -> Tensor | None:
        """The steps after a call were predicted, see `cspd.heads.calibrated`; may return the next state to take."""

    def verified(self, chain: Chain, ended: Any) -> None:
        """Speculative chains have ended, see `cspd.heads.speculative.Finished`."""


@dataclass
class Tally:
    """Head calls of a chain's tokens: `calls` one after the other, and `evaluations` of each token, all branches.

    `by_row` replaces both if they differ between tokens: int64 [2, R]. `parts` are the tallies of parts, with the
    indices of their rows. `drafted`: states that were verified, and accepted.
    """

    calls: int = 0
    evaluations: int = 0
    by_row: np.ndarray | None = None
    parts: list[tuple[np.ndarray, Tally]] = field(default_factory=list)
    drafted: tuple[int, int] = (0, 0)

    def of_rows(self, num_rows: int) -> np.ndarray:
        """(calls, evaluations) of each row, int64 [2, R]."""
        if self.by_row is not None:
            return self.by_row
        total = np.repeat([[self.calls], [self.evaluations]], num_rows, axis=1)
        for rows, part in self.parts:
            total[:, rows] += part.of_rows(len(rows))
        return total

    def of_owners(self, owner: np.ndarray, num_owners: int) -> np.ndarray:
        """The sequential calls that each owner's rows took part in, int64 [num_owners]; owner: int64 [R]."""
        total = np.full(num_owners, self.calls)
        if self.by_row is not None:
            np.maximum.at(total, owner, self.by_row[0])
        for rows, part in self.parts:
            total[np.unique(owner[rows])] += part.calls
        return total


def run_it(chain: Chain, function: Callable[[Chain], Tensor]) -> Tensor:
    """Runs a sampler as it is."""
    return function(chain)


@dataclass(eq=False)
class Chain:
    """R tokens under one head, on the way from noise to data: what a sampler is given.

    A sampler is a function of a chain that returns tokens [R, d]. All that it needs is here:

        x = chain.start()
        for step in chain.steps:
            x = chain.move(x, step, chain.evaluate(x, step))

    Attributes:
        head: with the interface of `mar.head.Head`. schedule: its chain. inputs: the tokens.
        noise: the source of random numbers, with functions as in `cspd.noise`. precision: how the head computes; the
            first call is in float32.
        noise_index: of the noise, see `cspd.noise.initial`.
        observers: are told of every evaluation. fitted: the fits of a sampler with `fit=True`.
        place: where the tokens stand in their images, if it is known.
        run: runs a sampler on a part of the rows, for example as a CUDA graph.
        rows: indices of the rows in the whole chain, int64 [R] on the device; None if this is the whole chain.
        tally: counts head calls.
    """

    head: Any
    schedule: Schedule
    inputs: Inputs
    noise: Any
    precision: Precision
    noise_index: int = 0
    observers: Sequence[Observer] = ()
    fitted: Any = None
    place: Place | None = None
    run: Callable[[Chain, Callable[[Chain], Tensor]], Tensor] = run_it
    rows: Tensor | None = None
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.constants = chain_steps(self.schedule, self.z.device)
        self._expected: deque[tuple[float, int]] = deque()  # of the calls to come: timestep, and branches
        self._ahead: Iterator[tuple[ReadyHead, Any]] = iter(())
        self._added: Tensor | None = None  # tau sigma_t eps_t [T, R, d]

    def __len__(self) -> int:
        return len(self.schedule)

    @property
    def z(self) -> Tensor:
        return self.inputs.z

    @functools.cached_property
    def steps(self) -> list[Step]:
        """The steps, the noisiest first."""
        last = len(self) - 1
        return [Step(index, last - index, timestep) for index, timestep in enumerate(self.constants.timesteps)]

    def start(self) -> Tensor:
        """Pure noise x_T [R, d]."""
        _, _, _, seed, position = self.inputs
        return self.noise.initial(seed, position, self.head.channels, self.noise_index)

    @functools.cached_property
    def eps(self) -> Tensor:
        """The noise eps_t [T, R, d] of all steps, in their order."""
        _, _, _, seed, position = self.inputs
        return self.noise.steps(seed, position, self.constants.t, self.head.channels, self.noise_index)

    def expect(self, calls: Sequence[tuple[Step, bool]]) -> None:
        """Announces head calls, as (step, guided), so that their modulations are computed together.

        A call of `steps` that was not announced is followed, it is supposed, by all later steps, guided as it is.
        """
        timesteps = [step.timestep for step, _ in calls]
        branches = [len(self.z) if is_guided else 1 for _, is_guided in calls]
        chunks = modulated(self.head, self.z, timesteps, self.precision, branches, calls[0][0].index == 0)
        self._expected, self._ahead = deque(zip(timesteps, branches)), _one_by_one(chunks)

    def evaluate(self, x: Tensor, step: Step, guided: bool = True) -> Prediction:
        """The head's outputs at states x [R, d] before a step; without guidance, of the conditional branch alone."""
        head, modulations = self.call(step, guided)
        return self._observed(x, step, Prediction(self.inputs.scale, pending=(head, x, modulations)))

    def call(self, step: Step, guided: bool = True) -> tuple[ReadyHead, Any]:
        """The head and the modulations of a call, which is counted: for samplers that look inside the head."""
        branches = len(self.z) if guided else 1
        if not self._expected or self._expected[0] != (step.timestep, branches):
            following = self.steps[step.index :]
            if following[:1] != [step]:  # a call of `calls_at`
                following = [step]
            self.expect([(each, guided) for each in following])
        self._expected.popleft()
        self.tally.calls += 1
        self.tally.evaluations += branches
        return next(self._ahead)

    def predicted(self, x: Tensor, step: Step, raw: Tensor) -> Prediction:
        """Outputs [G, R, 2d] that were found in another way, in place of `evaluate`."""
        return self._observed(x, step, Prediction(self.inputs.scale, raw))

    def _observed(self, x: Tensor, step: Step, out: Prediction) -> Prediction:
        if step.index == 0:
            with self.precision.full():
                out.raw  # noqa: B018 - computes it
        for observer in self.observers:
            observer.evaluated(self, step, x, out)
        return out

    def move(self, x: Tensor, step: Step, out: Prediction) -> Tensor:
        """The state after a step: mean + tau sigma eps_t; the last step adds no noise."""
        if self._added is None:
            self._added = self.eps * (self.constants.sigma * self.inputs.temperature)
        for observer in self.observers:
            observer.moved(self, step)
        at, added = step.index, self._added[step.index]
        mean_x, mean_eps, slope = self.constants.mean_x[at], self.constants.mean_eps[at], self.constants.slope[at]
        fused = driver.step(x, out, added, mean_x, mean_eps, slope)
        if fused is not None:
            return fused
        mean = torch.add(x * mean_x, out.eps, alpha=mean_eps)
        return torch.addcmul(mean, torch.exp(out.v * slope), added)

    def velocity(self, x: Tensor, step: Step, out: Prediction) -> Tensor:
        """dx / dt at a state x [R, d], of a head that is a stochastic differential equation."""
        s: Any = self.schedule
        return (out.eps - x) / max(1 - step.timestep / s.time_factor, LEAST_TO_GO) if s.clean else out.eps

    def calls_at(self, times: Sequence[float]) -> list[Step]:
        """Head calls at times of one's own, 0..1, of a head that is a stochastic differential equation."""
        s: Any = self.schedule
        calls = [Step(index, len(times) - 1 - index, s.time_factor * time) for index, time in enumerate(times)]
        self.expect([(call, True) for call in calls])
        return calls

    def respaced(self, schedule: Schedule) -> Chain:
        """The same tokens by other steps."""
        return replace(self, schedule=schedule)

    def over(self, inputs: Inputs) -> Chain:
        """The same chain with other tensors, counted by itself."""
        return replace(self, inputs=inputs, tally=Tally())

    def part(self, which: np.ndarray, schedule: Schedule) -> Chain:
        """The rows `which`, int64 [n] on the CPU, by other steps; they are counted by themselves."""
        index, tally = send_integers(which, self.z.device), Tally()
        self.tally.parts.append((which, tally))
        z, *others = self.inputs
        return replace(
            self,
            schedule=schedule,
            inputs=Inputs(z[:, index].contiguous(), *(values[index] for values in others)),
            place=self.place and self.place.at(which),
            rows=index if self.rows is None else self.rows[index],
            tally=tally,
        )


def _one_by_one(chunks: Iterator[tuple[range, ReadyHead, Iterator]]) -> Iterator[tuple[ReadyHead, Any]]:
    """(head, modulations) of each call of `modulated`; nothing of a chunk is held when the next one is made."""
    for _, head, by_call in chunks:
        for modulations in by_call:
            yield head, modulations
            del modulations
        del by_call
