"""Distributions of codes, and the rules by which drafted codes are accepted or resampled."""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.gpt import VQModel, steps
from cspd.option import VQ_OPTIONS, Option, check_integer
from cspd.request import Request

# Distributions over the V codes of the codebook: computed from logits, for target and draft alike, and sampled from.
#
# Probabilities are [..., V] in float32 or wider, with any leading dimensions. Uniform draws are arguments.

TINY = torch.finfo(torch.float32).tiny
LEAST_TEMPERATURE = 1e-5  # LlamaGen's
SPREAD = 0.1  # of `nearby`: how far a draft's distribution function is from the target's


def guide(logits: Tensor, scale: Tensor) -> Tensor:
    """Guided logits u + s (c - u) [B, ..., V] of logits (c, u) [2, B, ..., V] and s [B]; of logits [1, ...], these."""
    if len(logits) == 1:
        return logits[0]
    conditional, null = logits
    scale = scale.view(-1, *[1] * (null.dim() - 1))
    return (conditional - null).mul_(scale).add_(null)


class Filter(NamedTuple):
    """Top-k and top-p of each sequence. Codes as likely as the least likely one that passes, pass too.

    Attributes:
        count: int64 [B], k of top-k. mass: [B], p of top-p among these; 2 lets all pass. most: the largest count, on
            the CPU.
    """

    count: Tensor
    mass: Tensor
    most: int


def filter_numbers(top_k: list[int], top_p: list[float], vocabulary: int) -> tuple[list[int], list[float], int]:
    """The numbers of a `Filter` by top-k, 0 for all, and top-p, 1 for all; `most` is 0 if no sequence filters."""
    counts = [min(k, vocabulary) or vocabulary for k in top_k]
    masses = [p if p < 1 else 2.0 for p in top_p]  # at p = 1 rounding must not cut the tail
    filters = any(top_k) or min(top_p) < 1
    return counts, masses, max(counts) if filters else 0


def probabilities(logits: Tensor, temperature: Tensor, kept: Filter | None = None) -> Tensor:
    """Probabilities [B, ..., V] of logits, as LlamaGen (arXiv 2406.06525): temperature, top-k, top-p of what is left.

    Args:
        logits: [B, ..., V]. temperature: [B], not below LEAST_TEMPERATURE. kept: by default all codes.
    """
    per_sequence = [-1, *[1] * (logits.dim() - 1)]
    scaled = logits / temperature.view(per_sequence)
    if kept is not None:
        least = _least_kept(scaled, kept, per_sequence)
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    return scaled.softmax(-1)


def _least_kept(logits: Tensor, kept: Filter, per_sequence: list[int]) -> Tensor:
    """The least logit that passes the filter [B, ..., 1]."""
    ordered = logits.topk(kept.most).values

    # top-k
    beyond = steps(kept.most, logits.device) >= kept.count.view(per_sequence)

    # top-p
    mass = ordered.masked_fill(beyond, -torch.inf).softmax(-1)
    mass_before = mass.cumsum(-1) - mass
    cut = beyond | (mass_before > kept.mass.view(per_sequence))
    return ordered.masked_fill(cut, torch.inf).amin(-1, keepdim=True)


def likeliest_point(weights: Tensor) -> Tensor:
    """The point mass at the likeliest code of weights (or logits) [..., V]; NaN where they are not finite."""
    highest, code = weights.max(-1, keepdim=True)
    return torch.where(highest.isfinite(), torch.zeros_like(weights).scatter(-1, code, 1), torch.nan)


def point(x: Tensor, like: Tensor) -> Tensor:
    """The point masses at codes x [...]: [..., V], of the shape and dtype of `like`."""
    return torch.zeros_like(like).scatter(-1, x.unsqueeze(-1), 1)


def sample(P: Tensor, u: Tensor) -> Tensor:
    """Codes int64 [...] from weights P [..., V] and uniform draws u [...], by the inverse distribution function.

    One uniform draw per token suffices; Gumbel-max would need V. Sums are in float64 and cannot rise at codes of weight
    0, so such a code is never returned, whatever u and the rounding. If all weights are 0, or one is NaN, returns -1.
    """
    code, total = _drawn(P.double(), _below_one(u))
    return torch.where(total > 0, code, -1)


