"""The family of MAR: its models, its samplers as points on three axes, and the list of its methods."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cspd.continuous.denoisers import DENOISERS, of_kind
from cspd.continuous.sampling import Axis, Point, method_of
from cspd.continuous.tuning import WINDOW_CANDIDATES
from cspd.device import Precision
from cspd.graphs import Graphs
from cspd.heads.samplers import DIFFUSION, Sampler, for_users_samplers
from cspd.masked import budget
from cspd.masked.audit import audit_images
from cspd.masked.backbones import BACKBONES
from cspd.masked.cspd import CSPD
from cspd.masked.orders import ORDERS, ROUNDS, check_rounds
from cspd.masked.plan import is_exact
from cspd.masked.runner import MARRunner, check_memory, usual_tokens
from cspd.method import Method, register, register_family
from cspd.models import NO_NAMES, ClassNames
from cspd.option import BUDGET as ANY_BUDGET
from cspd.request import Request, Sequence, Stopwatch
from cspd.summary import MEASURED
from mar.model import MAR
from mar.vae import AutoencoderKL

# Samplers of MAR: a choice on each of three axes. Named methods are points on them.
#
# * order: the generation order of the tokens, `cspd.masked.orders`.
# * backbone: how their conditions z are computed, `cspd.masked.backbones`.
# * denoiser: how a token is drawn from z, `cspd.heads.samplers`.
#
# A method that is named after its denoiser can be combined with any order and backbone; the others with any denoiser
# too.

DRAWN_BY = of_kind(DIFFUSION)
AXES = {
    "order": Axis(
        ORDERS,
        "generation order of the tokens: MAR's random order, a checkerboard's colours one after the other, or the"
        " Halton sequence (arXiv 2503.17076)",
    ),
    "backbone": Axis(BACKBONES, "how the transformer is evaluated: in full, or with a cache of earlier iterations"),
    "denoiser": Axis(DRAWN_BY, "how a token is drawn from its condition"),
}
BASELINE = {"order": "random", "backbone": "full", "denoiser": "ancestral"}
sampling = functools.partial(method_of, MARRunner.family, AXES, BASELINE, free=("order", "backbone"))


# The named samplers of MAR: points on the axes, most of them published.

AR = sampling(
    "ar",
    "baseline sampling: every token takes the full denoising chain",
    {"2406.11838": "Autoregressive Image Generation without Vector Quantization"},
    free=(),
)
SPECULATIVE = sampling(
    "speculative",
    "speculates on the diffusion head's own denoising chain; no draft model",
    {"2501.05370": "Accelerated Diffusion Models via Speculative Sampling"},
    denoiser="speculative",
)
CALIBRATED = sampling(
    "calibrated",
    "evaluates the head at N of the T steps and predicts the others with a fitted linear model; same noise as ar",
    {},
    denoiser="calibrated",
)
DISA = sampling(
    "disa",
    "takes fewer denoising steps in later iterations",
    {"2505.20297": "DiSA: Diffusion Step Annealing in Autoregressive Image Generation"},
    denoiser="annealed",
)

DDIM = sampling(
    "ddim",
    "solves the head's chain deterministically, first order",
    {"2010.02502": "Denoising Diffusion Implicit Models"},
    denoiser="ddim",
)
DPM_SOLVER = sampling(
    "dpm-solver++",
    "solves the head's chain deterministically, second order",
    {"2211.01095": "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models"},
    denoiser="dpm-solver++",
)

GTR = sampling(
    "gtr",
    "generates one colour of a checkerboard in most iterations, the other in a few; more steps for detailed tokens",
    {"2510.17171": "Generation then Reconstruction: Accelerating Masked Autoregressive Models via Two-Stage Sampling"},
    order="checkerboard",
    denoiser="frequency-weighted",
    free=AXES,
)

LAZYMAR = sampling(
    "lazymar",
    "reuses transformer features between iterations and head features between denoising steps",
    {"2503.12450": "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching"},
    backbone="cached",
    denoiser="cached",
    free=AXES,
)


# The method that chooses a point itself, by prices.


def _is_open(request: Request) -> bool:
    """Whether a plan has yet to choose the axes."""
    return request.backbone is None or request.denoiser is None


def prepare_budget(request: Request, runner: MARRunner) -> Request:
    """The request with a plan's settings, and with those that its backbone and its denoiser fill in.

    Raises ValueError if the request has no plan, or if the settings of its axes are bad.
    """
    budget.check(request)
    check_rounds(request)
    if _is_open(request):
        request = BUDGET.fill(request.but(**runner.tuning.plan(request, runner.at_once).settings))
    request = PLANNED.prepare(request, runner)
    budget.planned(request, runner)  # prices axes that were given, before the run
    return request


def guarantee_of_budget(request: Request) -> str:
    """ "exact" without a budget, or if nothing approximate is faster."""
    has_no_price = request.budget == 0 if _is_open(request) else is_exact(request)
    return "exact" if has_no_price else "approximate"


def run_budget_round(runner: MARRunner, batch: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Runs the next iteration of every sequence, by its plan; returns the finished sequences."""
    finished = PLANNED.run_round(runner, batch, watch)
    for sequence in finished:
        if sequence.stats.guarantee == "exact":
            continue
        # what was measured of the head alone is replaced by the price of both
        for name in MEASURED:
            setattr(sequence.stats, name, None)
        sequence.stats.divergence, sequence.stats.divergence_error = budget.planned(sequence.request, runner).price
    return finished


