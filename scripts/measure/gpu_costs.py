"""Predicts MAR's time on a GPU from counts of launches, bytes, operations and waits. Nothing here was measured.

python scripts/measure/gpu_costs.py          prints the table
python scripts/measure/gpu_costs.py --write  puts it into docs/gpu.md
python scripts/measure/gpu_costs.py --measured gpu/fast.json  prints it with times of `cspd gpu-check fast` beside them
python scripts/measure/gpu_costs.py --plan   prints the plans of `budget` that the table assumes (minutes on first use)
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tabulate import tabulate

import cspd
from cspd import Request
from cspd.heads.speculative import PASSES
from cspd.masked.backbones import FRACTIONS, MIN_SELECTED, SELECTING, full_iterations
from cspd.masked.orders import cosine
from cspd.masked.plan import LAZY, best_plan, chain_seconds
from cspd.terminal import number_list
from cspd.tuner import Times
from mar.checkpoint import MARS
from mar.model import MARConfig

DOCS = Path(__file__).parents[2] / "docs" / "gpu.md"
STEPS = 100  # T
SIZES = {"B": "mar_base", "L": "mar_large", "H": "mar_huge"}
BATCHES, ITERATIONS = (1, 8, 64), (64, 16)
HEAD_CALLS = 10  # N of `calibrated`
CALLS = {12: 11.4, 24: 8.2}  # head calls per token by W, of `digits32` with guidance: docs/results.md
# by K, the plan of `--budget 0.3` that --plan prints: iterations that begin a round, rounds that evaluate the whole
# transformer, head calls, and how many of these there are for one of both branches
PLANS = {
    64: ("0,4,8,13,17,21,25,29,32,35,37,40,43,46,49,52,55,58,60,62", "0,6,11,15", 32, 2),
    16: ("0,2,4-15", "0,6,11", 32, 4),
}
LONGEST = 1.08  # rounds of the slowest token of an iteration, over the mean of tokens

# The least work of an image: floating-point operations, and bytes between memory and processors.
#
# Only matrix products, attention and the head's modulations are counted; each operand is read once and each result
# written once. Everything else could be fused with them. `size` is the bytes of a number.


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes: numbers, or arrays [K] with an entry for each iteration."""

    flops: float | np.ndarray = 0.0
    bytes: float | np.ndarray = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.bytes * times)

    def sum(self) -> Work:
        """The work of all iterations."""
        return Work(float(np.sum(self.flops)), float(np.sum(self.bytes)))


def product(rows: float | np.ndarray, inner: int, outer: int, size: int) -> Work:
    """[rows, inner] times weights [inner, outer]."""
    numbers = rows * inner + inner * outer + rows * outer
    return Work(flops=2 * rows * inner * outer, bytes=size * numbers)


class Layers(NamedTuple):
    """Layers of a transformer: how many, the tokens that each computes, and those that they attend to."""

    number: int
    tokens: float | np.ndarray
    attended: float | np.ndarray

    def work(self, dim: int, sequences: float, size: int) -> Work:
        pairs, numbers = self.tokens * self.attended, self.tokens + self.attended  # queries, results; keys, values
        layer = Work(flops=4 * sequences * pairs * dim, bytes=size * 2 * sequences * numbers * dim)
        for inner, outer in ((dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim)):
            layer += product(sequences * self.tokens, inner, outer, size)
        return layer * self.number


def full_layers(config: MARConfig, committed: float | np.ndarray) -> list[Layers]:
    """A call of MAR's encoder, over the committed tokens, and of its decoder, over all tokens."""
    encoded, everywhere = config.buffer_size + committed, config.buffer_size + config.seq_len
    return [Layers(config.depth, encoded, encoded), Layers(config.depth, everywhere, everywhere)]