def _below_one(u: Tensor) -> Tensor:
    return u.double().clamp(max=1 - 2**-53)


def _drawn(P: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [...] from float64 weights [..., V] and draws [...], and the weights' sum: above 0 if there is a code."""
    sums = P.cumsum(-1)
    if _adds_in_parallel(P.device):  # parallel sums may change even where 0 is added
        sums = sums.masked_fill(P <= 0, 0).cummax(-1).values
    total = sums[..., -1]
    level = u * total
    first_above = torch.searchsorted(sums, level.unsqueeze(-1), right=True).squeeze(-1)
    return first_above.clamp(max=P.shape[-1] - 1), total


def _adds_in_parallel(device: torch.device) -> bool:
    """Whether cumulative sums are computed in parallel, and so round differently from a loop."""
    return device.type == "cuda"


def without(Q: Tensor, x: Tensor) -> Tensor:
    """Q for the sibling after codes x [...]: [..., V], x zeroed, renormalised; 0 if nothing is left.

    x is -1 only if nothing of Q is left or Q is damaged; then it does not matter which code is zeroed.
    """
    left = Q.scatter(-1, x.clamp(min=0).unsqueeze(-1), 0)
    total = left.sum(-1, keepdim=True)
    return left / total.clamp(min=TINY)


def where_rows(mask: Tensor, rows: Tensor, others: Tensor | float) -> Tensor:
    """torch.where(mask, rows, others) of rows [..., V] and mask [..., 1], fast if the mask is true everywhere.

    Only a CPU tests that: on a GPU the test would be a synchronisation.
    """
    if mask.device.type == "cpu" and mask.all():
        return rows
    return torch.where(mask, rows, others)


def draw_siblings(Q: Tensor, u: Tensor) -> Tensor:
    """Siblings without replacement, in the order drawn: codes [..., K] by uniform draws u [..., K].

    They are -1 once Q is used up.
    """
    left, siblings, totals = Q.to(torch.float64, copy=True), [], []
    for uniform in _below_one(u).unbind(-1):
        if siblings:
            left.scatter_(-1, siblings[-1].unsqueeze(-1), 0)
        code, total = _drawn(left, uniform)
        siblings.append(code)
        totals.append(total)
    return torch.where(torch.stack(totals, -1) > 0, torch.stack(siblings, -1), -1)


def nearby(Q: Tensor, u: Tensor) -> Tensor:
    """How likely each code [..., V] is to be the target's `sample` at draws u [...], by a draft's distribution Q.

    The target's distribution function is near Q's, not equal to it. So its code at u is Q's at a draw near u, taken to
    be Cauchy around it between 0 and 1, which asks for one number, SPREAD. Float64, for Q [..., V] that sums to 1.
    """
    edges = functional.pad(Q.double().cumsum(-1), (1, 0))
    below = ((edges - u.unsqueeze(-1)) / SPREAD).atan()
    return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])


def likeliest(Q: Tensor, count: int) -> Tensor:
    """The codes of most probability, int64 [..., count], likeliest first, -1 where the codebook has fewer."""
    found = Q.topk(min(count, Q.shape[-1])).indices
    if found.shape[-1] == count:
        return found
    return functional.pad(found, (0, count - found.shape[-1]), value=-1)


# The parts of a rule: f, the acceptance probability; G, the distribution after a rejection; and the bound.
#
# Pure functions on probabilities [..., V], P of the target and Q of the draft, float32 or float64; any leading
# dimensions (sequences, positions, tree nodes).
#
# Sources:
#     exact: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
#     uniform-rsd, cool-sd: Li et al., "Annealed Relaxation of Speculative Decoding for Faster Autoregressive Image
#         Generation" (COOL-SD), arXiv 2601.09212. Equations are numbered as in the version without appendices.
#     lantern: Jang et al., "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding",
#         arXiv 2410.03355.
#     lantern++: Park et al., "LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual
#         Auto-regressive Models", arXiv 2502.06352.
#     gsd: So et al., "Grouped Speculative Decoding for Autoregressive Image Generation", arXiv 2508.07747, and its
#         authors' code.

MOST_JUDGED_AT_ONCE = 2**22  # probabilities gathered at a time, which bounds memory
LAST = torch.iinfo(torch.int64).max


