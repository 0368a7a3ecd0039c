"""The rules by which drafted VQ tokens are accepted or resampled."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.distributions import likeliest_point, order_keys
from cspd.discrete.gpt import VQModel
from cspd.option import BUDGET, VQ_OPTIONS, Option, option, options_of
from cspd.request import Request
from cspd.transformer import steps

# Rules. A rule accepts a drafted token x with probability f(x), and otherwise samples from G.
#
# Each is a class: its fields are its options, `accept` is its f, and `guarantee` and `local_bound` say how far the
# committed token is from P. They work on probabilities [..., V], P of the target and Q of the draft, float32 or
# float64, with any leading dimensions (sequences, positions, tree nodes). Any rule verifies any draft: for a token that
# was chosen, not sampled, Q is the point mass at it.
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


def ratio(mass: Tensor, Q: Tensor) -> Tensor:
    """min(1, mass / Q). 0 / 0 is 0: a token that the target never samples is never accepted."""
    return (mass / Q).clamp_(max=1).nan_to_num_(nan=0.0)


def residual(P: Tensor, Q: Tensor, f: Tensor | float) -> Tensor:
    """G* = norm([P - Q f]+) [..., V] (COOL-SD, eq. 5); P if that is 0 everywhere.

    No other G brings the distribution of the committed token nearer to P. With f = 1 it is the papers' own
    norm([P - Q]+) (COOL-SD, eq. 6): the same if f >= min(1, P / Q) everywhere, otherwise farther from P.
    """
    return _norm(P - Q * f, P)


def _norm(difference: Tensor, otherwise: Tensor | float) -> Tensor:
    """norm([difference]+) [..., V], or `otherwise` if that is 0 everywhere. Writes to `difference`."""
    weights = difference.clamp_(min=0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def bound(P: Tensor, Q: Tensor, f: Tensor, G: Tensor | None = None) -> Tensor:
    """The total variation [...] between P and the token that verifying one draft commits: the local term of COOL-SD's
    Theorem 2.

    Without G it is sum [Q f - P]+: for G*, and for lantern's own G, which depends on the rejected token (see the proof
    below).
    """
    committed = Q * f
    if G is not None:
        rejected = (Q * (1 - f)).sum(-1, keepdim=True)
        committed = committed + rejected * G
    return (committed - P).clamp(min=0).sum(-1)


class Rule:
    """A rule for drafted tokens. The six rules say what differs: f, and G and the bound if they are not these.

    Attributes:
        name: what requests give as `rule`.
        dial: the option that a budget chooses, and its values, each more relaxed than the one before; None if none.
        optimal: G is G*; otherwise the papers' own.
        greedy: whether tokens are sampled at temperature 0. pools: whether f depends on neighbours in the codebook.
    """

    name: ClassVar[str]
    dial: ClassVar[tuple[str, tuple[float, ...]] | None] = None
    optimal: bool
    greedy: ClassVar[bool] = False

    @property
    def guarantee(self) -> str:
        return "bounded"

    @property
    def pools(self) -> bool:
        return False

    @property
    def depends_on_x(self) -> bool:
        """Whether G depends on which token was rejected."""
        return False

    @property
    def has_whole_f(self) -> bool:
        """Whether f is computed at all tokens even on a CPU: G* needs it, or it is cheap."""
        return True

    def target(self, P: Tensor) -> Tensor:
        """The target's distribution: P, or at temperature 0 the point mass at its argmax."""
        return P

    def accept(self, P: Tensor, Q: Tensor, depth: Tensor | int = 1) -> Tensor:
        """f [..., V]. depth: of the candidates in a chain or tree, from 1, an int or int64 [...]."""
        raise NotImplementedError

    def accept_token(self, P: Tensor, Q: Tensor, x: Tensor) -> Tensor:
        """f for tokens x [..., 1] only, [..., 1], of a rule without `has_whole_f`."""
        return self.accept(P, Q).gather(-1, x)

    def resample(self, P: Tensor, Q: Tensor, f: Any, x: Tensor) -> Tensor:
        """G [..., V] after candidates x [...] were rejected. f: None if the rule has no `has_whole_f`."""
        return residual(P, Q, f if self.optimal else 1.0)

    def local_bound(self, P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
        """The local term [...] that verifying a candidate adds to the bound on the total variation, not capped at 1."""
        # norm([P - Q]+) is biased where f < min(1, P / Q), although Q f <= P there
        return bound(P, Q, f, None if self.optimal else residual(P, Q, 1.0))

    def merged(self, P: Tensor, x: Tensor) -> Tensor:
        """P after tokens x [...] took over the probability of their neighbours, if the rule pools."""
        return P


Optimal = Annotated[
    bool,
    option(
        "after a rejection, sample from COOL-SD's optimal distribution G*; otherwise from that of the rule's own paper",
        implied=True,
    ),
]
DELTAS = (1.01, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 3.0, 4.0)


class Ratio(Rule):
    """Rules that scale the ratio: f = min(1, omega P / Q) (COOL-SD, eq. 7)."""

    def omega(self, depth: Tensor | int) -> Tensor | float:
        """omega at depths from 1, an int or int64 [...]: a number or [..., 1]."""
        raise NotImplementedError

    def accept(self, P: Tensor, Q: Tensor, depth: Tensor | int = 1) -> Tensor:
        return ratio(self.omega(depth) * P, Q)

    def share(self, depth: Tensor | int) -> Tensor | float:
        """The fraction of a chosen token's probability that its rejection leaves, 1 - omega or 0; shaped like `omega`.

        A chosen token has Q = 1, so f and G depend on P alone.
        """
        left = 1 - self.omega(depth) if self.optimal else 0.0
        return left.clamp(min=0) if isinstance(left, Tensor) else max(left, 0.0)


@dataclass(frozen=True)
class Exact(Ratio):
    """f = min(1, P / Q), G = norm([P - Q]+): the committed token follows P."""

    name = "exact"
    optimal = True

    @property
    def guarantee(self) -> str:
        return "exact"

    def omega(self, depth: Tensor | int) -> float:
        return 1.0

    def accept(self, P: Tensor, Q: Tensor, depth: Tensor | int = 1) -> Tensor:
        return ratio(P, Q)


@dataclass(frozen=True)
class UniformRSD(Ratio):
    """f = min(1, delta P / Q)."""

    name = "uniform-rsd"
    dial = ("delta", DELTAS)
    delta: Annotated[float, option("accepts with min(1, delta P/Q)", low=1)] = 1.1
    optimal: Optimal = True

    def omega(self, depth: Tensor | int) -> float:
        return self.delta


@dataclass(frozen=True)
class CoolSD(Ratio):
    """f = min(1, omega_i P / Q) at depth i: omega falls with depth, and its mean is delta (COOL-SD, eq. 10).

    Attributes:
        length: L, the number of depths: a chain's length or a tree's height. omega is constant beyond. No option.

    Raises:
        ValueError: the last omega of the linear schedule would not be above 0.
    """

    name = "cool-sd"
    dial = ("delta", DELTAS)
    delta: Annotated[float, option("mean relaxation over the depths; 1.1 to 4 in the paper", above=0)] = 1.1
    schedule: Annotated[
        Literal["exponential", "linear"], option("how the relaxation falls with depth", implied=True)
    ] = "exponential"
    nu: Annotated[float, option("decay of the exponential schedule", implied=True, above=0)] = 0.7
    optimal: Optimal = True
    length: int = 1

    def __post_init__(self) -> None:
        if self.schedule == "linear" and self.length >= ELL:
            raise ValueError(
                f"schedule='linear' needs a draft length below {ELL}, got length={self.length}: draft less far, or use"
                " schedule='exponential'"
            )

    def omega(self, depth: Tensor | int) -> Tensor | float:
        if isinstance(depth, Tensor):
            depth = depth.clamp(max=self.length).unsqueeze(-1)
        else:
            depth = min(depth, self.length)
        if self.schedule == "linear":
            return linear(depth, self.delta, self.length)
        return exponential(depth, self.delta, self.length, self.nu)


ELL = 8  # of the linear schedule; COOL-SD's


def exponential(depth: Tensor | int, delta: float, length: int, nu: float) -> Tensor | float:
    """omega_i = delta exp(-nu i - mu) at depths i in 1 .. length, with mu such that their mean is delta."""
    decay = math.exp(-nu)
    total = sum(math.exp(-nu * i) for i in range(length))
    first = delta * length / total
    return first * decay ** (depth - 1)


def linear(depth: Tensor | int, delta: float, length: int) -> Tensor | float:
    """As `exponential`, with omega_i in proportion to ELL - i."""
    total = sum(ELL - i for i in range(1, length + 1))
    return delta * length * (ELL - depth) / total


@dataclass(frozen=True)
class GSD(Rule):
    """f = min(1, P(C) / Q(C)), C a group of tokens around x (its Algorithm 3); group = 1 is exact.

    In the order of rising P, lower index first at ties, C holds the token, the group // 2 before it and the
    (group - 1) // 2 after it, but none whose P differs from its own by `gap` or more. The paper also leaves out tokens
    whose embeddings are far apart, by a distance chosen for one model. By its Table 2 that changes nothing, and the
    authors' later code does not do it.
    """

    name = "gsd"
    dial = ("group", (2, 3, 5, 10, 14, 25, 50))
    group: Annotated[
        int,
        option(
            "tokens verified as one group: neighbours in the order of the target's probabilities; 3 to 50 in the paper",
            low=1,
        ),
    ] = 10
    gap: Annotated[
        float,
        option("tokens of one group differ by less than this in probability", implied=True, low=0.001, high=1),
    ] = 0.15
    optimal: Optimal = True

    @property
    def has_whole_f(self) -> bool:
        return self.optimal

    def accept(self, P: Tensor, Q: Tensor, depth: Tensor | int = 1) -> Tensor:
        ordered, tokens = P.sort(dim=-1, stable=True)
        ordered = ordered.contiguous()
        rank = steps(P.shape[-1], P.device)

        # where each group begins, and the index after its last token
        first = torch.searchsorted(ordered, ordered - self.gap, right=True)
        first = torch.maximum(first, rank - self.group // 2)
        end = torch.searchsorted(ordered, ordered + self.gap)
        end = torch.minimum(end, rank + (self.group + 1) // 2)

        # sums of P and Q over the group, as differences: float64, or small ones would be lost
        mass = torch.stack([ordered, Q.gather(-1, tokens)]).double()
        sums = functional.pad(mass.cumsum(-1), (1, 0))
        before_end = sums.gather(-1, end.expand_as(mass))
        before_first = sums.gather(-1, first.expand_as(mass))
        P_of_group, Q_of_group = before_end - before_first
        f = ratio(P_of_group, Q_of_group).to(P.dtype)
        f = f.masked_fill(ordered <= 0, 0)  # a token that the target never samples is never accepted
        return torch.empty_like(P).scatter_(-1, tokens, f)

    def accept_token(self, P: Tensor, Q: Tensor, x: Tensor) -> Tensor:
        """f at x. In float32 it takes a top-k instead of sorting rows."""
        if P.dtype == torch.float64:
            return super().accept_token(P, Q, x)

        # the group in the order of (P, index); fewer tokens at the ends of the order
        keys = order_keys(P)
        own_key = keys.gather(-1, x)
        num_before = min(self.group // 2, P.shape[-1])
        num_after = min((self.group - 1) // 2, P.shape[-1])
        before = keys.masked_fill(keys >= own_key, -1).topk(num_before)
        after = keys.masked_fill(keys <= own_key, LAST_KEY).topk(num_after, largest=False)
        tokens = torch.cat([x, before.indices, after.indices], -1)
        is_there = torch.cat([own_key >= 0, before.values >= 0, after.values < LAST_KEY], -1)

        # sums over those whose probability is near its own
        mass = P.gather(-1, tokens)
        own = mass[..., :1]
        inside = is_there & (mass > own - self.gap) & (mass < own + self.gap)
        P_of_group = (mass.double() * inside).sum(-1, keepdim=True)
        Q_of_group = (Q.gather(-1, tokens).double() * inside).sum(-1, keepdim=True)
        f = ratio(P_of_group, Q_of_group).to(P.dtype)
        return f.masked_fill(own <= 0, 0)


LAST_KEY = torch.iinfo(torch.int64).max


# Rules that pool: a token takes over the probability of its neighbours in the codebook.

NumNear = Annotated[int, option("maximum number of neighbours", implied=True, low=1)]
Metric = Annotated[
    Literal["l2", "cosine", "raw", "random"],
    option(
        "distance of neighbours: of the vectors that the decoder receives, or l2 of the codebook as it is stored (raw);"
        " random: any codes, the same ones in every run",
        implied=True,
    ),
]
Published = Annotated[
    bool,
    option(
        "verify as LANTERN's released code does instead of its paper: no bound; raw neighbours unless metric is given",
        implied=True,
    ),
]


class Pooling(Rule):
    """Rules with f = min(1, (P + absorbed) / Q): x absorbs its nearest neighbours' P while the sum is below a limit.

    Attributes:
        k: the maximum number of neighbours. metric: their distance.
        optimal: G is G*; otherwise norm([P_A - Q]+), see `merged`.
        published: f and G are those of LANTERN's released code, whatever `optimal` says: see `released_residual`. Sums
            that equal the limit are absorbed too.
        near: int64 [V, >= num_near], see `neighbours`. `rule_of` sets it; verifying without it is a ValueError.
    """

    k: int
    metric: str
    published: bool
    near: Tensor | None

    def limit(self, P: Tensor) -> Tensor:
        """What the absorbed mass must stay below, for tokens of probability P: shaped like P."""
        raise NotImplementedError

    @property
    def guarantee(self) -> str:
        return "heuristic" if self.published else "bounded"

    @property
    def pools(self) -> bool:
        return True

    @property
    def depends_on_x(self) -> bool:
        return self.published or not self.optimal

    @property
    def has_whole_f(self) -> bool:
        return not self.depends_on_x

    @property
    def num_near(self) -> int:
        """The number of neighbours per token that it reads. The released code empties one more than it pools."""
        return self.k + self.published

    def accept(self, P: Tensor, Q: Tensor, depth: Tensor | int = 1) -> Tensor:
        return ratio(P + absorbed(P, self._pooled(), self._limit(P)), Q)

    def accept_token(self, P: Tensor, Q: Tensor, x: Tensor) -> Tensor:
        own = P.gather(-1, x)
        return ratio(own + absorbed_by(P, x, self._pooled(), self._limit(own)), Q.gather(-1, x))

    def resample(self, P: Tensor, Q: Tensor, f: Any, x: Tensor) -> Tensor:
        if self.published:
            return released_residual(P, Q, x, self._neighbours(), self._limit(P))
        if self.optimal:
            return residual(P, Q, f)
        return residual(self.merged(P, x), Q, 1.0)

    def local_bound(self, P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
        return bound(P, Q, f)  # of the paper's G, too

    def merged(self, P: Tensor, x: Tensor) -> Tensor:
        """P_A [..., V] for tokens x [...]."""
        return merge(P, x, self._pooled(), self._limit(P))

    # A chosen token has Q = 1: f and G depend on P alone, at x and its neighbours.

    def reach(self, x: Tensor) -> Tensor:
        """The tokens that pooling for chosen tokens x [...] reads: x and neighbours, int64 [..., 1 + num_near]."""
        return torch.cat([x.unsqueeze(-1), self._neighbours()[x]], -1)

    def pool(self, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Verifies a chosen token by pooling, given the probabilities [..., 1 + num_near] of the tokens in its `reach`.

        Returns:
            (the mass that the token takes over [..., 1],
            bool [..., 1 + num_near], the tokens of which its rejection leaves nothing).
        """
        own = mass[..., :1]
        around = mass[..., 1 : 1 + self.k]
        limit = self._limit(own)
        given = around.cumsum(-1) < limit
        if self.published:  # rejecting a token that takes over any neighbour's mass empties all of them
            taken = given[..., :1].expand_as(mass[..., 1:])
        else:
            taken = torch.zeros_like(given) if self.optimal else given
        mass_absorbed = (around * given).sum(-1, keepdim=True)
        return mass_absorbed, functional.pad(taken, (1, 0), value=True)

    def _neighbours(self) -> Tensor:
        """int64 [V, num_near], nearest first."""
        least = self.num_near
        if self.near is None or self.near.shape[1] < min(least, len(self.near) - 1):
            raise ValueError(f"rule={self.name!r} needs near=neighbours(codebook, k) with k of at least {least}")
        return self.near[:, :least]

    def _pooled(self) -> Tensor:
        """int64 [V, k], the neighbours that may give mass."""
        return self._neighbours()[:, : self.k]

    def _limit(self, P: Tensor) -> Tensor:
        limit = self.limit(P)
        if self.published:  # just above: a sum that equals the limit stays below this
            return limit.nextafter(torch.full_like(P, math.inf))
        return limit


@dataclass(frozen=True)
class Lantern(Pooling):
    """f = min(1, (P + absorbed) / Q), with the distance of P_A from P below delta (its section 3.3).

    In total variation (tvd) that distance is the absorbed mass. The paper's Table 4 also has the Jensen-Shannon
    divergence (jsd). It does not name the logarithm; ours is the natural one: with that of base 2, as with the root of
    the divergence, jsd would allow hardly more than tvd or less at the same delta, but the paper's accepts more.
    """

    name = "lantern"
    dial = ("delta", (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4))
    delta: Annotated[
        float,
        option("limits the probability that neighbours may add, see bound; 0.05 to 0.4 in the paper", above=0, high=1),
    ] = 0.2
    k: NumNear = 10
    metric: Metric = "l2"
    bound: Annotated[
        Literal["tvd", "jsd"],
        option(
            "what must stay below delta between the target's and the pooled distribution: total variation, which is"
            " the probability added, or the Jensen-Shannon divergence in nats",
            implied=True,
        ),
    ] = "tvd"
    optimal: Optimal = True
    published: Published = False
    near: Tensor | None = field(default=None, repr=False, compare=False)

    def limit(self, P: Tensor) -> Tensor:
        if self.bound == "jsd":
            return mass_at_jsd(P, self.delta)
        return torch.full_like(P, self.delta)


@dataclass(frozen=True)
class LanternPlus(Pooling):
    """f = min(1, (P + absorbed) / Q), absorbed < lam P. The authors have (lambda - 1) P: lambda = 2 is lam = 1."""

    name = "lantern++"
    dial = ("lam", (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0))
    lam: Annotated[
        float,
        option(
            "the neighbours' probability relative to the token's own; the authors' lambda minus 1",
            implied=True,
            above=0,
        ),
    ] = 1.0
    k: NumNear = 10
    metric: Metric = "l2"
    optimal: Optimal = True
    published: Published = False
    near: Tensor | None = field(default=None, repr=False, compare=False)

    def limit(self, P: Tensor) -> Tensor:
        return self.lam * P


def jsd(P: Tensor, mass: Tensor) -> Tensor:
    """The Jensen-Shannon divergence in nats between P and P_A, if tokens of probability P take over a mass above 0.

    Each token that gives all its mass m adds m log(2) / 2; the token that takes it adds the rest.
    """
    pooled = P + mass
    middle = P + mass / 2
    of_taker = torch.xlogy(P, P / middle) + pooled * torch.log(pooled / middle)
    return (of_taker + mass * math.log(2)) / 2


NEWTON_STEPS = 4  # more change nothing, in float64 either


def mass_at_jsd(P: Tensor, delta: float) -> Tensor:
    """The mass at which `jsd` reaches delta, shaped like P; more than there is if it never does.

    Newton's method. The divergence is convex in the mass and rises by at least log(2) / 2 per unit of it, so that the
    iteration falls towards the solution from this start.
    """
    mass = torch.full_like(P, 2 * delta / math.log(2))
    for _ in range(NEWTON_STEPS):
        slope = torch.log(2 * (P + mass) / (P + mass / 2)) / 2
        mass = mass - (jsd(P, mass) - delta) / slope
    return mass


MAX_GATHERED = 2**22  # probabilities gathered at a time, which bounds memory


def absorbed(P: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """The mass that each x takes over [..., V]: its neighbours', nearest first, until the sum would reach limit(x).

    Args:
        near: int64 [V, k], see `neighbours`. limit: [..., V].
    """
    vocabulary, num_near = near.shape
    gathered = P.numel() * num_near
    chunk = max(1, MAX_GATHERED * vocabulary // max(1, gathered))
    # transposed to a row per token, so that whole rows are gathered
    rows = P.reshape(-1, vocabulary).T.contiguous()
    limits = limit.reshape(-1, vocabulary).T
    parts = []
    for block, most in zip(near.split(chunk), limits.split(chunk)):
        mass = rows.index_select(0, block.flatten()).unflatten(0, block.shape)
        sums = mass.cumsum(1)
        reached = sums >= most.unsqueeze(1)
        parts.append(sums.masked_fill_(reached, 0).amax(1))
    return torch.cat(parts).T.view(P.shape)


def absorbed_by(P: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """`absorbed` for tokens x [..., 1] only: [..., 1]. `limit`: [..., 1]."""
    around = near[x.squeeze(-1)]
    sums = P.gather(-1, around).cumsum(-1)
    reached = sums >= limit
    return sums.masked_fill_(reached, 0).amax(-1, keepdim=True)


def merge(P: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """P_A [..., V]: P after tokens x [...] took over the mass that they absorb; near, limit: as in `absorbed`.

    LANTERN, section 3.3, the distribution q_{k,delta}(. | D = x).
    """
    around = near[x]
    x = x.unsqueeze(-1)
    mass = P.gather(-1, around)
    is_below = mass.cumsum(-1) < limit.gather(-1, x)
    moved = mass * is_below
    emptied = P.scatter(-1, around, mass - moved)
    return emptied.scatter_add(-1, x, moved.sum(-1, keepdim=True))


def released_residual(P: Tensor, Q: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """G [..., V] of LANTERN's released code after tokens x [...], sampled from Q, were rejected: norm([P - Q']+).

    Q' is Q without the neighbours of x, all of them if the first one gives x its mass. (The paper's [P_A - Q]+ moves
    the neighbours' mass within P, see `merge`.) If nothing is left, every token is equally likely.

    Args:
        near, limit: as in `absorbed`, but `near` has one neighbour more than may give mass.
    """
    around = near[x]
    nearest = around[..., :1]
    gives = P.gather(-1, nearest) < limit.gather(-1, x.unsqueeze(-1))
    of_neighbours = Q.gather(-1, around).masked_fill(gives, 0)
    emptied = Q.scatter(-1, around, of_neighbours)
    return _norm(P - emptied, 1 / P.shape[-1])


@dataclass(frozen=True)
class Greedy(Rule):
    """Any rule at temperature 0: x is accepted if it is the argmax of P (of P_A, if the rule pools).

    The lowest index is taken at ties. After a rejection the argmax of P is committed. P is given at temperature 1.
    """

    rule: Rule
    greedy = True
    optimal = True

    @property
    def guarantee(self) -> str:
        return self.rule.guarantee

    @property
    def pools(self) -> bool:
        return self.rule.pools

    def target(self, P: Tensor) -> Tensor:
        return likeliest_point(P)

    def accept_token(self, P: Tensor, Q: Tensor, x: Tensor) -> Tensor:
        return likeliest_point(self.rule.merged(P, x.squeeze(-1))).gather(-1, x)


# Why the bound holds: Theorem 2 of COOL-SD (arXiv 2601.09212) proves it for chains, this also for trees and Jacobi
# windows.
#
# One position. Let P_1 = P be the target's distribution and x_1, x_2, ... the candidates in the order of verification.
# For every draft:
#
# * Given that x_1 .. x_{k-1} were rejected, x_k follows Q_k: Q without the earlier siblings, renormalised, or a point
#   mass (chosen, EAGLE-2).
# * x_k is accepted with probability f_k(x_k), else the distribution to sample from becomes P_{k+1} = G(P_k, Q_k, f_k).
#
# Let D_k(h) be the TV of the committed token from P_k(h), given the rejected candidates h. Verifying x_k commits with
# the sub-distribution Q_k f_k and leaves mass r. The local term b_k is the TV of Q_k f_k + r G from P_k. After a
# rejection, the next step is off from G by D_{k+1}(h, x_k). So
#
#     D_k(h) <= b_k(h) + E[ 1{x_k rejected} D_{k+1}(h, x_k) ].
#
# After the last candidate G itself is sampled, so D = 0. Hence D_1 <= E[sum of b over the verified candidates], where
# b is
#
# * for G* = norm([P - Q f]+): sum_x [Q f - P]+;
# * for LANTERN's G = norm([P_A - Q]+), which depends on the rejected x, the same. Let R = sum_x Q (1 - f), and Z_x =
#   sum [P_A - Q]+ = sum [Q - P_A]+. At x, [Q - P_A]+ = Q (1 - f); elsewhere P_A <= P, so [Q - P_A]+ >= [Q - P]+ >= Q
#   (1 - f). Hence Z_x >= R. A token y with P > Q gets at most [P - Q]+(y) sum_x Q(x) (1 - f(x)) / Z_x <= [P - Q]+(y)
#   on top of Q f <= Q: no excess. A token with P <= Q gets nothing more;
# * for norm([P - Q]+) if f may be below min(1, P/Q) (COOL-SD's eq. 6 with omega < 1, and GSD): the full TV between Q f
#   + r G and P.
#
# A whole image. Let H_i hold all samples for positions before i, and let the token committed at i, given H_i, be
# within D_i of the target's distribution. Couple the two sequences to stay equal as long as possible. They part at i
# with probability at most E[D_i], so the TV is at most sum_i E[D_i]. The facts above hold given H_i, since every
# decision has a random number of its own:
#
# * Chain. If i is verified, the drafted tokens before x_i are the committed ones. Drafts after a rejection are
#   dropped.
# * Tree. A static tree's siblings come from one distribution, in a number that does not depend on their values. A
#   dynamic tree is a function of the committed tokens.
# * Jacobi window. Tokens after a rejection are resampled or kept by the exact rule, so each follows the recorded Q,
#   the target's distribution after the *old* tokens before it. The relaxed rule verifies each token once. The
#   positions before i decide which round commits i. SJD-PAC samples siblings from Q without the first path's token.
# * Same-image coupling. The token is the target's own sample: D_i = 0.


# The rules by name, and the rule of a request.

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Exact, UniformRSD, CoolSD, Lantern, LanternPlus, GSD)}
PARAMETERS = {name: options_of(rule) for name, rule in RULES.items()}
DIALS = {name: rule.dial for name, rule in RULES.items() if rule.dial}
RULE = Option("rule", RULES, "how drafted tokens are accepted", default="exact")
WINDOW_CAP = 8  # L of a schedule over a Jacobi window: at its 64, omega_1 would be 32 delta, blind acceptance


def rule_of(request: Request, tokenizer: VQModel | None = None) -> Rule:
    """The rule of a checked request. With a tokenizer, rules that pool know its codes' neighbours, and can verify.

    Raises:
        ValueError: two parameters contradict each other.
    """
    given = {option.name: getattr(request, option.name) for option in PARAMETERS[request.rule]}
    if given.get("published"):
        if given["optimal"]:
            raise ValueError(
                "optimal=True and published=True are mutually exclusive: they select different residual distributions."
                " Pass only one"
            )
        given["metric"] = given["metric"] or "raw"
    settings = {name: value for name, value in given.items() if value is not None}
    if request.rule == CoolSD.name:
        settings["length"] = _num_depths(request)
    rule = RULES[request.rule](**settings)
    if isinstance(rule, Pooling) and tokenizer is not None:
        rule = replace(cast(Any, rule), near=near_codes(tokenizer, rule.metric, rule.num_near))
    return Greedy(rule) if request.temperature == 0 else rule


def _num_depths(request: Request) -> int:
    """How many depths a schedule spans: those that are drafted, but at most WINDOW_CAP of a Jacobi window."""
    if request.pd_k is None:
        return request.gamma
    path = request.window - (request.pd_k - 1) * request.pd_d  # the window's first path
    return min(path, ELL - 1 if request.schedule == "linear" else WINDOW_CAP)


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
    """`COUPLING` with a method's default. A default other than the usual one is written into requests."""
    return COUPLING.but(default=default, implied=default == COUPLING.default)


def rule_options(rule: str = "exact", **defaults: object) -> tuple[Option, ...]:
    """The options of a method that takes any rule: by default `rule`, with these values of its parameters."""
    options = [RULE.but(default=rule)]
    for name, parameters in PARAMETERS.items():
        for parameter in parameters:
            own = defaults.get(parameter.name)
            if parameter.fits(own):
                parameter = parameter.but(default=own, implied=False)
            options.append(parameter.but(only_with=("rule", (name,))))
    of_dials = f"{BUDGET.help}. Chooses delta, lam or group in their place"
    # a budget may choose the exact rule: then the request has both, and must be valid
    rules = tuple(DIALS) if rule == "exact" else (*DIALS, "exact")
    return *options, BUDGET.but(help=of_dials, only_with=("rule", rules))


# Neighbours in the codebook, for rules that pool the probability of near codes.

MAX_COMPARED = 2**22  # distances computed at a time
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
    """The k nearest others of each code, or all if there are fewer: int64 [V, k], nearest first, lower index at ties.

    Args:
        codebook: [V, c], the vectors that the decoder receives, for LlamaGen the l2-normalised codes; for "raw" the
            codes as they are stored.
        k: at least 1. metric: "l2", "cosine", "raw", which is l2, or "random", for which every distance is drawn.
    """
    generator = torch.Generator().manual_seed(0)  # the same neighbours in every run, on every device
    vectors = functional.normalize(codebook, dim=-1) if metric == "cosine" else codebook
    k = min(k, len(vectors) - 1)
    near = []
    first = 0
    for part in vectors.split(max(1, MAX_COMPARED // len(vectors))):
        if metric == "random":
            distance = torch.rand(len(part), len(vectors), generator=generator).to(vectors.device)
        else:
            # no matrix product: its rounding would reorder close neighbours
            distance = torch.cdist(part, vectors, compute_mode="donot_use_mm_for_euclid_dist")
        distance.diagonal(first).fill_(math.inf)  # a code is not its own neighbour
        # keys, since topk alone chooses arbitrarily among ties
        near.append(order_keys(distance.float()).topk(k, largest=False).indices)
        first += len(part)
    return torch.cat(near)
