"""The models that sample images by a GPT over VQ codes, and whether they fit each other."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from cspd.classes import NO_NAMES, ClassNames
from cspd.discrete import published, speculative
from cspd.discrete.draft import DRAFTS
from cspd.discrete.host import VQHost
from cspd.discrete.memory import bytes_per_slot
from cspd.discrete.tuning import Tuning
from cspd.graphs import Graphs
from cspd.machine import check_fits
from cspd.methods import register_family
from cspd.precision import Precision
from cspd.sequence import Request
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT, GPTConfig
from cspd.vq.hosted.config import HostedConfig
from cspd.vq.text import TextEncoder
from cspd.vq.tokenizer import VQModel

SHARED = "block_size", "vocab_size", "num_classes", "prefix_length", "caption_dim", "text_places", "row_end"


def check_draft(ours: GPTConfig | HostedConfig, theirs: GPTConfig | HostedConfig) -> None:
    """Raises ValueError where a target's draft is of other codes or conditions, by their configurations."""
    for name in SHARED:
        if getattr(ours, name) != getattr(theirs, name):
            raise ValueError(
                f"draft and target do not fit: {name} is {getattr(theirs, name)} and {getattr(ours, name)}; take a"
                " draft of the same codes"
            )


@dataclass(frozen=True)
class VQModels:
    """What samples images by a GPT over VQ codes.

    Attributes:
        target: the model whose images are made; its published settings are the requests' defaults.
        draft: a smaller model of the same codes, for chains. eagle: a drafter on the target's features, for trees.
        tokenizer: of the codes; without it outputs have codes and no image, and rules know no neighbours.
        classes: the names of the target's classes. text_encoder: of prompts, where it makes images of texts.
        calibrations: a folder of what was counted of these models' rounds, as beside their checkpoint.
    """

    family: ClassVar[str] = VQHost.family

    target: GPT
    draft: GPT | None = None
    eagle: Eagle | None = None
    tokenizer: VQModel | None = None
    classes: ClassNames = NO_NAMES
    text_encoder: TextEncoder | None = None
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
    ) -> VQHost:
        """A host of these models, which are on the device already; arguments as in `VQHost`.

        `cache`, in place of `calibrations`, is read before the user's cache directory. Raises ValueError if there is
        too little memory, or `compiled` is for other layers than LlamaGen's.
        """
        if compiled and not isinstance(self.target, GPT):
            raise ValueError("compiled=True, or --compile, is for LlamaGen's and MAR's layers: leave it out")
        fix = "use a smaller model or another device"
        copies = sum(precision.bytes_to_copy(model) for model in (self.target, self.draft, self.eagle))
        encoder = self.text_encoder.bytes_to_load if self.text_encoder is not None else 0
        per_slot = bytes_per_slot(self.target, (self.draft, self.eagle), precision)
        check_fits(per_slot, num_slots, " with its key-value caches", fix, device, copies + encoder)
        with_graphs = graphs is not None and graphs.enabled
        how = device, precision, compiled, with_graphs
        tuning = Tuning(self.target, self.eagle, *how, self.text_encoder, cache or self.calibrations)
        return VQHost(
            self.target,
            num_slots,
            device,
            precision,
            noise,
            draft=self.draft,
            eagle=self.eagle,
            tokenizer=self.tokenizer,
            text_encoder=self.text_encoder,
            tuning=tuning,
            compiled=compiled,
            graphs=graphs,
        )

    def check(self) -> None:
        """Raises ValueError where draft, drafter, tokenizer or text encoder do not fit the target."""
        config = self.target.config
        if self.draft is not None:
            check_draft(config, self.draft.config)
        if self.eagle is not None:
            for name in ("dim", "n_head", "block_size"):
                ours, theirs = getattr(config, name), getattr(self.eagle.config, name)
                if ours != theirs:
                    raise ValueError(
                        f"EAGLE drafter and target do not fit: {name} is {theirs} and {ours}; take the drafter that was"
                        " trained on this target"
                    )
        if self.tokenizer is not None and self.tokenizer.config.codebook_size != config.vocab_size:
            raise ValueError(
                f"tokenizer and target do not fit: they have {self.tokenizer.config.codebook_size} and"
                f" {config.vocab_size} codes; take the one the target was trained on"
            )
        if self.text_encoder is not None and self.text_encoder.width != config.caption_dim:
            raise ValueError(
                f"text encoder and target do not fit: features have {self.text_encoder.width} and {config.caption_dim}"
                f" channels; take the encoder the target was trained on"
            )


def _named_by(request: Request) -> str | None:
    """`sd` if a draft is named: it takes any."""
    return "sd" if isinstance(request.draft, str) and request.draft in DRAFTS else None


register_family(
    VQModels.family,
    [
        published.AR,
        speculative.METHOD,
        published.SD,
        published.EAGLE,
        published.EAGLE2,
        published.UNIFORM_RSD,
        published.COOL_SD,
        published.LANTERN,
        published.LANTERN_PLUS,
        published.SJD,
        published.MC_SJD,
        published.SJD_PAC,
        published.GSD,
    ],
    named_by=_named_by,
)
