"""MAR's model runner: given tokens, ragged batches, golden samples."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import relative_error
from distributions import normal_pvalue
from golden_files import SAMPLE_SETTINGS
from heads import MixtureHead
from toys import SMALL, staggered, toy_mar

from cspd import Engine, MARModels, Request, noise
from cspd.masked.orders import timetable
from cspd.method import METHODS
from mar.head import schedule
from mar.model import MAR, MARConfig

LENGTH, CHANNELS, STEPS = 4, 3, 12
NUM = 200
SAME = 1e-4  # p-value
GIVEN = [[0], [1, 2], [0, 1, 3], []]  # positions of given tokens: image i has GIVEN[i % 4]
CFG, TEMPERATURE, SCALE = 2.0, 0.9, 0.3
EXACT = {"ar": {}, "speculative": {"window": 3, "draft": "frozen"}}


class GaussianHead(MixtureHead):
    """The exact head for tokens ~ N(map z, 0.3^2), so that the distribution of its chains is Gaussian and known."""

    def __init__(self, dim: int) -> None:
        super().__init__(torch.zeros(1, CHANNELS), (SCALE,))
        self.map = torch.nn.Linear(dim, CHANNELS, bias=False)

    def cond_embed(self, z):
        return self.map(z)

    def moments(self, mean_z):
        """Mean [..., d] and variance of tokens with the guided map z: the chain's moments, step by step, in float64."""
        s = schedule(STEPS)
        mean, variance = torch.zeros_like(mean_z), 1.0
        for t in reversed(range(STEPS)):
            abar = s.alphas_cumprod[t]
            slope = np.sqrt(1 - abar) / (abar * SCALE**2 + 1 - abar)  # eps = slope (x - sqrt(abar) map z)
            of_x = s.mean_x[t] + s.mean_eps[t] * slope
            of_z = -s.mean_eps[t] * slope * np.sqrt(abar)
            mean = of_x * mean + of_z * mean_z
            variance = of_x**2 * variance
            if t:  # the last step adds no noise
                log_sigma = s.log_sigma_base[t] + s.log_sigma_slope[t] * self.v(s.timestep_map[t])
                variance += (TEMPERATURE * np.exp(log_sigma)) ** 2
        return mean, variance


