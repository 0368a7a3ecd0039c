"""A model of `transformers` in the place of LlamaGen's GPT: as it is, with our masks, positions and cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Cache

from cspd.vq.gpt import CacheView
from cspd.vq.hosted.config import HostedConfig, Parts


class SlotCache(Cache):
    """`transformers`' interface to a view of a host's cache."""

    def __init__(self, view: CacheView) -> None:
        super().__init__(layers=[])
        self.view = view

    def update(self, key: Tensor, value: Tensor, layer: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, heads, N, head_dim]; returns those that are looked at, [B, heads, width, ...]."""
        return self.view.update(layer, key, value)


class HostedModel(nn.Module):
    """Predicts each code from a prompt and the codes before it, as `cspd.vq.gpt.GPT` does, for `VQHost`.

    The input at position p is the code before p, and at 0 the prompt's last token; `cls_embedding` makes inputs of
    prompts [B, n], int64, and `tok_embeddings` of codes. It computes in the type of its weights.
    """

    def __init__(self, config: HostedConfig, parts: Parts) -> None:
        super().__init__()
        self.config = config
        self.decoder = parts.decoder
        self.decoder.set_attn_implementation("sdpa")  # of those that take any mask the fastest
        self.cls_embedding = self.decoder.get_input_embeddings()
        self.tok_embeddings = nn.Embedding.from_pretrained(parts.codes)
        self.output = parts.output

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    @property
    def own_type(self) -> torch.dtype:
        """What it computes in, whatever the policy is (`cspd.precision.Precision`)."""
        return self.tok_embeddings.weight.dtype

    def table(self, position: Tensor) -> Tensor:
        """What the layers take for positions int64 [...] of the prompt's tokens and the codes: these themselves."""
        return position

    def through(self, x: Tensor, table: Tensor, mask: Tensor | None = None, cache: CacheView | None = None) -> Tensor:
        """As `GPT.through`; table: int64 [B or 1, N], see there."""
        if mask is None and cache is not None:  # or else it would be causal among the inputs
            mask = torch.ones(1, 1, x.shape[1], cache.width, dtype=torch.bool, device=x.device)
        slots = None if cache is None else SlotCache(cache)
        made = self.decoder(
            inputs_embeds=x,
            position_ids=table,
            attention_mask=mask,
            past_key_values=slots,
            use_cache=slots is not None,
        )
        return made.last_hidden_state
