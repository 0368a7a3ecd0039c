"""MAR's transformer, whole and with caches."""

from __future__ import annotations

import pytest
import torch
from conftest import relative_error
from golden_files import official_shapes
from toys import toy_mar

from cspd.masked.backbones import SELECTING, Cache, cache_bytes, lazy, refresh, selecting_layer
from cspd.masked.runner import ModelInputs
from mar import checkpoint
from mar import model as mar_model
from mar.model import MAR, MARConfig

SHAPES = official_shapes("mar")
RAGGED = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64]  # both ends, and around the multiples that counts are padded to


@pytest.fixture
def batch(small_mar):
    """Tokens, orders and class embeddings of ten sequences."""
    g = torch.Generator().manual_seed(0)
    size, length, dim = len(RAGGED), small_mar.config.seq_len, small_mar.config.token_dim
    order = torch.rand(size, length, generator=g).argsort(1)
    return torch.randn(size, length, dim, generator=g), order, small_mar.class_emb(torch.arange(size))


def test_conditions_and_encoder_are_the_authors(small_mar, mar_golden):
    tokens, mask, labels = (mar_golden[f"backbone.{name}"] for name in ("tokens", "mask", "labels"))
    order, committed = mask.argsort(dim=1, stable=True), (mask == 0).sum(1).tolist()
    embeddings = {"z": small_mar.class_emb(labels), "z_uncond": small_mar.fake_latent.expand(len(labels), -1)}
    for name, embedding in embeddings.items():
        z = small_mar(tokens, order, committed, embedding)
        assert relative_error(z, mar_golden[f"backbone.{name}"]) < 1e-5
    expected = mar_golden["backbone.encoder_out"]  # the buffer, then the committed tokens in raster order
    encoded = small_mar.encode(tokens, *small_mar.known(order, committed), embeddings["z"])
    assert relative_error(encoded[:, : expected.shape[1]], expected) < 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_weights_have_the_official_shapes(name):
    with torch.device("meta"):
        model = getattr(checkpoint, name)()
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == SHAPES[name]


def test_a_sequence_does_not_depend_on_its_batch(small_mar, batch, monkeypatch):
    tokens, order, embedding = batch
    together = small_mar(tokens, order, RAGGED, embedding)
    monkeypatch.setattr(mar_model, "PAD_TO", 1)  # a single sequence has nothing to pad or to mask
    for i, count in enumerate(RAGGED):
        alone = small_mar(tokens[i : i + 1], order[i : i + 1], [count], embedding[i : i + 1])
        assert relative_error(together[i : i + 1], alone) < 1e-5, count


def test_conditions_are_computed_at_the_asked_positions(small_mar, batch):
    tokens, order, embedding = batch
    positions = torch.cat([order[:, 5:8], torch.zeros(len(order), 2, dtype=torch.int64), order[:, -1:]], dim=1)
    everywhere = small_mar(tokens, order, RAGGED, embedding)
    expected = everywhere[torch.arange(len(order)).unsqueeze(1), positions]
    assert relative_error(small_mar(tokens, order, RAGGED, embedding, positions), expected) < 1e-5


def test_values_of_masked_tokens_are_ignored(small_mar, batch):
    tokens, order, embedding = batch
    masked = order.argsort(1) >= torch.tensor(RAGGED).unsqueeze(1)
    changed = torch.where(masked.unsqueeze(-1), 1000 - 7 * tokens, tokens)
    assert torch.equal(small_mar(changed, order, RAGGED, embedding), small_mar(tokens, order, RAGGED, embedding))


@pytest.mark.parametrize("rank", [0, 12])
def test_values_of_committed_tokens_reach_every_condition(rank, small_mar, batch):
    tokens, order, embedding = batch
    counts = [13] * len(tokens)
    changed = tokens.clone()
    changed[torch.arange(len(tokens)), order[:, rank]] += 1
    difference = small_mar(changed, order, counts, embedding) - small_mar(tokens, order, counts, embedding)
    assert difference.abs().amax(-1).min() > 1e-5


def test_the_order_matters_only_by_what_is_committed(small_mar, batch):
    """13 tokens are committed: conditions change only if a reversed stretch has tokens of both kinds."""
    tokens, order, embedding = batch

    def conditions(start, stop):
        reversed_part = order[:, start:stop].flip(1)
        changed = torch.cat([order[:, :start], reversed_part, order[:, stop:]], dim=1)
        return small_mar(tokens, changed, [13] * len(tokens), embedding)

    reference = conditions(0, 1)
    for stretch in ((0, 13), (13, 64)):
        assert relative_error(conditions(*stretch), reference) < 1e-5
    assert relative_error(conditions(10, 16), reference) > 1e-3


@pytest.mark.parametrize("patch", [1, 2])
def test_tokens_become_a_latent_by_rows(patch):
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


