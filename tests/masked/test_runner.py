"""MAR's model runner: given tokens, ragged batches, golden samples."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import relative_error
from distributions import normal_pvalue
from golden_files import SAMPLE_SETTINGS, GoldenNoise
from heads import MixtureHead
from toys import SMALL, staggered, toy_mar

from cspd import Engine, MARModels, Request, noise
from cspd.masked import runner as masked_runner
from cspd.masked.orders import colours, timetable, two_stages
from cspd.method import METHODS
from mar.head import schedule
from mar.model import MAR, MARConfig

LENGTH, CHANNELS, STEPS = 4, 3, 12
NUM = 200
SAME, OTHER = 1e-4, 1e-8  # p-values
KEPT = [[0], [1, 2], [0, 1, 3], []]  # by image, in turn: positions that are known
CFG, TEMPERATURE, SCALE = 2.0, 0.9, 0.3
EXACT = {"ar": {}, "speculative": {"window": 3, "draft": "frozen"}}


class GaussianHead(MixtureHead):
    """Its chains' distribution is Gaussian and known: those of tokens ~ N(map z, 0.3^2)."""

    def __init__(self, dim: int) -> None:
        super().__init__(torch.zeros(1, CHANNELS), (SCALE,))
        self.map = torch.nn.Linear(dim, CHANNELS, bias=False)

    def cond_embed(self, z):
        return self.map(z)

    def moments(self, mean_z):
        """Mean [..., d] and variance of tokens under guided map z, propagated in float64 (DDPM's posterior)."""
        s, mean, variance = schedule(STEPS), torch.zeros_like(mean_z), 1.0
        for t in reversed(range(STEPS)):
            abar = s.alphas_cumprod[t]
            slope = np.sqrt(1 - abar) / (abar * SCALE**2 + 1 - abar)  # of eps in x
            of_x = s.posterior_mean_coef2[t] + s.posterior_mean_coef1[t] * (1 - np.sqrt(1 - abar) * slope) / abar**0.5
            of_z = s.posterior_mean_coef1[t] * np.sqrt(1 - abar) * slope
            mean, variance = of_x * mean + of_z * mean_z, of_x**2 * variance
            if t:
                f = (self.v(s.timestep_map[t]) + 1) / 2
                log_variance = f * np.log(s.betas[t]) + (1 - f) * s.posterior_log_variance_clipped[t]
                variance += TEMPERATURE**2 * np.exp(log_variance)
        return mean, variance


