"""The published samplers of MAR, and ours, by their names: points on the axes of `sampling`."""

from __future__ import annotations

from cspd.continuous import ancestral, ar, cached_backbone, denoisers  # noqa: F401 - they register their names
from cspd.continuous.sampling import sampling
from cspd.method import Method

AR = Method(
    name="ar",
    family="MAR",
    guarantee="exact",
    summary="baseline sampling: every token takes the full denoising chain",
    papers={"2406.11838": "Autoregressive Image Generation without Vector Quantization"},
    run_round=ar.run_round,
    options=ancestral.OPTIONS,
    mixed=lambda request: ancestral.MIXED,
    check=ancestral.check,
    advice=ancestral.advice,
    heat="calls",
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
    any_denoiser=True,
)

LAZYMAR = sampling(
    "lazymar",
    "reuses transformer features between iterations and head features between denoising steps",
    {"2503.12450": "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching"},
    backbone="cached",
    denoiser="cached",
    any_denoiser=True,
)
