"""The draws of `cspd.noise` by kernels: equal bits and uniform draws, and normals to two roundings."""

import pytest
import torch

from cspd import noise
from cspd.kernels import philox
from cspd.noise import INDEX_BITS, Purpose

SEEDS = torch.tensor([0, 7, 2**31, 2**40 + 7, 2**63 - 1])
SHAPES = {
    "one each": (SEEDS, SEEDS % 7, 3, 5),
    "steps": (SEEDS, SEEDS % 7, torch.tensor([99, 3, 0]).view(-1, 1), 0),
    "candidates": (SEEDS[:, None], (SEEDS % 7)[:, None], (SEEDS % 5)[:, None], torch.arange(11, 15)),
    "four dimensions": (
        SEEDS.view(-1, 1, 1, 1),
        torch.arange(0, 21, 7).view(-1, 1, 1),
        torch.tensor([0, 99]).view(-1, 1),
        torch.tensor([0, 5, 2**24 - 1]),
    ),
    "a single one": (SEEDS[3], SEEDS[1], 2**31, 2**24 - 1),
    "not contiguous": (SEEDS.repeat(2)[::2], torch.arange(10).view(5, 2).t()[1], 3, 5),
    "none": (SEEDS[:0], SEEDS[:0], 3, 5),
}


@pytest.mark.parametrize("num", [1, 5, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_draws_agree(shape, num):
    seed, position, step, index = SHAPES[shape]
    where = seed, Purpose.STEP, position, step, index
    drawn = {kind: philox.draw(kind, *where, num, INDEX_BITS) for kind in ("bits", "uniform", "normal")}
    assert torch.equal(drawn["bits"], noise.bits(*where, num))
    assert torch.equal(drawn["uniform"], noise.uniform(*where, num=num))
    expected = noise.normal(*where, num=num)
    assert drawn["normal"].dtype == torch.float32
    torch.testing.assert_close(drawn["normal"], expected, rtol=2.4e-7, atol=5e-7)


@pytest.mark.parametrize("purpose", [Purpose.CODE, torch.tensor([[[9]], [[11]]])], ids=["one", "several"])
def test_fine_draws_are_the_same(purpose):
    where = SEEDS, purpose, torch.arange(3).unsqueeze(-1), 3, SEEDS % 11
    drawn = philox.draw("fine", *where, 1, INDEX_BITS).squeeze(-1)
    assert drawn.dtype == torch.float64
    assert torch.equal(drawn, noise.fine_uniform(*where))


@pytest.mark.parametrize("rows,num_steps,channels", [(1, 1, 1), (3, 10, 16), (5, 7, 5), (2, 3, 64)])
def test_chains_draws_agree(rows, num_steps, channels):
    seed, position = SEEDS[:rows], torch.arange(2 * rows)[::2]
    x, eps, accept_uniforms = philox.chain(seed, position, num_steps, channels, noise._chain_tags(1, 0))
    expected = noise.chain(seed, position, num_steps, channels, 1, 0)
    assert torch.equal(accept_uniforms, expected[2])
    for drawn, value in zip((x, eps), expected):
        torch.testing.assert_close(drawn, value, rtol=2.4e-7, atol=5e-7)
