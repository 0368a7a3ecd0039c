"""Whole chains: the ancestral chain has the distribution that its head defines, and a chain is one graph."""

import contextlib
import functools

import numpy as np
import pytest
import torch
from causals import CausalGolden
from conftest import relative_error
from graphs import replayed
from heads import FP32, Case, Given, MixtureHead, gaussian_moments
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from cspd import CausalModels, Engine, MARModels, Request, noise
from cspd.device import Precision, on_device
from cspd.heads.calibrated import Predictor, follow, make_segments
from cspd.heads.calibration import Recorder, frozen
from cspd.heads.chain import Chain, Inputs, modulation_size
from cspd.heads.samplers import ancestral, solve
from mar.head import Head, ReadyHead, schedule

CPU = torch.device("cpu")
MEANS = torch.tensor([[[1.0]], [[-0.5]]]) * torch.linspace(0.5, 1.5, 8)  # z, the unconditional branch second


def test_a_schedule_is_made_once():
    """Its constants on devices are cached by identity: another equal one would keep them twice."""
    first = schedule(4)
    for num_steps in range(5, 100):
        schedule(num_steps)
    assert schedule(4) is first


@pytest.mark.parametrize(
    "scale, num_steps, tau, guidance",
    [
        (0.01, 100, 0.7, 2.5),
        (0.01, 50, 1.0, None),
        (0.5, 50, 1.0, 2.5),
        (0.5, 25, 0.7, None),
        (0.5, 25, 0.7, 2.5),
    ],
)
def test_tokens_of_a_linear_head_have_the_exact_mean_and_variance(scale, num_steps, tau, guidance):
    head = MixtureHead(torch.zeros(1, 8), (scale,))
    case = Case(head, MEANS if guidance else MEANS[:1], num_steps, guidance or 1.0, tau)
    g, num = torch.Generator().manual_seed(0), 25_000
    given = Given(torch.randn(num, 8, generator=g), torch.randn(num_steps, num, 8, generator=g))
    tokens = ancestral(case.chain(num, seed=0, noise=given)).double()
    mean, var = gaussian_moments(case)
    assert ((tokens.mean(0) - mean).abs() < 4 * (var / num) ** 0.5).all()
    measured = (tokens - mean).square().mean().item()
    assert measured == pytest.approx(var, rel=4 * (2 / tokens.numel()) ** 0.5)


@pytest.fixture
def chain(small_mar, mar_golden):
    """Makes a guided chain of 100 steps of the golden head over six rows."""
    g = torch.Generator().manual_seed(0)
    masked = mar_golden["backbone.mask"][0].nonzero().squeeze(1)[:6]
    z = torch.stack([mar_golden[f"backbone.{name}"][0, masked] for name in ("z", "z_uncond")])
    scale, temperature = torch.linspace(1, 4, 6).unsqueeze(1), torch.linspace(0, 1, 6).unsqueeze(1)
    x = torch.randn(6, small_mar.config.token_dim, generator=g)
    given = Given(x, torch.randn(100, *x.shape, generator=g))
    names = torch.arange(6)

    def make(precision=FP32, *observers):
        inputs = Inputs(z, scale, temperature, names, names)
        return Chain(small_mar.head, schedule(100), inputs, given, precision, observers=observers)

    return make


def test_a_guided_chain_is_the_formula(chain, small_mar):
    """DDPM's posterior (arXiv 2006.11239, eq. 7) with the learned variance of arXiv 2102.09672, eq. 15."""
    own = chain()
    z, scale, temperature, *_ = own.inputs
    s, x = own.schedule, own.noise.x
    for t in reversed(range(len(s))):
        timestep = torch.full((6,), int(s.timestep_map[t]))
        (eps_c, v), (eps_u, _) = (small_mar.head(x, timestep, each).chunk(2, dim=-1) for each in z)
        guided = eps_u + scale * (eps_c - eps_u)
        x0 = s.sqrt_recip_alphas_cumprod[t] * x - s.sqrt_recipm1_alphas_cumprod[t] * guided
        x = s.posterior_mean_coef1[t] * x0 + s.posterior_mean_coef2[t] * x
        log_var = (1 + v) / 2 * np.log(s.betas[t]) + (1 - v) / 2 * s.posterior_log_variance_clipped[t]
        x = x + (t > 0) * temperature * (log_var / 2).exp() * own.noise.eps[t]
    assert relative_error(ancestral(own), x) < 1e-4


@pytest.mark.parametrize("given, taken", [(5e-324, 0.0), (1e-31, 0.0), (1e-6, 1e-6)])
def test_noise_that_float32_loses_is_no_noise(given, taken, small_mar):
    """Ratios of its densities overflow: the plan of `calibrated` was not that of temperature 0."""
    for models in (MARModels(small_mar), CausalModels(CausalGolden("sphere").model)):
        engine = Engine(models, max_batch=1, device="cpu")
        assert engine.check(Request(1, method="calibrated", temperature=given)).temperature == taken
        speculative = Request(1, method="speculative", window=2, temperature=given)
        with contextlib.nullcontext() if taken else pytest.raises(ValueError, match="temperature"):
            engine.check(speculative)