@pytest.fixture(scope="module")
def toy():
    """A MAR of four tokens with a head of known distribution."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 12, "depth": 1, "num_heads": 2, "class_num": 4, "buffer_size": 3, "diffloss_w": 16}
    model = MAR(MARConfig(img_size=8, vae_stride=4, vae_embed_dim=CHANNELS, diffloss_d=1, **sizes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # conditions differ much with what is known
    model.diffloss.net = GaussianHead(12)
    return model.eval().requires_grad_(False)


def scores(model, method, num=NUM):
    """What is standard normal of images' made tokens if they follow the distribution given the known ones: [N, d].

    Their conditions are computed from what the images came to be, by one call of the model for each rank.
    """
    engine = Engine(MARModels(model), max_batch=num, device="cpu")
    tokens = torch.randn(num, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(1))
    settings = {"cfg": CFG, "temperature": TEMPERATURE, "num_sampling_steps": STEPS, **EXACT[method]}
    requests = []
    for seed in range(num):
        mask = torch.ones(LENGTH, dtype=torch.bool)
        mask[KEPT[seed % len(KEPT)]] = False
        known = {"image": tokens[seed], "mask": mask, "num_iter": int(mask.sum())}
        requests.append(Request(seed % 3, seed, method, **settings, **known))
    made = torch.stack([output.tokens for output in engine.generate(requests)])

    order = noise.order(torch.arange(num), LENGTH)
    kept = torch.stack([torch.isin(torch.arange(LENGTH), torch.tensor(KEPT[i % 4])) for i in range(num)])
    assert torch.equal(made[kept], tokens[kept])
    order = torch.stack([torch.cat([row[own[row]], row[~own[row]]]) for row, own in zip(order, kept)])
    labels = torch.arange(num) % 3
    found = []
    for rank in range(LENGTH):
        which = (kept.sum(1) <= rank).nonzero().squeeze(1)
        classes = model.class_emb(labels[which]), model.fake_latent.expand(len(which), -1)
        position = order[which, rank : rank + 1]
        z = [model(made[which], order[which], [rank] * len(which), each, position)[:, 0] for each in classes]
        of_class, of_none = (model.head.map(each).double() for each in z)
        left = max(1, LENGTH - rank - 1)  # tokens still masked after this one
        scale = 1 + (CFG - 1) * (LENGTH - left) / LENGTH
        mean, variance = model.head.moments(of_none + scale * (of_class - of_none))
        found.append((made[which, position.squeeze(1)] - mean) / variance**0.5)
    return torch.cat(found)


@pytest.mark.parametrize("num", [NUM, pytest.param(30 * NUM, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", EXACT)
def test_the_rest_follows_the_distribution_given_them(method, num, toy):
    """Images with different known tokens, and with none, in one batch."""
    with torch.inference_mode():
        assert normal_pvalue(scores(toy, method, num)) > SAME


@pytest.mark.slow  # that the tests above see bugs is shown once in a while
def test_a_planted_bug_shows(toy, monkeypatch):
    """The encoder sees nothing of the known tokens until the end."""
    give, results = masked_runner.MARRunner._give, masked_runner.MARRunner.results

    def late(own, sequences):
        give(own, sequences)
        slots = [s.slot for s in sequences]
        own.late = own.tokens[slots].clone()
        own.tokens[slots] = 0

    def shown(own, sequences):
        slots = [s.slot for s in sequences]
        own.tokens[slots] = torch.where(own.tokens[slots] == 0, own.late[slots], own.tokens[slots])
        return results(own, sequences)

    monkeypatch.setattr(masked_runner.MARRunner, "_give", late)
    monkeypatch.setattr(masked_runner.MARRunner, "results", shown)
    with torch.inference_mode():
        assert normal_pvalue(scores(toy, "ar", 3 * NUM)) < OTHER


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
def test_every_method_keeps_them_and_makes_the_rest(name, engine):
    """In ragged batches, beside plain requests, as if alone; slots are used again."""
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
    for i, (request, output) in enumerate(zip(requests, staggered(engine, requests))):
        (single,) = alone.generate([request])
        assert output.error is None and (output.tokens != 0).all()
        assert (output.tokens - single.tokens).abs().max() < 1e-3 * single.tokens.abs().max()
        kept = torch.zeros(16, dtype=torch.bool) if request.known is None else ~request.known.mask
        assert torch.equal(output.tokens[kept], tokens[i][kept])
        if name != "cspd":
            assert output.token_cost.isnan().tolist() == kept.tolist()
            assert output.stats.iterations == request.num_iter
            assert output.stats.head_calls_per_token == pytest.approx(output.token_cost.nanmean().item(), rel=1e-5)
        else:
            assert output.token_cost[kept].isnan().all()


def test_audits_are_of_the_made_tokens(engine):
    mask = MASKS[0]
    settings = {"method": "calibrated", "audit": 1.0, "head_calls": 3, "num_sampling_steps": 5, "num_iter": 4}
    request = Request(0, 3, image=images(1)[0], mask=mask, cfg=2.0, **settings)
    runner = engine.runners["MAR"]
    runner.audit.fill_(1e9)
    (output,) = engine.generate([request])
    made = runner.audit[:, mask]
    assert output.stats.audit == pytest.approx(made[made.max(1).values < 1e8].mean().item())


# ---- an image that baseline sampling made, continued from where it was


def first_of_order(seed, count, length=16):
    mask = torch.ones(length, dtype=torch.bool)
    mask[noise.order(torch.tensor([seed]), length)[0, :count]] = False
    return mask


@pytest.mark.parametrize(
    "method, count", [("ar", 1), ("speculative", 7), *(pytest.param(m, 15, marks=pytest.mark.slow) for m in EXACT)]
)
def test_an_image_is_continued_as_it_was_made(method, count, engine):
    """The first tokens of its order, one at a time, and its seed: the same image, bit for bit."""
    alone = engine.with_slots(1)
    plain = {key: PLAIN[key] for key in ("cfg", "num_sampling_steps")}
    whole = Request(2, 9, method, num_iter=16, **plain, **EXACT[method])
    (output,) = alone.generate([whole])
    mask = first_of_order(9, count)
    (continued,) = alone.generate([whole.but(image=output.tokens, mask=mask, num_iter=16 - count)])
    assert torch.equal(continued.tokens, output.tokens)
    assert continued.token_cost.isnan().tolist() == (~mask).tolist()
    (varied,) = alone.generate([whole.but(image=output.tokens, mask=(16 - count) / 16, num_iter=16 - count)])
    assert torch.equal(varied.tokens, output.tokens), "a share takes the first of the request's own order"
    (other,) = alone.generate([whole.but(image=output.tokens, mask=mask, num_iter=16 - count, seed=10)])
    assert not torch.equal(other.tokens, output.tokens)


def test_the_last_iteration_alone(engine):
    """Of any K: what the last iteration makes follows from what is known before it."""
    alone = engine.with_slots(1)
    whole = Request(1, 4, num_iter=3, **PLAIN)
    (output,) = alone.generate([whole])
    left = int(timetable(alone.resolve(whole), 16).masked[-2])
    (again,) = alone.generate([whole.but(image=output.tokens, mask=first_of_order(4, 16 - left), num_iter=1)])
    assert torch.equal(again.tokens, output.tokens)


def test_nothing_known_is_a_plain_request(engine):
    plain = Request(1, 4, num_iter=3, **PLAIN)
    request = plain.but(image=images(1)[0], mask=torch.ones(16))
    assert engine.check(request) == engine.check(plain)
    assert torch.equal(*(engine.generate([each])[0].tokens for each in (request, plain)))


@pytest.mark.parametrize(
    "changes, advice",
    [
        ({"mask": torch.zeros(16)}, "mask"),
        ({"mask": 0}, "mask"),
        ({"num_iter": 4, "mask": torch.arange(16) < 3}, "num_iter"),
        ({"image": torch.zeros(15, 3), "mask": torch.arange(15) < 3}, "tokens"),
        ({"image": torch.zeros(3, 16, 16), "mask": torch.eye(16)}, "autoencoder|decoder|tokenizer"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_does_not_fit(changes, advice, engine):
    request = {"label": 1, "image": images(1)[0], "mask": 0.5, **changes}
    with pytest.raises(ValueError, match=advice):
        engine.check(Request(**request))


# ---- the timetable


def test_guidance_goes_by_all_that_is_masked(engine):
    request = engine.resolve(Request(0, num_iter=2, image=images(1)[0], mask=torch.arange(16) < 4, **PLAIN))
    times = timetable(request, 16)
    assert times.masked.tolist() == [2, 0] and times.iteration[12:].tolist() == [0, 0, 1, 1]
    assert times.scale[12:].tolist() == pytest.approx([1 + 14 / 16] * 2 + [1 + 15 / 16] * 2)


def test_a_checkerboard_goes_over_what_is_left_of_each_colour():
    """Every iteration makes a token at least, and none makes tokens of both colours, however many are left."""
    for first in range(5):
        for second in range(5):
            for reconstruction in (1, 2, 4):
                late = min(reconstruction, second)
                for num_iter in range(1 + (late if first else 0), first + second + 1):
                    masked, left = two_stages(num_iter, first, second, reconstruction)
                    made = -np.diff(masked, prepend=first + second)
                    assert len(made) == num_iter and (made > 0).all() and masked[-1] == 0
                    assert not first or not second or second in masked
                    assert (left == np.maximum(masked, 1)).all()
    made = np.zeros(16, dtype=bool)
    made[[0, 1, 2, 7]] = True  # (0, 0), (0, 1), (0, 2) and (1, 3) of a grid of four
    assert colours(made, 4) == (3, 1)


# ---- pictures


def test_a_picture_becomes_a_draw_of_the_posterior(small_vae, vae_golden):
    """As the golden autoencoder has it, by the request's own draws, in the tokens' layout."""
    c = vae_golden.config
    sizes = {"embed_dim": 8, "depth": 1, "num_heads": 2, "class_num": 2, "buffer_size": 1, "diffloss_w": 8}
    target = MAR(MARConfig(16, 2, 2, c["embed_dim"], diffloss_d=1, **sizes))
    engine = Engine(MARModels(target, vae=small_vae), device="cpu")
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[5, 9] = True  # of token (1, 2) of a grid of four
    picture = (vae_golden["image"][0].clamp(-1, 1) + 1) / 2
    known = engine.check(Request(0, seed=3, image=picture, mask=mask)).known
    assert known.mask.nonzero().tolist() == [[1 * 4 + 2]]
    mean, log_variance = small_vae.encode(2 * picture[None] - 1)
    drawn = target.unpatchify(noise.latents(torch.tensor([3]), torch.arange(16), target.config.token_dim)[None])
    assert torch.allclose(target.unpatchify(known.image[None]), mean + (log_variance / 2).exp() * drawn, atol=1e-5)
    assert engine.check(Request(0, seed=4, image=picture, mask=mask)).known != known
    assert torch.equal(target.patchify(target.unpatchify(known.image[None]))[0], known.image)


# ---- Sequences of one batch that have ended an iteration do not wait for the slowest of them before they go on


BATCH, IN_FIRST_ITERATION = 8, 5  # tokens: MAR's cosine schedule leaves floor(64 cos(pi / 8)) = 59 of 64 masked
SETTINGS = {
    "method": "speculative",
    "num_iter": 4,
    "num_sampling_steps": 40,
    "window": 4,
    "draft": "frozen",
    "cfg": 1.0,
}


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
        engine.add_request(Request(i, seed=i, **SETTINGS))
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


# ---- With the golden noise injected, the engine makes the golden tokens: the whole sampler against MAR's own code


@pytest.mark.parametrize("case", SAMPLE_SETTINGS)
def test_samples_match(case, mar_golden, small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2, noise=GoldenNoise(mar_golden))  # 2 slots for 3: one starts late
    settings = {"method": "ar", "temperature": 1.0, **SAMPLE_SETTINGS[case]}
    labels = mar_golden["sample.labels"].tolist()
    rows = [0, 1, 0]
    outputs = engine.generate([Request(labels[row], seed=row, **settings) for row in rows])
    tokens = torch.stack([output.tokens for output in outputs])
    assert relative_error(tokens, mar_golden[f"sample.tokens.{case}"][rows]) < 1e-3
