"""The family of VQ models: the models of an engine, whether they are compatible, and the list of their methods."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cspd.device import Precision, check_fits
from cspd.discrete.drafts import DRAFTS
from cspd.discrete.fastest_draft import SPECULATIVE
from cspd.discrete.gpt import GPT, Eagle, GPTConfig, VQModel
from cspd.discrete.kv_cache import bytes_per_slot
from cspd.discrete.methods import (
    AR,
    COOL_SD,
    EAGLE,
    EAGLE2,
    GSD,
    LANTERN,
    LANTERN_PLUS,
    MC_SJD,
    SD,
    SJD,
    SJD_PAC,
    UNIFORM_RSD,
)
from cspd.discrete.registry import HFConfig
from cspd.discrete.runner import VQRunner
from cspd.discrete.text import TextEncoder
from cspd.discrete.tuning import DraftTuner
from cspd.discrete.zipar import ZIPAR
from cspd.graphs import Graphs
from cspd.method import register_family
from cspd.models import NO_NAMES, ClassNames
from cspd.request import Request

SHARED = "block_size", "vocab_size", "num_classes", "prefix_length", "caption_dim", "text_places", "row_end"


def check_draft(target: GPTConfig | HFConfig, draft: GPTConfig | HFConfig) -> None:
    """Raises ValueError if draft model and target have different tokens or conditions, by their configurations."""
    for name in SHARED:
        fix = "use a draft model for the same tokens"
        _check_equal("draft model", name, getattr(draft, name), getattr(target, name), fix)


def _check_equal(model: str, size: str, theirs: object, ours: object, fix: str) -> None:
    """Raises ValueError unless a size of a model equals the target's."""
    if theirs != ours:
        raise ValueError(f"{model} and target are incompatible: {size} is {theirs} and {ours}; {fix}")


@dataclass(frozen=True)
class VQModels:
    """The models that sample images from a transformer over VQ tokens.

    Attributes:
        target: the model whose images are generated; its authors' sampling settings are the defaults of requests.
        draft: a smaller model of the same tokens, which drafts chains.
        eagle: a drafter on the target's features, which drafts trees.
        tokenizer: decodes tokens to pixels. Without it outputs have tokens but no image, and LANTERN's rules, which
            pool near codebook entries, are not available.
        classes: the names of the target's classes.
        text_encoder: encodes prompts, for a text-to-image target.
        calibrations: a directory with counts of tokens per round, such as the checkpoint's own.
    """

    family: ClassVar[str] = VQRunner.family

    target: GPT
    draft: GPT | None = None
    eagle: Eagle | None = None
    tokenizer: VQModel | None = None
    classes: ClassNames = NO_NAMES
    text_encoder: TextEncoder | None = None
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
    ) -> VQRunner:
        """A model runner of these models, which are on the device already; arguments as in `VQRunner`.

        Args:
            cache: replaces `calibrations`.

        Raises:
            ValueError: there is too little memory, or `compiled` is set for a `transformers` model.
        """
        if compiled and not isinstance(self.target, GPT):
            raise ValueError("compiled=True (--compile) works with LlamaGen and MAR models only: omit it")
        # checked before the caches are allocated
        fix = "use a smaller model or another device"
        weights = sum(precision.bytes_to_copy(model) for model in (self.target, self.draft, self.eagle))
        encoder = self.text_encoder.bytes_to_load if self.text_encoder is not None else 0
        per_slot = bytes_per_slot(self.target, (self.draft, self.eagle), precision)
        check_fits(per_slot, num_slots, " with its key-value caches", fix, precision.device, weights + encoder)
        runner = VQRunner(self, num_slots, precision, noise, compiled=compiled, graphs=graphs)
        runner.tuning = DraftTuner(self, precision, compiled, runner.graphs.enabled, cache or self.calibrations)
        return runner

    def check(self) -> None:
        """Raises ValueError if draft, drafter, tokenizer or text encoder are incompatible with the target."""
        config = self.target.config
        if self.draft is not None:
            check_draft(config, self.draft.config)
        if self.eagle is not None:
            for name in ("dim", "n_head", "block_size"):
                theirs = getattr(self.eagle.config, name)
                fix = "use the drafter that was trained on this target"
                _check_equal("EAGLE drafter", name, theirs, getattr(config, name), fix)
        fix = "use the one that the target was trained on"
        if self.tokenizer is not None:
            theirs = self.tokenizer.config.codebook_size
            _check_equal("tokenizer", "the number of codes", theirs, config.vocab_size, fix)
        if self.text_encoder is not None:
            width = self.text_encoder.width
            _check_equal("text encoder", "the number of channels", width, config.caption_dim, fix)


def _named_by(request: Request) -> str | None:
    """The method `sd` if a request names a draft, since it takes any draft.

    `uniform-rsd` if it has a budget only: of the rules on EAGLE's tree it gained most for its price.
    """
    if isinstance(request.draft, str) and request.draft in DRAFTS:
        return SD.name
    return None if request.budget is None else UNIFORM_RSD.name


register_family(
    VQModels.family,
    [AR, SPECULATIVE, SD, EAGLE, EAGLE2, UNIFORM_RSD, COOL_SD, LANTERN, LANTERN_PLUS, SJD, MC_SJD, SJD_PAC, GSD, ZIPAR],
    named_by=_named_by,
    candidates="""
        speculative sd:gamma=3 sd:gamma=5 eagle eagle2
        sjd mc-sjd sjd-pac gsd
        uniform-rsd cool-sd:delta=1.1 cool-sd:delta=1.5 lantern lantern++
    """,
    exact_candidates="sjd:window=8 sjd:window=16 sjd:window=32 sjd-pac:window=16 sjd-pac:window=32",
)
