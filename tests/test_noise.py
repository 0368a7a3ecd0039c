"""The noise: each draw is a function of its key alone, streams never meet, and draws have their distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from cspd import noise
from cspd.heads import verify
from cspd.noise import DRAFT_OFFSET, MAX_INDEX, Purpose, candidates, chain, fine_uniform, initial, normal, order, steps

SEEDS = torch.tensor([0, 7, 2**31, 2**40 + 7, 2**63 - 1])
POSITIONS = torch.tensor([0, 3, 255, 2**16, 11])
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
KNOWN_ANSWERS = {  # of the authors' Random123
    "zeros": ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
}


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers(name):
    counter, key, expected = KNOWN_ANSWERS[name]
    drawn = noise.philox([*map(torch.tensor, counter)], [*map(torch.tensor, key)])
    assert torch.stack(drawn).tolist() == list(expected)


def test_a_draw_alone_is_the_same_draw():
    position = torch.arange(0, 70, 7)
    step = torch.tensor([0, 1, 99])
    index = torch.tensor([0, 5, 2**24 - 1])
    axes = torch.meshgrid(SEEDS, position, step, index, indexing="ij")
    seed, *others = axes
    batch = normal(seed, Purpose.STEP, *others, num=9)
    for place in [(0, 0, 0, 0), (1, 9, 2, 1), (3, 4, 1, 2), (4, 2, 0, 0)]:
        seed, *others = [axis[place] for axis in axes]
        for num in (9, 8, 1):
            alone = normal(seed, Purpose.STEP, *others, num=num)
            assert torch.equal(alone, batch[place][:num])


def test_tokens_draws():
    seed, position = SEEDS[4], POSITIONS[4]
    x = initial(SEEDS, POSITIONS, 16)
    assert torch.equal(x[4], normal(seed, Purpose.INIT, position, num=16))
    eps = steps(SEEDS, POSITIONS, torch.tensor([99, 3, 0]), 16)
    assert eps.shape == (3, 5, 16)
    assert torch.equal(eps[0, 4], normal(seed, Purpose.STEP, position, 99, num=16))
    assert torch.equal(eps[1:2, 4:5], steps(seed[None], position[None], torch.tensor([3]), 16))


def test_every_purpose_has_a_number_of_its_own():
    """Two names of one number would be one purpose, and their draws the same."""
    names = Purpose.__members__
    assert len(Purpose) == len(names)
    assert all(0 <= purpose < 2**8 for purpose in names.values())  # the bits above the index


BASE = {"seed": 5, "purpose": Purpose.STEP, "step": 3, "index": 2}
OTHERS = {
    "seed": 6,
    "seed above bit 32": 5 + 2**32,
    "seed in bit 62": 5 + 2**62,
    "purpose": Purpose.INIT,
    "step": 4,
    "index": 3,
    "index above bit 16": 2 + 2**16,
}


def assert_uncorrelated(first, second):
    """Neither the draws nor their squares are correlated, within 4 standard errors."""
    for a, b in ((first, second), (first**2, second**2)):
        correlation = np.corrcoef(a, b)[0, 1]
        assert abs(correlation) < 4 / len(a) ** 0.5


@pytest.mark.parametrize("other", [*OTHERS, "step and index swapped"])
def test_different_keys_are_independent(other):
    if other in OTHERS:
        word = other.split()[0]
        changed = BASE | {word: OTHERS[other]}
    else:
        changed = BASE | {"step": BASE["index"], "index": BASE["step"]}
    drawn = []
    for key in (BASE, changed):
        key = key | {"seed": torch.tensor(key["seed"])}
        drawn.append(normal(**key, position=torch.arange(4096), num=16).flatten())
    assert (drawn[0] == drawn[1]).float().mean() < 1e-4
    assert_uncorrelated(*drawn)


def test_keys_never_collide():
    values = torch.tensor([0, 1, 2, 3, 255, 2**16, 2**24 - 1])
    position, step, index = torch.meshgrid(values, values, values, indexing="ij")
    seed = torch.tensor(0)
    drawn = torch.cat([noise.bits(seed, purpose, position, step, index, 8) for purpose in Purpose])
    blocks = drawn.view(-1, 4)
    assert len(blocks) == 2 * len(Purpose) * len(values) ** 3
    assert len(blocks.unique(dim=0)) == len(blocks)


@pytest.mark.parametrize("axis", ["channel", "position", "seed"])
def test_neighbours_are_independent(axis):
    x = normal(torch.arange(16).view(-1, 1), Purpose.INIT, torch.arange(256), num=16)
    x = x.movedim({"seed": 0, "position": 1, "channel": 2}[axis], 0)
    for lag in (1, 2, 3, 4):
        assert_uncorrelated(x[:-lag].flatten(), x[lag:].flatten())


def test_normals_are_normal():
    x = normal(torch.arange(64).view(-1, 1), Purpose.STEP, torch.arange(1024), 50, num=16)
    x = x.flatten().double().numpy()
    assert abs(x.var() - 1) < 4 * (2 / len(x)) ** 0.5
    assert stats.kstest(x, "norm").pvalue > 0.001
    num_beyond = (abs(x) > 4).sum()
    expected = 2 * stats.norm.sf(4) * len(x)
    assert abs(num_beyond - expected) < 4 * expected**0.5


def test_fine_uniform_draws_have_52_bits():
    """Draw k of 2^52 is (k + 1/2) / 2^52, where k is one word and the upper 20 bits of the next."""
    where = SEEDS.view(-1, 1), Purpose.CODE, torch.arange(4096), 3, 2
    high, low = noise.bits(*where, 2).unbind(-1)
    drawn = fine_uniform(*where)
    assert drawn.dtype == torch.float64
    k = high * 2**20 + low // 2**12
    assert torch.equal((drawn * 2**53).long(), 2 * k + 1)
    lowest_bits = (drawn * 2**52).long() & 0xFFFFF
    assert stats.kstest(lowest_bits.flatten() / 2**20, "uniform").pvalue > 0.001


@pytest.mark.parametrize("word", [0, 2**32 - 1], ids=["zeros", "ones"])
def test_no_word_gives_a_uniform_draw_of_0_or_1(word, monkeypatch):
    """A draw of 0 would accept what has probability 0, and its logarithm is infinite."""

    def crafted(counter, key):
        words = torch.broadcast_tensors(*counter, *key)
        return [torch.full_like(words[0], word)] * 4

    monkeypatch.setattr(noise, "philox", crafted)
    position = torch.arange(3)
    x, eps, chain_draws = noise.chain(SEEDS[:3], position, 5, 2)
    normals, candidate_draws = noise.candidates(SEEDS[:3], position, position, 0, 4, 2)
    for drawn in (
        noise.uniform(SEEDS[:3], Purpose.ACCEPT, position, num=5),
        fine_uniform(SEEDS[:3], Purpose.CODE, position),
        noise.token_accept_uniforms(SEEDS[:3], position),
        chain_draws,
        candidate_draws,
    ):
        assert (0 < drawn).all() and (drawn < 1).all()
    assert all(torch.isfinite(drawn).all() for drawn in (x, eps, normals))


BEYOND = {
    "uniform": lambda last: noise.uniform(SEEDS, Purpose.ACCEPT, SEEDS, 0, last, num=1),
    "fine_uniform": lambda last: fine_uniform(SEEDS, Purpose.CODE, SEEDS, 0, last),
    "initial": lambda last: initial(SEEDS, SEEDS, 2, last),
    "steps": lambda last: steps(SEEDS, SEEDS, torch.arange(2), 2, last),
    "chain": lambda last: noise.chain(SEEDS, SEEDS, 3, 2, last),
    "chain's uniform draws": lambda last: noise.chain(SEEDS, SEEDS, 3, 2, 0, last),
    "token_candidates": lambda last: noise.token_candidates(SEEDS, SEEDS, last - 3, 4, 2),
    "candidates": lambda last: noise.candidates(SEEDS, SEEDS, SEEDS, last - 3, 4, 2),
}


@pytest.mark.parametrize("name", BEYOND)
def test_no_index_reaches_the_draws_of_another_purpose(name):
    """One word has the purpose above the index; and a draft model's candidates have indices above the target's."""
    limit = DRAFT_OFFSET if name == "candidates" else MAX_INDEX
    BEYOND[name](limit - 1)
    with pytest.raises(ValueError, match=str(limit)):
        BEYOND[name](limit)


def test_a_residual_needs_no_other_index_than_its_own():
    assert verify.MAX_TRIES <= DRAFT_OFFSET and 2 * DRAFT_OFFSET <= MAX_INDEX


@pytest.mark.parametrize("length", [1, 64, 256])
def test_orders_are_permutations(length):
    orders = order(SEEDS, length)
    for seed, row in zip(SEEDS, orders):
        assert torch.equal(row.sort().values, torch.arange(length))
        assert torch.equal(order(seed.view(1), length)[0], row)
    assert len(orders.unique(dim=0)) == (len(SEEDS) if length > 1 else 1)


@pytest.mark.parametrize("rank", [1, 15])
def test_orders_are_uniform(rank):
    """The pairs of the first token and the token `rank`."""
    orders = order(torch.arange(20_000), 16)
    pairs = orders[:, 0] * 16 + orders[:, rank]
    counts = torch.bincount(pairs, minlength=256).view(16, 16)
    is_other = ~torch.eye(16, dtype=torch.bool)
    assert stats.chisquare(counts[is_other]).pvalue > 0.001


# ---- A speculative chain draws from the same streams in one pass, alone, or in blocks


@pytest.mark.parametrize("channels", [1, 3, 4, 6, 16])
@pytest.mark.parametrize("num_steps", [2, 7, 100])
def test_a_chains_draws_are_the_streams(num_steps, channels):
    x, eps, uniforms = chain(SEEDS, POSITIONS, num_steps, channels)
    assert torch.equal(x, initial(SEEDS, POSITIONS, channels))
    assert torch.equal(eps.transpose(0, 1), steps(SEEDS, POSITIONS, torch.arange(num_steps), channels))
    assert torch.equal(uniforms, noise.uniform(SEEDS, Purpose.ACCEPT, POSITIONS, num=num_steps))
    assert eps.shape == (5, num_steps, channels) and uniforms.shape == (5, num_steps)
    alone = chain(SEEDS[3:4], POSITIONS[3:4], num_steps, channels)
    for one, many in zip(alone, (x, eps, uniforms)):
        assert torch.equal(one[0], many[3])


def test_indices_change_their_own_draws_only():
    """`index` is of x_T and eps_t, `accept_index` of the uniform draws. Cached counters of other calls do no harm."""
    where = SEEDS, POSITIONS, 7, 3
    x, eps, uniforms = chain(*where)
    other_x, other_eps, same_uniforms = chain(*where, index=1)
    assert torch.equal(other_x, initial(SEEDS, POSITIONS, 3, 1)) and not torch.equal(other_x, x)
    assert torch.equal(other_eps.transpose(0, 1), steps(SEEDS, POSITIONS, torch.arange(7), 3, 1))
    same_x, same_eps, other_uniforms = chain(*where, accept_index=1)
    expected = noise.uniform(SEEDS, Purpose.ACCEPT, POSITIONS, index=1, num=7)
    assert torch.equal(other_uniforms, expected) and not torch.equal(other_uniforms, uniforms)
    assert torch.equal(same_x, x) and torch.equal(same_eps, eps) and torch.equal(same_uniforms, uniforms)
    assert all(map(torch.equal, chain(*where), (x, eps, uniforms)))


def test_candidates_depend_on_their_index_alone():
    step = torch.tensor([98, 3, 1, 50, 0])
    normals, uniforms = candidates(SEEDS, POSITIONS, step, 0, 700, 3)
    assert normals.shape == (5, 700, 3) and uniforms.shape == (5, 700)
    which = torch.tensor([3, 1])
    for first, num in ((0, 1), (0, 32), (160, 512), (699, 1)):
        some = candidates(SEEDS[which], POSITIONS[which], step[which], first, num, 3)
        assert torch.equal(some[0], normals[which, first : first + num])
        assert torch.equal(some[1], uniforms[which, first : first + num])
    alone = normal(SEEDS[1], Purpose.CANDIDATE, POSITIONS[1], step[1], 123, num=3)
    assert torch.equal(normals[1, 123], alone)
    assert len(uniforms.unique()) == 5 * 700
    of_draft_model, _ = candidates(SEEDS, POSITIONS, step, 0, 700, 3, offset=DRAFT_OFFSET)
    everything = torch.cat([normals, of_draft_model]).view(-1, 3)
    assert len(everything.unique(dim=0)) == 2 * 5 * 700


def test_draws_of_chains_and_candidates_have_their_distributions():
    seed, position = torch.cartesian_prod(torch.arange(64), torch.arange(64)).T
    _, _, uniforms = chain(seed, position, 100, 2)
    correlation = np.corrcoef(uniforms.T)[np.triu_indices(100, 1)] * 64  # of two steps, in standard errors
    assert abs(correlation).max() < 5 and abs(correlation.std() - 1) < 0.1
    seed = torch.arange(64)
    normals, candidate_uniforms = candidates(seed, 0 * seed, 0 * seed + 1, 0, 500, 2)
    for drawn, expected in ((uniforms, "uniform"), (candidate_uniforms, "uniform"), (normals, "norm")):
        assert stats.kstest(drawn.double().flatten().numpy(), expected).pvalue > 0.001


def test_purposes_are_independent():
    """Neither a chain's draws at a step, its candidates and its uniform draws, nor their squares are correlated."""
    seed, position = torch.cartesian_prod(torch.arange(256), torch.arange(64)).T
    t = 5
    x, eps, uniforms = chain(seed, position, 8, 2)
    normals, candidate_uniforms = candidates(seed, position, torch.full_like(seed, t), 0, 2, 2)
    of_steps = [eps[:, t], eps[:, t - 1], uniforms[:, [t, t - 1]]]
    drawn = torch.cat([x, *of_steps, normals.flatten(1), candidate_uniforms], dim=1).double()
    squares = (drawn - drawn.mean(0)).square()
    correlation = np.corrcoef(torch.cat([drawn, squares], dim=1).T)
    np.fill_diagonal(correlation, 0)
    assert abs(correlation).max() < 5 / len(seed) ** 0.5