@pytest.mark.parametrize("per_table", [1, 7])
def test_splitting_the_table_of_modulations_changes_nothing(per_table, chain, small_mar, monkeypatch):
    whole, parts = ancestral(chain()), []
    num_rows = chain().z[..., 0].numel()
    monkeypatch.setattr("cspd.heads.chain.MODULATION_BYTES", per_table * modulation_size(small_mar.head) * num_rows)
    layer = small_mar.head.final_layer.adaLN_modulation[1]
    hook = layer.register_forward_hook(lambda layer, inputs, made: parts.append(made[..., 0].numel() // num_rows))
    split = ancestral(chain())
    hook.remove()
    assert max(parts) == per_table and sum(parts) == 100
    assert relative_error(split, whole) < 1e-4


def test_bf16_keeps_the_first_step_in_float32(chain):
    """There rounding grows 316 times."""
    assert 0 < relative_error(ancestral(chain(Precision("bf16", CPU))), ancestral(chain())) < 0.05


def test_bf16_keeps_the_first_call_of_calibrated_in_float32(chain, monkeypatch):
    """Its weights, and the mode of matrix products, which differs on GPUs only."""
    num_steps = len(chain())
    coefficients, drift = frozen(chain().schedule)
    predictor = Predictor(coefficients, drift, np.zeros_like(drift))
    plan = (num_steps - 1, num_steps - 2, 80, 50, 20, 5, 0)
    segments = make_segments(plan, chain().schedule, predictor, np.zeros((len(plan), 2)), 1, CPU)

    class Recording(Precision):
        mode = "none"

        def full(self):
            return self.recorded("full")

        def fast(self):
            return self.recorded("fast")

        @contextlib.contextmanager
        def recorded(self, mode):
            before, self.mode = self.mode, mode
            yield
            self.mode = before

    denoise = ReadyHead.denoise

    def states(policy):
        """The state at each call, and the modes of the calls."""
        precision, recorder, modes = Recording(policy, CPU), Recorder(), []
        monkeypatch.setattr(ReadyHead, "denoise", lambda *call: modes.append(precision.mode) or denoise(*call))
        with precision.fast():
            follow(chain(precision, recorder), segments)
        return [x for x, _, _ in recorder.states], modes

    (exact, _), (rounded, modes) = states("fp32"), states("bf16")
    is_same = [torch.equal(*pair) for pair in zip(exact, rounded)]
    assert is_same == [True, True] + [False] * (len(plan) - 2)  # the second state follows from the first call
    assert modes == ["full"] + ["fast"] * (len(plan) - 1)


# ---- Chains as functions of tensors: nothing is read on the CPU and no shape comes from data, so graphs can have them


ROWS, TOKEN, STEPS = 5, 4, 6


def by_segments(chain):
    coefficients, drift = frozen(schedule(STEPS))
    predictor = Predictor(coefficients, drift, np.zeros_like(drift))
    plan = make_segments((5, 3, 2, 1, 0), schedule(STEPS), predictor, np.zeros((5, 2)), 3, CPU)
    return follow(chain, plan)  # its third call has no unconditional branch


SAMPLED = {"ancestral": ancestral, "calibrated": by_segments, "solver": functools.partial(solve, order=1)}


def drawing(name, head, precision):
    """A function of tensors that draws tokens."""
    return lambda *inputs: SAMPLED[name](Chain(head, schedule(STEPS), Inputs(*inputs), noise, precision))


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(0)
    head = Head(TOKEN, 8, 1, 6).requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def inputs(seed):
    """z, scale, temperature, seed and position."""
    g = torch.Generator().manual_seed(seed)
    z, scale = torch.randn(2, ROWS, 6, generator=g), 1 + torch.rand(ROWS, 1, generator=g)
    return z, scale, torch.ones(ROWS, 1), torch.arange(ROWS) + 2**40 + seed, torch.arange(ROWS)


@pytest.mark.parametrize("policy", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("chain", ["ancestral", "calibrated"])
def test_a_chain_is_traced_in_one_piece(chain, policy, head):
    draw = drawing(chain, head, Precision(policy, CPU))
    expected = draw(*inputs(1))  # it also makes what is made once: nothing of the tracer's is kept
    traced = make_fx(draw, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs(2))
    assert torch.equal(traced(*inputs(1)), expected)


@pytest.mark.parametrize("chain", ["ancestral", "calibrated"])
def test_a_chain_is_replayed_on_other_inputs(chain, head):
    draw, graphs = drawing(chain, head, Precision("bf16", CPU)), replayed()
    for seed in (1, 2, 1):
        assert torch.equal(graphs.run("chain", draw, *inputs(seed)), draw(*inputs(seed)))


@pytest.mark.parametrize("chain", SAMPLED)
def test_only_one_part_of_the_modulations_is_in_memory(chain, head, monkeypatch):
    """They are the largest tensors of a chain: those of earlier calls are freed before more are computed."""
    made, alive = [], []
    monkeypatch.setattr("cspd.heads.chain.MODULATION_BYTES", 1)  # one call at a time

    def count(module, args, output):
        alive.append(sum(not each.expired() for each in made))
        made.append(StorageWeakRef(output.untyped_storage()))

    hook = head.final_layer.adaLN_modulation[1].register_forward_hook(count)
    with torch.inference_mode():
        drawing(chain, head, FP32)(*inputs(1))
    hook.remove()
    assert len(made) > 4 and max(alive) == 0


def test_noise_of_many_steps_is_that_of_each(monkeypatch):
    *_, seed, position = inputs(1)
    monkeypatch.setattr(noise, "MOST_AT_ONCE", 3 * ROWS * TOKEN)  # three steps at a time
    t = torch.tensor([9, 0, 5, 3, 7, 1, 2])
    each = [noise.steps(seed, position, step, TOKEN) for step in t.split(1)]
    assert torch.equal(noise.steps(seed, position, t, TOKEN), torch.cat(each))


def test_cached_constants_have_the_type_of_their_numbers():
    """Equal numbers of two types are one key of a cache."""
    for numbers, dtype in (((7.0,), torch.float32), ((7,), torch.int64)):
        assert on_device(numbers, CPU).dtype == dtype
