"""The published samplers of MAR, and ours, by their names: points on the axes of `sampling`."""

from __future__ import annotations

from cspd.continuous import denoisers  # noqa: F401 - names the denoisers
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
    {"2501.05370": "Accelerated Diffusion Models via Speculative Sampling"},
    denoiser="calibrated",
)
