"""LlamaGen's sampler as published, token by token: `ar` is measured against it and must agree with it.

A batch in lockstep with one key-value cache, both halves of guidance in one forward. It calls our modules, so it is a
baseline for the sampler, not for the layers. Use `cspd` to sample, and this to check and compare.
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
        mass = ordered.softmax(-1).cumsum(-1)
        mass_before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
        dropped = mass_before > top_p
        logits = logits.masked_fill(dropped.scatter(1, index, dropped), -torch.inf)
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
    config, device = model.config, labels.device
    guided = cfg != 1
    classes = labels
    if guided:  # the second half of the batch has the null class
        null_class = torch.full_like(labels, config.num_classes)
        classes = torch.cat([labels, null_class])
    rows = slice(0, len(classes))
    shape = (config.n_layer, len(classes), config.n_head, config.block_size, config.head_dim)
    keys = torch.zeros(shape, device=device)
    values = torch.zeros(shape, device=device)
    codes = torch.empty(len(labels), config.block_size, dtype=torch.int64, device=device)

    inputs = model.cls_embedding.embedding_table(classes).unsqueeze(1)
    for i in range(config.block_size):
        position = torch.full((len(classes), 1), i, device=device)
        cache = CacheView(keys, values, rows, position, i + 1)
        everything = torch.ones(1, 1, 1, i + 1, dtype=torch.bool, device=device)
        features = model.features(inputs, position, everything, cache)
        logits = model.output(features)[:, 0].float()
        if guided:
            conditional, null = logits.chunk(2)
            logits = null + cfg * (conditional - null)
        if temperature == 0:
            codes[:, i] = logits.argmax(-1)
        else:
            codes[:, i] = draw(distribution(logits, temperature, top_k, top_p), i)
        tokens = codes[:, i]
        if guided:
            tokens = torch.cat([tokens, tokens])
        inputs = model.tok_embeddings(tokens).unsqueeze(1)
    return codes
