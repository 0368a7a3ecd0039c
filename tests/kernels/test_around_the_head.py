"""A speculative round by kernels: decisions, states and Gaussians as `draft_verify.move` has them."""

import types

import pytest
import torch

from cspd.heads.calibration import draft_table
from cspd.heads.verify import MOVING, UNRESOLVED, Embeddings, Table, lookup, move, move_by_kernels
from cspd.kernels.speculative import after_head, before_head
from mar.head import Head, fill, filled

NUM_STEPS = 12


def a_round(num_chains, channels, window):
    """What a round is of, as `move` takes it: (lookup, draws), (windows, begin, scale, state, left, phase).

    Of several chains the first has one step left, the second waits, and the third has ended.
    """
    coefficients = 0.3 * torch.randn(NUM_STEPS, window, 3).numpy()
    drift = 0.1 * torch.randn(NUM_STEPS, window).numpy()
    own = lookup(torch.from_numpy(draft_table(coefficients, drift, NUM_STEPS, window, 1.0)))
    slots = num_chains + 2
    log_uniform = torch.rand(slots, NUM_STEPS, 1).log()
    log_uniform[:, 0] = -torch.inf
    draws = torch.cat([torch.randn(slots, NUM_STEPS, channels), log_uniform], dim=-1)
    state = torch.randn(num_chains, 8, channels)
    left = torch.randint(1, NUM_STEPS + 1, (num_chains,))
    phase = torch.zeros_like(left)
    left[0], left[2:3], phase[1:2] = 1, 0, UNRESOLVED
    windows = (torch.randperm(slots - 1)[:num_chains, None] + 1) * NUM_STEPS - own.lags
    begin = torch.arange(num_chains) * window
    scale = torch.linspace(0.2, 3, num_chains).view(-1, 1, 1)
    return (own, draws), (windows, begin, scale, state, left, phase)


class AsDrafted:
    """In place of a head: outputs that would make p equal to q, but for random errors. It keeps its inputs.

    Args:
        of_mean, of_sigma: how large the errors are, of eps and of log sigma_p.
    """

    def __init__(self, draft, state, left, y, noise, classes, of_mean, of_sigma):
        base_q, slope, mean_x, mean_eps, base_p = draft[left][..., -5:].unsqueeze(-1).unbind(2)
        self.y, self.inputs = y, torch.cat([state[:, :1], y[:, :-1]], dim=1)
        eps = torch.nan_to_num((y - noise - mean_x * self.inputs) / mean_eps, posinf=0, neginf=0)
        v = torch.nan_to_num((base_q + slope * state[:, 3:4] - base_p) / slope)
        eps = eps + of_mean * torch.randn(classes, *y.shape)
        v = v + torch.nan_to_num(of_sigma / slope, posinf=0) * torch.randn(classes, *y.shape)
        self.out = fill(torch.cat([eps, v], dim=-1).flatten(1, 2))

    def denoise(self, x, modulations):
        return self.out

    def split(self, layers):
        return layers


def drafted(own, draws, windows, state, left):
    """y [R, W, d] and their noise."""
    window = len(own.lags)
    rows = own.draft[left]
    base_q, slope = rows[..., 3 + window, None], rows[..., 4 + window, None]
    places = windows[:, :1] + 1 + (left[:, None] - own.lags).clamp(min=0)
    noise = (base_q + slope * state[:, 3:4]).exp() * draws.flatten(0, 1)[places][..., :-1]
    y = (rows[..., : 3 + window].unsqueeze(-1) * torch.cat([state[:, :3], noise], 1).unsqueeze(1)).sum(2)
    return y, noise, places


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
@pytest.mark.parametrize("spread", SPREADS)
def test_rounds_agree(num_chains, classes, channels, window, spread):
    (own, draws), chains = a_round(num_chains, channels, window)
    windows, _, scale, state, left, phase = chains
    moving = (left > 0) & (phase == MOVING)
    y, noise, places = drafted(own, draws, windows, state, left)
    head = AsDrafted(own.draft, state, left, y, noise, classes, *SPREADS[spread])
    anywhere = types.SimpleNamespace(layers_at=lambda head, at: [])
    expected = move(head, own, draws, anywhere, *chains, trace_sigma=True)

    given = own.draft, draws, windows, state, left, phase
    rows = num_chains * window
    inputs, last, at = before_head(*given, filled(rows))
    assert torch.equal(at[:rows].view_as(places)[moving], places[moving])
    assert not at[rows:].any() and not inputs[rows:].any()
    torch.testing.assert_close(inputs[:rows].view_as(y)[moving], head.inputs[moving], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last[moving], y[moving, -1], rtol=1e-5, atol=1e-5)
    made = after_head(*given, inputs, last, head.out, scale)
    after = type(expected)(*made)
    if num_chains == 33 and spread != "not a number":  # else it would not be a test of them
        assert 0 < (expected.record < 0).sum() < num_chains and expected.record.abs().max() > 1
        assert spread == "of the mean" or (expected.phase != phase).any()
    agree(after, expected, state, moving, finite=spread != "not a number")


def agree(after, expected, state, moving, finite=True):
    for name in ("left", "phase", "step_index", "record"):
        assert torch.equal(getattr(after, name), getattr(expected, name)), name
    assert torch.equal(after.state[~moving], state[~moving])
    has_ended = expected.left == 0  # their token is p's mean; the state itself is of no more use
    after.state[has_ended, 0] = expected.state[has_ended, 0]
    pairs = [(after.state, expected.state)]
    if finite:  # there 0 times NaN is NaN by PyTorch, and no image is made of it
        pairs.append((after.log_sigma, expected.log_sigma))
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("tabled", [True, False])
def test_rounds_with_a_head_agree(tabled):
    """Modulations are read in a table where they are, or computed."""
    num_chains, channels, width, window = 5, 5, 24, 3
    head = Head(channels, width, 2, 8)
    for parameter in head.parameters():
        parameter.normal_(std=0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    (own, draws), chains = a_round(num_chains, channels, window)
    modulations = Embeddings(torch.randn(NUM_STEPS, width), torch.randn(len(draws), 2, width))
    if tabled:
        layers = head.modulations(modulations.t_embed, modulations.c_embed.transpose(0, 1).unsqueeze(2))
        modulations = Table(torch.cat(layers, dim=-1), [layer.shape[-1] for layer in layers])
    work = head, own, draws, modulations, *chains
    _, _, _, state, left, phase = chains
    agree(move_by_kernels(*work), move(*work, trace_sigma=True), state, (left > 0) & (phase == MOVING))


def test_what_is_not_contiguous_is_an_error():
    (own, draws), (windows, _, _, state, left, phase) = a_round(3, 5, 2)
    with pytest.raises(ValueError):
        before_head(own.draft, draws, windows, state.mT.contiguous().mT, left, phase, 8)
