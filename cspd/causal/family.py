"""The family of SphereAR and BitDance: their models, and the list of their methods."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from cspd.causal.models import Causal
from cspd.causal.registry import Autoencoder
from cspd.causal.runner import CausalRunner, bytes_per_slot
from cspd.continuous.denoisers import DENOISERS, of_kind
from cspd.continuous.rows import Denoiser
from cspd.continuous.sampling import Axis, method_of
from cspd.continuous.tuning import CALIBRATED_CANDIDATES, WINDOW_CANDIDATES, HeadTuner
from cspd.device import Precision, check_fits
from cspd.graphs import Graphs
from cspd.heads.samplers import FLOW, Sampler, for_users_samplers
from cspd.method import register, register_family
from cspd.models import NO_NAMES, ClassNames

PAPERS = {
    "2509.24335": "Hyperspherical Latents Improve Continuous-Token Autoregressive Generation",
    "2602.14041": "BitDance: Scaling Autoregressive Generative Models with Binary Tokens",
}


def _of_flow(denoiser: Denoiser) -> Denoiser:
    """As a choice here: all chains begin at t = 0, and no first step overshoots, so that short ones need no advice."""
    options = tuple(option for option in denoiser.options if option.name != "first_timestep")
    return replace(denoiser, options=options, advice=lambda request: None)


DRAWN_BY = {name: _of_flow(denoiser) for name, denoiser in of_kind(FLOW).items()}
AXES = {"denoiser": Axis(DRAWN_BY, "how a token is drawn from its condition")}
sampling = functools.partial(method_of, CausalRunner.family, AXES, {"denoiser": "ancestral"}, free=())

AR = sampling("ar", "baseline sampling: every token takes all steps of the head's chain", PAPERS)
SPECULATIVE = sampling(
    "speculative",
    "speculates on the diffusion head's own denoising chain; no draft model",
    {"2501.05370": "Accelerated Diffusion Models via Speculative Sampling"},
    denoiser="speculative",
)
CALIBRATED = sampling(
    "calibrated",
    "evaluates the head at N of the steps and predicts the others with a fitted linear model; same noise as ar",
    {},
    denoiser="calibrated",
)
DISA = sampling(
    "disa",
    "takes fewer denoising steps for later tokens",
    {"2505.20297": "DiSA: Diffusion Step Annealing in Autoregressive Image Generation"},
    denoiser="annealed",
)
SOLVER_PAPERS = {"2011.13456": "Score-Based Generative Modeling through Stochastic Differential Equations"}
EULER = sampling("euler", "solves the head's chain deterministically, first order", SOLVER_PAPERS, denoiser="euler")
HEUN = sampling("heun", "solves the head's chain deterministically, second order", SOLVER_PAPERS, denoiser="heun")


@dataclass(frozen=True)
class CausalModels:
    """The models that sample images by SphereAR or BitDance.

    Attributes:
        target: the model that defines the images; its authors' sampling settings are the defaults of requests.
        vae: the autoencoder of its latents; without it outputs have tokens and no image.
        classes: the names of the target's classes.
        calibrations: a folder of calibrations of these models, for example next to their checkpoint.
    """

    family: ClassVar[str] = CausalRunner.family

    target: Causal
    vae: Autoencoder | None = None
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
    ) -> CausalRunner:
        """A model runner of these models, which are already on the device.

        Args:
            compiled: run speculative passes through torch.compile. cache: replaces `calibrations`. Others as in
                `CausalRunner`.

        Raises:
            ValueError: memory is too small.
        """
        fix, weights = "use a smaller model or another device", precision.bytes_to_copy(self.target)
        per_slot = bytes_per_slot(self.target, precision)
        check_fits(per_slot, num_slots, " with its key-value caches", fix, precision.device, weights)
        runner = CausalRunner(self.target, num_slots, precision, noise, vae=self.vae, graphs=graphs)
        folder = cache or self.calibrations
        runner.tuning = HeadTuner(self.target, None, precision, compiled, runner.graphs.enabled, folder, CausalRunner)
        return runner

    def check(self) -> None:
        """Raises ValueError if the autoencoder has other latents than the target."""
        if self.vae is None:
            return
        latents, config = self.vae.config, self.target.config
        for name in ("latent_dim", "stride"):
            theirs, ours = getattr(latents, name), getattr(config, name)
            if theirs != ours:
                raise ValueError(
                    f"autoencoder and target are incompatible: {name} is {theirs} in the autoencoder and {ours} in the"
                    " target: use the autoencoder that the target was trained with"
                )


register_family(
    CausalModels.family,
    [AR, SPECULATIVE, CALIBRATED, DISA, EULER, HEUN],
    candidates=f"""
        ar speculative disa {CALIBRATED_CANDIDATES}
        euler:head_calls=16 euler:head_calls=25 euler:head_calls=50 heun:head_calls=15 heun:head_calls=25
    """,
    exact_candidates=WINDOW_CANDIDATES,
)


def add_method(sampler: Sampler) -> None:
    """Makes a method of a user's sampler."""
    if sampler.of in (None, FLOW):
        DRAWN_BY[sampler.name] = _of_flow(DENOISERS[sampler.name])
        register(sampling(sampler.name, sampler.summary, {}, denoiser=sampler.name))


for_users_samplers(add_method)
