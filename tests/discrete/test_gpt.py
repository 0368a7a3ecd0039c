"""LlamaGen's GPT and tokenizer."""

import pytest
import torch
from conftest import relative_error
from golden_files import official_shapes

from cspd.discrete import gpt, registry
from cspd.discrete.gpt import Eagle
from cspd.discrete.registry import load_tokenizer
from cspd.transformer import CacheView

SHAPES = official_shapes("vq")


@pytest.mark.parametrize("null, name", [(False, "logits"), (True, "logits_uncond")])
def test_golden_logits(null, name, small_gpt, gpt_golden):
    labels = gpt_golden["labels"]
    labels = torch.full_like(labels, small_gpt.config.num_classes) if null else labels
    assert relative_error(small_gpt(labels, gpt_golden["tokens"][:, :-1]), gpt_golden[name]) < 1e-5


def test_golden_greedy_sample(small_gpt, gpt_golden):
    codes = gpt.sample_published(small_gpt, gpt_golden["labels"], cfg=2.0, temperature=0)
    assert torch.equal(codes, gpt_golden["greedy_cfg2"])


@pytest.mark.parametrize("name", [name for name in registry.GPTS if name.startswith("llamagen")])
def test_official_shapes(name):
    with torch.device("meta"):
        model = registry.create_gpt(name)
    assert {key: list(t.shape) for key, t in model.state_dict().items()} == SHAPES[name]


def empty_cache(model, rows, columns):
    c = model.config
    return torch.full((2, c.n_layer, rows, c.n_head, columns, c.head_dim), 7.0)  # reading these would show


def test_any_split_of_the_sequence_and_any_rows(small_gpt, gpt_golden):
    labels, tokens, expected = (gpt_golden[name] for name in ("labels", "tokens", "logits"))
    inputs, length = small_gpt.embed(labels, tokens[:, :-1]), tokens.shape[1]
    cache, rows = empty_cache(small_gpt, 5, length), torch.tensor([4, 0, 2])
    for start, stop in [(0, 1), (1, 6), (6, 7), (7, length)]:
        position = torch.arange(start, stop).expand(3, -1)
        mask = torch.arange(stop) <= position.unsqueeze(-1)
        view = CacheView(*cache, rows, position, stop)
        logits = small_gpt.output(small_gpt.features(inputs[:, start:stop], position, mask.unsqueeze(1), view))
        assert relative_error(logits, expected[:, start:stop]) < 1e-5
    assert (cache[:, :, [1, 3]] == 7).all()


def test_a_tree_of_drafts_at_different_depths(small_gpt, gpt_golden):
    """Two sequences of 3 and 9 tokens, each with the tree root -> (a -> b, c): each node as if its path were alone."""
    labels, tokens = gpt_golden["labels"][:2], gpt_golden["tokens"][:2]
    lengths, width = torch.tensor([3, 9]), 16
    cache = empty_cache(small_gpt, 2, width)
    prefix = torch.arange(10).expand(2, -1)
    view = CacheView(*cache, torch.arange(2), prefix, 10)
    causal = (torch.arange(10) <= prefix.unsqueeze(-1)).unsqueeze(1)
    # later columns of the first sequence now have rejected tokens
    small_gpt.features(small_gpt.embed(labels, tokens[:, :9]), prefix, causal, view)
    nodes = torch.tensor([[5, 6, 7], [8, 9, 10]])  # a, b, c
    depth = torch.tensor([1, 2, 1])
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    column = torch.arange(width)
    known = column <= lengths.view(-1, 1, 1)
    columns = lengths.unsqueeze(1) + 1 + torch.arange(3)
    own = column == columns.unsqueeze(-1)  # [B, node, width]
    mask = known | (sees.float() @ own.float()).bool()
    view = CacheView(*cache, torch.arange(2), columns, width)
    position = lengths.unsqueeze(1) + depth
    logits = small_gpt.output(small_gpt.features(small_gpt.tok_embeddings(nodes), position, mask.unsqueeze(1), view))
    for i, length in enumerate(lengths.tolist()):
        for node, path in enumerate([[0], [0, 1], [2]]):
            alone = small_gpt(labels[i : i + 1], torch.cat([tokens[i, :length], nodes[i, path]]).unsqueeze(0))
            assert relative_error(logits[i, node], alone[0, -1]) < 1e-5


def test_rotary_table_is_zero_at_the_class(small_gpt):
    table = small_gpt.table(torch.arange(small_gpt.config.block_size + 1))
    assert not table[0].any() and torch.allclose(table[1:].norm(dim=-1), torch.ones(()))


def test_reference_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    p = logits.softmax(-1)
    assert torch.allclose(gpt.distribution(logits, 1.0, 0, 1.0), p)
    assert torch.allclose(gpt.distribution(logits, 2.0, 0, 1.0), (logits / 2).softmax(-1))
    assert torch.allclose(gpt.distribution(logits, 1.0, 2, 1.0)[0, :2], p[0, :2] / p[0, :2].sum())
    allowed = gpt.distribution(logits, 1.0, 0, p[0, 0].item() + 1e-3)[0] > 0  # the token that crosses p is allowed
    assert allowed.tolist() == [True, True, False, False]


def test_eagle_with_a_cache(small_gpt):
    torch.manual_seed(0)
    config = small_gpt.config
    drafter = Eagle(config).eval().requires_grad_(False)
    features, embeddings = torch.randn(2, 3, 8, config.dim)
    position = torch.arange(1, 9).expand(3, -1)
    expected = drafter(features, embeddings, small_gpt.table(position))
    cache, rows = torch.zeros(2, 1, 3, config.n_head, 9, config.head_dim), torch.arange(3)
    for start, stop in [(0, 3), (3, 8)]:
        part = position[:, start:stop]
        mask = (torch.arange(1, stop + 1) <= part.unsqueeze(-1)).unsqueeze(1)
        view = CacheView(*cache, rows, part - 1, stop)
        out = drafter(features[:, start:stop], embeddings[:, start:stop], small_gpt.table(part), mask, view)
        assert relative_error(out, expected[:, start:stop]) < 1e-5


# ---- The tokenizer


RECORD = "quantize.codebook_used"


def test_golden_codes_and_image(small_vq, vq_golden):
    codes = small_vq.encode(vq_golden["image"])
    assert torch.equal(codes, vq_golden["encoded_indices"].reshape(codes.shape))
    assert relative_error(small_vq.lookup(codes), vq_golden["quantized"]) < 1e-5
    assert relative_error(small_vq.decode(vq_golden["codes"]), vq_golden["decoded"]) < 1e-5


def test_official_shapes_of_tokenizer():
    with torch.device("meta"):
        model = registry.create_tokenizer("vq16")
    own = {key: list(t.shape) for key, t in model.state_dict().items()}
    assert own | {RECORD: [65536]} == SHAPES["vq16"] and RECORD not in own
    assert model.config.stride == 16


def test_the_record_of_training_is_ignored(tmp_path):
    weights = registry.create_tokenizer("vq_digits32").state_dict()
    torch.save({"model": weights | {RECORD: torch.zeros(65536)}}, tmp_path / "vq.pt")
    loaded = load_tokenizer(tmp_path / "vq.pt").state_dict()
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[key], weights[key]) for key in weights)
