"""The head's modulations, of many timesteps at once: they do not depend on the noisy token."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cspd.precision import Precision
from mar.head import Head

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
    head: Head, z: Tensor, timesteps: Sequence[int], precision: Precision, classes: Sequence[int] | None = None
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
