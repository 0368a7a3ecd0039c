"""A head that is exact at the first denoising step stays so, whatever it is trained to do elsewhere."""

from __future__ import annotations

import pytest
import torch
from first_step import FREE, finish, keep, prepare

from mar.head import TRAIN_STEPS, Head


def error(head: Head, timestep: int) -> float:
    """Root mean square of eps - x_t at one timestep, over random tokens and conditions."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(1000, head.channels, generator=generator)
    z = 3 * torch.randn(1000, head.cond_embed.in_features, generator=generator)
    with torch.no_grad():
        eps = head(x, torch.full((1000,), timestep), z)[:, : head.channels]
    return (eps - x).square().mean().sqrt().item()


@pytest.fixture(scope="module")
def trained():
    """A small head that was trained to say 0 at all timesteps, the last one too."""
    torch.manual_seed(0)
    head = Head(8, 48, 2, 24)
    prepare(head)
    keep(head)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.02)
    for _ in range(1000):
        x, z = torch.randn(256, 8), torch.randn(256, 24)
        loss = head(x, torch.randint(TRAIN_STEPS, (256,)), z).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(head)
    return head


def test_the_first_step_is_exact(trained):
    assert error(trained, TRAIN_STEPS - 1) < 3e-4  # a head as it is made usually has 0.01 and more


def test_other_steps_are_what_was_learnt(trained):
    visited = [TRAIN_STEPS - 2 - FREE, 500, 0]
    assert all(error(trained, timestep) > 0.1 for timestep in visited)
