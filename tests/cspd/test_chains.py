"""Chains that speculate have the ancestral chain's distribution, whatever the draft, and do what the method says.

The distribution is tested where it is known (Gaussian tokens), and against ancestral chains (mixtures, whose sigma_p
depends on the state). Planted bugs must fail the same test, which shows that it has power.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np
import pytest
import torch
from heads import BATCH, FP32, Case, MixtureHead, finish, merge
from laws import normal_pvalue, same_law_pvalue
from torch.distributions import Normal

from cspd import noise
from cspd.continuous import gaussian
from cspd.continuous.calibration import Calibration, frozen
from cspd.continuous.chain_records import acceptance
from cspd.continuous.draft_verify import draft_table
from cspd.noise import Purpose
from cspd.precision import Precision
from mar.diffusion import schedule

ROWS, CHANNELS = 6000, 3
RIGHT, WRONG = 1e-3, 1e-9  # p-values: of right code above, of wrong code below
CENTRES = torch.tensor([[0.9, -0.6, 0.2], [-0.4, 0.7, 1.0], [0.1, -0.2, -1.1]])
MIXTURE = MixtureHead(CENTRES, (0.05, 0.1, 0.2), (0.5, 0.3, 0.2), wobble=0.3)
NULL_CLASS = torch.tensor([[[0.0, 0.0, 0.0]], [[0.3, -0.2, 0.1]]])
UNGUIDED = NULL_CLASS[:1]


def biased(case: Case, of_mean: float, of_log_sigma: float) -> Calibration:
    """A draft that is off by so many standard deviations a unit of the state, and in log sigma, at every step."""
    s, draft = schedule(case.num_steps), case.calibration()
    coefficients, drift = draft.coefficients.copy(), draft.drift + (of_log_sigma / s.log_sigma_slope)[:, None]
    coefficients[..., 0] += (of_mean * np.exp(s.log_sigma_base) / np.abs(s.mean_eps))[:, None]
    return dataclasses.replace(draft, coefficients=coefficients, drift=drift.astype(np.float32))


def scattered(case: Case, spread: float) -> Calibration:
    """A draft with random errors in everything."""
    draft, rng = case.calibration(), np.random.default_rng(0)
    changes = {name: getattr(draft, name) + spread * rng.normal(size=getattr(draft, name).shape) for name in DRAFT}
    return dataclasses.replace(draft, **{name: values.astype(np.float32) for name, values in changes.items()})


DRAFT = ("coefficients", "drift")


@functools.cache
def reference(case: Case, rows: int) -> torch.Tensor:
    return case.path(rows, seed=2)


def distribution_pvalue(case: Case, draft: Calibration, window: int, rows: int = ROWS, noise=noise) -> float:
    """Whether tokens, and log sigma along the way, are those of ancestral chains with other seeds."""
    ended = case.speculative(draft, window, rows, seed=1, noise=noise)
    paths = torch.cat([ended.tokens, ended.log_sigma.unsqueeze(1)], dim=1)
    return same_law_pvalue(reference(case, 3 * rows), paths)


def gaussian_distribution(case: Case) -> tuple[np.ndarray, float]:
    """Mean [d] and standard deviation of the tokens of a head with one component, in float64."""
    s, head, mean, variance = schedule(case.num_steps), case.head, np.zeros(CHANNELS), 1.0
    centre = (case.z[-1] + case.scale * (case.z[0] - case.z[-1]) if len(case.z) > 1 else case.z[0])[0].double().numpy()
    for t in reversed(range(case.num_steps)):
        abar, v = s.alphas_cumprod[t], head.v(s.timestep_map[t])
        gain = np.sqrt(1 - abar) / (abar * head.scales.item() ** 2 + 1 - abar)  # eps = gain (x - sqrt(abar) centre)
        mean = s.mean_x[t] * mean + s.mean_eps[t] * gain * (mean - np.sqrt(abar) * centre)
        variance *= (s.mean_x[t] + s.mean_eps[t] * gain) ** 2
        if t:
            variance += case.temperature**2 * np.exp(2 * (s.log_sigma_base[t] + s.log_sigma_slope[t] * v))
    return mean, variance**0.5


@pytest.mark.parametrize(
    "num_steps, window, frozen, guidance, tau, scale",
    [
        (25, 4, False, 2.5, 1.0, 0.5),
        (25, 12, True, None, 0.7, 0.01),
        (50, 1, True, 2.5, 1.0, 0.01),
        (100, 12, False, None, 1.0, 0.01),
        pytest.param(100, 4, True, None, 1.0, 0.5, marks=pytest.mark.slow),
        (250, 12, False, 2.5, 0.7, 0.01),
    ],
)
def test_gaussian_tokens_have_their_known_distribution(num_steps, window, frozen, guidance, tau, scale):
    z = torch.linspace(0.5, 1.5, CHANNELS) * torch.tensor([1.0, -0.5]).view(2, 1, 1)
    head = MixtureHead(torch.zeros(1, CHANNELS), (scale,))
    case = Case(head, z if guidance else z[:1], num_steps, guidance or 1.0, tau)
    tokens = case.speculative(case.calibration(frozen), window, ROWS, seed=1).tokens
    mean, deviation = gaussian_distribution(case)
    assert normal_pvalue((tokens.double() - torch.from_numpy(mean)) / deviation) > RIGHT


@pytest.mark.parametrize(
    "num_steps, window, frozen, guidance, tau",
    [
        (25, 1, True, None, 1.0),
        (25, 12, False, 2.0, 0.8),
        (50, 4, False, None, 1.0),
        (50, 12, True, None, 1.0),
        (100, 12, False, None, 1.0),
        pytest.param(100, 4, True, 2.0, 1.0, marks=pytest.mark.slow),
        pytest.param(250, 12, False, None, 1.0, marks=pytest.mark.slow),
    ],
)
def test_mixtures_have_the_ancestral_distribution(num_steps, window, frozen, guidance, tau):
    case = Case(MIXTURE, NULL_CLASS if guidance else UNGUIDED, num_steps, guidance or 1.0, tau)
    assert distribution_pvalue(case, case.calibration(frozen), window) > RIGHT


@pytest.mark.slow
def test_a_mixture_comes_out_as_the_mixture():
    """At T = 250 the ancestral chain itself is nearly exact."""
    case = Case(MIXTURE, UNGUIDED, 250)
    tokens = case.speculative(case.calibration(), 24, ROWS, seed=3).tokens
    nearest = torch.cdist(tokens, CENTRES).argmin(1)
    for j, (weight, scale) in enumerate(zip(MIXTURE.weights, MIXTURE.scales)):
        own = tokens[nearest == j]
        assert abs(len(own) / ROWS - weight) < 4 * (weight * (1 - weight) / ROWS) ** 0.5
        assert (own.mean(0) - CENTRES[j]).abs().max() < 5 * scale / len(own) ** 0.5
        assert own.std(0).mean() == pytest.approx(scale.item(), rel=0.06)


DRAFTS = {
    "close": lambda case: scattered(case, 0.02),
    "poor": lambda case: scattered(case, 0.3),
    "hopeless": lambda case: scattered(case, 3.0),
    "biased and narrow": lambda case: biased(case, 0.5, -0.25),
    "biased and wide": lambda case: biased(case, 1.0, 0.3),
}
TWELVE = Case(MIXTURE, UNGUIDED, 12)


@pytest.mark.parametrize("draft", DRAFTS)
def test_any_draft_is_exact(draft):
    assert distribution_pvalue(TWELVE, DRAFTS[draft](TWELVE), 3) > RIGHT


def plain_draw(x, log_uniform, p, q):
    return p[0] + p[1].exp() * torch.randn(x.shape, generator=torch.Generator().manual_seed(x.shape[0]))


def always(y):
    return y, torch.zeros(y.shape[:-1], dtype=torch.bool)


def residual_keeping(keep):
    """`residual` with another probability of keeping a candidate."""

    def residual(p, q, draws, first, max_tries):
        p, q = ([t[:, None] for t in gauss] for gauss in (p, q))
        return gaussian.first_kept(p, lambda y: keep(y, p, q), draws, max_tries, first)

    return residual


class ChangedUniforms:
    """Noise whose uniform draws, which accept drafts, are changed."""

    candidates = staticmethod(noise.candidates)

    def __init__(self, change):
        self.change = change

    def chain(self, *args):
        x, eps, uniform = noise.chain(*args)
        return x, eps, self.change(uniform)


resample, residual = gaussian.resample, gaussian.residual
BUGS = {
    "rejected drafts are kept": {"resample": lambda x, log_uniform, p, q: always(x)},
    "a rejected draft becomes a plain draw of p": {"resample": lambda *args: always(plain_draw(*args))},
    "the mirror image is not judged": {"resample": lambda *args: always(resample(*args)[0])},
    "the rejected draft's noise is used again": {
        "resample": lambda x, log_uniform, p, q: always(p[0] + (x - q[0]) * (p[1] - q[1]).exp())
    },
    "q's sigma for p": {"resample": lambda x, log_uniform, p, q: resample(x, log_uniform, (p[0], q[1]), q)},
    "p's sigma for q": {"resample": lambda x, log_uniform, p, q: resample(x, log_uniform, p, (q[0], p[1]))},
    "what is left is drawn from p": {"residual": residual_keeping(lambda y, p, q: torch.ones(y.shape[:-1]))},
    "the mirrored term is left out": {
        "residual": residual_keeping(lambda y, p, q: -torch.expm1(gaussian.log_ratio(y, q, p).clamp(max=0)))
    },
    "what is left has p and q exchanged": {"residual": lambda p, q, *draws: residual(q, p, *draws)},
    "one uniform draw for all steps": {
        "noise": ChangedUniforms(lambda uniform: uniform[:, :1].expand_as(uniform).clone())
    },
    "uniform draws that favour drafts": {"noise": ChangedUniforms(torch.square)},
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug, monkeypatch):
    changes = dict(BUGS[bug])
    source = changes.pop("noise", noise)
    monkeypatch.setattr(gaussian, "MAX_TRIES", 1024)  # some would look for what is not there
    for name, function in changes.items():
        monkeypatch.setattr(
            "cspd.continuous." + ("draft_verify." if name == "resample" else "residuals.") + name, function
        )
    drafts = [DRAFTS[name](TWELVE) for name in ("biased and wide", "biased and narrow")]
    assert any(distribution_pvalue(TWELVE, draft, 3, 2 * ROWS, source) < WRONG for draft in drafts)


def test_one_candidate_is_looked_at_for_every_step_judged():
    """On average: `residual` is needed with some probability, and then keeps a candidate with that probability."""
    for name in ("biased and wide", "biased and narrow"):
        ended = TWELVE.speculative(DRAFTS[name](TWELVE), 3, 2 * ROWS, seed=1)
        assert sum(ended.tries) / (2 * ROWS) == pytest.approx(10, rel=0.05)


def by_hand(case: Case, draft: Calibration, window: int, rows: int, seed: int):
    """(tokens, record, log sigma of the path): arXiv 2501.05370 written out, one step at a time, in float64.

    With calibrated drafts, and a residual that is drawn by mirroring first, see `cspd.continuous.gaussian.resample`.
    """
    s, last = schedule(case.num_steps), case.num_steps - 1
    seeds, position, every = torch.full((rows,), seed), torch.arange(rows), torch.arange(rows)
    eps_t = noise.steps(seeds, position, torch.arange(case.num_steps), CHANNELS).double()
    uniform = noise.uniform(seeds, Purpose.COIN, position, num=case.num_steps).double()
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


def test_records_count_calls():
    case, rows, window = Case(MIXTURE, UNGUIDED, 40), 50, 6
    chains = case.chains(case.calibration(), window)
    case.start(chains, rows, seed=1)
    calls, ended = torch.ones(rows, dtype=torch.int64), []
    while chains.owners:
        calls[list(chains.owners)] += 1
        ended += filter(None, [chains.advance()])
    record = merge(ended).record
    assert torch.equal((record != 0).sum(1), calls) and calls.min() < calls.max()
    assert (record.abs().sum(1) == 40).all() and record.abs().max() == window
    assert (record[:, 39] == 1).all()
    for row in record.tolist():
        step = 39
        while step >= 0:  # a round begins where the one before it ended
            assert 1 <= abs(row[step]) <= step + 1
            step, end, last = step - abs(row[step]), step, row[step]
        assert last > 0 and not any(row[i] for i in range(end))  # step 0 is never rejected
    (judged, accepted), (judged_at, accepted_at) = acceptance(record.numpy(), window)
    assert judged.sum() == judged_at.sum() == rows * 38 and judged_at[0] == judged_at[39] == 0
    assert accepted.sum() == accepted_at.sum() == rows * 38 - (record < 0).sum()


def test_acceptance_of_a_record_made_by_hand():
    record = np.zeros((2, 8), dtype=np.int8)
    record[0, [7, 6, 4, 1]] = 1, -2, 3, 2  # step 6 right, 5 wrong; 4 3 2 right; 1 right and 0 not judged
    record[1, [7, 6, 3]] = 1, 3, -1  # 6 5 4 right; 3 wrong;
    record[1, 2] = 3  # 2 1 right
    by_lag, by_step = acceptance(record, 4)
    assert by_lag.tolist() == [[6, 4, 2, 0], [5, 3, 2, 0]]
    assert by_step.tolist() == [[0, 2, 2, 2, 2, 2, 2, 0], [0, 2, 2, 1, 2, 1, 2, 0]]


def tokens_alone(case: Case, draft: Calibration, window: int, rows: int):
    chains = case.chains(draft, window)
    for i in range(rows):
        case.start(chains, rows, 4, slice(i, i + 1))
        yield from finish(chains)


def test_a_chain_does_not_depend_on_its_neighbours():
    """Alone, all together, or joining and leaving while others are under way; where drafts are often rejected."""
    case, rows, window = Case(MIXTURE, UNGUIDED, 30), 12, 5
    draft = case.calibration(frozen=True)
    alone, together = merge([*tokens_alone(case, draft, window, rows)]), case.speculative(draft, window, rows, 4)
    chains, staggered, waiting = case.chains(draft, window), [], list(range(0, rows, 3))[::-1]
    while waiting or chains.owners:
        for _ in range(2 if waiting else 0):
            if waiting:
                first = waiting.pop()
                case.start(chains, rows, 4, slice(first, first + 3))
        for _ in range(4):
            staggered += filter(None, [chains.advance() if chains.owners else None])
    for other in (together, merge(staggered)):
        assert torch.equal(other.record, alone.record)
        assert (other.tokens - alone.tokens).abs().max() < 1e-3
        assert (other.log_sigma - alone.log_sigma).abs().max() < 1e-2
        assert other.tries == alone.tries and other.fallbacks == alone.fallbacks
    assert (alone.record < 0).any() and any(alone.tries)


def test_tables_or_rounds_compute_the_modulations(monkeypatch):
    """Also where the chains under way outgrow the table and shrink again."""
    case = Case(MIXTURE, NULL_CLASS, 30, 2.0)
    draft, settings = case.calibration(), (5, 9, 4)
    whole = case.speculative(draft, *settings)
    for fitting in (0, 6):
        monkeypatch.setattr("cspd.continuous.chains.table_size", lambda *_, fitting=fitting: fitting * 30)
        chains = case.chains(draft, 5)
        case.start(chains, 9, 4, slice(0, 5))
        ended = [*filter(None, [chains.advance()])]
        case.start(chains, 9, 4, slice(5, 8))
        while len(chains.owners) > 1:
            ended += filter(None, [chains.advance()])
        case.start(chains, 9, 4, slice(8, 9))
        rounds = merge(ended + finish(chains))
        assert torch.equal(rounds.record, whole.record)
        assert (rounds.tokens - whole.tokens).abs().max() < 1e-3
    monkeypatch.undo()
    monkeypatch.setattr("cspd.continuous.modulations.TABLE_SHARE", 0)
    assert (case.speculative(draft, *settings).tokens - whole.tokens).abs().max() < 1e-3


def test_modulations_are_computed_once_a_chain(small_mar):
    """One product a layer for the chains that join, at all their steps; the rounds look them up."""
    head, products = copy.deepcopy(small_mar.head), []
    layers = [layer.adaLN_modulation[1] for layer in [*head.res_blocks, head.final_layer]]
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, output: products.append(output[..., 0].numel()))
    z = torch.randn(2, 1, head.cond_embed.in_features, generator=torch.Generator().manual_seed(0))
    case = Case(head, z, 20, 2.0)
    chains = case.chains(Calibration(*frozen(20), np.zeros(0)), 4)
    with torch.inference_mode():
        case.start(chains, 9, 4, slice(0, 5))
        chains.advance()
        case.start(chains, 9, 4, slice(5, 9))
        finish(chains)
    assert products == [2 * 5 * 20] * len(layers) + [2 * 4 * 20] * len(layers)


@pytest.mark.parametrize("policy", ["bf16", "tf32"])
def test_the_chain_is_in_float32_under_every_policy(policy):
    """This head has no matrix product, so nothing may be rounded: a coarse draft would not be the q it is judged by."""
    case = Case(MIXTURE, NULL_CLASS, 30, 2.0)
    draft = case.calibration()
    plain, coarse = (
        case.speculative(draft, 5, 20, 4, precision=precision)
        for precision in (FP32, Precision(policy, torch.device("cpu")))
    )
    assert torch.equal(coarse.tokens, plain.tokens)


def test_candidates_are_never_drawn_twice():
    """Every residual has candidates of its own: (seed, position, step) does not come again."""
    seen = []

    class Spy(ChangedUniforms):
        def candidates(self, seed, position, step, first, *args):
            asked = zip(seed.tolist(), position.tolist(), step.tolist())
            seen.extend((s, p, t, first) for s, p, t in asked if s)  # nobody's, which fill up, have seed 0
            return noise.candidates(seed, position, step, first, *args)

    TWELVE.speculative(biased(TWELVE, 0.5, -0.25), 3, BATCH, seed=1, noise=Spy(lambda uniform: uniform))
    assert len(seen) == len(set(seen)) > BATCH


def test_fallbacks_are_counted(monkeypatch):
    monkeypatch.setattr(gaussian, "FIRST_BLOCK", 2)
    monkeypatch.setattr(gaussian, "MAX_TRIES", 3)
    ended = TWELVE.speculative(biased(TWELVE, 0.5, -0.25), 3, 200, seed=1)
    assert 0 < sum(ended.fallbacks) < sum(ended.tries) / 3
    assert all(tries <= 3 * 11 and 3 * fallbacks <= tries for tries, fallbacks in zip(ended.tries, ended.fallbacks))
