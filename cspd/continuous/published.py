"""The published samplers of MAR, and ours, by their names: points on the axes of `sampling`."""

from __future__ import annotations

from cspd.continuous import cached_backbone, denoisers  # noqa: F401 - names backbones and denoisers
from cspd.continuous.sampling import sampling

SPECULATIVE = sampling(
    "speculative",
    "speculation inside the diffusion head, no draft model",
    {"2501.05370": "Accelerated Diffusion Models via Speculative Sampling"},
    denoiser="speculative",
)
CALIBRATED = sampling(
    "calibrated",
    "the head at N of the T steps, fitted predictions between; keeps the noise",
    {},
    denoiser="calibrated",
)
DISA = sampling(
    "disa",
    "fewer denoising steps in later iterations",
    {"2505.20297": "DiSA: Diffusion Step Annealing in Autoregressive Image Generation"},
    denoiser="annealed",
)

DDIM = sampling(
    "ddim",
    "the head's chain by a deterministic solver of order 1",
    {"2010.02502": "Denoising Diffusion Implicit Models"},
    denoiser="ddim",
)
DPM_SOLVER = sampling(
    "dpm-solver++",
    "the same of order 2",
    {"2211.01095": "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models"},
    denoiser="dpm-solver++",
)

GTR = sampling(
    "gtr",
    "one colour of a checkerboard in most iterations, then the other in few; more steps for detail",
    {"2510.17171": "Generation then Reconstruction: Accelerating Masked Autoregressive Models via Two-Stage Sampling"},
    order="checkerboard",
    denoiser="frequency-weighted",
    any_denoiser=True,
)

LAZYMAR = sampling(
    "lazymar",
    "reuses the transformer's work between iterations, the head's between steps",
    {"2503.12450": "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching"},
    backbone="cached",
    denoiser="cached",
    any_denoiser=True,
)
