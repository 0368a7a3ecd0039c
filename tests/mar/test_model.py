"""MAR's transformer, whole and with caches."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import GOLDEN, relative_error
from toys import toy_mar

from cspd.masked.backbones import SELECTING, Cache, cache_bytes, lazy, refresh, selecting_layer
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


# ---- The backbone with caches: a refresh is the full one, and a lazy evaluation is what a slow one by hand computes


BUFFER, LENGTH, SLOTS = 3, 16, 5
START = [[0, 5, 9], [2, 6, 10]]  # tokens known to a refresh
DEPTHS = [1, 2, 7]  # the judging layer is the first and last, the last, and LazyMAR's


@pytest.fixture(params=DEPTHS)
def model(request):
    return toy_mar(request.param)


def sequences(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and orders."""
    g = torch.Generator().manual_seed(num)
    return torch.randn(num, LENGTH, 3, generator=g), torch.rand(num, LENGTH, generator=g).argsort(1)


def empty(model: MAR) -> Cache:
    """Caches as damaged sequences may leave them."""
    kept = Cache.empty(model, SLOTS, torch.float32, torch.device("cpu"))
    for tensor in (kept.encoder, kept.decoder, kept.inputs):
        tensor.fill_(torch.nan)
    return kept


def next_positions(order: torch.Tensor, known: list[int], num: int) -> torch.Tensor:
    return torch.stack([own[k : k + num] for own, k in zip(order, known)])


@pytest.mark.parametrize("known", START)
def test_a_refresh_is_the_full_backbone(known, model):
    tokens, order = sequences(3)
    embedding = model.class_emb(torch.tensor([0, 1, 3]))
    positions = next_positions(order, known, 4)
    slots = torch.tensor([4, 1])  # the last sequence keeps nothing
    x = refresh(model, empty(model), slots, tokens, order, known, embedding, positions)
    expected = model(tokens, order, known, embedding, positions)
    assert relative_error(model.condition(x, positions), expected) < 1e-5


