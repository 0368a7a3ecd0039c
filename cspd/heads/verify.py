"""Draft, verify, accept, resample: one round of speculation in the head, on tensors."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cspd.device import Precision, send_integers
from cspd.heads.chain import Schedule, modulation_size, most_bytes
from cspd.heads.net import guided
from mar.head import Head, fill, filled

# Diagonal Gaussians: log-ratios, and a maximal coupling of p and q.
#
# Pure functions on tensors [..., d]. A Gaussian is (mean, log_sigma), float32.

MAX_TRIES = 2**16
FIRST_BLOCK = 32  # candidates per row in the first block; each later block has four times as many,
MOST_AT_ONCE = 2**18  # up to this number over all rows


def allowed_fallbacks(num_steps: int) -> float:
    """How often all candidates may be rejected in a number of denoising steps: more happens once in 10^7 images.

    In exact arithmetic a step has this probability below 1 / (e 2^16). More of them come from rounding, if p and q
    differ by less than float32 can tell, or states are large beside their noise.
    """
    mean = num_steps / (math.e * MAX_TRIES)
    return mean + 6 * mean**0.5 + 4  # of a Poisson distribution


Gaussian = tuple[Tensor, Tensor]
Draws = Callable[[int, int], tuple[Tensor, Tensor]]


def log_ratio(x: Tensor, p: Gaussian, q: Gaussian) -> Tensor:
    """log p(x) - log q(x), summed over the channels: [...]."""
    (mean_p, log_sigma_p), (mean_q, log_sigma_q) = p, q
    z_p = (x - mean_p) * torch.exp(-log_sigma_p)
    z_q = (x - mean_q) * torch.exp(-log_sigma_q)
    return (log_sigma_q - log_sigma_p + 0.5 * (z_q - z_p) * (z_q + z_p)).sum(-1)


def divergence(p: Gaussian, q: Gaussian) -> Tensor:
    """KL(p || q), nats summed over the channels: [...]."""
    (mean_p, log_sigma_p), (mean_q, log_sigma_q) = p, q
    log_ratio = log_sigma_p - log_sigma_q
    distance = (mean_p - mean_q) * torch.exp(-log_sigma_q)
    return (0.5 * (torch.expm1(2 * log_ratio) + distance.square()) - log_ratio).sum(-1)


def reflect(x: Tensor, p: Gaussian, q: Gaussian) -> Tensor:
    """Maps a draw of q to a draw of p: standardise under q, mirror along the line between the means, scale to p.

    Swapping p and q gives the inverse. The mirror is orthogonal, so densities map too: q(x) dx = p(y) dy.
    """
    (mean_p, log_sigma_p), (mean_q, log_sigma_q) = p, q
    xi = (x - mean_q) * torch.exp(-log_sigma_q)
    axis = (mean_p - mean_q) * torch.exp(-0.5 * (log_sigma_p + log_sigma_q))
    square = axis.square().sum(-1, keepdim=True)
    along = (xi * axis).sum(-1, keepdim=True) / square.clamp(min=torch.finfo(square.dtype).tiny)
    mirrored = torch.addcmul(xi, along, axis, value=-2)
    return torch.addcmul(mean_p, mirrored, log_sigma_p.exp())


def resample(x: Tensor, log_uniform: Tensor, p: Gaussian, q: Gaussian) -> tuple[Tensor, Tensor]:
    """Proposes a draw of the residual distribution, norm(max(0, p - q)), for each rejected draw x of q.

    x was rejected because its uniform draw u was at least p(x)/q(x). So 1 - u is uniform below 1 - p(x)/q(x). Let y be
    the mirror image of x. Unnormalised,

        a rejected draw gives y the density p(y) (1 - p(x)/q(x))+,
        the residual distribution has       p(y) (1 - q(y)/p(y))+.

    So y is accepted if 1 - u < 1 - q(y)/p(y), which needs no further draw. If sigma_p = sigma_q, the two densities are
    equal and y is always accepted: the reflection-maximal coupling. Otherwise `residual` draws the remaining part.

    Args:
        x: [..., d]. log_uniform: log u [...].

    Returns:
        (y [..., d], lost [...] bool): y has the residual distribution after `residual` has replaced the lost ones.
    """
    # reflect(x, p, q) and log_ratio(y, q, p), written with fewer operations
    (mean_p, log_sigma_p), (mean_q, log_sigma_q) = p, q
    exponents = torch.stack([-log_sigma_q, (log_sigma_p + log_sigma_q) * -0.5, log_sigma_p], dim=-2)
    scales = exponents.exp()
    inverse_sigma_q, _, sigma_p = scales.unbind(-2)

    # y: standardise x under q, mirror along the line between the means, scale to p
    from_mean_q = torch.stack([x, mean_p], dim=-2) - mean_q.unsqueeze(-2)
    both = from_mean_q * scales[..., :2, :]
    xi, axis = both.unbind(-2)
    along, square = (both * axis.unsqueeze(-2)).sum(-1, keepdim=True).unbind(-2)
    along = along / square.clamp(min=torch.finfo(square.dtype).tiny)
    mirrored = torch.addcmul(xi, along, axis, value=-2)
    y = torch.addcmul(mean_p, mirrored, sigma_p)

    z_q = (y - mean_q) * inverse_sigma_q
    log_q_over_p = torch.addcmul(log_sigma_p - log_sigma_q, z_q - mirrored, z_q + mirrored, value=-0.5).sum(-1)
    return y, log_uniform <= log_q_over_p  # NaN is not lost: a draw of `residual` would be NaN too


def residual(
    p: Gaussian, q: Gaussian, draws: Draws, first: int = 0, max_tries: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draws the part of max(0, p - q) that `resample` leaves open, by `first_accepted`.

    Candidates y ~ p are accepted with probability (1 - q(y)/p(y))+ - (1 - p(x)/q(x))+, where y is the mirror image of
    x. Near p = q, where rounding alone can reject, it can happen that no candidate is ever accepted. So the last of
    2^16 is taken, which biases a step by less than 1 / (e 2^16).

    Args:
        p, q: means and log sigmas [R, d]. draws, first: as in `first_accepted`. max_tries: by default 2^16.

    Returns:
        (y [R, d], tries int64 [R]), as in `first_accepted`.
    """
    p, q = (p[0][:, None], p[1][:, None]), (q[0][:, None], q[1][:, None])

    def accept_probability(y: Tensor) -> Tensor:
        x = reflect(y, q, p)
        wanted = -torch.expm1(log_ratio(y, q, p).clamp(max=0))
        from_mirror = -torch.expm1(log_ratio(x, p, q).clamp(max=0))
        return wanted - from_mirror

    return first_accepted(p, accept_probability, draws, max_tries or MAX_TRIES, first)


