"""Few-step denoisers: annealed chains are ancestral chains of the right lengths, and the solvers solve."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import relative_error
from heads import FP32, Given, MixtureHead, Watching

from cspd import Engine, MARModels, Request, noise
from cspd.continuous.denoisers import DENOISERS
from cspd.continuous.rows import Densities
from cspd.heads.calibrated import plan_of
from cspd.heads.chain import Chain, Inputs
from cspd.heads.samplers import ancestral, chain_lengths, solve
from cspd.masked.orders import cosine
from cspd.request import Sequence
from mar.head import respaced, schedule

SOLVERS = {"ddim": 1, "dpm-solver++": 2}
ABAR = schedule(1000).alphas_cumprod
LENGTH = 64  # tokens of the small model


@pytest.fixture
def engine(small_mar):
    return Engine(MARModels(small_mar, small_mar), max_batch=3, device="cpu")


# annealed chains


def lengths_by_the_formulas(num_iter, upper, lower, anneal):
    """T of the iterations 0 .. K - 1, by DiSA's formulas one by one."""
    found = []
    for k in range(num_iter):
        share = {
            "linear": (num_iter - 1 - k) / (num_iter - 1),
            "cosine": (math.cos(math.pi * k / (num_iter - 1)) + 1) / 2,
            "two-stage": 1 if k < (num_iter - 1) / 2 else 0,
        }[anneal]
        found.append(lower + int(share * (upper - lower)))
    return found


@pytest.mark.parametrize("anneal", ["linear", "cosine", "two-stage"])
def test_chain_lengths_are_the_formulas(anneal):
    for num_iter in (2, 3, 16, 64):
        found = chain_lengths(np.arange(num_iter), np.full(num_iter, num_iter), 50, 5, anneal).tolist()
        assert found == lengths_by_the_formulas(num_iter, 50, 5, anneal)
        assert (found[0], found[-1]) == (50, 5)
    assert chain_lengths(np.zeros(1), np.ones(1), 50, 5, anneal).tolist() == [50]


def started(engine, *requests):
    """Sequences of the requests in the runner's slots, about to run."""
    batch = [Sequence(engine.resolve(request), slot, slot) for slot, request in enumerate(requests)]
    engine.runner.admit(batch)
    return batch


def initial_noise(engine, rows):
    return noise.initial(rows.seed, rows.position, engine.runner.config.token_dim)


def chain_of(engine, rows, z, s, *observers):
    """The rows' chain, as samplers are given it."""
    return Chain(engine.runner.target.head, s, rows.inputs(z), noise, FP32, observers=observers)


def test_rows_of_any_iteration_have_ancestral_chains_of_its_length(engine):
    """Also if a sequence's rows are of several iterations, as CSpD's are; each row equals its chain alone."""
    runner, dim = engine.runner, engine.runner.config.token_dim
    settings = {"method": "disa", "upper": 12, "lower": 4, "anneal": "cosine"}
    batch = started(engine, *(Request(i, i, num_iter=num_iter, **settings) for i, num_iter in enumerate((4, 9, 6))))
    rows = runner.rows(batch, committed=[0, 20, 30], counts=[40, 3, 30])
    z = torch.randn(2, len(rows.seed), runner.target.head.cond_embed.in_features, generator=torch.manual_seed(0))
    seen = Densities(len(rows.seed), dim, runner.device)
    made = DENOISERS["annealed"].denoise(runner, "target", rows, z, observers=(seen,))

    lengths = []
    for sequence, committed, count in zip(batch, rows.committed, rows.counts):
        after, _ = cosine(sequence.request.num_iter, LENGTH)
        of_iteration = lengths_by_the_formulas(sequence.request.num_iter, 12, 4, "cosine")
        lengths += [of_iteration[(LENGTH - after <= rank).sum()] for rank in range(committed, committed + count)]
    assert made.calls.tolist() == lengths and len(set(lengths)) == 5
    by_sequence = [lengths[:40], lengths[40:43], lengths[43:]]  # each takes part in the chains of its own lengths
    assert made.head_calls.tolist() == [sum(set(own)) for own in by_sequence]
    some = np.arange(5, 73, 9)
    again = DENOISERS["annealed"].denoise(runner, "target", rows.at(some), z[:, some])
    assert relative_error(again.tokens, made.tokens[some]) < 1e-4
    for row in range(0, len(lengths), 7):
        own, s, log_sigmas = rows.at(np.array([row])), schedule(lengths[row], 950), []
        add = lambda t, x, eps, v: log_sigmas.append(s.log_sigma_base[t] + s.log_sigma_slope[t] * v)  # noqa: B023, E731
        tokens = ancestral(chain_of(engine, own, z[:, row : row + 1], s, Watching(add)))
        assert relative_error(made.tokens[row], tokens[0]) < 1e-4
        assert relative_error(seen.log_sigma_last[row], log_sigmas[-1][0]) < 1e-4
        assert relative_error(seen.log_sigma[row], torch.stack(log_sigmas[:-1]).sum()) < 1e-4


