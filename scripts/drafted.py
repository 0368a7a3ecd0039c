"""How far ahead a drafter's codes are accepted, and what training one costs."""

from __future__ import annotations

import torch
from codes import Codes
from torch import Tensor

from cspd.discrete.probabilities import guide
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT, GPTConfig
from cspd.vq.registry import GPTS

AT_ONCE = 4  # images: of each there are L distributions of both models
OFFICIAL = ("llamagen_b", "llamagen_l", "llamagen_xl")
SUSTAINED = 4e13  # floating-point operations per second in bfloat16
BANDWIDTH = 1e12  # bytes per second
LAUNCHES = 2e-4  # seconds of a layer in a forward over few codes
LOGITS = 30  # bytes of a code's probability in a step: of both models in 16 and 32 bits, and gradients


def acceptance_by_depth(target: GPT, drafter: Eagle, data: Codes, scale: float, depths: int) -> list[float]:
    """The probability that a chain's code is accepted by the exact rule, given those before it, by how far ahead it is.

    The codes of the data stand for the target's. A code x that follows P would have been drafted and accepted with
    weight min(1, Q(x) / P(x)), by which it counts where the codes after it are judged.

    Args:
        scale: of guidance. depths: at most L.
    """
    device = next(drafter.parameters()).device
    sums = torch.zeros(2, depths, dtype=torch.float64)
    with torch.inference_mode():
        for codes, labels in zip(data.codes.split(AT_ONCE), data.labels.split(AT_ONCE)):
            sums += _sums(target, drafter, codes.to(device), labels.to(device), scale, depths)
    accepted, judged = sums
    return (accepted / judged).tolist()


def _sums(target: GPT, drafter: Eagle, codes: Tensor, labels: Tensor, scale: float, depths: int) -> Tensor:
    """(accepted, judged) [2, depths], summed over the places of codes [B, L]."""
    length, device = codes.shape[1], codes.device
    both = torch.cat([labels, torch.full_like(labels, target.config.num_classes)])
    place = torch.arange(length, device=device)
    embedded = target.embed(both, codes[:, :-1].repeat(2, 1))
    features = target.features(embedded, place.unsqueeze(0))
    P = distributions(target, features, scale)

    # a chain starts at every place: its first input has the target's feature, the others the drafter's own
    past = [torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], 1)]
    inputs, places, sums = [], [], []
    weight = torch.ones_like(codes, dtype=torch.float32)
    for ahead in range(depths):
        at = (place + ahead).clamp(max=length - 1)
        inputs.append(embedded[:, at])
        places.append(at)
        table = target.table(torch.cat(places).unsqueeze(0))
        predicted = drafter(torch.cat(past, 1), torch.cat(inputs, 1), table, _sees(ahead, place))[:, -length:]
        past.append(predicted)

        # judged against what the target says there
        num = length - ahead
        p, q, weight = P[:, ahead:], distributions(target, predicted, scale)[:, :num], weight[:, :num]
        sums.append(torch.stack([(weight * torch.minimum(p, q).sum(-1)).sum(), weight.sum()]))
        own = codes[:, ahead:].unsqueeze(-1)
        weight = weight * (q.gather(-1, own) / p.gather(-1, own)).squeeze(-1).clamp(max=1).nan_to_num(nan=0.0)
    return torch.stack(sums, 1).double().cpu()


def distributions(target: GPT, features: Tensor, scale: float) -> Tensor:
    """Guided [B, N, V], of features [2 B, N, dim], the null class second."""
    logits = target.output(features).float().unflatten(0, (2, -1))
    return guide(logits, torch.full((logits.shape[1],), scale, device=logits.device)).softmax(-1)


def _sees(ahead: int, place: Tensor) -> Tensor:
    """bool [1, 1, N, N] of the inputs of chains from every place, depth after depth: what each looks at.

    That is the first inputs up to its chain's start, and its own chain's.
    """
    before, own = place <= place.unsqueeze(1), place == place.unsqueeze(1)
    none = torch.zeros_like(own)
    rows = [torch.cat([before, *[own] * depth, *[none] * (ahead - depth)], 1) for depth in range(ahead + 1)]
    return torch.cat(rows).unsqueeze(0).unsqueeze(0)


def parameters(config: GPTConfig) -> tuple[int, int]:
    """Of a GPT and of its drafter, but for the norms."""
    block = 4 * config.dim**2 + 3 * config.dim * config.hidden_dim
    embeddings = (2 * config.vocab_size + config.num_classes + 1) * config.dim
    return config.n_layer * block + embeddings, block + 2 * config.dim**2


def estimates(steps: int, batch: int, samples: int, max_batch: int) -> str:
    """Memory and hours of training drafters for official sizes, on one GPU, by formula."""
    lines = [f"{'target':<12} {'tokens':>6} {'drafter':>8} {'memory':>7} {'sampling':>9} {'training':>9}"]
    for name in OFFICIAL:
        config = GPTS[name].config
        target, drafter = parameters(config)
        codes = batch * config.block_size
        # while training: weights, of the drafter gradients, two moments and the average too; both models' logits
        trained = 20 * drafter + LOGITS * codes * config.vocab_size
        # while sampling: a copy of the weights in 16 bits; keys and values of the class and the null class
        sampled = 2 * target + 8 * max_batch * config.n_layer * config.block_size * config.dim
        memory = 4 * target + max(trained, sampled)
        # every forward reads all weights, 2 bytes each; a parameter takes 2 operations per code, 6 if trained,
        # and those of the output layer 4 more, which pass gradients on
        forward = config.n_layer * LAUNCHES + 2 * target / BANDWIDTH
        sampling = samples / max_batch * config.block_size * forward
        of_code = 2 * target + 6 * drafter + 4 * config.dim * config.vocab_size
        training = steps * codes * of_code / SUSTAINED
        lines.append(
            f"{name:<12} {config.block_size:>6} {drafter / 1e6:>7.0f}M {memory / 1e9:>4.0f} GB"
            f" {sampling / 3600:>7.1f} h {training / 3600:>7.1f} h"
        )
    return "\n".join(lines)