def test_counts_may_be_a_tensor_if_the_padded_length_is_given(small_mar, batch):
    """Shapes do not depend on the counts; a larger `padded` is more padding."""
    tokens, order, embedding = batch
    expected = small_mar(tokens, order, RAGGED, embedding)
    for padded in (small_mar.padded(max(RAGGED)), small_mar.config.seq_len):
        z = small_mar(tokens, order, torch.tensor(RAGGED), embedding, padded=padded)
        assert relative_error(z, expected) < 1e-5


@pytest.mark.slow  # tracing takes seconds
def test_the_backbone_is_traced_in_one_piece_and_once(small_mar, batch):
    """It reads no value of a tensor, so that a call can be captured as a CUDA graph."""
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


# ---- The backbone with caches: a refresh is the full backbone, and a lazy evaluation is a slow one by hand


BUFFER, LENGTH, SLOTS = 3, 16, 5
START = [[0, 5, 9], [2, 6, 10]]  # tokens committed at a refresh
DEPTHS = [1, 2, 7]  # the selecting layer is the first and last, the last, and LazyMAR's


@pytest.fixture(params=DEPTHS)
def model(request):
    return toy_mar(request.param)


@pytest.fixture
def inputs(model):
    """Tokens, orders and class embeddings of three sequences."""
    g = torch.Generator().manual_seed(3)
    order = torch.rand(3, LENGTH, generator=g).argsort(1)
    return ModelInputs(torch.randn(3, LENGTH, 3, generator=g), order, model.class_emb(torch.tensor([0, 1, 3])))


def empty(model: MAR) -> Cache:
    """Caches full of NaN, as failed sequences may leave them."""
    cache = Cache.empty(model, SLOTS, torch.float32, torch.device("cpu"))
    for tensor in (cache.encoder, cache.decoder, cache.inputs):
        tensor.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("committed", START)