@pytest.fixture(scope="module")
def toy():
    """A MAR of four tokens with a head of known distribution."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 12, "depth": 1, "num_heads": 2, "class_num": 4, "buffer_size": 3, "diffloss_w": 16}
    model = MAR(MARConfig(img_size=8, vae_stride=4, vae_embed_dim=CHANNELS, diffloss_d=1, **sizes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # conditions depend strongly on the committed tokens
    model.diffloss.net = GaussianHead(12)
    return model.eval().requires_grad_(False)


def requests_of(method, num, tokens):
    """Requests with different given tokens, and with none."""
    settings = {"cfg": CFG, "temperature": TEMPERATURE, "num_sampling_steps": STEPS, **EXACT[method]}
    requests = []
    for seed in range(num):
        mask = torch.ones(LENGTH, dtype=torch.bool)
        mask[GIVEN[seed % 4]] = False
        num_iter = int(mask.sum())
        requests.append(Request(seed % 3, seed, method, image=tokens[seed], mask=mask, num_iter=num_iter, **settings))
    return requests


def scores(model, method, num=NUM):
    """Scores [N, d] of generated tokens, standard normal if they follow the distribution conditioned on those before.

    The conditions are computed from the finished images, by one call of the model for each rank.
    """
    engine = Engine(MARModels(model), max_batch=num, device="cpu")
    tokens = torch.randn(num, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(1))
    made = torch.stack([output.tokens for output in engine.generate(requests_of(method, num, tokens))])

    given = torch.zeros(num, LENGTH, dtype=torch.bool)
    for i in range(num):
        given[i, GIVEN[i % 4]] = True
    assert torch.equal(made[given], tokens[given])
    orders = []
    for order, own in zip(noise.order(torch.arange(num), LENGTH), given):
        is_given = own[order]
        orders.append(torch.cat([order[is_given], order[~is_given]]))
    order = torch.stack(orders)
    labels = torch.arange(num) % 3
    found = []
    for rank in range(LENGTH):
        which = (given.sum(1) <= rank).nonzero().squeeze(1)
        position = order[which, rank : rank + 1]
        means = []
        for embedding in (model.class_emb(labels[which]), model.fake_latent.expand(len(which), -1)):
            z = model(made[which], order[which], [rank] * len(which), embedding, position)[:, 0]
            means.append(model.head.map(z).double())
        conditional, unconditional = means
        left = max(1, LENGTH - rank - 1)  # tokens still masked after this one
        scale = 1 + (CFG - 1) * (LENGTH - left) / LENGTH
        mean, variance = model.head.moments(unconditional + scale * (conditional - unconditional))
        found.append((made[which, position.squeeze(1)] - mean) / variance**0.5)
    return torch.cat(found)


@pytest.mark.parametrize("num", [NUM, pytest.param(30 * NUM, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", EXACT)
def test_generated_tokens_follow_the_distribution_given_the_others(method, num, toy):
    """Images with different given tokens, and with none, in one batch."""
    with torch.inference_mode():
        assert normal_pvalue(scores(toy, method, num)) > SAME


# ---- every method


@pytest.fixture(scope="module")
def engine():
    return Engine(MARModels(toy_mar(), toy_mar(depth=2)), max_batch=3, device="cpu")


MASKS = [torch.arange(16) >= 5, torch.arange(16) % 2 == 0, torch.arange(16) == 7, torch.arange(16) < 15]
PLAIN = {"method": "ar", "cfg": 2.0, "num_sampling_steps": 5, "first_timestep": 950}


def images(num):
    return torch.randn(num, 16, 3, generator=torch.Generator().manual_seed(2))


def cases():
    quick = {"lazymar", "speculative"}
    names = [method.name for method in METHODS if method.family == "MAR"]
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases())
def test_every_method_keeps_given_tokens(name, engine):
    """In batches with other requests, as if alone; slots are used again."""
    method = next(m for m in METHODS if m.name == name and m.family == "MAR")
    settings = {"method": name, "family": "MAR", "cfg": 2.0, "num_sampling_steps": 5}
    filled = method.fill(Request(0, **settings))
    settings |= {key: value for key, value in SMALL.items() if method.option(key, filled)}
    tokens = images(8)
    requests = [Request(i % 4, i, num_iter=4, **settings) for i in range(8)]
    for i in (0, 1, 3, 4, 5, 7):
        mask = MASKS[i % 4]
        requests[i] = requests[i].but(image=tokens[i], mask=mask, num_iter=min(3 + i % 2, int(mask.sum())))
    alone = engine.with_slots(1)
    for own, request, output in zip(tokens, requests, staggered(engine, requests)):
        (single,) = alone.generate([request])
        assert output.error is None and (output.tokens != 0).all()
        assert relative_error(output.tokens, single.tokens) < 1e-3
        given = torch.zeros(16, dtype=torch.bool) if request.known is None else ~request.known.mask
        assert torch.equal(output.tokens[given], own[given])
        assert output.token_cost[given].isnan().all()
        if name != "mar-draft":
            assert not output.token_cost[~given].isnan().any()
            assert output.stats.iterations == request.num_iter
            assert output.stats.head_calls_per_token == pytest.approx(output.token_cost.nanmean().item(), rel=1e-5)


def test_audits_are_of_generated_tokens(engine):
    mask = MASKS[0]
    settings = {"method": "calibrated", "audit": 1.0, "head_calls": 3, "num_sampling_steps": 5, "num_iter": 4}
    runner = engine.runners["MAR"]
    runner.audit.fill_(1e9)
    (output,) = engine.generate([Request(0, 3, image=images(1)[0], mask=mask, cfg=2.0, **settings)])
    audited = runner.audit[:, mask]
    is_own_slot = audited.max(1).values < 1e8
    assert output.stats.audit == pytest.approx(audited[is_own_slot].mean().item())


# ---- an image that is continued after some of its tokens is the same image


def first_of_order(seed, count, length=16):
    mask = torch.ones(length, dtype=torch.bool)
    mask[noise.order(torch.tensor([seed]), length)[0, :count]] = False
    return mask


@pytest.mark.parametrize(
    "method, count", [("ar", 1), ("speculative", 7), *(pytest.param(m, 15, marks=pytest.mark.slow) for m in EXACT)]
)
def test_a_continued_image_is_the_same(method, count, engine):
    """Given the first tokens of its order and its seed: the same image, bit for bit, at one token per iteration."""
    alone = engine.with_slots(1)
    settings = {"cfg": 2.0, "num_sampling_steps": 5, **EXACT[method]}
    whole = Request(2, 9, method, num_iter=16, **settings)
    (output,) = alone.generate([whole])
    mask = first_of_order(9, count)
    rest = whole.but(image=output.tokens, mask=mask, num_iter=16 - count)
    (continued,) = alone.generate([rest])
    assert torch.equal(continued.tokens, output.tokens)
    assert continued.token_cost.isnan().tolist() == (~mask).tolist()
    (by_fraction,) = alone.generate([rest.but(image=output.tokens, mask=(16 - count) / 16)])
    assert torch.equal(by_fraction.tokens, output.tokens), "a fraction takes the first tokens of the request's order"
    (other,) = alone.generate([rest.but(seed=10)])
    assert not torch.equal(other.tokens, output.tokens)


def test_the_last_iteration_alone(engine):
    """With several tokens per iteration too: the last iteration depends on the committed tokens only."""
    alone = engine.with_slots(1)
    whole = Request(1, 4, num_iter=3, **PLAIN)
    (output,) = alone.generate([whole])
    left = int(timetable(alone.resolve(whole), 16).masked[-2])
    (again,) = alone.generate([whole.but(image=output.tokens, mask=first_of_order(4, 16 - left), num_iter=1)])
    assert torch.equal(again.tokens, output.tokens)


def test_a_request_without_given_tokens_is_an_ordinary_one(engine):
    ordinary = Request(1, 4, num_iter=3, **PLAIN)
    request = ordinary.but(image=images(1)[0], mask=torch.ones(16))
    assert engine.check(request) == engine.check(ordinary)


@pytest.mark.parametrize(
    "changes, advice",
    [
        ({"mask": torch.zeros(16)}, "mask"),
        ({"num_iter": 4, "mask": torch.arange(16) < 3}, "num_iter"),
        ({"image": torch.zeros(15, 3), "mask": torch.arange(15) < 3}, "tokens"),
        ({"image": torch.zeros(3, 16, 16), "mask": torch.eye(16)}, "autoencoder|decoder|tokenizer"),
    ],
)
def test_bad_given_parts(changes, advice, engine):
    with pytest.raises(ValueError, match=advice):
        engine.check(Request(**{"label": 1, "image": images(1)[0], **changes}))


def test_guidance_depends_on_all_masked_tokens(engine):
    request = engine.resolve(Request(0, num_iter=2, image=images(1)[0], mask=torch.arange(16) < 4, **PLAIN))
    times = timetable(request, 16)
    assert times.masked.tolist() == [2, 0] and times.iteration[12:].tolist() == [0, 0, 1, 1]
    assert times.scale[12:].tolist() == pytest.approx([1 + 14 / 16] * 2 + [1 + 15 / 16] * 2)


def test_a_given_image_is_sampled_from_the_posterior(small_vae, vae_golden):
    """The golden autoencoder's posterior, with the request's own noise, in the layout of tokens."""
    c = vae_golden.config
    sizes = {"embed_dim": 8, "depth": 1, "num_heads": 2, "class_num": 2, "buffer_size": 1, "diffloss_w": 8}
    target = MAR(MARConfig(16, 2, 2, c["embed_dim"], diffloss_d=1, **sizes))
    engine = Engine(MARModels(target, vae=small_vae), device="cpu")
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[5, 9] = True  # of token (1, 2) of a grid of four
    image = (vae_golden["image"][0].clamp(-1, 1) + 1) / 2
    known = engine.check(Request(0, seed=3, image=image, mask=mask)).known
    assert known.mask.nonzero().tolist() == [[1 * 4 + 2]]
    mean, log_variance = small_vae.encode(2 * image[None] - 1)
    drawn = target.unpatchify(noise.latents(torch.tensor([3]), torch.arange(16), target.config.token_dim)[None])
    assert torch.allclose(target.unpatchify(known.image[None]), mean + (log_variance / 2).exp() * drawn, atol=1e-5)
    assert engine.check(Request(0, seed=4, image=image, mask=mask)).known != known


# ---- sequences of a batch that have ended an iteration do not wait for the slowest one


BATCH, IN_FIRST_ITERATION = 8, 5  # tokens: MAR's cosine schedule leaves floor(64 cos(pi / 8)) = 59 of 64 masked
HEAD = {"num_sampling_steps": 40, "window": 4, "draft": "frozen"}


def test_a_round_ends_when_three_in_four_have_ended_their_iteration(small_mar: MAR, monkeypatch):
    """The first step of the engine takes as many head calls as its sixth fastest sequence, not as its slowest."""
    model, calls = copy.deepcopy(small_mar), []
    denoise = model.head.denoise

    def counted(*args):
        calls.append(args)
        return denoise(*args)

    monkeypatch.setattr(model.head, "denoise", counted)
    engine = Engine(MARModels(model), max_batch=BATCH, device="cpu")
    for i in range(BATCH):
        engine.add_request(Request(i, i, "speculative", num_iter=4, cfg=1.0, **HEAD))
    finished = engine.step()
    calls_of_first_step = len(calls)
    while len(finished) < BATCH:
        finished |= engine.step()

    needed = []  # head calls that each sequence's first iteration takes: those of its slowest token
    for output in finished.values():
        order = noise.order(torch.tensor([output.request.seed]), len(output.token_cost))[0]
        needed.append(output.token_cost[order[:IN_FIRST_ITERATION]].max().item())
    needed.sort()
    assert calls_of_first_step == needed[BATCH * 3 // 4 - 1] < needed[-1]


# ---- the engine generates the golden tokens, which MAR's own code made with our noise


@pytest.mark.parametrize("case", SAMPLE_SETTINGS)
def test_samples_match(case, mar_golden, small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2)
    settings = {"method": "ar", "temperature": 1.0, **SAMPLE_SETTINGS[case]}
    labels, seeds = (mar_golden[f"sample.{name}"].tolist() for name in ("labels", "seeds"))
    rows = [0, 1] if case.startswith("iterL") else [0, 1, 0]  # the third waits for a slot
    outputs = engine.generate([Request(labels[row], seeds[row], **settings) for row in rows])
    tokens = torch.stack([output.tokens for output in outputs])
    assert relative_error(tokens, mar_golden[f"sample.tokens.{case}"][rows]) < 1e-3