@pytest.mark.parametrize("known", START)
def test_everything_computed_anew_is_the_full_backbone(known, model):
    """Caches are of other tokens: nothing of them is left."""
    (tokens, order), kept, slots = sequences(3), empty(model), torch.tensor([4, 0, 1])
    embedding = model.class_emb(torch.tensor([0, 1, 3]))
    refresh(model, kept, slots, tokens + 1, order, [k // 2 for k in known], embedding, order[:, :1])
    counts = [[k, k, 4, BUFFER + LENGTH - 4] for k in known]
    x, positions = lazy(model, kept, slots, tokens, order, counts, embedding)
    assert torch.equal(positions, next_positions(order, known, 4))
    assert relative_error(model.condition(x, positions), model(tokens, order, known, embedding, positions)) < 1e-5


class ByHand:
    """One sequence, evaluated position by position; what is kept is a dictionary by layer and place."""

    def __init__(self, model: MAR, tokens: torch.Tensor, order: torch.Tensor, embedding: torch.Tensor) -> None:
        self.model, self.tokens, self.order, self.embedding = model, tokens, order.tolist(), embedding
        self.encoder: list[dict] = [{} for _ in model.encoder_blocks]
        self.decoder: list[dict] = [{} for _ in model.decoder_blocks]
        self.inputs: dict[int, torch.Tensor] = {}

    def block(self, block, x: dict, kept: dict, visible: list[int]) -> dict:
        """Outputs by place of inputs x by place, whose keys and values are kept first."""
        inputs = torch.stack(list(x.values()))
        q, k, v = block.attn.qkv(block.norm1(inputs)).view(len(x), 3, block.attn.num_heads, -1).unbind(1)
        kept.update({place: (k[i], v[i]) for i, place in enumerate(x)})
        keys, values = (torch.stack([kept[place][i] for place in visible]) for i in range(2))
        weights = torch.einsum("qhd,khd->hqk", q, keys / keys.shape[-1] ** 0.5).softmax(-1)
        seen = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
        middle = inputs + block.attn.proj(seen)
        return dict(zip(x, middle + block.mlp(block.norm2(middle))))

    def evaluate(self, known: int, new: int, num_next: int, others: int) -> torch.Tensor:
        """The last block's output at the next positions; with all tokens new and all others, a refresh."""
        model, position = self.model, self.model.encoder_pos_embed_learned[0]
        x = {place: model.z_proj_ln(self.embedding + position[place]) for place in range(BUFFER)}
        for rank in range(known - new, known):
            at = self.order[rank]
            x[BUFFER + rank] = model.z_proj_ln(model.z_proj(self.tokens[at]) + position[BUFFER + at])
        for block, kept in zip(model.encoder_blocks, self.encoder):
            x = self.block(block, x, kept, list(range(BUFFER + known)))

        position = model.decoder_pos_embed_learned[0]
        for place, each in x.items():
            at = place if place < BUFFER else BUFFER + self.order[place - BUFFER]
            self.inputs[at] = model.decoder_embed(model.encoder_norm(each)) + position[at]
        for rank in range(known, LENGTH):
            at = BUFFER + self.order[rank]
            self.inputs[at] = model.mask_token[0, 0] + position[at]
        x = dict(sorted(self.inputs.items()))
        everywhere = list(x)
        to_predict = [BUFFER + at for at in self.order[known : known + num_next]]
        newly_known = [BUFFER + at for at in self.order[known - new : known]]
        for layer, (block, kept) in enumerate(zip(model.decoder_blocks, self.decoder)):
            before = dict(kept)
            out = self.block(block, x, kept, everywhere)
            if layer == min(SELECTING, len(model.decoder_blocks) // 2):
                change = {at: self.change(before, kept, at) for at in x if at not in to_predict + newly_known}
                by_change = sorted(change, key=change.get, reverse=True)
                chosen = [*to_predict, *newly_known, *by_change][: num_next + others]
                out = {at: out[at] for at in sorted(chosen)}
            x = out
        return torch.stack([x[at] for at in to_predict])

    @staticmethod
    def change(before: dict, kept: dict, at: int) -> float:
        """One minus the cosine similarity of values with those before, the mean over the heads."""
        if at not in before:
            return 2.0
        cosines = [(a @ b) / (a.norm() * b.norm()) for a, b in zip(before[at][1], kept[at][1])]
        return 1 - (sum(cosines) / len(cosines)).item()


def test_lazy_evaluations_are_those_by_hand(model):
    """Three sequences of unequal progress in one batch, three evaluations after a refresh, and another refresh."""
    (tokens, order), kept, slots = sequences(3), empty(model), torch.tensor([4, 0, 1])
    embedding = model.class_emb(torch.tensor([0, 1, 3]))
    by_hand = [ByHand(model, *each) for each in zip(tokens, order, embedding)]
    known = [0, 4, 6]
    everything = [[k, k, 3, BUFFER + LENGTH - 3] for k in known]
    schedules = [  # known, new, to be predicted, others
        [[1, 1, 2, 3], [6, 2, 1, 4], [7, 1, 3, 2]],
        [[3, 2, 1, 2], [7, 1, 2, 18], [10, 3, 1, 3]],
        [[3, 2, 1, 2], [7, 1, 2, 1], [10, 3, 1, 3]],  # the new ones are not those that changed most
        [[4, 1, 5, 1], [9, 2, 4, 2], [11, 1, 1, 1]],
        [[9, 5, 7, 5], [14, 5, 2, 7], [12, 1, 4, 6]],  # 14: places that the refresh did not reach
    ]
    for rows, hand in zip(everything, by_hand):
        hand.evaluate(*rows)
    refresh(model, kept, slots, tokens, order, known, embedding, order[:, :1])
    for counts in schedules:
        x, positions = lazy(model, kept, slots, tokens, order, counts, embedding)
        for i, (hand, own) in enumerate(zip(by_hand, counts)):
            num_next = own[2]
            assert positions[i, :num_next].tolist() == order[i, own[0] : own[0] + num_next].tolist()
            assert relative_error(x[i, :num_next], hand.evaluate(*own)) < 1e-4, (i, own)


def test_a_sequence_is_as_if_it_were_alone(model):
    tokens, order = sequences(3)
    embedding = model.class_emb(torch.tensor([0, 1, 3]))
    known, counts = [0, 4, 6], [[1, 1, 2, 3], [9, 5, 1, 12], [7, 1, 3, 2]]

    def run(which: list[int]) -> tuple[torch.Tensor, Cache]:
        kept, slots = empty(model), torch.tensor(which)
        inputs = tokens[which], order[which]
        refresh(model, kept, slots, *inputs, [known[i] for i in which], embedding[which], order[which, :1])
        return lazy(model, kept, slots, *inputs, [counts[i] for i in which], embedding[which])[0], kept

    together, kept = run([0, 1, 2])
    for i in range(3):
        alone, kept_alone = run([i])
        num_next = counts[i][2]
        assert relative_error(together[i, :num_next], alone[0, :num_next]) < 1e-5
        reached = BUFFER + counts[i][0]  # of the encoder; what padding left behind nobody reads
        assert relative_error(kept.encoder[:, i, :reached], kept_alone.encoder[:, i, :reached]) < 1e-5
        for one, other in ((kept.decoder, kept_alone.decoder), (kept.inputs[None], kept_alone.inputs[None])):
            assert relative_error(one[:, i, : BUFFER + LENGTH], other[:, i, : BUFFER + LENGTH]) < 1e-5


def test_the_layer_that_judges(model):
    depth = model.config.depth
    assert selecting_layer(model) == {1: 0, 2: 1, 7: 3}[depth]


def test_bytes(model):
    kept = Cache.empty(model, SLOTS, torch.bfloat16, torch.device("cpu"))
    tensors = (kept.encoder, kept.decoder, kept.inputs)
    assert sum(each.nbytes for each in tensors) == SLOTS * cache_bytes(model, torch.bfloat16)