BY_PLAN = {
    "backbone": AXES["backbone"],
    "denoiser": AXES["denoiser"]._replace(parts={name: DENOISERS[name] for name in ("speculative", "calibrated")}),
}  # what a plan may choose
PLANNED = Point({**AXES, **BY_PLAN}, {"order": "random", "backbone": "full", "denoiser": "speculative"})
BUDGET = Method(
    name="budget",
    family="MAR",
    guarantee="approximate",
    summary="the fastest exact or approximate combination that changes a token's chain by at most a budget of nats",
    papers={},
    run_round=run_budget_round,
    needs="calibration",
    options=(
        ANY_BUDGET.but(default=0.3),
        ROUNDS,
        *(
            option.but(default=None, decided=True) if option.name in AXES else option
            for option in PLANNED.options(BY_PLAN)
        ),
    ),
    mixed=lambda request: PLANNED.denoiser(request).mixed,
    prepare=prepare_budget,
    of_request=guarantee_of_budget,
    advice=lambda request: PLANNED.denoiser(request).advice(request),
    token_cost="calls",
    explain=budget.explain,
    audit=audit_images,
)


# The models of the family.


@dataclass(frozen=True)
class MARModels:
    """The models that sample images by MAR.

    Attributes:
        target: the model that defines the images; its default settings are the requests' defaults.
        draft: a smaller model of the same tokens, for methods that draft.
        vae: the autoencoder of the target's latents; without it outputs have tokens and no image.
        classes: the names of the target's classes.
        calibrations: a folder of calibrations of these models, for example next to their checkpoint.
    """

    family: ClassVar[str] = MARRunner.family

    target: MAR
    draft: MAR | None = None
    vae: AutoencoderKL | None = None
    classes: ClassNames = NO_NAMES
    calibrations: Path | None = None

    def runner(
        self,
        num_slots: int,
        precision: Precision,
        noise: types.ModuleType,
        *,
        compiled: bool = False,
        graphs: Graphs | None = None,
        cache: Path | None = None,
    ) -> MARRunner:
        """A model runner of these models, which are already on the device.

        Args:
            compiled: run the backbone, denoising steps and speculative passes through torch.compile.
            cache: replaces `calibrations`, the folder to look for calibrations in before the user's cache directory.
            Others as in `MARRunner`.

        Raises:
            ValueError: memory is too small.
        """
        copied_bytes = sum(precision.bytes_to_copy(model) for model in (self.target, self.draft))
        check_memory(self.target, num_slots, usual_tokens(self.target), precision.device, copied_bytes)
        runner = MARRunner(
            self.target, num_slots, precision, noise, draft=self.draft, vae=self.vae, graphs=graphs, compiled=compiled
        )
        folder = cache or self.calibrations
        runner.tuning = budget.Planner(
            self.target, self.draft, precision, compiled, runner.graphs.enabled, folder, MARRunner
        )
        return runner

    def check(self) -> None:
        """Raises ValueError if the draft model or the autoencoder has other tokens than the target."""
        config = self.target.config
        if self.draft is not None:
            for name in ("seq_len", "token_dim", "class_num"):
                ours, theirs = getattr(config, name), getattr(self.draft.config, name)
                if ours != theirs:
                    raise ValueError(
                        f"draft model and target are incompatible: {name} is {theirs} in the draft model and {ours} in"
                        " the target: use a draft model of the same tokens"
                    )
        if self.vae is not None:
            latents = self.vae.config
            pairs = {
                "channels": (latents.embed_dim, config.vae_embed_dim),
                "stride": (latents.stride, config.vae_stride),
            }
            for name, (theirs, ours) in pairs.items():
                if ours != theirs:
                    raise ValueError(
                        f"autoencoder and target are incompatible: {name} is {theirs} in the autoencoder and {ours} in"
                        " the target: use the autoencoder that the target was trained with"
                    )


register_family(
    MARModels.family,
    [
        AR,
        SPECULATIVE,
        CALIBRATED,
        DISA,
        DDIM,
        DPM_SOLVER,
        GTR,
        LAZYMAR,
        CSPD,
        BUDGET,
    ],
    named_by=lambda request: None if request.budget is None else BUDGET.name,
    # plans by prices, in place of combinations that would be tried one by one; solvers and other numbers of iterations
    # have no price
    candidates="""
        speculative budget:budget=0.1 budget:budget=0.3 budget:budget=0.5 budget:budget=1
        ddim:head_calls=6:num_iter=8 ddim:head_calls=10:num_iter=16
    """,
    exact_candidates=WINDOW_CANDIDATES,
)


def add_method(sampler: Sampler) -> None:
    """Makes a method of a user's sampler."""
    if sampler.of in (None, DIFFUSION):
        DRAWN_BY[sampler.name] = DENOISERS[sampler.name]
        register(sampling(sampler.name, sampler.summary, {}, denoiser=sampler.name))


for_users_samplers(add_method)
