"""Rules for drafted VQ tokens: accept x with probability f(x), else sample from G.

Pure functions on probabilities [..., V], P of the target and Q of the draft, float32 or float64; any leading dimensions
(sequences, positions, tree nodes). Coins and uniforms come in as arguments. A candidate that was chosen, not drawn, is
a point mass: Q = 1 at that token. Sources: exact, arXiv 2211.17192; uniform-rsd and cool-sd, COOL-SD; lantern, arXiv
2410.03355; lantern++, 2502.06352.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.option import Option, check_integer
from cspd.sequence import Request

SCHEDULES = ("exponential", "linear")
METRICS = ("l2", "cosine")
NEIGHBOURS = (
    Option("k", int, "neighbours at most", default=10, low=1),
    Option("metric", METRICS, "distance of neighbours, between the vectors that the decoder receives", default="l2"),
)
OPTIMAL = Option("optimal", bool, "resample from G*; false: as the paper's own code does", default=True)
PARAMETERS: dict[str, tuple[Option, ...]] = {  # of each rule
    "exact": (),
    "uniform-rsd": (Option("delta", float, "accepts with min(1, delta P/Q)", low=1), OPTIMAL),
    "cool-sd": (
        Option("delta", float, "mean relaxation over the depths, 1.1 to 4 in the paper", above=0),
        Option("schedule", SCHEDULES, "how the relaxation falls with depth", default="exponential"),
        Option("nu", float, "decay of the exponential schedule", default=0.7, above=0),
        OPTIMAL,
    ),
    "lantern": (
        Option("delta", float, "mass that the neighbours may give, 0.05 to 0.4 in the paper", above=0, high=1),
        *NEIGHBOURS,
        OPTIMAL,
    ),
    "lantern++": (
        Option("lam", float, "neighbours' mass over the code's own; the authors' lambda less 1", default=1.0, above=0),
        *NEIGHBOURS,
        OPTIMAL,
    ),
}
RULE = Option("rule", PARAMETERS, "how drafted codes are accepted", default="exact")
DEFAULTS = {option.name: option.default for options in PARAMETERS.values() for option in options}
MOST_DEPTHS = 2**16  # of a chain or tree
WINDOW_CAP = 8  # L of a schedule over a Jacobi window: at its 64, omega_1 would be 32 delta, blind acceptance
TINY = torch.finfo(torch.float32).tiny
MOST_AT_ONCE = 2**22  # numbers gathered, or distances, at a time


def relaxed(P: Tensor, Q: Tensor, omega: Tensor | float) -> Tensor:
    """f = min(1, omega P / Q) [..., V], omega a number or [..., 1]: 1 is exact, delta uniform-rsd, omega_i cool-sd."""
    return _ratio(omega * P, Q)


def pooled(P: Tensor, Q: Tensor, near: Tensor, limit: Tensor, x: Tensor | None = None) -> Tensor:
    """f = min(1, (P + absorbed) / Q) [..., V]: lantern with limit = delta everywhere, lantern++ with lam P.

    The authors' lantern++ has (lambda - 1) P: its lambda = 2 is lam = 1 here.

    Args:
        near, limit: as in `absorbed`. x: [...], the tokens whose f alone is wanted: other entries mean nothing.
    """
    return _ratio(P + absorbed(P, near, limit) if x is None else merge(P, x, near, limit), Q)


def _ratio(mass: Tensor, Q: Tensor) -> Tensor:
    # 0 / 0 is 0: what the target never emits is never accepted
    return (mass / Q).clamp(max=1).nan_to_num(nan=0.0)


def absorbed(P: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """The mass that each x takes over [..., V]: its neighbours', nearest first, until the sum would reach limit(x).

    Args:
        near: int64 [V, k] by `neighbours`, taken in chunks of rows. limit: [..., V].
    """
    rows = max(1, MOST_AT_ONCE * len(near) // max(1, P.numel() * near.shape[1]))
    parts = []
    for block, most in zip(near.split(rows), limit.split(rows, dim=-1)):
        # the k-th neighbours of all x side by side: vectors are long then
        sums = P.index_select(-1, block.T.flatten()).unflatten(-1, block.T.shape).cumsum(-2)
        parts.append(sums.masked_fill_(sums >= most.unsqueeze(-2), 0).amax(-2))
    return torch.cat(parts, dim=-1)


def merge(P: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """P_A [..., V]: P where tokens x [...] have taken over what they absorb; near, limit: as in `absorbed`."""
    block, x = near[x], x.unsqueeze(-1)
    mass = P.gather(-1, block)
    moved = mass * (mass.cumsum(-1) < limit.gather(-1, x))
    return P.scatter(-1, block, mass - moved).scatter_add(-1, x, moved.sum(-1, keepdim=True))


def residual(P: Tensor, Q: Tensor, f: Tensor | float) -> Tensor:
    """G* = norm([P - Q f]+) [..., V], P where that is 0: no G brings the law of what is committed nearer to P.

    With f = 1 it is the papers' norm([P - Q]+): the same if f >= min(1, P / Q) everywhere, else farther from P.
    """
    return _norm((P - Q * f).clamp(min=0), P)


def bound(P: Tensor, Q: Tensor, f: Tensor, G: Tensor | None = None) -> Tensor:
    """The total variation between P and what one judgement commits, the local term of COOL-SD's Theorem 2: [...].

    Without G it is sum [Q f - P]+: for G*, and for lantern's own G, which depends on the token that was rejected.
    """
    law = Q * f if G is None else Q * f + (Q * (1 - f)).sum(-1, keepdim=True) * G
    return (law - P).clamp(min=0).sum(-1)


def without(Q: Tensor, x: Tensor) -> Tensor:
    """Q for the sibling after tokens x [...] (-1: none): [..., V], x zeroed, renormalised; 0 if nothing is left."""
    left = _zeroed(Q, x)
    return left / left.sum(-1, keepdim=True).clamp(min=TINY)


def _zeroed(Q: Tensor, x: Tensor) -> Tensor:
    token = x.clamp(min=0).unsqueeze(-1)
    return Q.scatter(-1, token, Q.gather(-1, token) * (x < 0).unsqueeze(-1))


def _norm(weights: Tensor, otherwise: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def point(x: Tensor, like: Tensor) -> Tensor:
    """The point masses at tokens x [...]: [..., V], of the shape and dtype of `like`."""
    return torch.zeros_like(like).scatter(-1, x.unsqueeze(-1), 1)


def sample(P: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 [...] from weights P [..., V] and uniforms u [...], by the inverse distribution function.

    It takes one uniform a draw, where Gumbel-max would take V. Sums are in float64, and those at tokens of weight 0 do
    not count: no such token is ever returned, whatever u and the rounding.
    """
    sums = P.double().cumsum(-1).masked_fill(P <= 0, 0)
    level = u.double().clamp(max=1 - 2**-53).unsqueeze(-1) * sums.amax(-1, keepdim=True)
    return (sums > level).int().argmax(-1)