def test_annealed_images_do_not_depend_on_the_batch(engine):
    requests = [Request(i, seed=i, method="disa", upper=10, lower=4, num_iter=k) for i, k in enumerate((4, 7, 3))]
    for request, output in zip(requests, engine.generate(requests)):
        alone = engine.generate(request)[0]
        assert relative_error(output.tokens, alone.tokens) < 1e-4
        lengths = lengths_by_the_formulas(request.num_iter, 10, 4, "linear")
        assert output.stats.head_calls == alone.stats.head_calls == sum(lengths)
        assert output.stats.head_calls_per_token == pytest.approx(alone.token_cost.mean().item())
        assert set(alone.token_cost.tolist()) == set(lengths)


# solvers

CENTRE, SCALE = torch.tensor([0.7, -0.8, 0.5, 0.2], dtype=torch.float64), 2.0
LINEAR = MixtureHead(CENTRE[None].float(), [SCALE])  # of tokens ~ N(CENTRE, SCALE^2): linear in the noisy token
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def linear_eps(x, timestep):
    abar = ABAR[timestep]
    return math.sqrt(1 - abar) * (x - math.sqrt(abar) * CENTRE) / (abar * SCALE**2 + 1 - abar)


def solved(order, s, head=LINEAR, x=X):
    """Tokens if z is 0 and nothing is guided."""
    ones, names = torch.ones(len(x), 1), torch.arange(len(x))
    inputs = Inputs(torch.zeros(1, len(x), 4), ones, ones, names, names)
    return solve(Chain(head, s, inputs, Given(x.float()), FP32), order).double()


def by_the_papers(eps, x, timesteps, order):
    """DDIM (arXiv 2010.02502, eq. 12 with sigma = 0) or DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2), in float64.

    The last two steps of 2M are DDIM's, as is its first. `timesteps` fall.
    """
    signal, noise_share = np.sqrt(ABAR[timesteps]), np.sqrt(1 - ABAR[timesteps])
    log_snr = np.log(signal / noise_share)
    previous = None
    for i, timestep in enumerate(timesteps):
        predicted_noise = eps(x, timestep)
        x_0 = (x - noise_share[i] * predicted_noise) / signal[i]
        if order == 2 and 0 < i < len(timesteps) - 2:
            h = log_snr[i + 1] - log_snr[i]
            r = (log_snr[i] - log_snr[i - 1]) / h
            extrapolated = (1 + 1 / (2 * r)) * x_0 - 1 / (2 * r) * previous
            x = noise_share[i + 1] / noise_share[i] * x - signal[i + 1] * math.expm1(-h) * extrapolated
        elif i < len(timesteps) - 1:
            x = signal[i + 1] * x_0 + noise_share[i + 1] * predicted_noise
        previous = x_0
    return x_0


