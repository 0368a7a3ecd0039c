"""The cached head of LazyMAR (arXiv 2503.12450): most denoising steps reuse what the head's blocks added. Heuristic.

A head call adds the residual blocks' updates to the projected token, and a last layer makes (eps, v) of the sum. After
the first tenth of the steps, the blocks are evaluated at one step of `reuse` only; the others add the same updates to
their own projected token, and evaluate the last layer at their own timestep. They leave out the null class: how far its
output is from the class's is taken from the last step that evaluated both.

The authors' code evaluates the blocks at the first step and at those that 7 divides. At the others it reuses the
updates of the second to the fifth block only, and of the rest what is inside the gate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from cspd.continuous import ancestral
from cspd.continuous.denoiser import ContinuousHost, Denoised, denoiser
from cspd.continuous.modulations import modulated, on_device, table_bytes
from cspd.continuous.rows import Rows
from cspd.option import Option
from cspd.precision import Precision
from mar.head import Head

REUSE = Option(
    "reuse",
    int,
    "after a tenth of the denoising steps, evaluate the head's blocks only at every N-th",
    default=8,
    low=1,
    metavar="N",
)


def evaluated_calls(num_calls: int, reuse: int) -> np.ndarray:
    """Those of so many head calls, from 0, that evaluate the blocks: the first tenth, then one of `reuse`."""
    warmup = -(-num_calls // 10)
    return np.r_[0:warmup, warmup:num_calls:reuse]


def outputs(
    head: Head, z: Tensor, timesteps: Sequence[int], precision: Precision, *, reuse: int
) -> Iterator[tuple[range, Iterator[Callable[[Tensor], Tensor]]]]:
    """As `ancestral.every_output`, but that only some calls evaluate the blocks, of both classes."""
    evaluated = evaluated_calls(len(timesteps), reuse)
    ends = np.append(evaluated[1:], len(timesteps))
    with precision.full():
        c_embed = head.cond_embed(z[:1])
    for some, own_head, by_call in modulated(head, z, [timesteps[call] for call in evaluated], precision):
        calls = range(evaluated[some[0]], ends[some[-1]])
        others = np.setdiff1d(calls, evaluated)
        last_layers = _last_layers(head, c_embed, tuple(timesteps[call] for call in others), precision)
        reusing = (itertools.islice(last_layers, ends[i] - evaluated[i] - 1) for i in some)
        yield calls, itertools.chain.from_iterable(map(_outputs, itertools.repeat(own_head), by_call, reusing))
        del by_call


@functools.cache  # one function, so that it can be known again
def _reusing(reuse: int) -> ancestral.Outputs:
    return functools.partial(outputs, reuse=reuse)


def _last_layers(head: Head, c_embed: Tensor, timesteps: tuple[int, ...], precision: Precision) -> Iterator[tuple]:
    """The last layer's modulations of the class at each of some timesteps, in tables as `modulated` has."""
    with precision.full():
        t_embed = head.time_embed(on_device(timesteps, c_embed.device))
    head = precision.prepare(head)
    chunk = max(1, table_bytes(c_embed.device) // (4 * 2 * head.width * c_embed.shape[1]))
    for some in t_embed[:, None, None].split(chunk):
        with precision.fast():
            (last,) = head.split(head.modulations(some, c_embed, with_blocks=False))
        yield from zip(*(each.unbind(0) for each in last))


def _outputs(head: Head, modulations: Sequence[tuple], last_layers: Iterator[tuple]) -> Iterator:
    """A call's output [G, R, 2d], and those of the calls that reuse its updates, as functions of the noisy tokens."""
    updates, distance = [], []

    def evaluate(x: Tensor) -> Tensor:
        start = head.input_proj(x)
        end = head.through_blocks(start, modulations)
        out = head.final_layer(end, *modulations[-1])
        updates.append(end[:1] - start)
        distance.append(out - out[:1])
        return out

    def reuse(last_layer: tuple, x: Tensor) -> Tensor:
        return head.final_layer(head.input_proj(x) + updates[0], *last_layer) + distance[0]

    yield evaluate
    yield from (functools.partial(reuse, last_layer) for last_layer in last_layers)


@denoiser(
    "cached",
    options=(REUSE, *ancestral.OPTIONS),
    mixed=ancestral.MIXED,
    check=ancestral.check,
    advice=ancestral.advice,
)
def denoise(
    host: ContinuousHost, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Every token by the ancestral chain; arguments as in `cspd.continuous.denoiser`.

    Only the calls that evaluate the blocks are counted.
    """
    request = rows.sequences[0].request
    made = ancestral.denoise(host, model, rows, z, index=index, densities=densities, outputs=_reusing(request.reuse))
    head_calls = len(evaluated_calls(request.num_sampling_steps, request.reuse))
    calls = np.full(len(rows.seed), head_calls)
    return dataclasses.replace(made, calls=calls, head_calls=head_calls, evaluations=calls * len(z))
