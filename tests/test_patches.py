"""scripts/train/train_patches.py: tokens of patches, the training of others' heads, and their head calls."""

from __future__ import annotations

import math

import pytest
import torch
import train_patches
from causals import LABELS
from seams import CHANNELS, COND, FlowMatchingHead, Known, layered
from torch import Tensor, nn
from train_patches import CALLS, CODES, Drawing, Heavy, Model, bitdance_loss, latents_of, patches

import cspd
from cspd.causal.models import CausalConfig
from cspd.files import FileCache
from cspd.seams import next_step_chain, seam_of

SIDE = 4
USUAL = CausalConfig(dim=32, n_layer=1, n_head=2, diff_dim=16, cls_token_num=2, num_classes=10)
HEADS = {"nextstep": "nextstep", "bitdance": "t2i_16"}


@pytest.fixture
def seen(monkeypatch) -> Tensor:
    """Conditions that fits are made from, fewer than usual."""
    monkeypatch.setattr("cspd.heads.learned.TOKENS", 99)
    monkeypatch.setattr("cspd.heads.learned.CALLS", 9)
    monkeypatch.setattr(train_patches, "CHUNK", 11)
    return torch.randn(1, 99, COND, generator=torch.Generator().manual_seed(0))


def test_patches_are_those_of_bitdance():
    """And latents are put together from them again."""
    latents = torch.arange(2 * 3 * SIDE**2).view(2, 3, SIDE, SIDE).float()
    config = CODES["bitdance"].config(USUAL, 3, SIDE, 2)
    tokens = patches(latents.flatten(2).transpose(1, 2), 2)
    assert torch.equal(tokens, Model(config, nn.Identity()).patchify(latents))
    assert torch.equal(latents_of(tokens, 2), latents)


class Clean(nn.Module):
    """A head that knows the token, which is its condition."""

    ch_target = 3
    net = staticmethod(lambda x, t, z: z)


def test_the_loss_of_a_head_that_knows_the_token_is_0():
    tokens = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    assert bitdance_loss(Clean(), tokens, tokens, torch.Generator().manual_seed(1)) == 0
    assert bitdance_loss(Clean(), tokens, tokens.flip(0), torch.Generator().manual_seed(1)) > 0.1


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_conditions_are_those_of_the_sampled_tokens(name, cfg):
    """Those that the transformer has for whole images, class and no class."""
    patch = 2 if name == "nextstep" else 4
    config = CODES[name].config(USUAL, CHANNELS if patch == 4 else 1, 2 * patch, patch)
    model = Model(config, layered(HEADS[name])).eval().requires_grad_(False)
    model.cls_embedding.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    wide = nn.Linear(config.dim, COND)
    ask = CODES[name].ask
    narrow = lambda config, z, cfg: ask(config, wide(z.unflatten(-1, (-1, config.dim))).flatten(2), cfg)  # noqa: E731
    tokens, z = train_patches.sampled(model, CODES[name]._replace(ask=narrow), cfg, len(LABELS))
    labels = torch.arange(len(LABELS))
    for branch, classes in zip(z, (labels, torch.full_like(labels, config.num_classes))):
        torch.testing.assert_close(branch.unflatten(0, (len(labels), -1)), model(classes, tokens[:, :-1]))


def drawing(module: nn.Module, tmp_path) -> Drawing:
    seam = seam_of(module)
    chain = next_step_chain(CALLS, 1.0, False, 0.04)
    if isinstance(seam.head, cspd.heads.Net):
        seam.head.take([COND])
    return Drawing(seam.head, chain, 1.0, FileCache([tmp_path]), {})


def test_calls_of_a_head_whose_drafts_are_right(seen, tmp_path):
    """A Gaussian token's head is linear, so every window is accepted."""
    module = FlowMatchingHead(Known("velocity", torch.full([COND], 0.5)), COND)
    for row in train_patches.calls_by_window(drawing(module, tmp_path), seen, seen[:, :20]):
        least = 1 + math.ceil((CALLS - 1) / row["window"])
        assert row["calls"] == pytest.approx(least, abs=0.2)
        assert row["slowest"] <= least + 1


def test_a_heavy_head_draws_the_same_tokens(seen, tmp_path):
    light = drawing(layered("nextstep"), tmp_path)
    larger = seam_of(layered("nextstep")).head
    heavy = Drawing(Heavy(light.head, larger), light.schedule, 1.0, light.cache, light.about)
    ends = []
    for each in (light, heavy):
        fitted = each.fitted("speculative", seen)
        torch.manual_seed(0)
        ends.append(each.draw("speculative", seen[:, :5], fitted, window=6)[1])
    torch.testing.assert_close(ends[0].tokens, ends[1].tokens)
    assert torch.equal(ends[0].record, ends[1].record)