def relaxed(P: Tensor, Q: Tensor, omega: Tensor | float) -> Tensor:
    """f = min(1, omega P / Q) [..., V], omega a number or [..., 1] (COOL-SD, eq. 7).

    omega = 1 is exact, delta is uniform-rsd, omega_i is cool-sd.
    """
    mass = P if isinstance(omega, float) and omega == 1 else omega * P
    return _ratio(mass, Q)


def pooled(P: Tensor, Q: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """f = min(1, (P + absorbed) / Q) [..., V]: lantern (its section 3.3) with limit = delta, lantern++ with lam P.

    The authors' lantern++ has (lambda - 1) P: its lambda = 2 is lam = 1 here.

    Args:
        near, limit: as in `absorbed`.
    """
    return _ratio(P + absorbed(P, near, limit), Q)


def pooled_code(P: Tensor, Q: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """`pooled` of codes x [..., 1] only: f [..., 1], as limit is."""
    return _ratio(P.gather(-1, x) + absorbed_by(P, x, near, limit), Q.gather(-1, x))


def grouped(P: Tensor, Q: Tensor, group: int, gap: float) -> Tensor:
    """f = min(1, P(C) / Q(C)) [..., V], C a group of codes around each: gsd (its Algorithm 3).

    By rising P, lower index first at ties, C has the code, the group // 2 before it and the (group - 1) // 2 after it,
    but for those whose P differs from its own by `gap` or more. The paper also leaves out codes whose embeddings are
    far apart, by a distance chosen for one model; by its Table 2 that changes nothing, and its authors' later code does
    not do it.

    Args:
        group: >= 1, codes of a group; 1 is exact. gap: in (0, 1].
    """
    ordered, codes = P.sort(dim=-1, stable=True)
    ordered = ordered.contiguous()
    place = steps(P.shape[-1], P.device)

    # where each group begins, and the place after its last
    first = torch.searchsorted(ordered, ordered - gap, right=True)
    first = torch.maximum(first, place - group // 2)
    end = torch.searchsorted(ordered, ordered + gap)
    end = torch.minimum(end, place + (group + 1) // 2)

    # sums of P and Q over it, as differences: float64, or small ones would be lost
    mass = torch.stack([ordered, Q.gather(-1, codes)]).double()
    sums = functional.pad(mass.cumsum(-1), (1, 0))
    inside = sums.gather(-1, end.expand_as(mass)) - sums.gather(-1, first.expand_as(mass))
    f = _ratio(*inside).to(P.dtype)
    f = f.masked_fill(ordered <= 0, 0)  # what the target never emits is never accepted
    return torch.empty_like(P).scatter_(-1, codes, f)


def grouped_code(P: Tensor, Q: Tensor, x: Tensor, group: int, gap: float) -> Tensor:
    """`grouped` of codes x [..., 1] only: f [..., 1]. In float32 it takes a top-k instead of sorting rows."""
    if P.dtype == torch.float64:
        return grouped(P, Q, group, gap).gather(-1, x)
    # An integer for each code that sorts as (P, index) does. The bits of a float64 >= 0, read as an integer, sort as
    # the float does, and the lowest 29 bits of a float32 turned into float64 are 0: the index is added there.
    order_key = P.double().view(torch.int64) + steps(P.shape[-1], P.device)
    own, most = order_key.gather(-1, x), P.shape[-1]
    before = order_key.masked_fill(order_key >= own, -1).topk(min(group // 2, most))
    after = order_key.masked_fill(order_key <= own, LAST).topk(min((group - 1) // 2, most), largest=False)
    codes = torch.cat([x, before.indices, after.indices], -1)
    is_there = torch.cat([own >= 0, before.values >= 0, after.values < LAST], -1)

    # sums over those whose probability is near its own
    mass, drafted = P.gather(-1, codes), Q.gather(-1, codes)
    own = mass[..., :1]
    inside = is_there & (mass > own - gap) & (mass < own + gap)
    sums = [(each.double() * inside).sum(-1, keepdim=True) for each in (mass, drafted)]
    return _ratio(*sums).to(P.dtype).masked_fill(own <= 0, 0)


def _ratio(mass: Tensor, Q: Tensor) -> Tensor:
    # 0 / 0 is 0: what the target never emits is never accepted
    return (mass / Q).clamp_(max=1).nan_to_num_(nan=0.0)


def absorbed(P: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """The mass that each x takes over [..., V]: its neighbours', nearest first, until the sum would reach limit(x).

    Args:
        near: int64 [V, k] by `cspd.discrete.rules`, taken in chunks of codes. limit: [..., V].
    """
    gathered = P.numel() * near.shape[1]
    chunk = max(1, MOST_JUDGED_AT_ONCE * len(near) // max(1, gathered))
    # a row for each code, so that what is gathered are whole rows
    rows = P.reshape(-1, len(near)).T.contiguous()
    limits = limit.reshape(-1, len(near)).T
    parts = []
    for block, most in zip(near.split(chunk), limits.split(chunk)):
        mass = rows.index_select(0, block.flatten()).unflatten(0, block.shape)
        sums = mass.cumsum(1)
        reached = sums >= most.unsqueeze(1)
        parts.append(sums.masked_fill_(reached, 0).amax(1))
    return torch.cat(parts).T.view(P.shape)


def absorbed_by(P: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """`absorbed` of codes x [..., 1] only: [..., 1], as limit is."""
    sums = P.gather(-1, near[x.squeeze(-1)]).cumsum(-1)
    return sums.masked_fill_(sums >= limit, 0).amax(-1, keepdim=True)


def merge(P: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """P_A [..., V]: P where codes x [...] have taken over what they absorb; near, limit: as in `absorbed`.

    LANTERN, section 3.3, the distribution q_{k,delta}(. | D = x).
    """
    block, x = near[x], x.unsqueeze(-1)
    mass = P.gather(-1, block)
    below = mass.cumsum(-1) < limit.gather(-1, x)
    moved = mass * below
    emptied = P.scatter(-1, block, mass - moved)
    return emptied.scatter_add(-1, x, moved.sum(-1, keepdim=True))


def residual(P: Tensor, Q: Tensor, f: Tensor | float) -> Tensor:
    """G* = norm([P - Q f]+) [..., V] (COOL-SD, eq. 5), P where that is 0.

    No other G brings the distribution of the committed code nearer to P. With f = 1 it is the papers' own
    norm([P - Q]+) (eq. 6): the same if f >= min(1, P / Q) everywhere, else farther from P.
    """
    return _norm(P - Q * f, P)


def _norm(difference: Tensor, otherwise: Tensor | float) -> Tensor:
    """norm([difference]+) [..., V], which is written to; `otherwise` where that is 0."""
    weights = difference.clamp_(min=0)
    total = weights.sum(-1, keepdim=True)
    return where_rows(total > 0, weights / total, otherwise)


def released_residual(P: Tensor, Q: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """G [..., V] of LANTERN's released code after codes x [...], drawn from Q, were rejected: norm([P - Q']+).

    Q' is Q without the neighbours of x, all of them, if the first gives x its mass. (The paper's [P_A - Q]+ moves what
    neighbours give within P, see `merge`.) Where nothing is left, every code is equally likely.

    Args:
        near, limit: as in `absorbed`; near has one neighbour more than may give mass.
    """
    block, x = near[x], x.unsqueeze(-1)
    gives = P.gather(-1, block[..., :1]) < limit.gather(-1, x)
    emptied = Q.scatter(-1, block, Q.gather(-1, block).masked_fill(gives, 0))
    return _norm(P - emptied, 1 / P.shape[-1])


def bound(P: Tensor, Q: Tensor, f: Tensor, G: Tensor | None = None) -> Tensor:
    """The total variation between P and what one judgement commits, the local term of COOL-SD's Theorem 2: [...].

    Without G it is sum [Q f - P]+: for G*, and for lantern's own G, which depends on the code that was rejected.
    """
    committed = Q * f
    if G is not None:
        rejected = (Q * (1 - f)).sum(-1, keepdim=True)
        committed = committed + rejected * G
    return (committed - P).clamp(min=0).sum(-1)


def exponential(depth: Tensor | int, delta: float, length: int, nu: float = 0.7) -> Tensor | float:
    """omega_i = delta exp(-nu i - mu) at depths i in 1 .. length (COOL-SD, eq. 10).

    mu is such that the mean of omega over them is delta.
    """
    total = sum(math.exp(-nu * i) for i in range(length))
    first = delta * length / total
    return first * math.exp(-nu) ** (depth - 1)


def linear(depth: Tensor | int, delta: float, length: int, ell: int = 8) -> Tensor | float:
    """As `exponential`, with omega_i in proportion to ell - i; ValueError where the last would not be above 0."""
    if length >= ell:
        raise ValueError(f"linear schedule: length={length} must be below ell={ell}; or take the exponential one")
    total = sum(ell - i for i in range(1, length + 1))
    return delta * length * (ell - depth) / total


# A rule accepts a drafted code x with probability f(x), and otherwise samples from G.
#
# It is a name and its parameters. Any rule verifies any draft: candidates that were sampled from Q, and candidates that
# were chosen, for which Q is the point mass at that code.

SCHEDULES = ("exponential", "linear")
METRICS = ("l2", "cosine", "raw")
NEIGHBOURS = (
    Option("k", int, "maximum number of neighbours", default=10, implied=True, low=1),
    Option(
        "metric",
        METRICS,
        "distance of neighbours: of the vectors that the decoder receives, or l2 of the codebook as it is stored (raw)",
        default="l2",
        implied=True,
    ),
)
OPTIMAL = Option(
    "optimal",
    bool,
    "after a rejection, sample from the optimal residual distribution G*; otherwise as in the authors' code",
    default=True,
    implied=True,
)
PUBLISHED = Option(
    "published",
    bool,
    "verify as LANTERN's released code does instead of its paper: no bound; raw neighbours unless metric is given",
    default=False,
    implied=True,
)
PARAMETERS: dict[str, tuple[Option, ...]] = {  # of each rule
    "exact": (),
    "uniform-rsd": (Option("delta", float, "accepts with min(1, delta P/Q)", low=1), OPTIMAL),
    "cool-sd": (
        Option("delta", float, "mean relaxation over the depths; 1.1 to 4 in the paper", above=0),
        Option("schedule", SCHEDULES, "how the relaxation falls with depth", default="exponential", implied=True),
        Option("nu", float, "decay of the exponential schedule", default=0.7, implied=True, above=0),
        OPTIMAL,
    ),
    "lantern": (
        Option(
            "delta", float, "maximum probability that neighbours may add; 0.05 to 0.4 in the paper", above=0, high=1
        ),
        *NEIGHBOURS,
        OPTIMAL,
        PUBLISHED,
    ),
    "lantern++": (
        Option(
            "lam",
            float,
            "the neighbours' probability relative to the token's own; the authors' lambda minus 1",
            default=1.0,
            implied=True,
            above=0,
        ),
        *NEIGHBOURS,
        OPTIMAL,
        PUBLISHED,
    ),
    "gsd": (
        Option(
            "group",
            int,
            "tokens verified as one group: neighbours in the order of the target's probabilities; 3 to 50 in the paper",
            low=1,
        ),
        Option(
            "gap",
            float,
            "tokens of one group differ by less than this in probability",
            default=0.15,
            implied=True,
            low=0.001,
            high=1,
        ),
        OPTIMAL,
    ),
}
RULE = Option("rule", PARAMETERS, "how drafted tokens are accepted", default="exact")
DEFAULTS = {option.name: option.default for options in PARAMETERS.values() for option in options}
MOST_DEPTHS = 2**16  # of a chain or tree
WINDOW_CAP = 8  # L of a schedule over a Jacobi window: at its 64, omega_1 would be 32 delta, blind acceptance


@dataclass(frozen=True)
class Rule:
    """A rule with its parameters: f, G and the bound of a judgement, whatever the draft.

    Attributes:
        name: "exact", "uniform-rsd", "cool-sd", "lantern", "lantern++" or "gsd".
        delta: uniform-rsd: >= 1. cool-sd: > 0, the mean of omega, 1.1 to 4 in the paper. lantern: in (0, 1], what the
            neighbours give stays below it, 0.05 to 0.4 in the paper.
        schedule, nu, ell: cool-sd: of omega; nu > 0 is the exponential one's, ell the linear one's.
        length: cool-sd: L, a chain's length or a tree's depth; min(length, WINDOW_CAP) for a Jacobi window.
        lam: lantern++: > 0, see `pooled`. k: lantern, lantern++: how many neighbours at most.
        group, gap: gsd: see `grouped`.
        optimal: G is G*; or else the papers' own, norm([P - Q]+) and lantern's norm([P_A - Q]+).
        published: lantern, lantern++: f and G are those of the released code, whatever `optimal` says: `pool`,
            `acceptance.released_residual`, and sums that equal the limit are pooled too. There is no bound.
        greedy: temperature 0. P is given at temperature 1, and every candidate is a point mass; x is accepted if it is
            P's argmax (P_A's, of a rule that pools), lowest index at ties, else P's argmax is committed.

    Raises:
        ValueError: a parameter of this rule is missing or out of range.
    """

    name: str = "exact"
    delta: float | None = None
    schedule: str = DEFAULTS["schedule"]
    nu: float = DEFAULTS["nu"]
    ell: int = 8
    length: int | None = None
    lam: float = DEFAULTS["lam"]
    k: int = DEFAULTS["k"]
    metric: str = DEFAULTS["metric"]
    group: int | None = None
    gap: float = DEFAULTS["gap"]
    optimal: bool = DEFAULTS["optimal"]
    published: bool = DEFAULTS["published"]
    greedy: bool = False

    def __post_init__(self) -> None:
        RULE.check(self.name)
        for option in PARAMETERS[self.name]:
            option.check(getattr(self, option.name))
        if self.name == "cool-sd":
            check_integer("length", self.length, 1, MOST_DEPTHS, "it is how many depths are drafted")
        self.omega(1)

    @property
    def guarantee(self) -> str:
        if self.name == "exact":
            return "exact"
        return "heuristic" if self.published else "bounded"

    @property
    def pools(self) -> bool:
        """Whether its f depends on neighbours in the codebook."""
        return self.name in ("lantern", "lantern++")

    @property
    def groups(self) -> bool:
        """Whether its f depends on codes of similar probability."""
        return self.name == "gsd"

    @property
    def follows_f(self) -> bool:
        """Whether its G needs f at all codes."""
        return self.optimal and not self.published

    @property
    def num_near(self) -> int:
        """How many neighbours of a code it looks at; the released code empties one more than it pools."""
        return self.k + self.published

    def omega(self, depth: Tensor | int) -> Tensor | float:
        """The factor of `relaxed` at depths from 1, an int or int64 [...]: a number or [..., 1]; constant from L on."""
        if self.name != "cool-sd":
            return self.delta if self.name == "uniform-rsd" else 1.0
        depth = depth.clamp(max=self.length).unsqueeze(-1) if isinstance(depth, Tensor) else min(depth, self.length)
        if self.schedule == "linear":
            return linear(depth, self.delta, self.length, self.ell)
        return exponential(depth, self.delta, self.length, self.nu)

    def target(self, P: Tensor) -> Tensor:
        """The distribution to sample from: P, or at temperature 0 the point mass at its argmax."""
        return likeliest_point(P) if self.greedy else P

    def accept(
        self, P: Tensor, Q: Tensor, depth: Tensor | int = 1, near: Tensor | None = None, x: Tensor | None = None
    ) -> Tensor:
        """f [..., V].

        Args:
            depth: of the candidates, from 1, an int or int64 [...]. near: int64 [V, >= k] by `neighbours`, see `pools`.
            x: [...], the candidates: greedily a rule that pools has an f for each.
        """
        if self.greedy:
            return self.target(self._merged(P, x, near) if self.pools else P)
        if self.pools:
            return pooled(P, Q, self._neighbours(near)[:, : self.k], self._limit(P))
        if self.groups:
            return grouped(P, Q, self.group, self.gap)
        return relaxed(P, Q, self.omega(depth))

    def accept_code(
        self, P: Tensor, Q: Tensor, x: Tensor, depth: Tensor | int = 1, near: Tensor | None = None
    ) -> Tensor:
        """f [..., 1] of codes x [..., 1] only, at temperatures above 0; the other arguments as in `accept`."""
        if self.pools:
            limit = self._limit(P.gather(-1, x))
            return pooled_code(P, Q, x, self._neighbours(near)[:, : self.k], limit)
        if self.groups:
            return grouped_code(P, Q, x, self.group, self.gap)
        return relaxed(P.gather(-1, x), Q.gather(-1, x), self.omega(depth))

    def resample(self, P: Tensor, Q: Tensor, f: Tensor | None, x: Tensor, near: Tensor | None = None) -> Tensor:
        """G [..., V] after candidates x [...] were rejected; the other arguments as in `accept`. f may be None where G
        does not follow from it.
        """
        if self.greedy:
            return self.target(P)
        if self.published:
            return released_residual(P, Q, x, self._neighbours(near), self._limit(P))
        if self.optimal:
            return residual(P, Q, f)
        return residual(self._merged(P, x, near) if self.pools else P, Q, 1.0)

    def bound(self, P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
        """What judging a candidate adds to the bound on the total variation [...]; the cap at 1 is the caller's."""
        if self.guarantee != "bounded":
            return torch.zeros_like(P[..., 0])
        # their own G is biased where f < min(1, P / Q), though Q f <= P there
        own = self.name in ("cool-sd", "gsd") and not (self.optimal or self.greedy)
        return bound(self.target(P), Q, f, residual(P, Q, 1.0) if own else None)

    def _merged(self, P: Tensor, x: Tensor, near: Tensor | None) -> Tensor:
        """P_A [..., V] of codes x [...]."""
        return merge(P, x, self._neighbours(near)[:, : self.k], self._limit(P))

    def share(self, depth: Tensor | int) -> Tensor | float:
        """What rejecting a chosen code, Q = 1 there, leaves of its own probability, as `omega`; without pooling."""
        left = 1 - self.omega(depth) if self.optimal else 0.0
        return left.clamp(min=0) if isinstance(left, Tensor) else max(left, 0.0)

    def reach(self, x: Tensor, near: Tensor | None) -> Tensor:
        """What judging chosen codes x [...] by pooling looks at: they and neighbours, int64 [..., 1 + num_near]."""
        return torch.cat([x.unsqueeze(-1), self._neighbours(near)[x]], -1)

    def pool(self, mass: Tensor) -> tuple[Tensor, Tensor]:
        """The judgement of a chosen code by pooling, from the probabilities [..., 1 + num_near] of what it reaches.

        Returns:
            (what the code takes over [..., 1], bool [..., 1 + num_near], of which its rejection leaves nothing).
        """
        own, around = mass[..., :1], mass[..., 1 : 1 + self.k]
        limit = self.delta if self.name == "lantern" else self.lam * own
        sums = around.cumsum(-1)
        if self.published:  # rejecting a code that takes over any neighbour's mass empties all of them
            given = sums <= limit
            taken = given[..., :1].expand_as(mass[..., 1:])
        else:
            given = sums < limit
            taken = torch.zeros_like(given) if self.optimal else given
        return (around * given).sum(-1, keepdim=True), functional.pad(taken, (1, 0), value=True)

    def _neighbours(self, near: Tensor | None) -> Tensor:
        """int64 [V, num_near], nearest first."""
        least = self.num_near
        if near is None or near.shape[1] < min(least, len(near) - 1):
            raise ValueError(f"{self.name}: give near, int64 [V, k] by `neighbours` with k of at least {least}")
        return near[:, :least]

    def _limit(self, P: Tensor) -> Tensor:
        """The mass that stays above what the neighbours of codes of probability P give, of the shape of P."""
        limit = torch.full_like(P, self.delta) if self.name == "lantern" else self.lam * P
        if self.published:  # just above: a sum that equals the limit stays below this
            return limit.nextafter(torch.full_like(P, math.inf))
        return limit


@functools.lru_cache(maxsize=256)
def _rule(name: str, length: int | None, greedy: bool, *parameters: tuple[str, object]) -> Rule:
    return Rule(name, length=length, greedy=greedy, **dict(parameters))


def is_jacobi(request: Request) -> bool:
    """Whether a request's method is Jacobi decoding: only these have the option `pd_k`."""
    return request.pd_k is not None


def rule_of(request: Request) -> Rule:
    """The rule of a request. Its schedule spans the drafted depths; of a Jacobi window at most WINDOW_CAP.

    Raises:
        ValueError: a parameter is missing or out of range, or two contradict each other.
    """
    given = {option.name: getattr(request, option.name) for option in PARAMETERS[request.rule]}
    if given.get("published"):
        if given["optimal"]:
            raise ValueError(
                "optimal=True and published=True are mutually exclusive: they select different residual distributions."
                " Pass only one"
            )
        given["metric"] = given["metric"] or "raw"
    parameters = [(name, value) for name, value in given.items() if value is not None]
    length = request.gamma
    if is_jacobi(request):
        # the schedule spans the first path of the window, up to its cap
        path = request.window - (request.pd_k - 1) * request.pd_d
        length = min(path, WINDOW_CAP - 1 if request.schedule == "linear" else WINDOW_CAP)
    return _rule(request.rule, length, request.temperature == 0, *parameters)


# The settings of VQ methods that take any rule or coupling.

COUPLING = Option(
    "coupling",
    ("maximal", "same-image"),
    "maximal: the highest acceptance rate; same-image: accept only what ar would sample, so that each seed gives ar's"
    " image in fewer forward passes",
    default="maximal",
    implied=True,
    only_with=("rule", ("exact",)),
    off="maximal",
)
MIXED = tuple(option.name for option in VQ_OPTIONS)  # may differ between the sequences of a round


def coupling_option(default: str) -> Option:
    """`COUPLING` of a method; one that is not everyone's is written into requests."""
    return COUPLING.but(default=default, implied=default == COUPLING.default)


def rule_options(rule: str = "exact", **defaults: object) -> tuple[Option, ...]:
    """The options of a method that takes any rule: by default `rule`, with these values of its parameters."""
    options = [RULE.but(default=rule)]
    for name, parameters in PARAMETERS.items():
        for option in parameters:
            own = defaults.get(option.name)
            if option.fits(own):
                option = option.but(default=own, implied=False)
            options.append(option.but(only_with=("rule", (name,))))
    return tuple(options)


# Neighbours in the codebook, for rules that pool the probability of near codes.

MOST_COMPARED_AT_ONCE = 2**22  # distances at a time
_TABLES: weakref.WeakKeyDictionary[VQModel, dict[str, Tensor]] = weakref.WeakKeyDictionary()  # by metric


def near_codes(tokenizer: VQModel, metric: str, k: int) -> Tensor:
    """`neighbours` of the tokenizer's codes, at least k of each if the codebook has them; computed once."""
    tables = _TABLES.setdefault(tokenizer, {})
    wanted = min(k, tokenizer.config.codebook_size - 1)
    if metric not in tables or tables[metric].shape[1] < wanted:
        vectors = tokenizer.quantize.embedding.weight if metric == "raw" else tokenizer.codebook
        tables[metric] = neighbours(vectors.float(), k, metric)
    return tables[metric]


def neighbours(codebook: Tensor, k: int, metric: str = "l2") -> Tensor:
    """The k nearest others of each code, all of them if fewer: int64 [V, k], nearest first, lower index at ties.

    Args:
        codebook: [V, c], the vectors that the decoder receives, for LlamaGen the l2-normalised codes; for "raw" the
            codes as they are stored.
        k: >= 1. metric: "l2", "cosine", or "raw", which is l2; else ValueError.
    """
    if metric not in METRICS or k < 1:
        raise ValueError(f"metric={metric!r}, k={k}: give one of {', '.join(METRICS)}, and k of at least 1")
    vectors = functional.normalize(codebook, dim=-1) if metric == "cosine" else codebook
    k = min(k, len(vectors) - 1)
    near, start = [], 0
    for part in vectors.split(max(1, MOST_COMPARED_AT_ONCE // len(vectors))):
        # no matrix product: its rounding would reorder close neighbours
        distance = torch.cdist(part, vectors, compute_mode="donot_use_mm_for_euclid_dist")
        distance.diagonal(start).fill_(math.inf)  # a code is not its own neighbour
        near.append(_nearest(distance.float(), k))
        start += len(part)
    return torch.cat(near)


def _nearest(distance: Tensor, k: int) -> Tensor:
    """Indices of the k least of distance [n, V]: int64 [n, k], least first, lower index at ties."""
    farthest = distance.topk(k, largest=False).values[:, -1:]
    nearer = distance < farthest
    # topk chooses arbitrarily among ties for the last places: choose the lowest indices
    tied = distance == farthest
    num_tied = k - nearer.sum(1, keepdim=True)
    nearest = nearer | (tied & (tied.cumsum(1) <= num_tied))
    index = nearest.nonzero()[:, 1].view(-1, k)  # ascending in each row, which the stable sort keeps at ties
    order = distance.gather(1, index).argsort(dim=1, stable=True)
    return index.gather(1, order)
