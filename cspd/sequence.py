"""What goes into the engine and what comes out: requests, running sequences, outputs and their statistics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from torch import Tensor

PHASES = ("backbone", "head", "decode", "other")


@dataclass(frozen=True)
class Request:
    """One image to make. What is None takes the target's published setting.

    Attributes:
        label: class, 0 .. class_num - 1.
        seed: of everything random in this image, 0 .. 2^63 - 1.
        method: a name of `cspd.methods.METHODS`.
        num_iter: K, autoregressive iterations, 1 .. L.
        cfg: guidance scale s >= 0; 1 is no guidance.
        cfg_schedule: "linear" (s grows over the iterations) or "constant".
        temperature: tau >= 0, multiplies the noise of the denoising steps.
        num_sampling_steps: T, denoising steps a token, 2 .. 1000.
    """

    label: int
    seed: int = 0
    method: str = "ar"
    num_iter: int | None = None
    cfg: float | None = None
    cfg_schedule: str | None = None
    temperature: float | None = None
    num_sampling_steps: int | None = None

    @property
    def guided(self) -> bool:
        """Whether the null class is evaluated too."""
        return self.cfg != 1

    @property
    def round_key(self) -> tuple:
        """Requests with equal keys can share a round, whatever else differs."""
        return self.method, self.guided, self.num_sampling_steps


@dataclass
class RoundStats:
    """What a request cost. Counts are of the calls it took part in, alone or with others.

    Attributes:
        guarantee: of the method: "exact", "bounded" or "heuristic".
        iterations: autoregressive iterations.
        backbone_calls: backbone forwards, conditional and null class in one.
        head_calls: sequential calls of the head.
        head_evaluations: rows of this request the head was evaluated on, null class included.
        seconds: wall time of the rounds it took part in, by phase; neighbours in the batch share the same seconds.
    """

    guarantee: str = "exact"
    iterations: int = 0
    backbone_calls: int = 0
    head_calls: int = 0
    head_evaluations: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def to_dict(self) -> dict:
        return asdict(self)


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
        tokens: float32 [L, d] on the CPU, raster order.
        image: float32 [3, H, W] in 0..1 on the CPU; None in an engine without autoencoder.
        stats: what it cost.
    """

    request: Request
    tokens: Tensor
    image: Tensor | None
    stats: RoundStats
