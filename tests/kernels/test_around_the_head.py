"""A speculative round by kernels: decisions, states and Gaussians as `draft_verify.move` has them."""

import types

import pytest
import torch

from cspd.continuous.draft_verify import Lookup, draft_table, move
from cspd.kernels.drafting import before_head
from cspd.kernels.judging import after_head
from mar.head import fill, filled

NUM_STEPS = 12


def a_round(num_chains, channels, window):
    """What a round is of."""
    coefficients = 0.3 * torch.randn(NUM_STEPS, window, 3).numpy()
    drift = 0.1 * torch.randn(NUM_STEPS, window).numpy()
    table = torch.from_numpy(draft_table(coefficients, drift, NUM_STEPS, window, 1.0))
    entries = num_chains + 2
    log_uniform = torch.rand(entries, NUM_STEPS, 1).log()
    draws = torch.cat([torch.randn(entries, NUM_STEPS, channels), log_uniform], dim=-1)
    state = torch.randn(num_chains, 4, channels)
    t = torch.randint(0, NUM_STEPS, (num_chains,))
    t[0] = 0
    entry = torch.randperm(entries)[:num_chains]
    scale = torch.linspace(0.2, 3, num_chains).view(-1, 1, 1)
    return table, draws, state, t, entry, scale


def head_near_the_draft(table, draws, state, t, entry, classes, of_mean, of_sigma):
    """(Its inputs, y_W, in place of a head the outputs that would make p equal to q, but for random errors).

    Args:
        of_mean, of_sigma: how large the errors are, of eps and of log sigma_p.
    """
    channels, window = state.shape[2], table.shape[1]
    rows = table[t]
    base_q, slope, mean_x, mean_eps, base_p = rows[..., 3 + window :].unsqueeze(-1).unbind(2)
    steps = (t.unsqueeze(1) - torch.arange(window)).clamp(min=0)
    noise = (base_q + slope * state[:, 3:]).exp() * draws[entry.unsqueeze(1), steps][..., :channels]
    y = (rows[..., : 3 + window].unsqueeze(-1) * torch.cat([state[:, :3], noise], 1).unsqueeze(1)).sum(2)
    x = torch.cat([state[:, :1], y[:, :-1]], dim=1)
    eps = torch.nan_to_num((y - noise - mean_x * x) / mean_eps)
    v = torch.nan_to_num((base_q + slope * state[:, 3:] - base_p) / slope)
    eps = eps + of_mean * torch.randn(classes, *x.shape)
    v = v + torch.nan_to_num(of_sigma / slope, posinf=0) * torch.randn(classes, *x.shape)
    out = fill(torch.cat([eps, v], dim=-1).flatten(1, 2))
    return x, y[:, -1], types.SimpleNamespace(denoise=lambda x, layers: out, split=lambda layers: layers)


SPREADS = {"of the mean": (0.1, 0.0), "of sigma": (0.01, 0.3), "not a number": (float("nan"), 0.0)}
SIZES = [  # chains, classes, channels, window
    (3, 2, 5, 3),
    (3, 2, 16, 5),
    (1, 1, 5, 1),
    (33, 2, 5, 3),
    (33, 2, 16, 12),
    (9, 2, 64, 4),
]


@pytest.mark.parametrize("num_chains,classes,channels,window", SIZES)
@pytest.mark.parametrize("spread", ["of the mean", "of sigma", "not a number"])
def test_rounds_agree(num_chains, classes, channels, window, spread):
    table, draws, state, t, entry, scale = a_round(num_chains, channels, window)
    steps = (torch.arange(NUM_STEPS).unsqueeze(1) - torch.arange(window)).clamp(min=0)
    begin = torch.arange(num_chains) * window
    x, y_last, head = head_near_the_draft(table, draws, state, t, entry, classes, *SPREADS[spread])
    expected = move(head, Lookup(table, steps), draws, [], state, t, entry, scale, begin, trace_sigma=True)

    # the kernels take the steps left, and places in the list of all slots' steps; the second chain waits
    left, waiting = t + 1, torch.zeros_like(t)
    waiting[1:2] = NUM_STEPS
    windows = (entry * NUM_STEPS).unsqueeze(1) - torch.arange(1, window + 1)
    table = torch.cat([torch.zeros_like(table[:1]), table])
    old = torch.cat([state, torch.randn(num_chains, 4, channels)], dim=1)
    given = table, draws, windows, old, left, waiting
    rows, moving = num_chains * window, waiting == 0
    inputs, last, at = before_head(*given, filled(rows))
    own_at = at[:rows].view(num_chains, window)
    assert torch.equal(own_at[moving], (steps[t] + (entry * NUM_STEPS).unsqueeze(1))[moving])
    assert not at[rows:].any() and not inputs[rows:].any()
    torch.testing.assert_close(inputs[:rows].view_as(x)[moving], x[moving], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last[moving], y_last[moving], rtol=1e-5, atol=1e-5)
    after = after_head(*given, inputs, last, head.denoise(inputs, []), scale)

    assert torch.equal(after.left, torch.where(moving, expected.left + 1, left))
    assert torch.equal(after.record, expected.record * moving)
    assert torch.equal(after.waiting, waiting + NUM_STEPS * (expected.unresolved & moving))
    assert torch.equal(after.place, entry * NUM_STEPS + t)
    if num_chains == 33 and spread != "not a number":  # else it would not be a test of them
        assert 0 < expected.rejected.sum() < num_chains and expected.decided.max() > 1
        assert spread == "of the mean" or expected.unresolved.any()
    assert torch.equal(after.state[~moving], old[~moving])
    ended = expected.left < 0  # their token is p's mean; the state itself is of no more use
    wanted_state = torch.cat([expected.state, torch.stack([*expected.p, *expected.q], dim=1)], dim=1)
    after.state[ended, 0] = wanted_state[ended, 0]
    pairs = [(after.state[moving], wanted_state[moving])]
    if spread != "not a number":  # there 0 times NaN is NaN by PyTorch, and no image is made of it
        pairs.append((after.log_sigma[moving], expected.log_sigma[moving]))
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_what_is_not_contiguous_is_an_error():
    table, draws, state, t, _, _ = a_round(3, 5, 2)
    windows = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"state .* has strides"):
        before_head(table, draws, windows, state.mT.contiguous().mT, t, t, 8)
