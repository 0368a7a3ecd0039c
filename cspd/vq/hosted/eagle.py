"""EAGLE's drafter for a model of `transformers`: the layer that a LlamaGen of its width and heads would have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from cspd.vq.checkpoint import EAGLE
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPTConfig
from cspd.vq.hosted.config import HostedConfig
from mar.checkpoint import load_weights


class HostedEagle(Eagle):
    """Runs ahead of a model in its features, code by code: the ends of rows are no inputs of its.

    It computes in the type of its weights, as its target does. config: the target's.
    """

    def __init__(self, config: HostedConfig) -> None:
        names = ("dim", "n_head", "vocab_size", "block_size", "prefix_length")
        sizes = {name: getattr(config, name) for name in names}
        super().__init__(GPTConfig(**sizes, n_layer=1, num_classes=0))

    @property
    def own_type(self) -> torch.dtype:
        """As `HostedModel.own_type`."""
        return self.fc.weight.dtype


def load_hosted_eagle(path: Path, target: HostedConfig, dtype: torch.dtype) -> HostedEagle:
    """A drafter with the weights of a file, on the CPU in a type; target: what it drafts for.

    Raises:
        CheckpointError: as in `mar.checkpoint.load_weights`.
    """
    kind = replace(EAGLE, names={target.architecture: target}, create=lambda name: HostedEagle(target))
    return load_weights(path, kind)[0].to(dtype)