def first_accepted(
    p: Gaussian, accept_probability: Callable[[Tensor], Tensor], draws: Draws, max_tries: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: draws candidates y ~ p in growing blocks and takes the first accepted one by index.

    After each block the CPU waits for the device, to know whether another one is needed.

    Args:
        p: mean and log sigma [R, 1, d].
        accept_probability: maps candidates [R, n, d] to probabilities [R, n].
        draws: maps (first index, number of candidates n) to standard normals [R, n, d] and logs of uniform draws
            [R, n].
        max_tries: candidates per row at most. first: index of the first candidate; earlier ones were rejected.

    Returns:
        (y [R, d], tries int64 [R]); if all of max_tries are rejected, y is the last and tries are max_tries + 1.
    """
    mean, log_sigma = p
    rows = torch.arange(len(mean), device=mean.device)
    y, tries = mean[:, 0], torch.full_like(rows, max_tries + 1)
    done, block = first, FIRST_BLOCK
    while done < max_tries and (done == first or bool((tries > max_tries).any())):
        block = min(block, max_tries - done)
        normal, log_uniform = draws(done, block)
        candidates = torch.addcmul(mean, normal, torch.exp(log_sigma))
        log_probability = accept_probability(candidates).clamp(min=0).log()
        accepted = ~(log_uniform >= log_probability)  # NaN is accepted: a search for something else would not end
        found = accepted.any(-1)
        index = torch.where(found, accepted.int().argmax(-1), block - 1)
        searching = tries > max_tries
        y = torch.where(searching.unsqueeze(-1), candidates[rows, index], y)
        tries = torch.where(searching & found, done + index + 1, tries)
        done += block
        block = max(FIRST_BLOCK, min(4 * block, MOST_AT_ONCE // len(rows)))
    return y, tries


# The memory of chains: tensors with a slot for each chain, allocated once. Chains join and leave one by one.

LEAST = 16  # slots; their number doubles when more are needed
NOBODY = 0  # the slot that pads a batch: its chain always stands still
LEFT, PHASE, TRIES, FALLBACKS = range(4)  # columns of `Slots.progress`
# Phases of a chain, see `Moved`. A chain with no step left has ended. A chain moves if `left > phase`: the phases other
# than MOVING exceed any number of steps, so one comparison tests both that it is MOVING and that it has steps left.
MOVING, UNRESOLVED, SEARCHING = 0, 2**20, 2**21
STATE_ROWS, MEAN_P, LOG_SIGMA_P = 8, 4, 5  # rows of `Slots.state`
PER_SLOT = ("state", "progress", "names", "scale", "log_sigma", "draws", "record", "c_embed")


class Table(NamedTuple):
    """The head's modulations, computed in advance: all layers side by side [G, C, T, ..], and the layers' widths."""

    values: Tensor
    widths: list[int]

    def layers(self) -> Sequence[Tensor]:
        """By layer, [G, C, T, ..]; views."""
        return self.values.split_with_sizes(self.widths, dim=-1)

    def layers_at(self, head: Head, at: Tensor) -> Sequence[Tensor]:
        """By layer, [G, N, ..], at indices [N] into the flat list of all slots' steps."""
        return self.values.flatten(1, 2).index_select(1, at).split_with_sizes(self.widths, dim=-1)

    def in_place(self, head: Head, at: Tensor) -> tuple[Sequence[Tensor], Tensor | None]:
        """For kernels: all layers where they stand, and the indices to read at."""
        return [layer.flatten(1, 2) for layer in self.layers()], at


class Embeddings(NamedTuple):
    """The inputs of the head's modulations, if no `Table` fits: t_embed [T, width], c_embed [C, G, width]."""

    t_embed: Tensor
    c_embed: Tensor

    def layers_at(self, head: Head, at: Tensor) -> Sequence[Tensor]:
        """As `Table.layers_at`."""
        num_steps = len(self.t_embed)
        c_embed = self.c_embed.transpose(0, 1).index_select(1, at // num_steps)
        return head.modulations(self.t_embed[at % num_steps], c_embed)

    def in_place(self, head: Head, at: Tensor) -> tuple[Sequence[Tensor], Tensor | None]:
        """As `Table.in_place`."""
        return self.layers_at(head, at), None


class Slots:
    """C slots for chains of T steps. Values of free slots mean nothing.

    Args:
        num_branches: G, 2 or 3 with guidance. tabled: also store the head's modulations at all steps.

    Attributes:
        state: [C, 8, d], see `Moved`. scale: guidance [C, 1, G - 1].
        progress: int64 [C, 4]: `Moved.left` and `Moved.phase`; the residual candidates drawn so far, and how often all
            of them were rejected.
        names: int64 [C, 3], the chain's row, and the seed and position of its noise. log_sigma: [C], the sum so far.
        draws: [C, T, d + 1], eps_t and the log of a uniform draw for each step. c_embed: [C, G, width], conditions.
        record: int64 [C, T], see `speculative.Finished`.
        first_progress, first_record: values of a chain after its first step. no_progress: of one that stands still.
        key: identifies the graphs that were captured over these tensors.
    """

    def __init__(
        self, head: Head, num_steps: int, num_branches: int, capacity: int, tabled: bool, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(capacity, *shape, dtype=dtype, device=device)

        self.num_steps, self.num_branches, self.capacity, self.tabled = num_steps, num_branches, capacity, tabled
        self.state = zeros(STATE_ROWS, head.channels)
        self.progress = zeros(4, dtype=torch.int64)
        self.names = zeros(3, dtype=torch.int64)
        self.scale, self.log_sigma = zeros(1, max(1, num_branches - 1)), zeros()
        self.draws = zeros(num_steps, head.channels + 1)
        self.record = zeros(num_steps, dtype=torch.int64)
        self.c_embed = zeros(num_branches, head.width)
        self.first_progress, self.first_record = self.progress.new_zeros(4), self.record.new_zeros(num_steps)
        self.no_progress = self.progress.new_zeros(4)
        # `fill_` starts a kernel; an assignment to one element would copy the number from the CPU, and wait
        self.no_progress[LEFT].fill_(num_steps)  # its window is then read from slot 0, see `end_indices` of `move`
        self.no_progress[PHASE].fill_(SEARCHING)
        self.progress[NOBODY] = self.no_progress
        self.first_progress[LEFT].fill_(num_steps - 1)
        self.first_record[-1].fill_(1)
        self.key = object()
        self._table = cast(Table, None)  # until modulations are written
        self.clear()

    def clear(self) -> None:
        self._free = [*range(self.capacity - 1, NOBODY, -1)]  # the next slot to take is the last

    def take(self, count: int) -> list[int]:
        """`count` free slots, the lowest first."""
        return [self._free.pop() for _ in range(count)]

    def release(self, slots: Sequence[int]) -> None:
        self._free = sorted([*self._free, *slots], reverse=True)

    def adopt(self, other: Slots, live: Sequence[int]) -> None:
        """Copies the chains in the `live` slots of `other` to the first slots here, in their order."""
        here = send_integers(self.take(len(live)), self.state.device)
        there = send_integers(live, self.state.device)
        for name in PER_SLOT:
            getattr(self, name)[here] = getattr(other, name)[there]
        if self.tabled and other.tabled:
            self.write_modulations(here, [layer[:, there] for layer in other._table.layers()])

    def modulations(self, t_embed: Tensor) -> Table | Embeddings:
        """The modulations' table, or their inputs if there is no table; t_embed: [T, width], of all steps."""
        return self._table or Embeddings(t_embed, self.c_embed)

    def write_modulations(self, slots: Tensor, layers: Sequence[Tensor], steps: slice = slice(None)) -> None:
        """Stores the modulations of the chains in slots [N] at these steps: by layer, [G, N, steps, ..] each."""
        if self._table is None:
            widths = [layer.shape[-1] for layer in layers]
            shape = self.num_branches, self.capacity, self.num_steps, sum(widths)
            self._table = Table(layers[0].new_empty(shape), widths)  # not zeroed: it is large
        for own, layer in zip(self._table.layers(), layers):
            own[:, slots, steps] = layer


def capacity_for(needed: int, most: int) -> int:
    """Slots to allocate: a power of two, at least `needed`; at most `most` if that is enough."""
    doubled = max(LEAST, 1 << (needed - 1).bit_length())
    return min(doubled, most) if needed <= most else doubled


def table_size(head: Head, num_branches: int, precision: Precision) -> int:
    """Chains times steps whose modulations fit in memory at once; for more, every pass computes them."""
    size = modulation_size(head) // 4 * precision.dtype.itemsize  # for one step of a chain, and one branch
    return most_bytes(precision.device) // (num_branches * size)


# The states that `resample` left open.


def draw_residual(
    slots: Slots, noise: types.ModuleType, offset: int, first: int, max_tries: int, rows: Tensor
) -> Tensor:
    """Draws the unresolved states of chains in slots `rows`, int64 [R]; chains that get one go on.

    With the first block of candidates alone it has fixed shapes and reads nothing from the device.

    Args:
        noise, offset: of the candidates, see `cspd.noise.candidates`. first, max_tries: which candidates, see
            `first_accepted`. If they are the last ones, all chains go on.

    Returns:
        The chains' progress, see `Slots`: int64 [R, 4].
    """
    state, progress = slots.state.index_select(0, rows), slots.progress.index_select(0, rows)
    _, seed, position = slots.names.index_select(0, rows).unbind(1)
    begun_at = (slots.record.index_select(0, rows) != 0).int().argmax(1)  # the step at which the last pass began

    def draws(first: int, num: int) -> tuple[Tensor, Tensor]:
        normals, uniform = noise.candidates(seed, position, begun_at, first, num, state.shape[-1], offset)
        return normals, uniform.log()

    mean_p, log_sigma_p, mean_q, log_sigma_q = state[:, MEAN_P:].unbind(1)
    drawn, tries = residual((mean_p, log_sigma_p), (mean_q, log_sigma_q), draws, first, max_tries)
    missed = (tries > max_tries) | (rows == NOBODY)  # so that nobody's chain never moves
    state[:, 0] = drawn
    progress[:, TRIES] += tries.clamp(max=max_tries) - first
    if max_tries == MAX_TRIES:
        progress[:, PHASE] = MOVING
        progress[:, FALLBACKS] += missed
    else:
        progress[:, PHASE] = missed * SEARCHING  # or MOVING, which is 0
    slots.state.index_copy_(0, rows, state)
    slots.progress.index_copy_(0, rows, progress)
    return progress


# One pass of speculative denoising, as functions on tensors: draft, verify, accept, resample.
#
# Source: De Bortoli et al. 2025 (arXiv 2501.05370), with calibrated linear drafts. A token's denoising chain is a
# Markov chain of diagonal Gaussians, for which speculative sampling is exact. The *anchor* is the last state x' at
# which the head was evaluated, with the head's outputs (eps', v') there. It is at step t + 1, one step noisier than
# x_t. A pass of a chain at state x_t:
#
# 1. Draft: predict the head's outputs at the next W steps from the anchor. Each prediction gives a Gaussian q_w. Draw
#    a state y_w from each with the chain's own noise.
# 2. Verify: evaluate the head at x_t, y_1 .. y_{W-1} in one batched call. This gives the target's Gaussians p_w.
# 3. Accept: y_w is accepted if a uniform draw is below p_w(y_w) / q_w(y_w). The longest accepted prefix is committed.
# 4. Resample: replace the first rejected state by a draw of norm(max(0, p_w - q_w)), so that it is a draw of p_w.
# 5. Go on from there: the head's input before this state is the new anchor.
#
# A window is cut off at step 0. That step adds no noise and is never rejected: the token is p's mean.


class Columns(NamedTuple):
    """The columns of a draft table, [..., 3 + W] and five of [..., 1].

    Attributes:
        mix: the weights of y_w on (x_t, eps', x', sigma_1 eps_1 .. sigma_W eps_W).
        base_q, slope: log sigma_q = base_q + slope v'.
        mean_x, mean_eps: p's mean = mean_x x + mean_eps eps, at an input x with the head's eps.
        base_p: log sigma_p = base_p + slope v, with the head's v.
    """

    mix: Tensor
    base_q: Tensor
    slope: Tensor
    mean_x: Tensor
    mean_eps: Tensor
    base_p: Tensor


NUM_SCALARS = len(Columns._fields) - 1  # columns of a draft table after the 3 + W of `mix`


class Lookup(NamedTuple):
    """Tables indexed by the steps that a chain has left, from 0 to T.

    Attributes:
        draft: float32 [T + 1, W, 3 + W + 5], see `draft_table`; zeros if no step is left.
        limits: int64 [T + 1, 2], the steps that a pass decides at most, and the last of them as an index from 0.
        lags: int64 [W], 1 .. W.
        fixed: whether log sigma does not depend on the head, so that p and q differ in their means only. Then the
            mirror image of a rejected draft always has the residual distribution; rounding alone would reject it.
    """

    draft: Tensor
    limits: Tensor
    lags: Tensor
    fixed: bool

    def at(self, steps_left: Tensor) -> tuple[Columns, Tensor, Tensor]:
        """The columns of R windows, the steps that each decides at most, and the last of these, int64 [R]."""
        widths = [3 + len(self.lags)] + [1] * NUM_SCALARS
        columns = Columns(*self.draft.index_select(0, steps_left).split_with_sizes(widths, dim=-1))
        max_decided, max_last = self.limits.index_select(0, steps_left).unbind(1)
        return columns, max_decided, max_last


def lookup(table: Tensor, fixed: bool = False) -> Lookup:
    """The `Lookup` of a `draft_table`; others as there."""
    num_steps, window = table.shape[:2]
    most = torch.arange(num_steps + 1, device=table.device).clamp(max=window)
    return Lookup(
        draft=torch.cat([torch.zeros_like(table[:1]), table]),
        limits=torch.stack([most, (most - 1).clamp(min=0)], dim=1),
        lags=torch.arange(1, window + 1, device=table.device),
        fixed=fixed,
    )


class Moved(NamedTuple):
    """R chains after a pass.

    Attributes:
        state: [R, 8, d]: the state x_t; the anchor's eps', x' and v'; and of the last step decided, means and log
            sigmas of the Gaussians p and q. If no step is left, p's mean is the token.
        left: int64 [R], the steps left. A chain with 0 has ended, whatever its phase.
        phase: int64 [R]: MOVING; or the last state was rejected and must be drawn by `residual` before the chain can
            go on. Then it is UNRESOLVED, and SEARCHING after the first block of candidates was rejected.
        step_index: int64 [R], the step at which the pass began, in the flat list of all slots' steps.
        record: int64 [R], the value of `speculative.Finished.record` there; 0 for a chain that stood still.
        log_sigma: [R], if traced, log sigma_p summed over channels and the decided steps except step 0; or None.
    """

    state: Tensor
    left: Tensor
    phase: Tensor
    step_index: Tensor
    record: Tensor
    log_sigma: Any


def draft(columns: Columns, state: Tensor, eps_t: Tensor) -> tuple[Tensor, Gaussian]:
    """Step 1: the drafted states y [R, W, d], and the Gaussians q that they are drawn from.

    Args:
        state: see `Moved`. eps_t: [R, W, d], the noise of each step.
    """
    log_sigma = torch.addcmul(columns.base_q, columns.slope, state[:, 3:4])
    noise = log_sigma.exp() * eps_t
    sources = torch.cat([state[:, :3], noise], dim=1)
    # not a matrix product: rounded in low precision, y would no longer be a draw of q
    y = (columns.mix.unsqueeze(-1) * sources.unsqueeze(1)).sum(2)
    return y, (y - noise, log_sigma)


def evaluate_filled(
    head: Head, x: Tensor, modulations: Sequence[tuple[Tensor, ...]], scale: Tensor
) -> tuple[Tensor, Tensor]:
    """`chain.evaluate`, rounded alike in every batch: modulations [G, N, width] of the flat rows of x, padded.

    Rounding can flip a decision, and the first step multiplies its error by 316 at T = 100 and by 4,500 at T = 8.
    """
    rows = x.shape[:-1]
    out = head.denoise(fill(x.flatten(0, -2)), modulations)
    return guided(out[:, : rows.numel()].unflatten(1, rows), scale)


def first_step(
    head: Head,
    x: Tensor,
    eps_t: Tensor,
    layers: Sequence[Tensor],
    scale: Tensor,
    temperature: Tensor,
    s: Schedule,
) -> tuple[Tensor, Tensor]:
    """Step T - 1, ancestral: the state after it with its anchor [N, 4, d], and log sigma [N, d].

    Args:
        x, eps_t: x_T and the step's noise [N, d]. layers: the head's modulations of the padded rows.
        scale, temperature: [N, 1].
    """
    last = len(s) - 1
    eps, v = evaluate_filled(head, x, head.split(layers), scale)
    mean = x * s.mean_x[last] + eps * s.mean_eps[last]
    log_sigma = s.log_sigma_base[last] + temperature.log() + s.log_sigma_slope[last] * v
    after = torch.addcmul(mean, log_sigma.exp(), eps_t)
    return torch.stack([after, eps, x, v], dim=1), log_sigma


def verify(
    head: Head, columns: Columns, inputs: Tensor, layers: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Gaussian]:
    """Step 2: the head's (eps, v) at the inputs [R, W, d], and the target's Gaussians p of the next states."""
    eps, v = evaluate_filled(head, inputs, head.split(layers), scale)
    mean = torch.addcmul(columns.mean_x * inputs, columns.mean_eps, eps)
    log_sigma = torch.addcmul(columns.base_p, columns.slope, v)
    return eps, v, (mean, log_sigma)


def ratios(y: Tensor, p: Gaussian, q: Gaussian, eps_t: Tensor) -> Tensor:
    """log p(y) / q(y) of the drafted states [R, W]; eps_t: y standardised under q."""
    (mean_p, log_sigma_p), (_, log_sigma_q) = p, q
    z_p = (y - mean_p) * torch.exp(-log_sigma_p)
    z_q = eps_t
    log_ratio = torch.addcmul(log_sigma_q - log_sigma_p, z_q - z_p, z_q + z_p, value=0.5)
    return log_ratio.sum(-1)


def accept(log_ratio: Tensor, log_uniform: Tensor) -> Tensor:
    """Step 3: the length of the longest accepted prefix, int64 [R].

    Args:
        log_ratio: [R, W], see `ratios`. log_uniform: log u [R, W]; -inf at step 0, so that it is accepted.
    """
    return (log_uniform < log_ratio).cumprod(1).sum(1)


def draws_at(draws: Tensor, step_indices: Tensor) -> tuple[Tensor, Tensor]:
    """eps_t [R, W, d] and the log of a uniform draw [R, W] of steps, int64 [R, W], flat indices into `move`'s draws."""
    own = draws.flatten(0, 1).index_select(0, step_indices.view(-1)).unflatten(0, step_indices.shape)
    return own[..., :-1], own[..., -1]


def gather_last(states: list[Tensor], log_uniform: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Of one step of every window, n states [R, W, d] side by side [R, n, d], and log_uniform [R].

    One gather of concatenated values needs seven kernel launches less than nine gathers. In small batches the launches
    are most of a pass's time.

    Args:
        at: int64 [R], flat index of the step.
    """
    gathered = torch.cat([*states, log_uniform.unsqueeze(-1)], dim=-1).flatten(0, 1).index_select(0, at)
    return gathered[:, :-1].unflatten(1, (len(states), -1)), gathered[:, -1]


def traced_log_sigma(lookup: Lookup, log_sigma_p: Tensor, decided: Tensor, left: Tensor) -> Tensor:
    """`Moved.log_sigma`, [R]."""
    traced = lookup.lags <= torch.minimum(decided, left - 1).unsqueeze(1)
    return torch.where(traced, log_sigma_p.sum(-1), 0).sum(1)


def move(
    head: Head,
    lookup: Lookup,
    draws: Tensor,
    modulations: Table | Embeddings,
    end_indices: Tensor,
    row_starts: Tensor,
    scale: Tensor,
    state: Tensor,
    left: Tensor,
    phase: Tensor,
    trace_sigma: bool = False,
) -> Moved:
    """One pass of R chains, steps 1 to 5, with one head call. A chain that has ended or is not MOVING stands still.

    Args:
        draws: [C, T, d + 1], eps_t and the log of a uniform draw for the steps of C slots.
        modulations: of the head, as a table or as their inputs.
        end_indices: int64 [R, W], T slot - w for w = 1 .. W. With `left` added: flat indices of steps left - w, [C T].
        row_starts: int64 [R], W r: the index of each window's first step in the flat list of all windows' steps, [R W].
        scale: guidance [R, 1, G - 1]. state, left, phase: as in `Moved`. trace_sigma: whether to sum log sigma_p.
    """
    moving = left > phase  # MOVING, with steps left

    # look up the values of each window's steps; those beyond step 0 belong to another slot and are not used
    columns, max_decided, max_last = lookup.at(left * moving)
    step_indices = end_indices + left.unsqueeze(1)
    eps_t, log_uniform = draws_at(draws, step_indices)
    layers = modulations.layers_at(head, fill(step_indices.view(-1, 1)).view(-1))

    # 1. draft y_w ~ q_w
    y, q = draft(columns, state, eps_t)

    # 2. verify: the head's output at the state before y_w gives p_w
    inputs = torch.cat([state[:, :1], y[:, :-1]], dim=1)
    eps, v, p = verify(head, columns, inputs, layers, scale)

    # 3. accept while u < p_w(y_w) / q_w(y_w): the accepted prefix and the first rejected step are decided
    num_accepted = accept(ratios(y, p, q, eps_t), log_uniform)
    rejected = num_accepted < max_decided
    last = torch.minimum(num_accepted, max_last)  # index of the last decided step in the window
    decided = last + moving  # 0 for a chain that stands still: with no steps left, `last` is 0

    # 4. resample the last decided state from norm(max(0, p - q)), if it was rejected
    anchor_p_q_y, log_uniform_last = gather_last([eps, inputs, v, *p, *q, y], log_uniform, row_starts + last)
    mean_p, log_sigma_p, mean_q, log_sigma_q, y_last = anchor_p_q_y[:, 3:].unbind(1)
    resampled, lost = resample(y_last, log_uniform_last, (mean_p, log_sigma_p), (mean_q, log_sigma_q))
    unresolved = torch.zeros_like(rejected) if lookup.fixed else rejected & lost

    # 5. go on from there; after step 0, p's mean is the token
    x = torch.where(rejected.unsqueeze(-1), resampled, y_last)
    moved = torch.cat([x.unsqueeze(1), anchor_p_q_y[:, :7]], dim=1)
    return Moved(
        state=torch.where(moving.view(-1, 1, 1), moved, state),
        left=left - decided,
        phase=torch.add(phase, unresolved, alpha=UNRESOLVED),  # from MOVING, which is 0
        step_index=step_indices[:, 0],
        record=torch.addcmul(decided, decided, rejected, value=-2),  # negative if the last step was rejected
        log_sigma=traced_log_sigma(lookup, p[1], decided, left) if trace_sigma else None,
    )


def move_by_kernels(
    head: Head,
    lookup: Lookup,
    draws: Tensor,
    modulations: Table | Embeddings,
    end_indices: Tensor,
    row_starts: Tensor,
    scale: Tensor,
    state: Tensor,
    left: Tensor,
    phase: Tensor,
    trace_sigma: bool = False,
) -> Moved:
    """`move` with one launch before the head call and one after it; log sigma_p is always summed."""
    from cspd.kernels.head import denoise
    from cspd.kernels.speculative import after_head, before_head

    left, phase = left.contiguous(), phase.contiguous()  # in the first pass they are columns of the slots' progress
    given = lookup.draft, draws, end_indices, state, left, phase
    inputs, last, at = before_head(*given, filled(end_indices.numel()))
    layers, rows_of = modulations.in_place(head, at)
    out = denoise(head, inputs, head.split(layers), rows_of)
    return Moved(*after_head(*given, inputs, last, out, scale))
