"""Jacobi decoding with the request's own draws: each code is a function of those before it, and the window iterates
towards its fixed point, which is the image of `ar`.

Sources:
    Song et al., "Accelerating Feedforward Computation via Parallel Nonlinear Equation Solving", arXiv 2002.03629.
    Wiggers and Hoogeboom, "Predictive Sampling with Forecasting Autoregressive Models", arXiv 2002.09928.

A round:

1. Draft. The window's codes come from the round before, and so do K - 1 siblings beside each of the first D.
2. Verify. One forward of the target over all of them, and one draw after each node, at its position's own number.
3. Commit the codes that are what is drawn after those before them, and the code that is drawn after the last.
4. Redraw. What was drawn along the first path is the next window: codes that had settled stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.batch import Batch
from cspd.discrete.cache import MOST_NODES
from cspd.discrete.draft import Drafted
from cspd.discrete.draft_verify import commit
from cspd.discrete.host import VQHost
from cspd.discrete.probabilities import likeliest, nearby, sample, without
from cspd.discrete.rounds import outcome
from cspd.discrete.tree import follow
from cspd.discrete.window import Comb, comb_of
from cspd.vq.steps import steps


def kept_nodes(host: VQHost) -> Tensor:
    """int64 [slots, N], the drafted nodes that windows keep from round to round, made on first use."""
    if host.nodes is None:
        host.nodes = torch.zeros(host.num_slots, MOST_NODES, dtype=torch.int64, device=host.device)
    return host.nodes


def judge_and_redraw(host: VQHost, batch: Batch) -> Tensor:
    """The round but for what the host counts: its `outcome`."""
    request = batch.request
    comb = comb_of(request.window, request.pd_k or 1, request.pd_d or 0, host.device)
    codes = _draft(host, batch, comb)
    features = host.features(batch, codes, depth=comb.shape.depth, seen=comb.shape.seen)
    P = host.distributions(batch, features)
    drawn = sample(P, host.drawn(batch, comb.shape.depth))
    verified = follow(comb.shape, codes, drawn, host.seq_len - batch.known_t)
    commit(host, batch, Drafted(comb.shape, codes, None), verified)
    _redraw(host, batch, comb, P, drawn, verified.count)
    accepted = steps(comb.shape.height, host.device) < verified.count.unsqueeze(1)
    return outcome(host, verified.count, verified.bound, verified.judged, accepted)


def _draft(host: VQHost, batch: Batch, comb: Comb) -> Tensor:
    """Codes int64 [B, N] of the root and of the nodes that the round before left; a new request's are guesses."""
    kept = kept_nodes(host)[batch.slot, : comb.shape.num_nodes - 1]
    guesses = _guesses(host, batch, steps(comb.path, host.device))
    guesses = functional.pad(guesses, (0, comb.siblings.numel()), value=-1)  # no two siblings are alike
    drafted = torch.where((batch.iteration == 0).unsqueeze(1), guesses, kept)
    return torch.cat([host.last(batch, 1)[0], drafted], 1)


def _guesses(host: VQHost, batch: Batch, ahead: Tensor) -> Tensor:
    """Codes as a uniform distribution would give them at the draws of places so far ahead."""
    return (host.drawn(batch, ahead) * host.config.vocab_size).long()


def _redraw(host: VQHost, batch: Batch, comb: Comb, P: Tensor, drawn: Tensor, count: Tensor) -> None:
    """Keeps the nodes of the next round: codes along the first path, moved up behind what is committed, and beside
    them those that the target's distributions there, P [B, N, V], make likely.
    """
    path = comb.path
    place = count.unsqueeze(1) + 1 + steps(path, host.device)  # in the old window, where the last is that of P after it
    inside = place <= path
    place_inside = place.clamp(max=path)
    codes = torch.where(inside, drawn.gather(1, place_inside), _guesses(host, batch, place))
    nodes = codes
    if comb.depth:
        each = steps(len(codes), host.device).unsqueeze(1)
        Q = P[each, place_inside[:, : comb.depth]]
        u = host.drawn(batch, place[:, : comb.depth])
        left = without(nearby(Q, u), codes[:, : comb.depth])
        siblings = likeliest(left, comb.siblings.shape[1])
        possible = left.gather(-1, siblings.clamp(min=0)) > 0  # or else it may be the path's own code
        siblings = torch.where(possible, siblings, -1)
        nodes = torch.cat([codes, siblings.flatten(1)], 1)
    kept_nodes(host)[batch.slot, : nodes.shape[1]] = nodes
