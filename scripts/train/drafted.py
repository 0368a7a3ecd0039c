"""The acceptance of a drafter's tokens by depth, and the cost of training one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from codes import Codes
from conditions import Inputs, features_of
from torch import Tensor
from torch.nn import functional as F

from cspd.discrete.distributions import TINY, Filter, filter_numbers, guide, probabilities
from cspd.discrete.gpt import GPT, Eagle, GPTConfig
from cspd.discrete.registry import GPTS, VQDefaults

AT_ONCE = 4  # images; each one has L distributions of both models
TEXTS = GPTS["llamagen_xl_t2i"].config
OFFICIAL = {name: GPTS[name].config for name in ("llamagen_b", "llamagen_l", "llamagen_xl")}
OFFICIAL |= {"t2i_XL_stage1_256": replace(TEXTS, block_size=256), "t2i_XL_stage2_512": TEXTS}
SUSTAINED = 4e13  # floating-point operations per second in bfloat16
BANDWIDTH = 1e12  # bytes per second
LAUNCHES = 2e-4  # seconds per layer of a forward pass over few tokens
LOGITS = 30  # bytes per probability in a training step: of both models in 16 and 32 bits, and gradients
TEXT_ENCODER = 4.9e9  # bytes of FLAN-T5-XL's encoder in 32 bits


def acceptance_by_depth(
    target: GPT,
    drafter: Eagle,
    data: Codes,
    take_in: Callable[[Tensor, Tensor, Tensor], Inputs],
    sampling: VQDefaults,
    depths: int,
) -> list[float]:
    """The probability that the exact rule accepts a chain's token at each depth, if the tokens before were accepted.

    The tokens of the data are taken as samples of the target. A token x that follows P would have been drafted and
    accepted with weight min(1, Q(x) / P(x)), so the verification of the tokens after it counts with that weight. A
    token that the target never samples has weight 0.

    Args:
        take_in: `conditions.inputs_of` with its first two arguments.
        sampling: the target's settings. depths: at most L.
    """
    sums = torch.zeros(2, depths, dtype=torch.float64)
    with torch.inference_mode():
        for codes, labels in zip(data.codes.split(AT_ONCE), data.labels.split(AT_ONCE)):
            is_null = torch.arange(2 * len(labels)) >= len(labels)
            inputs = take_in(labels.repeat(2), is_null, codes.repeat(2, 1))
            sums += _sums(target, drafter, codes.to(inputs.embedded.device), inputs, sampling, depths)
    accepted, verified = sums
    return (accepted / verified.clamp(min=TINY)).tolist()


def _sums(target: GPT, drafter: Eagle, codes: Tensor, inputs: Inputs, sampling: VQDefaults, depths: int) -> Tensor:
    """(accepted, verified) [2, depths], summed over all tokens [B, L]; inputs: of both guidance branches, [2 B]."""
    length, device = inputs.length, codes.device
    index = torch.arange(length, device=device)
    of_codes = inputs.embedded[:, -length:]
    features = features_of(target, inputs)
    P = distributions(target, features[:, -length:], sampling)

    # a chain starts at every position: its first input has the target's feature, the others the drafter's own
    past, embedded, positions = [inputs.past(features[:, :-1])], [inputs.embedded], [inputs.position[0]]
    weight, sums = torch.ones_like(codes, dtype=torch.float32), []
    for ahead in range(depths):
        table = drafter.table(torch.cat(positions).unsqueeze(0))
        mask = _sees(ahead, inputs.sees(), length).unsqueeze(1)
        predicted = drafter(torch.cat(past, 1), torch.cat(embedded, 1), table, mask)[:, -length:]

        # the probability of acceptance is the sum of min(P, Q)
        num = length - ahead
        p, q, weight = P[:, ahead:], distributions(target, predicted, sampling)[:, :num], weight[:, :num]
        sums.append(torch.stack([(weight * torch.minimum(p, q).sum(-1)).sum(), weight.sum()]))
        own = codes[:, ahead:].unsqueeze(-1)
        p, q = (each.gather(-1, own).squeeze(-1) for each in (p, q))
        weight = weight * torch.where(p > 0, q / p, 0).clamp(max=1)

        # the next input of every chain
        after = (index + ahead + 1).clamp(max=length - 1)
        past.append(predicted)
        embedded.append(of_codes[:, after])
        positions.append(after)
    return torch.stack(sums, 1).double().cpu()


def distributions(target: GPT, features: Tensor, sampling: VQDefaults) -> Tensor:
    """Guided and filtered distributions [B, N, V] from features of both guidance branches [2 B, N, dim]."""
    features = features.to(target.tok_embeddings.weight.dtype)  # a drafter is trained in float32
    logits = target.output(features).float().unflatten(0, (2, -1))
    num, device = logits.shape[1], logits.device
    counts, masses, most = filter_numbers([sampling.top_k] * num, [sampling.top_p] * num, logits.shape[-1])
    allowed = None
    if most:
        allowed = Filter(torch.tensor(counts, device=device), torch.tensor(masses, device=device), most)
    each = torch.ones(num, device=device)
    return probabilities(guide(logits, sampling.cfg * each), sampling.temperature * each, allowed)


def _sees(ahead: int, first: Tensor, length: int) -> Tensor:
    """The attention mask, bool [B, M, M], of chains from each of the last `length` positions, ordered by depth.

    Inputs of depth 0 have the mask `first`, bool [B, N, N]. Others attend to the same inputs as the start of their
    chain, and to the earlier inputs of their chain.
    """
    own = torch.eye(length, dtype=torch.bool, device=first.device).expand(len(first), -1, -1)
    none, starts = torch.zeros_like(own), first[:, -length:]
    rows = [F.pad(first, (0, ahead * length))]
    for depth in range(1, ahead + 1):
        rows.append(torch.cat([starts, *[own] * depth, *[none] * (ahead - depth)], 2))
    return torch.cat(rows, 1)


def parameters(config: GPTConfig) -> tuple[int, int]:
    """The parameters of a GPT and of its drafter, without the norms."""
    block = 4 * config.dim**2 + 3 * config.dim * config.hidden_dim
    condition = config.caption_dim + config.dim if config.caption_dim else config.num_classes + 1
    embeddings = (2 * config.vocab_size + condition) * config.dim
    return config.n_layer * block + embeddings, block + 2 * config.dim**2


def estimates(steps: int, batch: int, samples: int, max_batch: int) -> str:
    """Memory and hours of training drafters for official sizes on one GPU, by formula; prompts have maximal length."""
    lines = [f"{'target':<17} {'tokens':>6} {'drafter':>8} {'memory':>7} {'sampling':>9} {'training':>9}"]
    for name, config in OFFICIAL.items():
        target, drafter = parameters(config)
        inputs = config.prefix_length - 1 + config.block_size
        # training: weights; the drafter's gradients, two moments and average; both models' logits
        trained = 20 * drafter + LOGITS * batch * config.block_size * config.vocab_size
        # sampling: a copy of the weights in 16 bits; keys and values of both guidance branches
        sampled = 2 * target + 8 * max_batch * config.n_layer * inputs * config.dim
        memory = 4 * target + max(trained, sampled) + (TEXT_ENCODER if config.caption_dim else 0)
        # every forward pass reads all weights, 2 bytes each; a parameter takes 2 operations per input, 6 if trained,
        # and the output layer 4 more, which propagate gradients
        forward = config.n_layer * LAUNCHES + 2 * target / BANDWIDTH
        sampling = samples / max_batch * config.block_size * forward
        of_input = 2 * target + 6 * drafter + 4 * config.dim * config.vocab_size
        training = steps * batch * inputs * of_input / SUSTAINED
        lines.append(
            f"{name:<17} {config.block_size:>6} {drafter / 1e6:>7.0f}M {memory / 1e9:>4.0f} GB"
            f" {sampling / 3600:>7.1f} h {training / 3600:>7.1f} h"
        )
    return "\n".join(lines)
