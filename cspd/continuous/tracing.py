"""Chains of the sampler's own, which predictions of the head are fitted to and measured on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cspd.continuous import ancestral, ar
from cspd.continuous.denoiser import ContinuousHost, Denoised, MakeHost
from cspd.continuous.rows import Rows
from cspd.precision import Precision, Stopwatch
from cspd.sequence import Request, Sequence
from cspd.telling import Advance, no_advance

TRACE_TOKENS, TRACE_ITERATIONS, TRACE_SEED = 256, 8, 2**40  # what a fit sees: the sampler's own tokens


class Trace(NamedTuple):
    """Ancestral chains of N tokens, on the CPU.

    Attributes:
        x, eps, v: [T, N, d], by step, inputs, guided noise predictions and variance channels. tokens: [N, d].
        z: [G, N, D]. seed, position: int64 [N], of their noise. scale, temperature: [N, 1].
    """

    x: Tensor
    eps: Tensor
    v: Tensor
    tokens: Tensor
    z: Tensor
    seed: Tensor
    position: Tensor
    scale: Tensor
    temperature: Tensor

    @property
    def chains(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.eps, self.v

    def to(self, device: torch.device) -> Trace:
        return Trace(*(values.to(device) for values in self))

    def finite(self) -> Trace:
        """The tokens whose chains are finite throughout. Raises ValueError where none is."""
        right = torch.stack([values.isfinite().all(2).all(0) for values in self.chains]).all(0)
        which = (right & self.tokens.isfinite().all(1)).nonzero().squeeze(1)
        if not len(which):
            raise ValueError(
                f"all of {len(right)} chains left the numbers of float32, so there is nothing to fit: look at cfg,"
                f" temperature, num_sampling_steps={len(self.x)} and the weights"
            )
        return Trace(*(_of_tokens(values, which) for values in self))


def _of_tokens(values: Tensor, which: Tensor) -> Tensor:
    """Some tokens of a field of `Trace`: they are its last dimension but one, or its only one."""
    return values.index_select(max(0, values.dim() - 2), which)


def num_traced(length: int, device: torch.device) -> int:
    """Images of L tokens that a trace takes: two at least, but on a CPU, where a large model would take minutes."""
    return max(1 if device.type == "cpu" else 2, -(-TRACE_TOKENS // length))


def trace(
    model: Any,
    request: Request,
    device: torch.device,
    precision: Precision,
    make_host: MakeHost,
    held_out: bool = False,
    advance: Advance = no_advance,
) -> Trace:
    """256 tokens of the sampler's own, labels and iterations mixed; `held_out`: others, of other labels and seeds.

    `advance` is told of its parts, 1 in all.
    """
    length, num_classes = model.config.seq_len, model.config.class_num
    num_images = num_traced(length, device)
    spread = max(1, num_classes // num_images)  # between the labels
    first = num_images if held_out else 0
    common = {"num_iter": min(TRACE_ITERATIONS, length), "cfg": request.cfg, "cfg_schedule": request.cfg_schedule}
    common |= {"temperature": request.temperature, "num_sampling_steps": request.num_sampling_steps}
    batch = []
    for i in range(num_images):
        label = (i * spread + bool(first)) % num_classes
        batch.append(Sequence(Request(label, TRACE_SEED + first + i, "ar", **common), ticket=i, slot=i))
    host, watch = make_host(model, num_images, device, precision), Stopwatch(device)
    host.admit(batch)
    parts: list[Trace] = []
    share = 1 / (common["num_iter"] * request.num_sampling_steps)
    traced = functools.partial(_traced, parts, lambda: advance(share))
    for _ in range(common["num_iter"]):
        ar.run_round(host, batch, watch, denoise=traced)
    return Trace(*(torch.cat(of_all, dim=max(0, of_all[0].dim() - 2)) for of_all in zip(*parts)))  # over the tokens


def _traced(
    parts: list[Trace], advance: Callable[[], None], host: ContinuousHost, model: str, rows: Rows, z: Tensor
) -> Denoised:
    """The ancestral chains of an iteration's rows, which are added to `parts`; `advance` is told of each step."""
    steps: list[Tensor] = []

    def keep(t: int, x: Tensor, eps: Tensor, v: Tensor) -> None:
        steps.append(torch.stack([x, eps, v]))
        advance()

    made = ancestral.denoise(host, model, rows, z, trace=keep)
    steps.reverse()  # they ran from T - 1 down to 0
    x, eps, v = torch.stack(steps, dim=1)
    whole = Trace(x, eps, v, made.tokens, z, rows.seed, rows.position, rows.scale, rows.temperature)
    parts.append(whole.to(torch.device("cpu")))
    return made
