"""GtR (arXiv 2510.17171): the checkerboard's order and counts, its guidance, and denoising steps by frequency."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from cspd import Engine, MARModels, Request, noise
from cspd.heads.solvers import highest, importance, num_early
from cspd.masked.orders import ORDERS, largest, timetable, two_stages
from mar.model import MAR

STEPS = {"upper": 7, "lower": 4, "detail": 0.25}
QUICK = {"method": "gtr", "num_iter": 8, "cfg": 2.0, **STEPS}


def engine(model: MAR, max_batch: int = 1) -> Engine:
    return Engine(MARModels(model), max_batch=max_batch, device="cpu")


def stage(position: np.ndarray, side: int) -> np.ndarray:
    """0 and 1 of the first colour's two quarters, 2 of the second colour."""
    row, column = np.divmod(position, side)
    return np.where((row + column) % 2 == 1, 2, ((row + column) % 4 == 2).astype(int))


# ---- the order


@pytest.mark.parametrize("side", [2, 6, 8, 16])
def test_colours_follow_each_other_in_random_order(side):
    random = noise.order(torch.arange(5), side**2)
    order = ORDERS["checkerboard"].arrange(random, side)
    assert torch.equal(order.sort(dim=1).values, torch.arange(side**2).expand(5, -1))
    quarter = side**2 // 4
    for own, before in zip(order.numpy(), random.numpy()):
        assert stage(own, side).tolist() == [0] * quarter + [1] * quarter + [2] * 2 * quarter
        for i in range(3):  # as random as they were
            assert own[stage(own, side) == i].tolist() == before[stage(before, side) == i].tolist()
    assert side == 2 or len(order.unique(dim=0)) == 5


@pytest.mark.parametrize("seq_len", [4, 36, 64, 256])
def test_every_iteration_predicts_a_token_and_all_predict_all(seq_len):
    half = seq_len // 2
    for reconstruction in {1, 2, half}:
        for num_iter in range(reconstruction + 1, seq_len + 1):
            masked, left = two_stages(num_iter, half, half, reconstruction)
            counts = -np.diff(masked, prepend=seq_len)
            assert len(counts) == num_iter and counts.min() >= 1 and counts.sum() == seq_len
            assert largest(masked, seq_len) == counts.max()
            late = max(reconstruction, num_iter - half)
            assert masked[num_iter - late - 1] == half, "an iteration predicts tokens of both colours"
            assert np.ptp(counts[num_iter - late :]) <= 1
            assert left.tolist() == [*masked[:-1], 1]


def test_the_first_colour_goes_by_the_cosine():
    """floor(32 cos(pi/2 (k + 1)/6)) of the first 32 are left after iteration k; the last two predict 16 each."""
    masked, _ = two_stages(8, 32, 32, 2)
    assert masked.tolist() == [32 + n for n in (30, 27, 22, 16, 8)] + [32, 16, 0]


def test_guidance_rises_with_what_is_known():
    times = timetable(
        Request(0, num_iter=8, cfg=3.0, cfg_schedule="linear", order="checkerboard", reconstruction=2), 64
    )
    masked, _ = two_stages(8, 32, 32, 2)
    known = 64 - np.maximum(masked, 1)
    assert np.allclose(times.scale, np.repeat(1 + 2 * known / 64, -np.diff(masked, prepend=64)))
    assert times.scale.max() == 1 + 2 * 63 / 64 and (np.diff(times.scale) >= 0).all()


# ---- steps by frequency


def test_importance_weights_frequencies_as_the_paper_does():
    z = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    spectrum = np.abs(np.fft.fft(z.double().numpy()))
    expected = sum(spectrum[:, n] * (1 + n / 48) for n in range(1, 49))
    assert importance(z).tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert importance(z + 100).tolist() == pytest.approx(expected.tolist(), rel=1e-3)  # the mean is no frequency
    low, high = (torch.cos(2 * np.pi * n * torch.arange(96) / 96) for n in (1, 40))
    assert importance(high[None]) > 1.5 * importance(low[None])


