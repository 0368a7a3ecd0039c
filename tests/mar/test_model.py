"""MAR's backbone is the authors': golden outputs and shapes; each sequence of a ragged batch is as if it were alone."""

import json

import pytest
import torch
from conftest import GOLDEN, relative_error

from mar import checkpoint
from mar import model as mar_model
from mar.model import MAR, MARConfig

SHAPES = json.loads((GOLDEN / "shapes_mar.json").read_text())
RAGGED = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64]  # both ends, and around the multiples that counts are padded to


@pytest.fixture
def batch(small_mar):
    """Tokens, orders and class embeddings of ten sequences."""
    g = torch.Generator().manual_seed(0)
    size, length, dim = len(RAGGED), small_mar.config.seq_len, small_mar.config.token_dim
    order = torch.rand(size, length, generator=g).argsort(1)
    return torch.randn(size, length, dim, generator=g), order, small_mar.class_emb(torch.arange(size))


def shuffled(order, start, stop):
    """The order with its entries start..stop reversed."""
    return torch.cat([order[:, :start], order[:, start:stop].flip(1), order[:, stop:]], dim=1)


@pytest.mark.parametrize("condition", ["z", "z_uncond"])
def test_golden_conditions(condition, small_mar, mar_golden):
    tokens, mask, labels = (mar_golden[f"backbone.{name}"] for name in ("tokens", "mask", "labels"))
    num_known = (mask == 0).sum(1).tolist()
    embedding = small_mar.class_emb(labels) if condition == "z" else small_mar.fake_latent.expand(len(labels), -1)
    z = small_mar(tokens, mask.argsort(dim=1, stable=True), num_known, embedding)
    assert relative_error(z, mar_golden[f"backbone.{condition}"]) < 1e-5


def test_golden_encoder(small_mar, mar_golden):
    tokens, mask, labels = (mar_golden[f"backbone.{name}"] for name in ("tokens", "mask", "labels"))
    expected = mar_golden["backbone.encoder_out"]  # buffer, then the known tokens in raster order
    num_known = (mask == 0).sum(1).tolist()
    known = small_mar.known(mask.argsort(dim=1, stable=True), num_known)
    encoded = small_mar.encode(tokens, *known, small_mar.class_emb(labels))
    assert relative_error(encoded[:, : expected.shape[1]], expected) < 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_official_shapes(name):
    with torch.device("meta"):
        model = getattr(checkpoint, name)()
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == SHAPES[name]


def test_ragged_batch(small_mar, batch, monkeypatch):
    tokens, order, embedding = batch
    together = small_mar(tokens, order, RAGGED, embedding)
    monkeypatch.setattr(mar_model, "PAD_TO", 1)  # alone there is nothing to pad or to mask
    for i, count in enumerate(RAGGED):
        alone = small_mar(tokens[i : i + 1], order[i : i + 1], [count], embedding[i : i + 1])
        assert relative_error(together[i : i + 1], alone) < 1e-5, count


def test_conditions_at_positions(small_mar, batch):
    tokens, order, embedding = batch
    positions = torch.cat([order[:, 5:8], torch.zeros(len(order), 2, dtype=torch.int64), order[:, -1:]], dim=1)
    everywhere = small_mar(tokens, order, RAGGED, embedding)
    expected = everywhere[torch.arange(len(order)).unsqueeze(1), positions]
    assert relative_error(small_mar(tokens, order, RAGGED, embedding, positions), expected) < 1e-5


def test_unknown_values_are_ignored(small_mar, batch):
    tokens, order, embedding = batch
    unknown = order.argsort(1) >= torch.tensor(RAGGED).unsqueeze(1)
    changed = torch.where(unknown.unsqueeze(-1), 1000 - 7 * tokens, tokens)
    assert torch.equal(small_mar(changed, order, RAGGED, embedding), small_mar(tokens, order, RAGGED, embedding))


@pytest.mark.parametrize("rank", [0, 12])
def test_known_values_reach_every_condition(rank, small_mar, batch):
    tokens, order, embedding = batch
    counts = [13] * len(tokens)
    changed = tokens.clone()
    changed[torch.arange(len(tokens)), order[:, rank]] += 1
    difference = small_mar(changed, order, counts, embedding) - small_mar(tokens, order, counts, embedding)
    assert difference.abs().amax(-1).min() > 1e-5


@pytest.mark.parametrize("stretch", [(0, 13), (13, 64)], ids=["known", "unknown"])
def test_order_within_a_set_is_irrelevant(stretch, small_mar, batch):
    tokens, order, embedding = batch
    counts = [13] * len(tokens)
    reference = small_mar(tokens, order, counts, embedding)
    assert relative_error(small_mar(tokens, shuffled(order, *stretch), counts, embedding), reference) < 1e-5
    assert relative_error(small_mar(tokens, shuffled(order, 10, 16), counts, embedding), reference) > 1e-3


@pytest.mark.parametrize("patch", [1, 2])
def test_unpatchify(patch):
    sizes = dict(embed_dim=16, depth=1, num_heads=2, class_num=2, buffer_size=2, diffloss_w=8, diffloss_d=1)
    model = MAR(MARConfig(img_size=16, vae_stride=2, patch_size=patch, vae_embed_dim=3, **sizes))
    side = model.config.grid_size
    tokens = torch.randn(2, side**2, 3 * patch**2, generator=torch.Generator().manual_seed(0))
    latent = model.unpatchify(tokens)
    assert latent.shape == (2, 3, 8, 8)
    for row in range(side):
        for column in range(side):
            cell = latent[:, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            assert torch.equal(tokens[:, row * side + column], cell.flatten(1))


def test_counts_may_be_on_the_device(small_mar, batch):
    """With `padded` shapes do not depend on them: a larger one is more padding."""
    tokens, order, embedding = batch
    expected = small_mar(tokens, order, RAGGED, embedding)
    for padded in (small_mar.padded(max(RAGGED)), small_mar.config.seq_len):
        z = small_mar(tokens, order, torch.tensor(RAGGED), embedding, padded=padded)
        assert relative_error(z, expected) < 1e-5


@pytest.mark.slow  # tracing takes seconds
def test_traced_whole_and_once(small_mar, batch):
    """No value of a tensor is looked at, so that a call can be captured as a CUDA graph."""
    tokens, order, embedding = batch
    traces = []

    def backend(program, inputs):
        traces.append(program)
        return program

    compiled = torch.compile(small_mar, fullgraph=True, dynamic=False, backend=backend)
    padded = small_mar.padded(max(RAGGED))
    for counts in (torch.tensor(RAGGED), torch.tensor(RAGGED).flip(0)):
        inputs = tokens, order, counts, embedding, order[:, -8:], padded
        assert torch.equal(compiled(*inputs), small_mar(*inputs))
    assert len(traces) == 1
