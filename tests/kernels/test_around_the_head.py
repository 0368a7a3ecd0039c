"""A speculative round by kernels: decisions, states and Gaussians as `draft_verify.move` has them."""

import types

import pytest
import torch

from cspd.continuous.draft_verify import Lookup, draft_table, move
from cspd.kernels.drafting import before_head
from cspd.kernels.judging import after_head
from mar.head import filled

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
    """In place of a head the outputs that would make p equal to q, and random errors of eps and of log sigma."""
    num_chains, _, channels = state.shape
    window = table.shape[1]

    def denoise(inputs, modulations):
        rows = table[t]
        base_q, slope, mean_x, mean_eps, base_p = rows[..., 3 + window :].unsqueeze(-1).unbind(2)
        steps = (t.unsqueeze(1) - torch.arange(window)).clamp(min=0)
        noise = (base_q + slope * state[:, 3:]).exp() * draws[entry.unsqueeze(1), steps][..., :channels]
        x = inputs[: num_chains * window].view(num_chains, window, channels)
        last = (rows[:, -1, : 3 + window].unsqueeze(-1) * torch.cat([state[:, :3], noise], 1)).sum(1, keepdim=True)
        y = torch.cat([x[:, 1:], last], dim=1)
        eps = torch.nan_to_num((y - noise - mean_x * x) / mean_eps)
        v = torch.nan_to_num((base_q + slope * state[:, 3:] - base_p) / slope)
        eps = eps + of_mean * torch.randn(classes, *x.shape)
        v = v + torch.nan_to_num(of_sigma / slope, posinf=0) * torch.randn(classes, *x.shape)
        out = torch.cat([eps, v], dim=-1)
        padding = torch.zeros(classes, len(inputs) - num_chains * window, 2 * channels)
        return torch.cat([out.flatten(1, 2), padding], dim=1)

    torch.manual_seed(1)
    return types.SimpleNamespace(denoise=denoise, split=lambda layers: layers)


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
    head = head_near_the_draft(table, draws, state, t, entry, classes, *SPREADS[spread])
    expected = move(head, Lookup(table, steps), draws, [], state, t, entry, scale, begin, trace_sigma=True)

    rows = num_chains * window
    inputs, last, at = before_head(table, draws, state, t, entry, filled(rows))
    assert torch.equal(at[:rows], (steps[t] + (entry * NUM_STEPS).unsqueeze(1)).flatten())
    assert not at[rows:].any() and not inputs[rows:].any()
    out = head_near_the_draft(table, draws, state, t, entry, classes, *SPREADS[spread]).denoise(inputs, [])
    after = after_head(table, draws, state, t, entry, inputs, last, out, scale)

    for name in ("left", "decided", "rejected", "unresolved"):
        assert torch.equal(getattr(after, name), getattr(expected, name)), name
    if num_chains == 33 and spread != "not a number":  # else it would not be a test of them
        assert 0 < expected.rejected.sum() < num_chains and expected.decided.max() > 1
        assert spread == "of the mean" or expected.unresolved.any()
    pairs = [(after.state, expected.state), *zip(after.gaussians, (*expected.p, *expected.q))]
    if spread != "not a number":  # there 0 times NaN is NaN by PyTorch, and no image is made of it
        pairs.append((after.log_sigma, expected.log_sigma))
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_what_is_not_contiguous_is_an_error():
    table, draws, state, t, entry, _ = a_round(3, 5, 2)
    with pytest.raises(ValueError, match=r"state .* has strides"):
        before_head(table, draws, state.transpose(0, 1).contiguous().transpose(0, 1), t, entry, 8)