def lazy_layers(config: MARConfig, committed: np.ndarray, tokens: np.ndarray, retain: float) -> list[Layers]:
    """A lazy call of the cached backbone in each iteration [K]; see `cspd.masked.backbones`."""
    encoded, everywhere = config.buffer_size + committed, config.buffer_size + config.seq_len
    new = np.diff(committed, prepend=0.0)
    retained = retain * FRACTIONS[len(FRACTIONS) * np.arange(len(tokens)) // len(tokens)] * everywhere
    selected = tokens + np.maximum(retained - tokens, new + MIN_SELECTED * everywhere)
    selecting = min(SELECTING, config.depth // 2)
    return [
        Layers(config.depth, config.buffer_size + new, encoded),
        Layers(selecting, everywhere, everywhere),
        Layers(config.depth - selecting, np.minimum(selected, everywhere), everywhere),
    ]


def modulation_floats(config: MARConfig) -> int:
    """Numbers that modulate a row of a head call."""
    return (3 * config.diffloss_d + 2) * config.diffloss_w


def modulations(config: MARConfig, rows: float | np.ndarray, size: int) -> Work:
    """Computing the modulations of some rows from their conditions."""
    return product(rows, config.diffloss_w, modulation_floats(config), size)


def denoise(config: MARConfig, rows: float | np.ndarray, size: int) -> Work:
    """A head call of some rows whose modulations exist."""
    width = config.diffloss_w
    work = product(rows, width, width, size) * (2 * config.diffloss_d)
    work += product(rows, config.token_dim, width, size)
    work += product(rows, width, 2 * config.token_dim, size)  # eps and v
    modulation_bytes = size * rows * modulation_floats(config)
    return work + Work(bytes=modulation_bytes)


def iterations(num_iter: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens committed before each of MAR's iterations, and generated in it, float64 [K]."""
    masked, _ = cosine(num_iter, seq_len)
    before = np.concatenate([[seq_len], masked[:-1]]).astype(np.float64)
    return seq_len - before, before - masked


@dataclass(frozen=True)
class Device:
    """The constants of a GPU and its CPU.

    Attributes:
        launch: seconds of the CPU per kernel. replay: seconds of the CPU per graph.
        wait: seconds lost each time the CPU waits for the GPU.
        kernel: seconds that a small kernel takes on the GPU, also in a graph: 2 us if it works on each number for
            itself, and 3 to 5 us for the product of a few rows, which reads its weights with few of the processors.
            About half of the kernels are products.
        bandwidth: bytes per second, nine tenths of the H200's. peak: operations per second: large products reach half
            of the H200's.
        size: bytes of a number in matrix products and in the table of modulations.
    """

    launch: float = 5e-6
    wait: float = 10e-6
    kernel: float = 3.5e-6
    replay: float = 10e-6
    bandwidth: float = 4.3e12
    peak: float = 500e12
    size: int = 2


H200 = Device()


@dataclass(frozen=True)
class Kernels:
    """The number of kernels of each piece of work, as (fixed, per layer), and of waits of the CPU.

    Attributes:
        backbone: a call; layers are those of encoder and decoder.
        step: a denoising step whose modulations are there; layers are the blocks of the head.
        window: a call of `calibrated`. round: of speculation, half of a launch.
        start, join: the work before an iteration's first step, and before its first round.
        published_backbone, published_step: the same for the released sampler.
        glue: the work between graphs: copies to and from their inputs, and to the CPU, indices, commits. It is launched
            kernel by kernel, in an iteration and in a launch of `PASSES` rounds.
        elementwise: bytes that the operations between products move for each channel of a token in a layer of the
            backbone, and of the head. Products take 16-bit numbers. The backbone's other numbers have 32 bits: GELU
            moves 16 bytes; adding to the residual 10, a norm and its cast 14, twice, or 12 if a kernel does both. In
            the head, our kernels move 8 bytes between two blocks and 4 inside one.
        gathers: how often a round's modulations are read or written before its head call reads them.
        waits: per iteration. published_waits: per step of the released sampler.
    """

    backbone: tuple[int, int] = (30, 8)
    step: tuple[int, int] = (1, 4)
    window: tuple[int, int] = (2, 4)
    round: tuple[int, int] = (10, 4)
    start: tuple[int, int] = (32, 6)
    join: tuple[int, int] = (35, 8)
    published_backbone: tuple[int, int] = (33, 10)
    published_step: tuple[int, int] = (63, 9)
    glue: tuple[int, int] = (14, 8)
    elementwise: tuple[int, int] = (40, 12)
    gathers: int = 0
    waits: int = 1
    published_waits: int = 9


KERNELS = Kernels()  # with the package's own kernels
PYTORCH = Kernels(
    backbone=(30, 12),
    step=(10, 6),
    window=(14, 6),
    round=(76, 6),
    start=(219, 6),
    join=(144, 10),
    elementwise=(64, 38),
    gathers=2,
)


def count(kernels: tuple[int, int], layers: int) -> int:
    """The number of kernels for a number of layers."""
    fixed, per_layer = kernels
    return fixed + per_layer * layers


@dataclass(frozen=True)
class Piece:
    """A part of every iteration: its kernels, their work [K], the waits of the CPU, and the number of repetitions.

    `fits_graph` is false for kernels that are launched one by one also with graphs.
    """

    kernels: float
    work: Work
    times: float = 1.0
    waits: float = 0.0
    fits_graph: bool = True

    def on_device(self, device: Device) -> np.ndarray:
        """Seconds of the GPU: the time of its smallest kernels, or of the work if that takes longer."""
        work = self.work.flops / device.peak + self.work.bytes / device.bandwidth
        return self.times * np.maximum(self.kernels * device.kernel, work)

    def on_host(self, device: Device, graphs: bool) -> float:
        """Seconds of the CPU to launch the kernels, or one graph of them."""
        return self.times * (device.replay if graphs and self.fits_graph else self.kernels * device.launch)


def as_one(chain: Piece) -> Piece:
    """A chain as one piece: the CPU does nothing between its steps, so that one graph can have all of them."""
    return Piece(chain.kernels * chain.times, chain.work * chain.times)


def seconds(pieces: list[Piece], device: Device, graphs: bool) -> np.ndarray:
    """Seconds of each iteration, [K]: the CPU launches ahead of the GPU except at waits, of which graphs have none."""
    busy = sum(piece.on_device(device) for piece in pieces)
    launching = sum(piece.on_host(device, graphs) for piece in pieces)
    waiting = 0.0 if graphs else device.wait * sum(piece.times * piece.waits for piece in pieces)
    return np.maximum(busy, launching) + waiting


class Iterations(NamedTuple):
    """The iterations of an image, with the numbers of known and of predicted tokens [K], in a batch, with guidance."""

    config: MARConfig
    known: np.ndarray
    tokens: np.ndarray
    batch: int
    device: Device
    kernels: Kernels
    graphs: bool

    def z(self, kernels: tuple[int, int], waits: float) -> Piece:
        """The backbone's call."""
        work = self._backbone(full_layers(self.config, self.known), 2 * self.batch)
        return Piece(count(kernels, 2 * self.config.depth), work, waits=waits)

    def cached_z(self, is_full: np.ndarray, retain: float) -> Piece:
        """The cached backbone's call: lazy, of one branch, where it is not full."""
        full = self._backbone(full_layers(self.config, self.known), 2 * self.batch)
        lazy = self._backbone(lazy_layers(self.config, self.known, self.tokens, retain), self.batch)
        work = Work(np.where(is_full, full.flops, lazy.flops), np.where(is_full, full.bytes, lazy.bytes))
        return Piece(count(self.kernels.backbone, 2 * self.config.depth), work, waits=self.kernels.waits)

    def _backbone(self, layers: list[Layers], sequences: float) -> Work:
        work = Work()
        for each in layers:
            work += each.work(self.config.embed_dim, sequences, self.device.size)
            rows = sequences * each.tokens * each.number
            work += Work(bytes=self.kernels.elementwise[0] * self.config.embed_dim * rows)
        return work

    def joined(self, starts: list[int]) -> Iterations:
        """The rounds that begin at some iterations; each draws the tokens of the iterations up to the next one."""
        return self._replace(known=self.known[starts], tokens=np.add.reduceat(self.tokens, starts))

    def table(self, kernels: tuple[int, int], num_steps: int, classes: float = 2.0) -> Piece:
        """The modulations of `num_steps` steps, and the other work before the first step."""
        rows = classes * self.batch * self.tokens * num_steps
        return Piece(count(kernels, self.config.diffloss_d), modulations(self.config, rows, self.device.size))

    def call(self, kernels: tuple[int, int], times: float, states: float = 1.0, classes: float = 2.0) -> Piece:
        """Head calls, `times` of them, with a number of states per token."""
        rows = classes * self.batch * self.tokens * states
        work = denoise(self.config, rows, self.device.size)
        work += Work(bytes=self.kernels.elementwise[1] * self.config.diffloss_w * self.config.diffloss_d * rows)
        return Piece(count(kernels, self.config.diffloss_d), work, times)

    def glue(self, times: float = 0.0) -> Piece:
        """The work between graphs, with `times` launches of rounds."""
        per_iteration, per_launch = self.kernels.glue
        return Piece(per_iteration + times * per_launch, Work(bytes=np.zeros_like(self.tokens)), fits_graph=False)


def published(of: Iterations) -> list[Piece]:
    kernels = of.kernels
    step = of.call(kernels.published_step, STEPS)
    repeated = modulations(of.config, 2 * of.batch * of.tokens, of.device.size)
    return [
        of.z(kernels.published_backbone, waits=1),
        replace(step, work=step.work + repeated, waits=kernels.published_waits),
    ]


def ar(of: Iterations) -> list[Piece]:
    chain = of.call(of.kernels.step, STEPS)
    table = of.table(of.kernels.start, STEPS)
    return [of.z(of.kernels.backbone, of.kernels.waits), table, as_one(chain), of.glue()]


def calibrated(of: Iterations, head_calls: int = HEAD_CALLS, null_every: int = 2) -> list[Piece]:
    """The unconditional branch is evaluated at every `null_every`-th call only."""
    classes = 1 + 1 / null_every
    chain = of.call(of.kernels.window, head_calls, classes=classes)
    table = of.table(of.kernels.start, head_calls, classes=classes)
    return [of.z(of.kernels.backbone, of.kernels.waits), table, as_one(chain), of.glue()]


def ddim(of: Iterations) -> list[Piece]:
    chain = of.call(of.kernels.step, HEAD_CALLS)
    return [
        of.z(of.kernels.backbone, of.kernels.waits),
        of.table(of.kernels.start, HEAD_CALLS),
        as_one(chain),
        of.glue(),
    ]


def lazymar(of: Iterations) -> list[Piece]:
    """As `lazymar` is by default: the head's blocks at a tenth of the steps, and then at every eighth."""
    num_iter = len(of.tokens)
    is_full = np.array(full_iterations(None, warmup=5, refresh=9, num_rounds=num_iter))
    blocks = of.call(of.kernels.step, STEPS / 10 + STEPS * 0.9 / 8)
    others = replace(of.call((of.kernels.step[0], 0), STEPS * 0.9 * 7 / 8), work=Work(bytes=np.zeros_like(of.tokens)))
    table = of.table(of.kernels.start, STEPS)
    return [of.cached_z(is_full, retain=1.0), table, as_one(blocks), as_one(others), of.glue()]


def budget(of: Iterations) -> list[Piece]:
    rounds, refreshes, head_calls, null_every = PLANS[len(of.tokens)]
    own = of.joined(number_list(rounds))
    is_full = np.isin(np.arange(len(own.tokens)), number_list(refreshes))
    _, *head = calibrated(own, head_calls, null_every)
    return [own.cached_z(is_full, retain=0.0), *head]


def speculative(window: int, of: Iterations) -> list[Piece]:
    # the CPU learns a launch late that the chains have ended: see `cspd.heads.speculative.PASSES`
    idle = 1.5 * (PASSES if of.graphs else 1) - 0.5
    a_round = of.call(of.kernels.round, LONGEST * CALLS[window] - 1 + idle, states=window)
    floats = 2 * of.batch * of.tokens * window * modulation_floats(of.config)
    gathered = Work(bytes=of.kernels.gathers * of.device.size * floats)
    return [
        of.z(of.kernels.backbone, of.kernels.waits),
        of.table(of.kernels.join, STEPS),
        replace(a_round, work=a_round.work + gathered),
        of.glue(a_round.times / PASSES),
    ]


def plan(num_iter: int) -> dict:
    """The settings of `--budget 0.3` for MAR-L at batch 64 with linear guidance, at the prices of `digits32`."""
    request = Request(0, method="budget", budget=0.3, num_iter=num_iter, cfg=3.0, cfg_schedule="linear")
    with cspd.load("digits32", device="cpu") as engine:
        request = engine.check(request)
        prices = engine.runner.tuning.prices(request)
    config, batch = MARS["mar_large"].config, 64
    of = Iterations(config, *iterations(num_iter, config.seq_len), batch, H200, KERNELS, graphs=True)
    numbers = 1 + np.arange(num_iter)
    is_never = np.zeros(num_iter, bool)
    times = Times({"full": np.array([numbers, of.z(KERNELS.backbone, 0).on_device(H200)])})
    for i, lazy in enumerate(LAZY):
        times[f"lazy {i}"] = np.array([numbers, of.cached_z(is_never, float(str(lazy["retain"]))).on_device(H200)])
    rows = 4.0 ** np.arange(8)
    for name, classes in (("both", 2.0), ("one", 1.0)):
        alone = of._replace(known=np.zeros_like(rows), tokens=rows, batch=1)
        call = [alone.call(KERNELS.window, 1.0, classes=classes), alone.table((0, 0), 1, classes)]
        times[name] = np.array([rows, sum(piece.on_device(H200) for piece in call)])
    exact_head = float(chain_seconds(times, of.tokens * batch, STEPS, 0).sum())
    return best_plan(request, prices, times, of.tokens, batch, exact_head).settings


METHODS: dict[str, Callable[[Iterations], list[Piece]]] = {
    "published": published,
    "ar": ar,
    **{f"speculative W={window}": functools.partial(speculative, window) for window in CALLS},
    f"calibrated N={HEAD_CALLS}": calibrated,
    f"ddim N={HEAD_CALLS}": ddim,
    "lazymar": lazymar,
    "budget 0.3": budget,
}


def image_ms(
    size: str, batch: int, num_iter: int, method: str, graphs: bool, device: Device = H200, kernels: Kernels = KERNELS
) -> float:
    """Milliseconds per image."""
    config = MARS[SIZES[size]].config
    of = Iterations(config, *iterations(num_iter, config.seq_len), batch, device, kernels, graphs)
    pieces = METHODS[method](of)
    return 1000 * float(seconds(pieces, device, graphs).sum()) / batch


# how `cspd gpu-check fast` calls them; its times include decoding, which is not predicted
MEASURED = {"published": "authors' code", "speculative W=12": "speculative", f"calibrated N={HEAD_CALLS}": "calibrated"}


def table(measured: dict[str, dict] | None = None) -> str:
    """The predictions as Markdown: MAR's sampler with PyTorch's operations, ours with our kernels in graphs.

    `measured`: cases of `cspd gpu-check fast`, whose milliseconds are written in parentheses.
    """
    rows = []
    for size in SIZES:
        for batch in BATCHES:
            for num_iter in ITERATIONS:
                cells = []
                for method in METHODS:
                    is_ours = method != "published"
                    kernels = KERNELS if is_ours else PYTORCH
                    cell = f"{image_ms(size, batch, num_iter, method, is_ours, kernels=kernels):.0f}"
                    case = f"MAR-{size}, batch {batch}: {MEASURED.get(method, method)}"
                    ms = (measured or {}).get(case, {}).get("ms")
                    cells.append(cell if ms is None else f"{cell} ({ms:.0f})")
                rows.append([size, batch, num_iter, *cells])
    return tabulate(rows, ["MAR", "batch", "K", *METHODS], tablefmt="pipe", disable_numparse=True)


def written(text: str) -> str:
    """A page with the current table."""
    before, rest = text.split("<!-- predicted -->")
    _, after = rest.split("<!-- /predicted -->")
    return f"{before}<!-- predicted -->\n\n{table()}\n\n<!-- /predicted -->{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="a report of `cspd gpu-check fast`")
    parser.add_argument("--plan", action="store_true", help="print the plans of `budget` for the table")
    args = parser.parse_args()
    if args.plan:
        for num_iter in ITERATIONS:
            print(num_iter, plan(num_iter))
    elif args.write:
        DOCS.write_text(written(DOCS.read_text()))
    else:
        print(table(json.loads(args.measured.read_text())["cases"] if args.measured else None))


if __name__ == "__main__":
    main()