def test_the_highest_of_each_image_are_chosen():
    owner = np.array([0] * 8 + [1] * 3 + [2] * 4)
    score = np.random.default_rng(0).random(15)
    chosen = highest(score, owner, 0.25)
    for image, num in enumerate((2, 1, 1)):
        own = owner == image
        assert set(np.flatnonzero(chosen & own)) == set(np.flatnonzero(own)[np.argsort(-score[own])[:num]])
    assert highest(score, owner, 1.0).all() and not highest(score, owner, 0.0).any()


@pytest.mark.parametrize(
    "order, num_iter, falling",
    [("checkerboard", 8, (7, 6, 5, 5, 4, 4)), ("random", 8, (7, 6, 5, 5, 4, 4)), ("checkerboard", 3, (7,))],
)
def test_steps_fall_over_the_first_half_and_then_go_by_frequency(order, num_iter, falling, small_mar):
    """Over the iterations that begin with less than half known; in two later ones 4 steps, of a quarter 7."""
    request = engine(small_mar).check(Request(3, 1, **(QUICK | {"num_iter": num_iter}), order=order))
    early = len(falling)
    assert num_early(request.num_generated(64), timetable(request, 64).masked, 64) == early
    (output,) = engine(small_mar).generate([request])
    masked = timetable(request, 64).masked
    positions = ORDERS[order].arrange(noise.order(torch.tensor([1]), 64), 8)[0]
    token_cost = np.split(output.token_cost[positions].numpy(), 64 - masked[:-1])
    assert [set(own) for own in token_cost[:early]] == [{n} for n in falling]
    for own in token_cost[early:]:
        assert sorted(own) == [4] * (len(own) - round(len(own) / 4)) + [7] * round(len(own) / 4)
    assert output.stats.head_calls == sum(falling) + 2 * 11 and output.stats.guarantee == "heuristic"
    assert output.stats.head_evaluations == 2 * output.token_cost.sum()


def test_equal_seeds_make_equal_images_and_others_do_not(small_mar):
    a, b, c = engine(small_mar, 3).generate([Request(3, seed, **QUICK) for seed in (5, 5, 6)])
    assert (a.tokens - b.tokens).abs().max() < 1e-4 * a.tokens.abs().max()
    assert (a.tokens - c.tokens).abs().max() > 0.1 * a.tokens.abs().max()


def test_orders_share_an_engine(small_mar):
    """Requests of both orders in flight together, which join one after the other, are as each alone."""
    kinds = [(7, "checkerboard", 2), (4, "random", None), (5, "checkerboard", 1), (4, "checkerboard", 2)]
    requests = [
        Request(i, i, **(QUICK | {"num_iter": num_iter, "order": order, "reconstruction": reconstruction}))
        for i, (num_iter, order, reconstruction) in enumerate(kinds)
    ]
    together, outputs, tickets = engine(small_mar, 3), {}, []
    for request in requests:
        tickets.append(together.add_request(request))
        outputs |= together.step()
    while len(outputs) < len(requests):
        outputs |= together.step()
    for ticket, request in zip(tickets, requests):
        (alone,) = engine(small_mar).generate([request])
        assert (outputs[ticket].tokens - alone.tokens).abs().max() < 1e-4 * alone.tokens.abs().max()
        assert torch.equal(outputs[ticket].token_cost, alone.token_cost)


# ---- bad input


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"reconstruction": 0}, "reconstruction"),
        ({"reconstruction": 33}, "reconstruction"),
        ({"num_iter": 2}, "num_iter"),
        ({"num_iter": 1}, "num_iter"),
        ({"order": "random", "reconstruction": 2}, "reconstruction"),
        ({"lower": 9}, "lower"),
        ({"upper": 1}, "upper"),
        ({"detail": 1.5}, "detail"),
        ({"first_timestep": 5}, "first_timestep"),
    ],
    ids=str,
)
def test_bad_settings_raise_one_line_that_names_the_fix(changes, error, small_mar):
    with pytest.raises(ValueError, match=error) as raised:
        engine(small_mar).check(Request(3, **(QUICK | changes)))
    assert "\n" not in str(raised.value)


def test_an_odd_grid_has_no_halves(small_mar):
    odd = MAR(dataclasses.replace(small_mar.config, img_size=small_mar.config.img_size // 8 * 7)).eval()
    with pytest.raises(ValueError, match="order"):
        engine(odd).check(Request(3, **QUICK))
