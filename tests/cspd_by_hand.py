"""CSpD's Algorithm 1 (arXiv 2411.11925) written a second time, and models of known score to run it on.

The models have a small MAR's backbone and a head of known score, whose tokens are of order one. So an image can be
computed again, token by token and in float64.
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from heads import MixtureHead
from torch import Tensor
from torch.distributions import Normal

from cspd import Engine, MARModels, Request, noise
from mar.head import schedule
from mar.model import MAR

LENGTH, CHANNELS, GAMMA = 64, 16, 8
SETTINGS = {"num_iter": 64, "cfg": 3.0, "temperature": 0.9, "num_sampling_steps": 12, "gamma": GAMMA, "prefill": 0.0}
TOKEN = 1e-3  # equal tokens differ by less
LEFT = {64: [*range(63, 0, -1), 1], 8: [62, 59, 53, 45, 35, 24, 12, 1]}  # mask_len of each iteration, by num_iter


class KnownHead(MixtureHead):
    """The exact head for tokens ~ N(map z +- 0.4, 0.4^2).

    Args:
        apart: how far the map is from that of the target. shift: added to the variance channel.
    """

    def __init__(self, apart: float = 0.0, shift: float = 0.0) -> None:
        means = [0.4] * CHANNELS, [-0.4] * CHANNELS
        super().__init__(means, scales=[0.4, 0.4], weights=[0.5, 0.5], wobble=0.2)
        same, other = (torch.randn(CHANNELS, 96, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        self.map = torch.nn.Linear(96, CHANNELS, bias=False)
        self.map.weight.data = (same + apart * other) * 0.05
        self.shift = shift

    def cond_embed(self, z: Tensor) -> Tensor:
        return self.map(z)

    def v(self, timestep: np.ndarray) -> np.ndarray:
        return MixtureHead.v(timestep) + self.shift


def with_head(model: MAR, head: KnownHead) -> MAR:
    model = copy.deepcopy(model).requires_grad_(False)
    model.diffloss.net = head
    model.fake_latent *= 10  # so that guidance changes the tokens
    return model


@pytest.fixture(scope="module", name="target")
def known_target(small_mar):
    return with_head(small_mar, KnownHead())


@pytest.fixture(scope="module", name="draft")
def known_draft(small_mar):
    """About a third of its tokens are accepted."""
    return with_head(small_mar, KnownHead(apart=0.15, shift=0.01))


def request(label: int = 3, seed: int = 5, **changes) -> Request:
    return Request(label, seed, **({"method": "mar-draft"} | SETTINGS | changes))


def plain(label: int = 3, seed: int = 5, **changes) -> Request:
    settings = {name: value for name, value in SETTINGS.items() if name not in ("gamma", "prefill")}
    return Request(label, seed, **({"method": "ar"} | settings | changes))


def generate(target: MAR, draft: MAR | None, *requests: Request, max_batch: int = 1, **functions) -> list:
    """Outputs; `functions` replace those of `cspd.noise` with the same names."""
    source = SimpleNamespace(**(vars(noise) | functions))
    return Engine(MARModels(target, draft), max_batch=max_batch, device="cpu", noise=source).generate(list(requests))


def order_of(request: Request) -> Tensor:
    return noise.order(torch.tensor([request.seed]), LENGTH)[0]


# ---- Algorithm 1: slow, in float64, one token at a time


class Chain(NamedTuple):
    """A chain of R tokens.

    Attributes:
        mean: of the last step [R, d]. path: log sigma summed over channels and steps T-1 .. 1 [R]. last: log sigma at 0
            [R, d]. log_prob: log density of x_T and all states after it, but the last [R].
    """

    mean: Tensor
    path: Tensor
    last: Tensor
    log_prob: Tensor


def denoise(head: torch.nn.Module, z: Tensor, scale: float | Tensor, request: Request, x: Tensor, eps_t: list) -> Chain:
    """Chains from x_T with conditions z [2, R, D], the unconditional branch second, and the noise eps_t[t] [R, d]."""
    s = schedule(request.num_sampling_steps)
    path = 0
    log_prob = Normal(0, 1).log_prob(x).sum(-1)
    for t in reversed(range(request.num_sampling_steps)):
        t_embed = head.time_embed(torch.tensor([s.timestep_map[t]]))
        out = head.denoise(x.float(), head.split(head.modulations(t_embed, head.cond_embed(z)))).double()
        eps, v = out.chunk(2, -1)
        eps = eps[1] + scale * (eps[0] - eps[1])
        x0 = x / s.alphas_cumprod[t] ** 0.5 - (1 / s.alphas_cumprod[t] - 1) ** 0.5 * eps
        mean = s.posterior_mean_coef1[t] * x0 + s.posterior_mean_coef2[t] * x
        f = (v[0] + 1) / 2
        log_variance = f * np.log(s.betas[t]) + (1 - f) * s.posterior_log_variance_clipped[t]
        log_sigma = 0.5 * log_variance + math.log(request.temperature)
        if t:
            path = path + log_sigma.sum(-1)
            x = mean + log_sigma.exp() * eps_t[t]
            log_prob = log_prob + Normal(mean, log_sigma.exp()).log_prob(x).sum(-1)
    return Chain(mean, path, log_sigma, log_prob)


def log_density(x: Tensor, chain: Chain) -> Tensor:
    """Log density of a chain that ends in tokens x [R, d], eq. 1's: [R]."""
    return chain.log_prob + Normal(chain.mean, chain.last.exp()).log_prob(x).sum(-1)


