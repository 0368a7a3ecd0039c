"""How far ahead a drafter's codes are accepted, and what training one costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from codes import Codes
from conditions import Inputs, features_of
from torch import Tensor
from torch.nn import functional as F

from cspd.discrete.gpt import GPT, Eagle, GPTConfig
from cspd.discrete.registry import GPTS, SamplingDefaults
from cspd.discrete.rules import TINY, Filter, filter_numbers, guide, probabilities

AT_ONCE = 4  # images: of each there are L distributions of both models
TEXTS = GPTS["llamagen_xl_t2i"].config
OFFICIAL = {name: GPTS[name].config for name in ("llamagen_b", "llamagen_l", "llamagen_xl")}
OFFICIAL |= {"t2i_XL_stage1_256": replace(TEXTS, block_size=256), "t2i_XL_stage2_512": TEXTS}
SUSTAINED = 4e13  # floating-point operations per second in bfloat16
BANDWIDTH = 1e12  # bytes per second
LAUNCHES = 2e-4  # seconds of a layer in a forward over few codes
LOGITS = 30  # bytes of a code's probability in a step: of both models in 16 and 32 bits, and gradients
TEXT_ENCODER = 4.9e9  # bytes, of FLAN-T5-XL's encoder in 32 bits


def acceptance_by_depth(
    target: GPT,
    drafter: Eagle,
    data: Codes,
    take_in: Callable[[Tensor, Tensor, Tensor], Inputs],
    sampling: SamplingDefaults,
    depths: int,
) -> list[float]:
    """The probability that a chain's code is accepted by the exact rule, given those before it, by how far ahead it is.

    The codes of the data stand for the target's. A code x that follows P would have been drafted and accepted with
    weight min(1, Q(x) / P(x)), by which it counts where the codes after it are judged; one that the target never makes
    counts nothing.

    Args:
        take_in: `conditions.inputs_of` labels int64 [B], whether null is in their place, bool [B], and codes [B, L].
        sampling: how the target is sampled. depths: at most L.
    """
    sums = torch.zeros(2, depths, dtype=torch.float64)
    with torch.inference_mode():
        for codes, labels in zip(data.codes.split(AT_ONCE), data.labels.split(AT_ONCE)):
            is_null = torch.arange(2 * len(labels)) >= len(labels)
            inputs = take_in(labels.repeat(2), is_null, codes.repeat(2, 1))
            sums += _sums(target, drafter, codes.to(inputs.bundled.device), inputs, sampling, depths)
    accepted, judged = sums
    return (accepted / judged.clamp(min=TINY)).tolist()


def _sums(
    target: GPT, drafter: Eagle, codes: Tensor, inputs: Inputs, sampling: SamplingDefaults, depths: int
) -> Tensor:
    """(accepted, judged) [2, depths], summed over the places of codes [B, L]; inputs: of 2 B, the null ones second."""
    length, device = inputs.length, codes.device
    place = torch.arange(length, device=device)
    of_codes = inputs.bundled[:, -length:]
    features = features_of(target, inputs)
    P = distributions(target, features[:, -length:], sampling)

    # a chain starts at every place: its first input has the target's feature, the others the drafter's own
    past, bundled, places = [inputs.past(features[:, :-1])], [inputs.bundled], [inputs.position[0]]
    weight, sums = torch.ones_like(codes, dtype=torch.float32), []
    for ahead in range(depths):
        table = drafter.table(torch.cat(places).unsqueeze(0))
        mask = _sees(ahead, inputs.sees(), length).unsqueeze(1)
        predicted = drafter(torch.cat(past, 1), torch.cat(bundled, 1), table, mask)[:, -length:]

        # judged against what the target says there
        num = length - ahead
        p, q, weight = P[:, ahead:], distributions(target, predicted, sampling)[:, :num], weight[:, :num]
        sums.append(torch.stack([(weight * torch.minimum(p, q).sum(-1)).sum(), weight.sum()]))
        own = codes[:, ahead:].unsqueeze(-1)
        p, q = (each.gather(-1, own).squeeze(-1) for each in (p, q))
        weight = weight * torch.where(p > 0, q / p, 0).clamp(max=1)

        # the next input of every chain
        after = (place + ahead + 1).clamp(max=length - 1)
        past.append(predicted)
        bundled.append(of_codes[:, after])
        places.append(after)
    return torch.stack(sums, 1).double().cpu()


def distributions(target: GPT, features: Tensor, sampling: SamplingDefaults) -> Tensor:
    """Guided and filtered [B, N, V], of features [2 B, N, dim], those of the null condition second."""
    features = features.to(target.tok_embeddings.weight.dtype)  # a drafter's are in float32 while it is trained
    logits = target.output(features).float().unflatten(0, (2, -1))
    num, device = logits.shape[1], logits.device
    counts, masses, most = filter_numbers([sampling.top_k] * num, [sampling.top_p] * num, logits.shape[-1])
    kept = Filter(torch.tensor(counts, device=device), torch.tensor(masses, device=device), most) if most else None
    each = torch.ones(num, device=device)
    return probabilities(guide(logits, sampling.cfg * each), sampling.temperature * each, kept)


def _sees(ahead: int, first: Tensor, length: int) -> Tensor:
    """bool [B, M, M] of the inputs of chains from each of the last `length` places, depth after depth.

    Those of depth 0 look as `first`, bool [B, N, N], has it; others at what their chain's start does, and at their own
    chain's.
    """
    own = torch.eye(length, dtype=torch.bool, device=first.device).expand(len(first), -1, -1)
    none, starts = torch.zeros_like(own), first[:, -length:]
    rows = [F.pad(first, (0, ahead * length))]
    for depth in range(1, ahead + 1):
        rows.append(torch.cat([starts, *[own] * depth, *[none] * (ahead - depth)], 2))
    return torch.cat(rows, 1)


def parameters(config: GPTConfig) -> tuple[int, int]:
    """Of a GPT and of its drafter, but for the norms."""
    block = 4 * config.dim**2 + 3 * config.dim * config.hidden_dim
    condition = config.caption_dim + config.dim if config.caption_dim else config.num_classes + 1
    embeddings = (2 * config.vocab_size + condition) * config.dim
    return config.n_layer * block + embeddings, block + 2 * config.dim**2


def estimates(steps: int, batch: int, samples: int, max_batch: int) -> str:
    """Memory and hours of training drafters for official sizes, on one GPU, by formula; texts as long as can be."""
    lines = [f"{'target':<17} {'tokens':>6} {'drafter':>8} {'memory':>7} {'sampling':>9} {'training':>9}"]
    for name, config in OFFICIAL.items():
        target, drafter = parameters(config)
        inputs = config.prefix_length - 1 + config.block_size
        # while training: weights, of the drafter gradients, two moments and the average too; both models' logits
        trained = 20 * drafter + LOGITS * batch * config.block_size * config.vocab_size
        # while sampling: a copy of the weights in 16 bits; keys and values of the condition and the null condition
        sampled = 2 * target + 8 * max_batch * config.n_layer * inputs * config.dim
        memory = 4 * target + max(trained, sampled) + (TEXT_ENCODER if config.caption_dim else 0)
        # every forward reads all weights, 2 bytes each; a parameter takes 2 operations per input, 6 if trained,
        # and those of the output layer 4 more, which pass gradients on
        forward = config.n_layer * LAUNCHES + 2 * target / BANDWIDTH
        sampling = samples / max_batch * config.block_size * forward
        of_input = 2 * target + 6 * drafter + 4 * config.dim * config.vocab_size
        training = steps * batch * inputs * of_input / SUSTAINED
        lines.append(
            f"{name:<17} {config.block_size:>6} {drafter / 1e6:>7.0f}M {memory / 1e9:>4.0f} GB"
            f" {sampling / 3600:>7.1f} h {training / 3600:>7.1f} h"
        )
    return "\n".join(lines)
