"""LlamaGen's sampler as it is published, token by token: what `ar` is measured against and must agree with.

A batch in lockstep with one key-value cache, both halves of guidance in one forward. It calls our modules, so it is a
baseline for the sampler, not for the layers. Use `cspd` to sample; use this to check and to compare.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cspd.vq.gpt import GPT, CacheView


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Token probabilities [B, V] of logits [B, V]: temperature, then the k likeliest, then the least set of mass p."""
    logits = logits / max(temperature, 1e-5)
    if top_k > 0:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, index = logits.sort(descending=True, stable=True)
        past = ordered.softmax(-1).cumsum(-1)
        beyond = torch.cat([torch.zeros_like(past[:, :1]), past[:, :-1]], dim=-1) > top_p
        logits = logits.masked_fill(beyond.scatter(1, index, beyond), -torch.inf)
    return logits.softmax(-1)


def _multinomial(probabilities: Tensor, position: int) -> Tensor:
    return torch.multinomial(probabilities, 1).squeeze(1)


@torch.inference_mode()
def sample(
    model: GPT,
    labels: Tensor,
    *,
    cfg: float = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    draw: Callable[[Tensor, int], Tensor] = _multinomial,
) -> Tensor:
    """Samples one batch, all sequences in lockstep.

    Args:
        labels: int64 [B].
        cfg, temperature, top_k, top_p: as in `cspd.Request`; temperature 0 takes the likeliest token.
        draw: maps token probabilities [B, V] and the position to tokens [B]; torch's global generator by default.

    Returns:
        Codes, int64 [B, L].
    """
    config, device, guided = model.config, labels.device, cfg != 1
    classes = torch.cat([labels, torch.full_like(labels, config.num_classes)]) if guided else labels
    rows = slice(0, len(classes))
    keys = torch.zeros(
        2, config.n_layer, len(classes), config.block_size, config.n_head, config.head_dim, device=device
    )
    inputs = model.cls_embedding.embedding_table(classes).unsqueeze(1)
    codes = torch.empty(len(labels), config.block_size, dtype=torch.int64, device=device)
    for i in range(config.block_size):
        place = torch.full((len(classes), 1), i, device=device)
        cache = CacheView(*keys, rows, place, i + 1)
        everything = torch.ones(1, 1, 1, i + 1, dtype=torch.bool, device=device)
        logits = model.output(model.features(inputs, place, everything, cache))[:, 0].float()
        if guided:
            conditional, null = logits.chunk(2)
            logits = null + cfg * (conditional - null)
        if temperature == 0:
            codes[:, i] = logits.argmax(-1)
        else:
            codes[:, i] = draw(distribution(logits, temperature, top_k, top_p), i)
        token = torch.cat([codes[:, i], codes[:, i]]) if guided else codes[:, i]
        inputs = model.tok_embeddings(token).unsqueeze(1)
    return codes