def log_ratio(x: Tensor, p: Chain, q: Chain, ratio_temperature: float, sigma: str | None = None) -> Tensor:
    """log p - log q at tokens x [R, d], Sigma included: [R]."""

    def last(chain: Chain) -> Tensor:
        z = (x - chain.mean) / chain.last.exp() / ratio_temperature
        return (-0.5 * z.square() - chain.last - 0.5 * math.log(2 * math.pi)).sum(-1)

    path = p.log_prob - q.log_prob
    if sigma == "published":  # Sigma is inverted
        path = path - 2 * (q.path - p.path)
    return path + last(p) - last(q)


def scales(request: Request) -> list[float]:
    """The guidance scale of each token, by its rank in the order: that of its iteration."""
    by_rank: list[float] = []
    lefts = LEFT[request.num_iter]
    masked = [*lefts[:-1], 0]  # the last iteration leaves no token masked, although its scale is that of one
    for left, after in zip(lefts, masked):
        s = request.cfg
        if request.cfg_schedule != "constant":
            s = 1 + (request.cfg - 1) * (LENGTH - left) / LENGTH
        by_rank += [s] * (LENGTH - after - len(by_rank))
    return by_rank


class ByHand(NamedTuple):
    tokens: Tensor
    accepted: list  # by rank; None for tokens of the target alone
    by_lag: np.ndarray  # verified and accepted drafts by draft position, [2, gamma]
    rounds: int
    drafted: int
    tries: int
    num_next: int  # tokens of the target alone, after drafts that were all accepted
    by_target: int  # chains of the target


@torch.inference_mode()
def by_hand(target: MAR, draft: MAR, request: Request) -> ByHand:
    seed, order, s = torch.tensor([request.seed]), order_of(request), scales(request)
    tokens, accepted = torch.zeros(LENGTH, CHANNELS), [None] * LENGTH

    def chain(model: MAR, rank: int, committed: int, index: int = 0) -> Chain:
        at = order[rank : rank + 1]
        classes = torch.cat([model.class_emb.weight[[request.label]], model.fake_latent])
        z = model(tokens.repeat(2, 1, 1), order.repeat(2, 1), [committed] * 2, classes, at.repeat(2, 1))
        x = noise.initial(seed, at, CHANNELS, index).double()
        eps_t = noise.steps(seed, at, torch.arange(request.num_sampling_steps), CHANNELS, index)
        return denoise(model.head, z, s[rank], request, x, eps_t)

    def ratio(x: Tensor, p: Chain, q: Chain) -> float:
        return log_ratio(x, p, q, request.ratio_temperature or 42, request.sigma).item()

    # prefill: the target alone, by MAR's schedule
    rounds = drafted = tries = committed = num_next = by_target = 0
    prefill = math.ceil(request.prefill * LENGTH)
    while committed < prefill:
        left = LEFT[request.num_iter][rounds] if rounds + 1 < request.num_iter else 0
        ranks = range(committed, min(LENGTH - left, prefill))
        tokens[order[ranks]] = torch.cat([chain(target, rank, committed).mean for rank in ranks]).float()
        committed = ranks.stop
        by_target += len(ranks)
        rounds += 1

    is_sequential = request.verify == "sequential"
    index = 1 if request.align is False else 0
    by_lag = np.zeros((2, request.gamma), dtype=int)
    while committed < LENGTH:
        ranks = range(committed, min(committed + request.gamma, LENGTH))
        rounds += 1
        drafted += len(ranks)
        by_target += len(ranks) + (is_sequential and ranks.stop < LENGTH)
        q = {}
        for rank in ranks:
            q[rank] = chain(draft, rank, rank)
            tokens[order[rank]] = q[rank].mean[0]
        p = {rank: chain(target, rank, rank if is_sequential else committed, index) for rank in ranks}
        for rank in ranks:
            at = order[rank : rank + 1]
            uniform = noise.token_accept_uniforms(seed, at)
            accepted[rank] = uniform.log().item() < ratio(q[rank].mean, p[rank], q[rank])
            by_lag[:, rank - ranks.start] += [1, accepted[rank]]
            committed = rank + 1
            if accepted[rank]:
                continue
            # resample: the first accepted candidate, or the target's own token
            tokens[at] = p[rank].mean.float()
            for i in range(100):
                normal, uniform = noise.token_candidates(seed, at, i, 1, CHANNELS)
                y = p[rank].mean + p[rank].last.exp() * normal[0]
                tries += 1
                if uniform.item() < 1 - math.exp(-ratio(y, p[rank], q[rank])):
                    tokens[at] = y.float()
                    break
            if is_sequential:
                break
        # p_{gamma + 1}, after all drafted tokens
        if is_sequential and committed == ranks.stop < LENGTH and accepted[committed - 1]:
            tokens[order[committed]] = chain(target, committed, committed, index).mean[0].float()
            committed += 1
            num_next += 1
    return ByHand(tokens, accepted, by_lag, rounds, drafted, tries, num_next, by_target)
