"""What goes into the engine and what comes out: requests, running sequences, outputs and their statistics."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass, field, replace

from torch import Tensor

PHASES = ("backbone", "head", "draft", "decode", "other")


@dataclass(frozen=True)
class Request:
    """One image to make. What is None takes the target's published setting.

    Attributes:
        label: class, 0 .. class_num - 1.
        seed: of everything random in this image, 0 .. 2^63 - 1.
        method: a name of `cspd.methods.METHODS`; its options follow, None where a method has none of that name. By
            default `speculative` of MAR, `sjd-pac` of VQ models.
        num_iter: K, autoregressive iterations, 1 .. L; to `cspd` only the guidance of each token, and the prefill.
        cfg: guidance scale s >= 0; 1 is no guidance.
        cfg_schedule: "linear" (s grows over the iterations) or "constant".
        temperature: tau >= 0, multiplies the noise of the denoising steps; of VQ models, divides the logits.
        num_sampling_steps: T, denoising steps a token, 2 .. 1000.
        window: W, denoising steps drafted ahead in the head, 0 (ancestral) .. min(32, T); by default what this device's
            cost model finds fastest for the engine's slots. It decides which image a seed gives, not the law. Of a
            Jacobi method, how many codes are judged at once.
        draft: "calibrated" or "frozen", how the head's output is drafted; of VQ models "chain", "eagle-static" or
            "eagle-dynamic".
        gamma: tokens drafted a round by the draft model; the height of a tree.
        verify: "parallel" (all drafted tokens judged from the verified prefix, rejected ones replaced in place) or
            "sequential" (each judged after those before it, the round ends at the first rejection).
        ratio_temperature: divides the last step's z-scores in the ratio of the densities.
        align: whether draft and target denoise a token with the same noise.
        prefill: share of the tokens that the target makes alone, at first; in 0 .. 1.
        chains: "ancestral" or "speculative", how both models denoise in `cspd`.
        top_k, top_p: of VQ models: the k likeliest codes are kept (0: all), then the fewest of this mass (1: all).
        rule: how drafted VQ codes are accepted, of `cspd.discrete.rules.NAMES`; its parameters follow: delta, schedule,
            nu, lam, k, optimal (see `cspd.discrete.rules.Rule`), and metric, "l2" or "cosine", of neighbouring codes.
        pd_k, pd_d: K candidates at each of D levels after a rejection, of a Jacobi window; continuation: whether codes
            after a rejection are kept where they can be.
        family: "MAR" or "VQ", whose models make it; by default the engine's first that have the method.
    """

    label: int
    seed: int = 0
    method: str | None = None
    num_iter: int | None = None
    cfg: float | None = None
    cfg_schedule: str | None = None
    temperature: float | None = None
    num_sampling_steps: int | None = None
    window: int | None = None
    draft: str | None = None
    gamma: int | None = None
    verify: str | None = None
    ratio_temperature: float | None = None
    align: bool | None = None
    prefill: float | None = None
    chains: str | None = None
    top_k: int | None = None
    top_p: float | None = None
    rule: str | None = None
    delta: float | None = None
    schedule: str | None = None
    nu: float | None = None
    lam: float | None = None
    k: int | None = None
    metric: str | None = None
    pd_k: int | None = None
    pd_d: int | None = None
    continuation: bool | None = None
    optimal: bool | None = None
    family: str | None = None

    @property
    def guided(self) -> bool:
        """Whether the null class is evaluated too."""
        return self.cfg != 1

    @property
    def round_key(self) -> Hashable:
        """Requests with equal keys can share a round, whatever else differs."""
        if self.family == "VQ":
            settings = replace(self, label=0, seed=0, cfg=None, temperature=None, top_k=None, top_p=None)
            return settings, self.guided, self.temperature == 0
        if self.method == "ar":
            return self.method, self.guided, self.num_sampling_steps
        return replace(self, label=0, seed=0, num_iter=None)


@dataclass
class RoundStats:
    """What a request cost. Counts are of the calls it took part in, alone or with others.

    Attributes:
        guarantee: of the method: "exact", "bounded" or "heuristic".
        iterations: autoregressive iterations; rounds of draft and verification count as one.
        backbone_calls: the target's backbone forwards, conditional and null class in one.
        head_calls: sequential calls of the target's head; head_calls_per_token: of one token's chain, their mean.
        head_evaluations: rows of this request it was evaluated on, null class included.
        draft_backbone_calls, draft_head_calls: the same of the draft model.
        by_lag, by_step, by_rank: drafts judged, and accepted, by how far ahead they were (from 1) and, if states of a
            chain, by denoising step or, if tokens, by rank in the generation order.
        committed: how many rounds committed 1 VQ code, 2, ... bound: the rule's local bounds, summed: over requests its
            mean bounds the total variation of an image's codes from the target's.
        resample_tries: residual candidates looked at; fallbacks: how often none was kept and the last had to do.
        seconds: wall time of the rounds it took part in, by phase; neighbours in the batch share the same seconds. Of
            "decode" that of the images that finished with it, on a GPU beside other rounds.
    """

    guarantee: str = "exact"
    iterations: int = 0
    backbone_calls: int = 0
    head_calls: int = 0
    head_calls_per_token: float = 0.0
    head_evaluations: int = 0
    draft_backbone_calls: int = 0
    draft_head_calls: int = 0
    by_lag: list[list[int]] = field(default_factory=lambda: [[], []])
    by_step: list[list[int]] = field(default_factory=lambda: [[], []])
    by_rank: list[list[int]] = field(default_factory=lambda: [[], []])
    committed: dict[int, int] = field(default_factory=dict)
    bound: float = 0.0
    resample_tries: int = 0
    fallbacks: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def alpha(self) -> float | None:
        """Share of the judged drafts that were accepted; None where nothing was judged."""
        judged, accepted = map(sum, self.by_lag)
        return accepted / judged if judged else None

    @property
    def step_compression(self) -> float | None:
        """VQ codes a target forward; None of MAR."""
        return sum(n * count for n, count in self.committed.items()) / self.backbone_calls if self.committed else None

    def to_dict(self) -> dict:
        return asdict(self) | {"alpha": self.alpha, "step_compression": self.step_compression}


@dataclass(eq=False)
class Sequence:
    """A running request: its slot and how far it is. `num_known` tokens of its order are committed."""

    request: Request
    ticket: int
    slot: int = -1
    iteration: int = 0
    num_known: int = 0
    stats: RoundStats = field(default_factory=RoundStats)


@dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        request: as it ran, defaults filled in.
        tokens: on the CPU, raster order: MAR's float32 [L, d], VQ codes int64 [L].
        image: float32 [3, H, W] in 0..1 on the CPU; None in an engine without autoencoder.
        heat: float32 [L] on the CPU, raster order: sequential head calls of each token; of `cspd` and VQ models 1 where
            a drafted token was accepted, 0 where the target drew it, NaN where nothing was drafted by design.
        stats: what it cost.
    """

    request: Request
    tokens: Tensor
    image: Tensor | None
    heat: Tensor
    stats: RoundStats
