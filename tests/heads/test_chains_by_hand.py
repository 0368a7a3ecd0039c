"""Chains that speculate do what the method says: written out by hand, and with drafts that are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heads import Case, MixtureHead
from mixtures import CHANNELS, MIXTURE, NULL_CLASS, UNGUIDED
from torch.distributions import Normal

from cspd import noise
from cspd.heads.calibration import Calibration, draft_table
from cspd.noise import Purpose
from mar.head import schedule


def by_hand(case: Case, draft: Calibration, window: int, rows: int, seed: int):
    """(tokens, record, log sigma of the path): arXiv 2501.05370 written out, one step at a time, in float64.

    With calibrated drafts, and a residual that is drawn by mirroring first, see `cspd.heads.verify.resample`.
    """
    s, last = schedule(case.num_steps), case.num_steps - 1
    seeds, position, every = torch.full((rows,), seed), torch.arange(rows), torch.arange(rows)
    eps_t = noise.steps(seeds, position, torch.arange(case.num_steps), CHANNELS).double()
    uniform = noise.uniform(seeds, Purpose.ACCEPT, position, num=case.num_steps).double()
    t_embed = case.head.time_embed(torch.as_tensor(s.timestep_map))

    def evaluate(x, k):
        out = case.head.denoise(x, case.head.split(case.head.modulations(t_embed[k], case.z.expand(-1, rows, -1))))
        eps, v = out.chunk(2, dim=-1)
        return (eps[1] + case.scale * (eps[0] - eps[1]) if len(eps) == 2 else eps[0]), v[0]

    def gaussian_after(x, eps, v, k):
        sigma = case.temperature * torch.exp(s.log_sigma_base[k] + s.log_sigma_slope[k] * v)
        return Normal(s.mean_x[k] * x + s.mean_eps[k] * eps, sigma)

    def ratio(x, p, q):
        return (p.log_prob(x).sum(-1) - q.log_prob(x).sum(-1)).exp()

    def mirror(xi, p, q):
        axis = (p.mean - q.mean) / (p.scale * q.scale).sqrt()
        return xi - 2 * (xi * axis).sum(-1, keepdim=True) * axis / axis.square().sum(-1, keepdim=True)

    x = noise.initial(seeds, position, CHANNELS).double()
    anchor = [x, *evaluate(x, last)]
    since = torch.full((rows,), last)  # the step of each chain's anchor
    p = gaussian_after(*anchor, last)
    x, path = p.mean + p.scale * eps_t[last], p.scale.log().sum(-1)
    record = torch.zeros(rows, case.num_steps, dtype=torch.int8)
    record[:, last] = 1
    for k in reversed(range(last)):
        lag = since - k
        c0, c1, c2 = torch.as_tensor(draft.coefficients[k])[lag - 1].double().T.unsqueeze(-1)
        drafted = c0 * x + c1 * anchor[1] + c2 * anchor[0]
        v_drafted = anchor[2] + torch.as_tensor(draft.drift[k])[lag - 1].double().unsqueeze(-1)
        q = gaussian_after(x, drafted, v_drafted, k)
        evaluated = [x, *evaluate(x, k)]
        p = gaussian_after(*evaluated, k)
        if k == 0:
            record[every, since - 1] = lag.to(torch.int8)
            return p.mean, record, path
        path = path + p.scale.log().sum(-1)
        y = q.mean + q.scale * eps_t[k]
        rejected = uniform[:, k] >= ratio(y, p, q)
        mirrored = p.mean + p.scale * mirror(eps_t[k], p, q)
        x = torch.where(rejected.unsqueeze(-1), mirrored, y)
        for i in (rejected & (uniform[:, k] <= ratio(mirrored, q, p))).nonzero().flatten():
            mine = slice(i, i + 1)
            p_i, q_i = (Normal(g.mean[i], g.scale[i]) for g in (p, q))
            kept, first = torch.zeros(0), 0
            while not len(kept):
                draws = noise.candidates(seeds[mine], position[mine], since[mine] - 1, first, 512, CHANNELS)
                xi, uniform_keep = draws[0][0].double(), draws[1][0].double()
                candidates, image = p_i.mean + p_i.scale * xi, q_i.mean + q_i.scale * mirror(xi, p_i, q_i)
                keep = (1 - ratio(candidates, q_i, p_i)).clamp(min=0) - (1 - ratio(image, p_i, q_i)).clamp(min=0)
                kept, first = candidates[uniform_keep < keep], first + 512
            x[i] = kept[0]
        over = rejected | (lag == window)
        record[every[over], since[over] - 1] = torch.where(rejected, -lag, lag)[over].to(torch.int8)
        anchor = [torch.where(over.unsqueeze(-1), new, old) for new, old in zip(evaluated, anchor)]
        since = torch.where(over, k, since)


@pytest.mark.parametrize(
    "num_steps, window, frozen, guidance, tau",
    [(25, 1, True, None, 1.0), (25, 4, False, 2.0, 0.8), (50, 12, True, None, 1.0), (100, 12, False, 2.0, 1.0)],
)
def test_chains_do_what_the_method_says(num_steps, window, frozen, guidance, tau):
    case = Case(MIXTURE, NULL_CLASS if guidance else UNGUIDED, num_steps, guidance or 1.0, tau)
    draft = case.calibration(frozen)
    ended = case.speculative(draft, window, 100, seed=5)
    tokens, record, path = by_hand(case, draft, window, 100, seed=5)
    same = (ended.record == record).all(1)
    assert same.sum() >= 97 and (record < 0).any()  # rounding flips a decision now and then
    assert sum(ended.tries) > 0 and sum(ended.fallbacks) == 0
    off = (ended.tokens - tokens)[same].abs().amax(1)
    assert off.median() < 1e-4 and (off < 0.01).sum() >= 95
    assert (ended.log_sigma - path)[same].abs().median() < 1e-3
    assert torch.equal(ended.row, torch.arange(100)) and ended.owners == list(range(100))


@pytest.mark.parametrize("num_steps, window", [(2, 1), (7, 7), (20, 6)])
def test_the_draft_table_is_the_recursion(num_steps, window):
    """Drafted states of every start, step by step in float64, against the table's closed form; windows end at 0."""
    rng, s, tau = np.random.default_rng(0), schedule(num_steps), 0.8
    coefficients, drift = rng.normal(size=(num_steps, window, 3)), rng.normal(size=(num_steps, window))
    table = draft_table(coefficients, drift, num_steps, window, tau).astype(np.float64)
    assert table.shape == (num_steps, window, 3 + window + 5)
    x, eps, anchor_x, v = rng.normal(size=(4, CHANNELS))
    for t in range(num_steps):
        y, noises = x, np.zeros((window, CHANNELS))
        for w in range(window):
            k, columns = t - w, table[t, w]
            if k < 0:
                assert not columns.any()
                continue
            log_sigma = np.log(tau) + s.log_sigma_base[k] + s.log_sigma_slope[k] * (v + drift[k, w])
            noises[w] = np.exp(log_sigma) * rng.normal(size=CHANNELS)
            c = coefficients[k, w]
            y = s.mean_x[k] * y + s.mean_eps[k] * (c[0] * y + c[1] * eps + c[2] * anchor_x) + noises[w]
            draft_base, slope, mean_x, mean_eps, base = columns[3 + window :]
            assert columns[: 3 + window] @ np.stack([x, eps, anchor_x, *noises]) == pytest.approx(y, rel=1e-4, abs=1e-4)
            assert draft_base + slope * v == pytest.approx(log_sigma, abs=1e-5)
            own = (s.log_sigma_slope[k], s.mean_x[k], s.mean_eps[k], np.log(tau) + s.log_sigma_base[k])
            assert (slope, mean_x, mean_eps, base) == pytest.approx(own, rel=1e-6)


