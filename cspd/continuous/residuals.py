"""The states of chains that wait, since `gaussian.resample` left them open."""

from __future__ import annotations

import types

from torch import Tensor

from cspd.continuous import gaussian
from cspd.continuous.gaussian import residual
from cspd.continuous.slots import FALLBACKS, MEAN_P, NOBODY, TRIES, WAITING, Slots


def draw_residual(
    slots: Slots, noise: types.ModuleType, offset: int, first: int, max_tries: int, rows: Tensor
) -> Tensor:
    """Draws the states that chains in slots `rows`, int64 [R], wait for; those that get one go on.

    Of the first candidates alone it is a function of fixed shape, which reads nothing from the device.

    Args:
        noise, offset: of the candidates, see `cspd.noise.candidates`. first, max_tries: which candidates, see
            `gaussian.first_kept`. If they are the last that there are, all chains go on.

    Returns:
        The chains' progress, see `Slots`: int64 [R, 4].
    """
    state, progress = slots.state.index_select(0, rows), slots.progress.index_select(0, rows)
    _, seed, position = slots.names.index_select(0, rows).unbind(1)
    begun_at = (slots.record.index_select(0, rows) != 0).int().argmax(1)  # the last round, by its step

    def draws(first: int, num: int) -> tuple[Tensor, Tensor]:
        normals, uniform = noise.candidates(seed, position, begun_at, first, num, state.shape[-1], offset)
        return normals, uniform.log()

    mean_p, log_sigma_p, mean_q, log_sigma_q = state[:, MEAN_P:].unbind(1)
    drawn, tries = residual((mean_p, log_sigma_p), (mean_q, log_sigma_q), draws, first, max_tries)
    missed = (tries > max_tries) | (rows == NOBODY)  # who waits for good
    state[:, 0] = drawn
    progress[:, TRIES] += tries.clamp(max=max_tries) - first
    if max_tries == gaussian.MAX_TRIES:
        progress[:, WAITING] = 0
        progress[:, FALLBACKS] += missed
    else:
        progress[:, WAITING] = (progress[:, WAITING] + slots.num_steps) * missed
    slots.state.index_copy_(0, rows, state)
    slots.progress.index_copy_(0, rows, progress)
    return progress