def draw_siblings(Q: Tensor, u: Tensor) -> Tensor:
    """Siblings without replacement, in the order drawn: uniforms [..., K] to tokens [..., K], -1 once Q is used up."""
    drawn = []
    for i, uniform in enumerate(u.unbind(-1)):
        Q = _zeroed(Q, drawn[-1]) if i else Q
        drawn.append(torch.where(Q.amax(-1) > 0, sample(Q, uniform), -1))
    return torch.stack(drawn, dim=-1)


def exponential(depth: Tensor | int, delta: float, length: int, nu: float = 0.7) -> Tensor | float:
    """omega_i = delta exp(-nu i - mu) at depths i in 1 .. length, with mu such that delta is its mean over them."""
    total = sum(math.exp(-nu * i) for i in range(length))
    return delta * length / total * math.exp(-nu) ** (depth - 1)


def linear(depth: Tensor | int, delta: float, length: int, ell: int = 8) -> Tensor | float:
    """As `exponential`, with omega_i in proportion to ell - i; ValueError where the last would not be above 0."""
    if length >= ell:
        raise ValueError(f"linear schedule: length={length} must be below ell={ell}; or take the exponential one")
    return delta * length * (ell - depth) / sum(ell - i for i in range(1, length + 1))


def neighbours(codebook: Tensor, k: int, metric: str = "l2") -> Tensor:
    """The k nearest others of each code, all of them if fewer: int64 [V, k], nearest first, lower index at ties.

    Args:
        codebook: [V, c], the vectors that the decoder receives: for LlamaGen the l2-normalised codes.
        k: >= 1. metric: "l2" or "cosine"; else ValueError.
    """
    if metric not in METRICS or k < 1:
        raise ValueError(f"metric={metric!r}, k={k}: give one of {', '.join(METRICS)}, and k of at least 1")
    vectors = functional.normalize(codebook, dim=-1) if metric == "cosine" else codebook
    near, start, k = [], 0, min(k, len(vectors) - 1)
    index = torch.arange(len(vectors), device=vectors.device)
    for rows in vectors.split(max(1, MOST_AT_ONCE // len(vectors))):
        # no matrix product: its rounding would reorder close neighbours
        distance = torch.cdist(rows, vectors, compute_mode="donot_use_mm_for_euclid_dist")
        distance.diagonal(start).fill_(math.inf)
        key = distance.float().view(torch.int32).long() << 32 | index  # in the order of (distance, index)
        near.append(key.topk(k, largest=False).values & 0xFFFFFFFF)
        start += len(rows)
    return torch.cat(near)


@dataclass(frozen=True)
class Rule:
    """A rule with its parameters: f, G and the bound of a judgement, whatever the draft.

    Attributes:
        name: "exact", "uniform-rsd", "cool-sd", "lantern" or "lantern++".
        delta: uniform-rsd: >= 1. cool-sd: > 0, the mean of omega, 1.1 to 4 in the paper. lantern: in (0, 1], what the
            neighbours give stays below it, 0.05 to 0.4 in the paper.
        schedule, nu, ell: cool-sd: of omega; nu > 0 is the exponential one's, ell the linear one's.
        length: cool-sd: L, a chain's length or a tree's depth; min(length, WINDOW_CAP) for a Jacobi window.
        lam: lantern++: > 0, see `pooled`. k: lantern, lantern++: how many neighbours at most.
        optimal: G is G*; or else the papers' own, norm([P - Q]+) and lantern's norm([P_A - Q]+).
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
    optimal: bool = DEFAULTS["optimal"]
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
        return "exact" if self.name == "exact" else "bounded"

    @property
    def pools(self) -> bool:
        """Whether it looks at neighbours."""
        return self.name in ("lantern", "lantern++")

    def omega(self, depth: Tensor | int) -> Tensor | float:
        """The factor of `relaxed` at depths from 1, an int or int64 [...]: a number or [..., 1]; constant from L on."""
        if self.name != "cool-sd":
            return self.delta if self.name == "uniform-rsd" else 1.0
        depth = depth.clamp(max=self.length).unsqueeze(-1) if isinstance(depth, Tensor) else min(depth, self.length)
        if self.schedule == "linear":
            return linear(depth, self.delta, self.length, self.ell)
        return exponential(depth, self.delta, self.length, self.nu)

    def target(self, P: Tensor) -> Tensor:
        """What is to be sampled from: P, or the point mass at its argmax."""
        return point(P.argmax(-1), P) if self.greedy else P

    def accept(
        self, P: Tensor, Q: Tensor, depth: Tensor | int = 1, near: Tensor | None = None, x: Tensor | None = None
    ) -> Tensor:
        """f [..., V].

        Args:
            depth: of the candidates, from 1, an int or int64 [...]. near: int64 [V, >= k] by `neighbours`, see `pools`.
            x: [...], the candidates if they are point masses: a rule that pools then computes f at x alone.
        """
        if self.greedy:
            return self.target(merge(P, x, *self._pool(P, near)) if self.pools else P)
        return pooled(P, Q, *self._pool(P, near), x) if self.pools else relaxed(P, Q, self.omega(depth))

    def resample(self, P: Tensor, Q: Tensor, f: Tensor, x: Tensor, near: Tensor | None = None) -> Tensor:
        """G [..., V] after candidates x [...] were rejected; the other arguments as in `accept`."""
        if self.greedy or self.optimal:
            return self.target(P) if self.greedy else residual(P, Q, f)
        return residual(merge(P, x, *self._pool(P, near)) if self.pools else P, Q, 1.0)

    def bound(self, P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
        """What judging a candidate adds to the bound on the total variation [...]; the cap at 1 is the caller's."""
        if self.name == "exact":
            return torch.zeros_like(P[..., 0])
        # where omega < 1 the shortcut is biased though Q f <= P
        shortcut = self.name == "cool-sd" and not (self.optimal or self.greedy)
        return bound(self.target(P), Q, f, residual(P, Q, 1.0) if shortcut else None)

    def _pool(self, P: Tensor, near: Tensor | None) -> tuple[Tensor, Tensor]:
        if near is None or near.shape[1] < min(self.k, P.shape[-1] - 1):
            raise ValueError(f"{self.name}: give near, int64 [V, k] by `neighbours` with k of at least {self.k}")
        return near[:, : self.k], torch.full_like(P, self.delta) if self.name == "lantern" else self.lam * P


@functools.lru_cache(maxsize=256)
def _rule(name: str, length: int | None, greedy: bool, *parameters: tuple[str, object]) -> Rule:
    return Rule(name, length=length, greedy=greedy, **dict(parameters))


def rule_of(request: Request) -> Rule:
    """The rule a request asks for, its schedule over as many depths as are drafted, of a window at most WINDOW_CAP.

    Raises:
        ValueError: a parameter is missing or out of range.
    """
    given = {option.name: getattr(request, option.name) for option in PARAMETERS[request.rule]}
    parameters = [(name, value) for name, value in given.items() if value is not None]
    length = request.gamma
    if request.pd_k is not None:  # of a window: the first path, as far as a schedule goes
        path = request.window - (request.pd_k - 1) * request.pd_d
        length = min(path, WINDOW_CAP - 1 if request.schedule == "linear" else WINDOW_CAP)
    return _rule(request.rule, length, request.temperature == 0, *parameters)


def rule_options(rule: str = "exact", **defaults: object) -> tuple[Option, ...]:
    """The options of a method that takes any rule: by default `rule`, with these values of its parameters."""
    options = [RULE.but(default=rule)]
    for name, parameters in PARAMETERS.items():
        for option in parameters:
            own = defaults.get(option.name, option.default) if name == rule else option.default
            options.append(option.but(default=own, only_with=("rule", (name,))))
    return tuple(options)


class Judged(NamedTuple):
    """Of K siblings: index, int64 [...], of the one accepted, or -1; residual [..., V], to sample from if none was; and
    bound [...], the sum over those that were judged."""

    index: Tensor
    residual: Tensor
    bound: Tensor


def judge_siblings(
    rule: Rule,
    P: Tensor,
    Q: Tensor | None,
    candidates: Tensor,
    coins: Tensor,
    depth: Tensor | int = 1,
    near: Tensor | None = None,
) -> Judged:
    """Judges candidates for one place in their order, each against what the rejection of those before it leaves of P.

    Args:
        P: [..., V]. Q: [..., V], which they were drawn from without replacement, in this order; None: point masses.
        candidates: int64 [..., K], -1 where there is none; K = 1 for the positions of a chain or a Jacobi window.
        coins: uniform [..., K]. depth, near: as in `Rule.accept`.
    """
    points = Q is None or rule.greedy
    index, total = candidates.new_full(candidates.shape[:-1], -1), torch.zeros_like(P[..., 0])
    for i, (x, coin) in enumerate(zip(candidates.unbind(-1), coins.unbind(-1))):
        judged, token = (index < 0) & (x >= 0), x.clamp(min=0)
        q = point(token, P) if points else Q
        f = rule.accept(P, q, depth, near, token if points else None)
        taken = judged & (coin < f.gather(-1, token.unsqueeze(-1)).squeeze(-1))
        index = torch.where(taken, i, index)
        total = total + torch.where(judged, rule.bound(P, q, f), 0)
        if not rule.greedy:
            P = torch.where(judged.unsqueeze(-1), rule.resample(P, q, f, token, near), P)
        if not points and i + 1 < candidates.shape[-1]:
            Q = without(Q, x)
    return Judged(index, rule.target(P), total)