def linear_case(num_steps=100, **changes) -> Case:
    head = MixtureHead(torch.zeros(1, CHANNELS), (0.5,))
    return Case(head, torch.tensor([[[1.0, -0.5, 2.0]]]), num_steps, **changes)


def exact_draft(case: Case, window: int) -> Calibration:
    """eps_k = g_k x_k + o_k z is g_k x_k + (o_k / o') (eps' - g' x'): nothing is left to chance."""
    s, head = schedule(case.num_steps), case.head
    gain = np.sqrt(1 - s.alphas_cumprod) / (s.alphas_cumprod * head.scales.item() ** 2 + 1 - s.alphas_cumprod)
    offset, v = -gain * np.sqrt(s.alphas_cumprod), head.v(s.timestep_map)
    coefficients, drift = np.zeros((case.num_steps, window, 3)), np.zeros((case.num_steps, window))
    for k in range(case.num_steps):
        for lag in range(1, min(window, case.num_steps - 1 - k) + 1):
            share = offset[k] / offset[k + lag]
            coefficients[k, lag - 1] = gain[k], share, -share * gain[k + lag]
            drift[k, lag - 1] = v[k] - v[k + lag]
    return Calibration(coefficients, drift, np.zeros(0))


@pytest.mark.parametrize("window", [1, 4, 12])
def test_an_exact_draft_is_never_rejected(window):
    """Then the tokens are those of the ancestral chain with the same noise, in as few calls as there can be."""
    case = linear_case(temperature=0.9)
    ended, path = case.speculative(exact_draft(case, window), window, 5, seed=2), case.path(5, seed=2)
    assert (ended.record >= 0).all() and not any(ended.tries)
    assert ((ended.record != 0).sum(1) == 1 + -(-99 // window)).all()
    assert (ended.tokens - path[:, :-1]).abs().max() < 2e-3
    assert (ended.log_sigma - path[:, -1]).abs().max() < 1e-2
    s = schedule(100)
    last = np.log(0.9) + s.log_sigma_base[0] + s.log_sigma_slope[0] * case.head.v(0)
    assert ended.log_sigma_last == pytest.approx(last, abs=1e-5)