def test_a_refresh_is_the_full_backbone(committed, model, inputs):
    tokens, order, embedding = inputs
    positions = torch.stack([own[k : k + 4] for own, k in zip(order, committed)])
    expected = model(tokens, order, committed, embedding, positions)
    slots = torch.tensor([4, 1])  # the last sequence caches nothing
    x = refresh(model, empty(model), slots, inputs, committed, positions)
    assert relative_error(model.condition(x, positions), expected) < 1e-5

    # So is a lazy evaluation of everything: nothing is left of other tokens' caches.
    cache, slots = empty(model), torch.tensor([4, 0, 1])
    others = inputs._replace(tokens=tokens + 1)
    refresh(model, cache, slots, others, [k // 2 for k in committed], order[:, :1])
    counts = [[k, k, 4, BUFFER + LENGTH - 4] for k in committed]
    x, at = lazy(model, cache, slots, inputs, counts)
    assert torch.equal(at, positions)
    assert relative_error(model.condition(x, positions), expected) < 1e-5


class ByHand:
    """One sequence, evaluated position by position; its caches are a dictionary per layer."""

    def __init__(self, model: MAR, tokens: torch.Tensor, order: torch.Tensor, embedding: torch.Tensor) -> None:
        self.model, self.tokens, self.order, self.embedding = model, tokens, order.tolist(), embedding
        self.encoder: list[dict] = [{} for _ in model.encoder_blocks]
        self.decoder: list[dict] = [{} for _ in model.decoder_blocks]
        self.inputs: dict[int, torch.Tensor] = {}

    def block(self, block, x: dict, cache: dict, visible: list[int]) -> dict:
        """Outputs by position of inputs x by position, whose keys and values are cached first."""
        inputs = torch.stack(list(x.values()))
        q, k, v = block.attn.qkv(block.norm1(inputs)).view(len(x), 3, block.attn.num_heads, -1).unbind(1)
        cache.update({index: (k[i], v[i]) for i, index in enumerate(x)})
        keys, values = (torch.stack([cache[index][i] for index in visible]) for i in range(2))
        weights = torch.einsum("qhd,khd->hqk", q, keys / keys.shape[-1] ** 0.5).softmax(-1)
        seen = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
        middle = inputs + block.attn.proj(seen)
        return dict(zip(x, middle + block.mlp(block.norm2(middle))))

    def evaluate(self, committed: int, new: int, num_next: int, others: int) -> torch.Tensor:
        """The last block's output at the next positions; with all tokens new and all others, a refresh."""
        model, position = self.model, self.model.encoder_pos_embed_learned[0]
        # The encoder computes the buffer and the new tokens; the others' keys and values are cached.
        x = {index: model.z_proj_ln(self.embedding + position[index]) for index in range(BUFFER)}
        for rank in range(committed - new, committed):
            at = self.order[rank]
            x[BUFFER + rank] = model.z_proj_ln(model.z_proj(self.tokens[at]) + position[BUFFER + at])
        for block, cache in zip(model.encoder_blocks, self.encoder):
            x = self.block(block, x, cache, list(range(BUFFER + committed)))

        position = model.decoder_pos_embed_learned[0]
        for index, each in x.items():
            at = index if index < BUFFER else BUFFER + self.order[index - BUFFER]
            self.inputs[at] = model.decoder_embed(model.encoder_norm(each)) + position[at]
        # The decoder's first layers compute everything.
        for rank in range(committed, LENGTH):
            at = BUFFER + self.order[rank]
            self.inputs[at] = model.mask_token[0, 0] + position[at]
        x = dict(sorted(self.inputs.items()))
        everywhere = list(x)
        to_predict = [BUFFER + at for at in self.order[committed : committed + num_next]]
        newly_committed = [BUFFER + at for at in self.order[committed - new : committed]]
        for layer, (block, cache) in enumerate(zip(model.decoder_blocks, self.decoder)):
            before = dict(cache)
            out = self.block(block, x, cache, everywhere)
            if layer == min(SELECTING, len(model.decoder_blocks) // 2):
                # From here on: positions to predict, new tokens, and those whose values changed most.
                change = {at: self.change(before, cache, at) for at in x if at not in to_predict + newly_committed}
                by_change = sorted(change, key=change.get, reverse=True)
                chosen = [*to_predict, *newly_committed, *by_change][: num_next + others]
                out = {at: out[at] for at in sorted(chosen)}
            x = out
        return torch.stack([x[at] for at in to_predict])

    @staticmethod
    def change(before: dict, cache: dict, at: int) -> float:
        """One minus the cosine similarity of values with those before, the mean over the heads."""
        if at not in before:
            return 2.0
        cosines = [(a @ b) / (a.norm() * b.norm()) for a, b in zip(before[at][1], cache[at][1])]
        return 1 - (sum(cosines) / len(cosines)).item()


def test_lazy_evaluations_are_those_by_hand(model, inputs):
    """Three sequences of unequal progress in one batch, three evaluations after a refresh, and another refresh."""
    order, cache, slots = inputs.order, empty(model), torch.tensor([4, 0, 1])
    by_hand = [ByHand(model, *each) for each in zip(*inputs)]
    committed = [0, 4, 6]
    everything = [[k, k, 3, BUFFER + LENGTH - 3] for k in committed]
    schedules = [  # committed, new, to be predicted, others
        [[1, 1, 2, 3], [6, 2, 1, 4], [7, 1, 3, 2]],
        [[3, 2, 1, 2], [7, 1, 2, 18], [10, 3, 1, 3]],
        [[3, 2, 1, 2], [7, 1, 2, 1], [10, 3, 1, 3]],  # the new ones did not change most
        [[4, 1, 5, 1], [9, 2, 4, 2], [11, 1, 1, 1]],
        [[9, 5, 7, 5], [14, 5, 2, 7], [12, 1, 4, 6]],  # 14: positions that the refresh did not reach
    ]
    for rows, hand in zip(everything, by_hand):
        hand.evaluate(*rows)
    refresh(model, cache, slots, inputs, committed, order[:, :1])
    for counts in schedules:
        x, positions = lazy(model, cache, slots, inputs, counts)
        for i, (hand, own) in enumerate(zip(by_hand, counts)):
            num_next = own[2]
            assert positions[i, :num_next].tolist() == order[i, own[0] : own[0] + num_next].tolist()
            assert relative_error(x[i, :num_next], hand.evaluate(*own)) < 1e-4, (i, own)


def test_a_cached_sequence_does_not_depend_on_its_batch(model, inputs):
    committed, counts = [0, 4, 6], [[1, 1, 2, 3], [9, 5, 1, 12], [7, 1, 3, 2]]

    def run(which: list[int]) -> tuple[torch.Tensor, Cache]:
        cache, slots = empty(model), torch.tensor(which)
        own = ModelInputs(*(each[which] for each in inputs))
        refresh(model, cache, slots, own, [committed[i] for i in which], own.order[:, :1])
        return lazy(model, cache, slots, own, [counts[i] for i in which])[0], cache

    together, cache = run([0, 1, 2])
    for i in range(3):
        alone, cache_alone = run([i])
        num_next = counts[i][2]
        assert relative_error(together[i, :num_next], alone[0, :num_next]) < 1e-5
        reached = BUFFER + counts[i][0]  # of the encoder; nobody reads what padding wrote behind
        assert relative_error(cache.encoder[:, i, :reached], cache_alone.encoder[:, i, :reached]) < 1e-5
        for one, other in ((cache.decoder, cache_alone.decoder), (cache.inputs[None], cache_alone.inputs[None])):
            assert relative_error(one[:, i, : BUFFER + LENGTH], other[:, i, : BUFFER + LENGTH]) < 1e-5


def test_the_selecting_layer_and_the_bytes_of_a_cache(model):
    assert selecting_layer(model) == {1: 0, 2: 1, 7: 3}[model.config.depth]
    cache = Cache.empty(model, SLOTS, torch.bfloat16, torch.device("cpu"))
    tensors = (cache.encoder, cache.decoder, cache.inputs)
    assert sum(each.nbytes for each in tensors) == SLOTS * cache_bytes(model, torch.bfloat16)