GRIDS = {
    "uniform": schedule(12, 950),
    "planned": respaced(np.array([0, 40, 90, 200, 420, 660, 900, 950])),
    "short": schedule(2, 950),
    "every timestep": schedule(301, 300),
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_solver_is_the_papers_formula(grid, order):
    expected = by_the_papers(linear_eps, X, GRIDS[grid].timestep_map[::-1], order)
    assert relative_error(solved(order, GRIDS[grid]), expected) < 1e-4


@pytest.mark.parametrize("order", [1, 2])
def test_errors_fall_as_the_order_says(order):
    """A Gaussian's path is known: x_t is as far from its centre as the standard deviation there says."""
    width = np.sqrt(ABAR * SCALE**2 + 1 - ABAR)
    at_0 = math.sqrt(ABAR[0]) * CENTRE + width[0] / width[950] * (X - math.sqrt(ABAR[950]) * CENTRE)
    exact = (at_0 - math.sqrt(1 - ABAR[0]) * linear_eps(at_0, 0)) / math.sqrt(ABAR[0])
    errors = [(solved(order, schedule(num_calls, 950)) - exact).abs().max() for num_calls in (10, 40, 160)]
    for coarse, fine in itertools.pairwise(errors):
        assert 0.75 * 4**order < coarse / fine < 1.25 * 4**order


@pytest.mark.parametrize("name, order", SOLVERS.items())
def test_requests_are_solved_with_guidance(name, order, engine):
    """A request of one iteration, by the model's own z: the guided head, the request's noise, at any temperature."""
    settings = {"num_iter": 1, "cfg": 3.0, "head_calls": 6, "first_timestep": 940}
    requests = [Request(3, 5, method=name, temperature=tau, **settings) for tau in (1.0, 0.0)]
    first, second = engine.generate(requests)
    assert torch.equal(first.tokens, second.tokens)
    assert first.stats.guarantee == "heuristic"
    assert (first.stats.head_calls, first.stats.head_evaluations) == (6, 6 * 2 * LENGTH)

    runner, batch = engine.runner, started(engine, requests[0])
    rows = runner.next_rows(batch)
    z = runner.conditions(batch, rows)

    def guided(x, timestep):
        t = torch.full((LENGTH,), int(timestep))
        with_class, without = (runner.target.head(x.float(), t, each).chunk(2, dim=-1)[0] for each in z)
        return (without + rows.scale * (with_class - without)).double()

    x = initial_noise(engine, rows).double()
    expected = by_the_papers(guided, x, schedule(6, 940).timestep_map[::-1], order)
    assert relative_error(first.tokens[rows.position], expected.float()) < 1e-3


@pytest.mark.parametrize("num_calls", [4, 7])
def test_the_planned_grid_is_that_of_calibrated(num_calls, engine):
    """Only timesteps above the first one are moved, so that all still differ."""
    settings = {"num_iter": 1, "num_sampling_steps": 7, "cfg": 1.0, "head_calls": num_calls}
    request = engine.resolve(Request(2, 1, method="ddim", grid="planned", first_timestep=800, **settings))
    steps = plan_of(engine.runner.tuning.calibrations["target"].predictor(request).skip_cost, num_calls).steps
    timesteps = [round(999 / 6 * step) for step in steps]
    assert len(timesteps) == num_calls and timesteps[0] == 999
    timesteps = [min(800 - i, timestep) for i, timestep in enumerate(timesteps)]

    runner, batch = engine.runner, started(engine, request)
    rows = runner.next_rows(batch)
    s = respaced(np.array(timesteps[::-1]))
    expected = solve(chain_of(engine, rows, runner.conditions(batch, rows), s), order=1)
    assert relative_error(engine.generate(request)[0].tokens[rows.position], expected) < 1e-4


@pytest.mark.parametrize("name, order", SOLVERS.items())
def test_densities_are_the_ancestral_chains(name, order, engine):
    """Over the same timesteps, at the states that the solver visits."""
    runner, batch = engine.runner, started(engine, Request(1, method=name, head_calls=5, temperature=0.5, cfg=1.0))
    rows = runner.rows(batch, committed=[0], counts=[3])
    z, s, v_of = runner.conditions(batch, rows), schedule(5, 950), []
    seen = Densities(3, runner.config.token_dim, runner.device)
    made = DENOISERS[name].denoise(runner, "target", rows, z, observers=(seen,))
    watching = Watching(lambda t, x, eps, v: v_of.append(v))
    assert torch.equal(made.tokens, solve(chain_of(engine, rows, z, s, watching), order))
    log_sigmas = [
        0.5 * ((1 + v) / 2 * np.log(s.betas[t]) + (1 - v) / 2 * s.posterior_log_variance_clipped[t]) + math.log(0.5)
        for t, v in zip((4, 3, 2, 1, 0), v_of)
    ]
    assert relative_error(seen.log_sigma, torch.stack(log_sigmas[:-1]).sum((0, 2))) < 1e-5
    assert relative_error(seen.log_sigma_last, log_sigmas[-1]) < 1e-5


@pytest.mark.parametrize(
    "method, settings, message",
    [
        ("ddim", {"head_calls": 9, "grid": "planned", "num_sampling_steps": 8}, "head_calls"),
        ("ddim", {"head_calls": 20, "first_timestep": 18}, "first_timestep"),
        ("dpm-solver++", {"head_calls": 960}, "first_timestep"),
        ("disa", {"upper": 4}, "lower"),
        ("disa", {"lower": 1}, "lower"),
        ("disa", {"first_timestep": 48}, "first_timestep"),
        # the prefill is by whole chains, from the same timestep
        ("cspd", {"chains": "ddim", "head_calls": 2, "first_timestep": 3, "num_sampling_steps": 12}, "first_timestep"),
    ],
)
def test_bad_settings_are_errors_that_name_the_option(method, settings, message, engine):
    with pytest.raises(ValueError, match=message):
        engine.resolve(Request(1, method=method, **settings))


@pytest.mark.parametrize(
    "method, enough",
    [
        ({"method": "ar"}, {"first_timestep": 950}),
        ({"method": "mar-draft"}, {"first_timestep": 950}),
        ({"method": "speculative", "window": 3}, {"num_sampling_steps": 100}),
    ],
    ids=str,
)
def test_a_short_chain_from_the_noisiest_timestep_is_warned_of(method, enough, engine, recwarn):
    for settings in ({"num_sampling_steps": 25}, {"num_sampling_steps": 24} | enough):
        engine.resolve(Request(1, **method, **settings))
    assert not recwarn
    (name,) = enough
    with pytest.warns(UserWarning, match=name):
        engine.resolve(Request(1, **method, num_sampling_steps=24))


def test_an_error_of_tokens_that_are_not_finite_names_a_short_chain(engine):
    request = Request(1, method="ar", num_iter=1, cfg=1e38)
    for num_steps, named in ((24, True), (25, False)):
        with pytest.raises(FloatingPointError) as caught:
            engine.generate(request.but(num_sampling_steps=num_steps))
        assert ("a chain of 24 denoising steps overshoots" in str(caught.value)) == named
