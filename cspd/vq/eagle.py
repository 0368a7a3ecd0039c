"""EAGLE's drafter: a transformer layer that runs ahead of a GPT in its features (Li et al. 2024, arXiv 2401.15077)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cspd.vq.gpt import Block, CacheView, GPTConfig, rotary_table


class Eagle(nn.Module):
    """Predicts the target's next feature from its last one and the token drawn from that.

    Embeddings and the output layer are the target's own. The input at position i joins the target's feature at
    position i - 1 with the embedding of position i, and stands for the target's feature at position i. Positions are
    LlamaGen's, whatever the target's are: 0 of all a condition's inputs, then those of codes.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.dim, config.dim)
        self.layers = nn.ModuleList([Block(config)])

    def table(self, position: Tensor) -> Tensor:
        """As `GPT.table`."""
        return rotary_table(self.config, position.device)[position]

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        table: Tensor,
        mask: Tensor | None = None,
        cache: CacheView | None = None,
    ) -> Tensor:
        """Predicted features [B, N, dim]; table: rotary angles of the positions; mask, cache as in `GPT.features`."""
        x = self.fc(torch.cat([embeddings, features], dim=-1).to(self.fc.weight.dtype))
        for layer in self.layers:
            x = layer(x, table, mask, cache)
        return x
