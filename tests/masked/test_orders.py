"""GtR (arXiv 2510.17171): the checkerboard's order and counts, its guidance, and denoising steps by frequency."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import relative_error
from toys import staggered

from cspd import Engine, MARModels, Request, noise
from cspd.continuous.rows import num_early
from cspd.heads.samplers import highest, importance
from cspd.masked.orders import ORDERS, colours, halton_cells, largest, timetable, two_stages
from mar.model import MAR

QUICK = {"method": "gtr", "num_iter": 8, "cfg": 2.0, "upper": 7, "lower": 4, "detail": 0.25}


def engine(model: MAR, max_batch: int = 1) -> Engine:
    return Engine(MARModels(model), max_batch=max_batch, device="cpu")


def stage(position: np.ndarray, side: int) -> np.ndarray:
    """0 and 1 for the first colour's two quarters, 2 for the second colour."""
    row, column = np.divmod(position, side)
    return np.where((row + column) % 2 == 1, 2, ((row + column) % 4 == 2).astype(int))


@pytest.mark.parametrize("side", [2, 6, 16])
def test_stages_follow_each_other_in_random_order(side):
    random = noise.order(torch.arange(5), side**2)
    order = ORDERS["checkerboard"].arrange(random, side)
    assert torch.equal(order.sort(dim=1).values, torch.arange(side**2).expand(5, -1))
    quarter = side**2 // 4
    for own, before in zip(order.numpy(), random.numpy()):
        stages, stages_before = stage(own, side), stage(before, side)
        assert stages.tolist() == [0] * quarter + [1] * quarter + [2] * 2 * quarter
        for i in range(3):  # within a stage, the random order stays
            assert own[stages == i].tolist() == before[stages_before == i].tolist()


HALVES = [(half, half, reconstruction) for half in (2, 32, 128) for reconstruction in {1, 2, half}]
REST = [(first, second, most) for first in range(5) for second in range(5) for most in (1, 2, 4)]  # of given images


@pytest.mark.parametrize("first, second, reconstruction", [*HALVES, *REST])
def test_every_iteration_predicts_tokens_of_one_colour(first, second, reconstruction):
    fewest = min(reconstruction, second)
    for num_iter in range(1 + (fewest if first else 0), first + second + 1):
        masked, left = two_stages(num_iter, first, second, reconstruction)
        counts = -np.diff(masked, prepend=first + second)
        assert len(counts) == num_iter and counts.min() >= 1 and masked[-1] == 0
        assert largest(masked, first + second) == counts.max()
        assert left.tolist() == np.maximum(masked, 1).tolist()
        if first and second:
            assert second in masked
            late = counts[masked < second]
            assert np.ptp(late) <= 1 and len(late) == max(fewest, num_iter - first)


def test_the_colours_of_generated_tokens():
    generated = np.zeros(16, dtype=bool)
    generated[[0, 1, 2, 7]] = True  # (0, 0), (0, 1), (0, 2) and (1, 3) of a grid of four
    assert colours(generated, 4) == (3, 1)


def test_the_first_colour_follows_the_cosine():
    """floor(32 cos(pi/2 (k + 1)/6)) of the first 32 are left after iteration k; the last two predict 16 each."""
    masked, _ = two_stages(8, 32, 32, 2)
    assert masked.tolist() == [32 + n for n in (30, 27, 22, 16, 8)] + [32, 16, 0]


def test_guidance_rises_with_the_committed_tokens():
    request = Request(0, num_iter=8, cfg=3.0, cfg_schedule="linear", order="checkerboard", reconstruction=2)
    scale = timetable(request, 64).scale
    masked, _ = two_stages(8, 32, 32, 2)
    by_iteration = 1 + 2 * (64 - np.maximum(masked, 1)) / 64
    assert np.allclose(scale, np.repeat(by_iteration, -np.diff(masked, prepend=64)))
    assert scale.max() == 1 + 2 * 63 / 64


# ---- steps by frequency


def test_importance_weights_frequencies_as_the_paper_does():
    z = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    spectrum = np.abs(np.fft.fft(z.double().numpy()))
    expected = sum(spectrum[:, n] * (1 + n / 48) for n in range(1, 49))
    assert importance(z).tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert importance(z + 100).tolist() == pytest.approx(expected.tolist(), rel=1e-3)  # the mean is no frequency


