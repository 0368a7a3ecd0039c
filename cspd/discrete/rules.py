"""Rules for drafted VQ codes: accept x with probability f(x), else sample from G (`cspd.discrete.acceptance`).

A rule is a name and its parameters. Any rule judges any draft: candidates that were drawn from Q, and candidates that
were chosen, which are point masses, Q = 1 at that code.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete import acceptance
from cspd.discrete.probabilities import likeliest_point
from cspd.option import Option, check_integer
from cspd.sequence import Request

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
        """Whether it looks at neighbours."""
        return self.name in ("lantern", "lantern++")

    @property
    def groups(self) -> bool:
        """Whether it looks at the codes of similar probability."""
        return self.name == "gsd"

    @property
    def follows_f(self) -> bool:
        """Whether what it resamples from, G, follows from f at all codes."""
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
            return acceptance.linear(depth, self.delta, self.length, self.ell)
        return acceptance.exponential(depth, self.delta, self.length, self.nu)

    def target(self, P: Tensor) -> Tensor:
        """What is to be sampled from: P, or the point mass at its argmax."""
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
            return acceptance.pooled(P, Q, self._neighbours(near)[:, : self.k], self._limit(P))
        if self.groups:
            return acceptance.grouped(P, Q, self.group, self.gap)
        return acceptance.relaxed(P, Q, self.omega(depth))

    def accept_code(
        self, P: Tensor, Q: Tensor, x: Tensor, depth: Tensor | int = 1, near: Tensor | None = None
    ) -> Tensor:
        """f [..., 1] of codes x [..., 1] only, at temperatures above 0; the other arguments as in `accept`."""
        if self.pools:
            limit = self._limit(P.gather(-1, x))
            return acceptance.pooled_code(P, Q, x, self._neighbours(near)[:, : self.k], limit)
        if self.groups:
            return acceptance.grouped_code(P, Q, x, self.group, self.gap)
        return acceptance.relaxed(P.gather(-1, x), Q.gather(-1, x), self.omega(depth))

    def resample(self, P: Tensor, Q: Tensor, f: Tensor | None, x: Tensor, near: Tensor | None = None) -> Tensor:
        """G [..., V] after candidates x [...] were rejected; the other arguments as in `accept`. f may be None where G
        does not follow from it.
        """
        if self.greedy:
            return self.target(P)
        if self.published:
            return acceptance.released_residual(P, Q, x, self._neighbours(near), self._limit(P))
        if self.optimal:
            return acceptance.residual(P, Q, f)
        return acceptance.residual(self._merged(P, x, near) if self.pools else P, Q, 1.0)

    def bound(self, P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
        """What judging a candidate adds to the bound on the total variation [...]; the cap at 1 is the caller's."""
        if self.guarantee != "bounded":
            return torch.zeros_like(P[..., 0])
        # their own G is biased where f < min(1, P / Q), though Q f <= P there
        own = self.name in ("cool-sd", "gsd") and not (self.optimal or self.greedy)
        return acceptance.bound(self.target(P), Q, f, acceptance.residual(P, Q, 1.0) if own else None)

    def _merged(self, P: Tensor, x: Tensor, near: Tensor | None) -> Tensor:
        """P_A [..., V] of codes x [...]."""
        return acceptance.merge(P, x, self._neighbours(near)[:, : self.k], self._limit(P))

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


def rule_of(request: Request) -> Rule:
    """The rule a request asks for, its schedule over as many depths as are drafted, of a window at most WINDOW_CAP.

    Raises:
        ValueError: a parameter is missing or out of range, or two contradict each other.
    """
    given = {option.name: getattr(request, option.name) for option in PARAMETERS[request.rule]}
    if given.get("published"):
        if given["optimal"]:
            raise ValueError("optimal=True and published=True ask for two ways to resample: give one of them")
        given["metric"] = given["metric"] or "raw"
    parameters = [(name, value) for name, value in given.items() if value is not None]
    length = request.gamma
    if request.pd_k is not None:  # of a window: the first path, as far as a schedule goes
        path = request.window - (request.pd_k - 1) * request.pd_d
        length = min(path, WINDOW_CAP - 1 if request.schedule == "linear" else WINDOW_CAP)
    return _rule(request.rule, length, request.temperature == 0, *parameters)
