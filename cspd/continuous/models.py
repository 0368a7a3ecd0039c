"""The models that sample images by MAR, and whether they fit each other."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from cspd.classes import NO_NAMES, ClassNames
from cspd.continuous import cspd_method, published
from cspd.continuous.host import MARHost
from cspd.continuous.memory import check_memory, usual_tokens
from cspd.continuous.tuning import Tuning
from cspd.graphs import Graphs
from cspd.methods import register_family
from cspd.precision import Precision
from mar.model import MAR
from mar.vae import AutoencoderKL


@dataclass(frozen=True)
class MARModels:
    """What samples images by MAR.

    Attributes:
        target: the model whose images are made; its published settings are the requests' defaults.
        draft: a smaller model of the same tokens, for methods that draft.
        vae: the autoencoder of the target's latents; without it outputs have tokens and no image.
        classes: the names of the target's classes.
        calibrations: a folder of what was fitted to these models, as beside their checkpoint.
    """

    family: ClassVar[str] = MARHost.family

    target: MAR
    draft: MAR | None = None
    vae: AutoencoderKL | None = None
    classes: ClassNames = NO_NAMES
    calibrations: Path | None = None

    def host(
        self,
        num_slots: int,
        device: torch.device,
        precision: Precision,
        noise: types.ModuleType,
        *,
        compiled: bool = False,
        graphs: Graphs | None = None,
        cache: Path | None = None,
    ) -> MARHost:
        """A host of these models, which are on the device already.

        Args:
            compiled: run speculative rounds through torch.compile. cache: in place of `calibrations`: where
                calibrations are kept, before the user's cache directory. Others as in `MARHost`.

        Raises:
            ValueError: too little memory.
        """
        copies = sum(precision.bytes_to_copy(model) for model in (self.target, self.draft))
        check_memory(self.target, num_slots, usual_tokens(self.target), device, copies)
        with_graphs = graphs is not None and graphs.enabled
        beside = cache or self.calibrations
        tuning = Tuning(self.target, self.draft, device, precision, compiled, with_graphs, beside, MARHost)
        return MARHost(
            self.target,
            num_slots,
            device,
            precision,
            noise,
            draft=self.draft,
            vae=self.vae,
            tuning=tuning,
            graphs=graphs,
        )

    def check(self) -> None:
        """Raises ValueError where draft or autoencoder do not speak the target's tokens."""
        config = self.target.config
        if self.draft is not None:
            for name in ("seq_len", "token_dim", "class_num"):
                ours, theirs = getattr(config, name), getattr(self.draft.config, name)
                if ours != theirs:
                    raise ValueError(
                        f"draft and target do not fit: {name} is {theirs} and {ours}; take a draft of the same tokens"
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
                        f"autoencoder and target do not fit: {name} is {theirs} and {ours}; take the one the target"
                        " was trained on"
                    )


register_family(
    MARModels.family,
    [
        published.AR,
        published.SPECULATIVE,
        published.CALIBRATED,
        published.DISA,
        published.DDIM,
        published.DPM_SOLVER,
        published.GTR,
        published.LAZYMAR,
        cspd_method.METHOD,
    ],
)