def test_the_highest_of_each_image_are_chosen():
    owner = np.array([0] * 8 + [1] * 3 + [2] * 4)
    score = np.random.default_rng(0).random(15)
    chosen = highest(score, owner, 0.25)
    for image, num in enumerate((2, 1, 1)):
        own = np.flatnonzero(owner == image)
        assert set(own[chosen[own]]) == set(own[np.argsort(-score[own])[:num]])
    assert highest(score, owner, 1.0).all() and not highest(score, owner, 0.0).any()


@pytest.mark.parametrize(
    "order, num_iter, falling",
    [("checkerboard", 8, (7, 6, 5, 5, 4, 4)), ("random", 8, (7, 6, 5, 5, 4, 4)), ("checkerboard", 3, (7,))],
)
def test_steps_fall_over_the_first_half_and_then_depend_on_frequency(order, num_iter, falling, small_mar):
    """They fall over the iterations that begin with less than half of the tokens committed. In the two later ones a
    quarter of the tokens take 7 steps, the others 4."""
    request = engine(small_mar).check(Request(3, 1, **(QUICK | {"num_iter": num_iter}), order=order))
    masked = timetable(request, 64).masked
    early = len(falling)
    assert num_early(request.num_generated(64), masked, 64) == early
    (output,) = engine(small_mar).generate([request])
    positions = ORDERS[order].arrange(noise.order(torch.tensor([1]), 64), 8)[0]
    steps_by_iteration = np.split(output.token_cost[positions].numpy(), 64 - masked[:-1])
    assert [set(steps) for steps in steps_by_iteration[:early]] == [{n} for n in falling]
    for steps in steps_by_iteration[early:]:
        num_detailed = round(len(steps) / 4)
        assert sorted(steps) == [4] * (len(steps) - num_detailed) + [7] * num_detailed
    assert output.stats.head_calls == sum(falling) + 2 * 11 and output.stats.guarantee == "heuristic"
    assert output.stats.head_evaluations == 2 * output.token_cost.sum()


def test_orders_share_an_engine(small_mar):
    """Requests of both orders in one batch, which join one after the other, give the same images as alone."""
    cases = [(7, "checkerboard", 2), (4, "random", None), (5, "checkerboard", 1), (4, "checkerboard", 2)]
    requests = []
    for i, (num_iter, order, reconstruction) in enumerate(cases):
        own = {"num_iter": num_iter, "order": order, "reconstruction": reconstruction}
        requests.append(Request(i, i, **(QUICK | own)))
    for request, output in zip(requests, staggered(engine(small_mar, 3), requests)):
        (alone,) = engine(small_mar).generate([request])
        assert relative_error(output.tokens, alone.tokens) < 1e-4
        assert torch.equal(output.token_cost, alone.token_cost)


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"reconstruction": 33}, "reconstruction"),
        ({"num_iter": 2}, "num_iter"),
        ({"order": "random", "reconstruction": 2}, "reconstruction"),
        ({"lower": 9}, "lower"),
        ({"first_timestep": 5}, "first_timestep"),
    ],
    ids=str,
)
def test_bad_settings(changes, error, small_mar):
    with pytest.raises(ValueError, match=error):
        engine(small_mar).check(Request(3, **(QUICK | changes)))


def test_an_odd_grid_has_no_halves(small_mar):
    odd = MAR(dataclasses.replace(small_mar.config, img_size=small_mar.config.img_size // 8 * 7)).eval()
    with pytest.raises(ValueError, match="order"):
        engine(odd).check(Request(3, **QUICK))


def test_halton_order():
    """The cells of points (1/2, 1/3), (1/4, 2/3), (3/4, 1/9), (1/8, 4/9) and so on, from a random one of them on."""
    random = noise.order(torch.arange(6), 16)
    order = ORDERS["halton"].arrange(random, 4)
    cycle = halton_cells(4)
    assert cycle[:5] == [2 * 4 + 1, 1 * 4 + 2, 3 * 4 + 0, 0 * 4 + 1, 2 * 4 + 3]
    for own, before in zip(order.tolist(), random.tolist()):
        first = before[0]
        assert own == cycle[first:] + cycle[:first]


def test_images_in_halton_order(small_mar):
    settings = {"num_iter": 4, "cfg": 2.0, "num_sampling_steps": 5, "order": "halton"}
    requests = [Request(i, i, "speculative", window=0, draft="frozen", **settings) for i in range(3)]
    outputs = engine(small_mar, 3).generate(requests)
    assert {output.stats.guarantee for output in outputs} == {"heuristic"}
    (alone,) = engine(small_mar).generate(requests[2:])
    assert relative_error(alone.tokens, outputs[2].tokens) < 1e-3
