"""Lumina-mGPT's weights, where they are not in the form of `transformers`' Chameleon."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import ChameleonConfig, ChameleonForConditionalGeneration
from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm


class SharedNorms(ChameleonForConditionalGeneration):
    """Chameleon with norms of queries and keys that are shared by groups of heads, to read weights into.

    There are `model_parallel_size` groups. `spread_norms` makes of it what `transformers` computes.
    """

    def __init__(self, config: ChameleonConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            shape = (config.model_parallel_size, layer.self_attn.head_dim)
            layer.self_attn.q_norm = ChameleonLayerNorm(shape)
            layer.self_attn.k_norm = ChameleonLayerNorm(shape)


@torch.no_grad()
def spread_norms(model: Any) -> None:
    """Gives each head of a Chameleon the norms that its group shares; where each has its own, nothing changes."""
    for layer in model.model.layers:
        attention = layer.self_attn
        for norm, heads in ((attention.q_norm, attention.num_heads), (attention.k_norm, attention.num_key_value_heads)):
            for name in ("weight", "bias"):
                shared = getattr(norm, name)
                own = shared.repeat_interleave(heads // len(shared), dim=0)
                setattr(norm, name, nn.Parameter(own, requires_grad=False))
