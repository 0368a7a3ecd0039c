"""Text-to-image models and their text encoder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import relative_error
from graphs import replayed
from PIL import Image
from stores import small_vq_checkpoint
from texts import (
    MOST,
    PROMPTS,
    Words,
    conditions,
    next_logits,
    plain_codes,
    plain_guided,
    plain_logits,
    running,
    text_models,
    uniforms,
)
from toys import LENGTH, counts, draw, p_value, request_of, sequences, staggered, toy_models

import cspd
from cspd import Engine, MARModels, Request, VQModels
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.discrete.batch import by_slot
from cspd.discrete.distributions import Filter, guide, probabilities
from cspd.discrete.drafts import _eagle_root
from cspd.discrete.registry import VQDefaults, create_gpt, defaults_of, gpt_spec, load_gpt
from mar.tensors import CheckpointError

NEGATIVE = "a grey sky over it"
COMB = {"window": 7, "pd_k": 3, "pd_d": 2}
METHODS = {"ar": {}, "sd": {"gamma": 3}, "eagle": {"gamma": 3}, "eagle2": {"gamma": 3}, "sjd": {"window": 5}}
METHODS |= {"sjd-pac": COMB}
SAME = 1e-4  # p-values


@pytest.fixture(scope="module")
def models():
    return text_models()


@pytest.fixture(scope="module")
def engine(models):
    return Engine(VQModels(**models), max_batch=3, device="cpu")


def requests(method="ar", **changes):
    """A request for each prompt, the last with a negative prompt."""
    settings = {"cfg": 2.5} | METHODS[method] | changes
    own = [request_of(method, label=None, prompt=text, seed=i, **settings) for i, text in enumerate(PROMPTS)]
    return [*own[:2], own[2].but(negative_prompt=NEGATIVE)]


def test_logits_are_those_of_the_formulas(models):
    """Also in a batch as in training: prompts of unequal lengths, padded on the left, or the unconditional branch."""
    target, codes = models["target"], torch.arange(8)
    every = [condition for request in requests() for condition in conditions(target, request)]
    features, present = (torch.stack(each) for each in zip(*every))
    batched = target(features, codes.expand(len(every), -1), present)
    for own, (features, present) in zip(batched, every):
        expected = plain_logits(target, features, present, codes)
        alone = target(features[present].unsqueeze(0), codes.unsqueeze(0))[0]
        assert relative_error(own, expected) < 1e-5 and relative_error(alone, expected) < 1e-5


@pytest.mark.parametrize("rounds", [(0, 3, 1), (2, 2, 2)], ids=str)
def test_a_ragged_batch(rounds, models):
    """Three prompts of unequal length and unequal progress in one forward pass."""
    runner, started = running(models, requests(), rounds)
    with torch.inference_mode():
        logits = next_logits(runner, started)
    for sequence in started:
        codes = runner.tokens[sequence.slot, : sequence.num_committed]
        expected = plain_guided(models["target"], sequence.request, codes)[-1]
        assert relative_error(logits[sequence.slot], expected) < 1e-5


def test_eagles_drafter_attends_to_the_prompt(models):
    """Its output at the root is its output for the whole sequence without a cache."""
    runner, started = running(models, requests("eagle"), (0, 2, 1))
    target, drafter = models["target"], models["eagle"]
    with torch.inference_mode():
        root = _eagle_root(runner, runner.batch_of(by_slot(started)), 3)
    for sequence in started:
        codes = runner.tokens[sequence.slot, : sequence.num_committed]
        for half, (features, present) in enumerate(conditions(target, sequence.request)):
            inputs = target.embed(features[present].unsqueeze(0), codes.unsqueeze(0))
            last = inputs.shape[1] - len(codes) - 1
            position = (torch.arange(inputs.shape[1]) - last).clamp(min=0).unsqueeze(0)
            past = target.features(inputs, position).roll(1, 1)
            past[:, 0] = 0
            expected = drafter(past, inputs, target.table(position))[0, -1]
            assert relative_error(root[half, sequence.slot, 0], expected) < 1e-5


@pytest.fixture(scope="module")
def formulas(models):
    """The tokens of `requests` by the formulas: the likeliest, and with the requests' own draws and top-k."""
    target = models["target"]
    greedy = [plain_codes(target, request) for request in requests()]
    sampled = [plain_codes(target, request.but(top_k=6), uniforms(request.seed, 9)) for request in requests()]
    return {"greedy": greedy, "sampled": sampled}


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_the_formulas(method, engine, formulas):
    """Prompts join one after the other; greedy, and sampled by every method with same-image coupling."""
    coupled = {} if method == "ar" else {"coupling": "same-image"}
    for kind, changes in (("greedy", {"temperature": 0.0}), ("sampled", {"top_k": 6, **coupled})):
        asked = requests(method, **changes)
        for request, output, codes in zip(asked, staggered(engine, asked), formulas[kind]):
            assert torch.equal(output.tokens, codes) and output.class_name == request.prompt


def test_without_guidance(engine, models):
    request = Request(prompt=PROMPTS[0], method="sjd-pac", cfg=1.0, temperature=0.0, **COMB)
    codes = plain_codes(models["target"], request)
    others = requests("sjd-pac")  # in the same engine
    assert torch.equal(engine.generate([*others, request])[3].tokens, codes)


def test_a_draft_that_is_the_target_is_always_accepted(models):
    """It attends to the prompt, the unconditional branch and negative prompts too."""
    same = Engine(VQModels(**models | {"draft": models["target"]}), max_batch=3, device="cpu")
    for output in same.generate(requests("sd")):
        assert output.stats.alpha == 1


def test_images_do_not_depend_on_their_batch(engine):
    """Prompts of all lengths, guided or not, with several methods; slots are used again, and some tokens are given."""
    asked = []
    for seed in range(8):
        method = ("ar", "eagle", "sd")[seed % 3]
        text = " ".join(str(number) for number in range(1 + seed % MOST))
        negative = {"negative_prompt": NEGATIVE} if seed % 4 == 3 else {}
        known = {"image": torch.arange(9), "mask": torch.arange(9) >= seed - 4} if seed > 5 else {}
        cfg = 1.0 if seed % 4 == 2 else 3.0
        asked.append(Request(prompt=text, seed=seed, method=method, cfg=cfg, **METHODS[method], **negative, **known))
    alone = engine.with_slots(1)
    for request, output in zip(asked, engine.generate(asked)):
        assert torch.equal(output.tokens, alone.generate(request)[0].tokens)


@pytest.mark.parametrize("method", ["eagle", "sjd-pac"])
def test_graphs_and_late_reports(method, models, engine):
    graphed = Engine(VQModels(**models), max_batch=3, device="cpu")
    graphed.runner.graphs, graphed.runner.late = replayed(), True
    asked = requests(method)
    for output, plain in zip(staggered(graphed, asked), engine.generate(asked)):
        assert torch.equal(output.tokens, plain.tokens)


def p_of(method, num, **changes):
    """The p-value of a test that sequences follow the target's distribution, which is computed without a cache."""
    models = text_models(codes=4, length=LENGTH, n_layer=1)
    request = request_of(method, **METHODS[method] | changes, label=None, prompt=PROMPTS[0])
    every = sequences()
    halves = []
    for features, present in conditions(models["target"], request):
        own = features[present].expand(len(every), -1, -1)
        halves.append(models["target"](own, every[:, :-1]))
    ones = torch.ones(len(every))
    logits = guide(torch.stack(halves), request.cfg * ones)
    allowed = Filter(torch.tensor([request.top_k]), torch.tensor([2.0]), request.top_k) if request.top_k else None
    P = probabilities(logits, request.temperature * ones, allowed)
    expected = P.double().gather(-1, every.unsqueeze(-1)).squeeze(-1).prod(1)
    return p_value(counts(draw(models, request, num)[0]), expected)


@pytest.mark.parametrize(
    "method, num, changes",
    [
        ("sjd-pac", 800, {"top_k": 3}),
        *[
            pytest.param(method, 5_000, changes, marks=pytest.mark.slow)
            for method in METHODS
            for changes in ({}, {"negative_prompt": NEGATIVE})
        ],
    ],
    ids=str,
)
def test_the_distribution_is_the_targets(method, num, changes):
    assert p_of(method, num, **changes) > SAME


def test_bfloat16(models):
    half = Engine(VQModels(**models), max_batch=3, device="cpu", precision="bf16")
    for method in ("ar", "eagle"):
        for output in half.generate(requests(method)):
            assert (output.tokens >= 0).all()


def test_sample_takes_prompts(engine):
    outputs = engine.sample(prompts=PROMPTS[:2], seed=3, method="ar", negative_prompt=NEGATIVE)
    asked = [(output.request.prompt, output.request.seed, output.request.negative_prompt) for output in outputs]
    assert asked == [(PROMPTS[0], 3, NEGATIVE), (PROMPTS[1], 4, NEGATIVE)]
    again = engine.sample(prompts=PROMPTS[1], seed=4, method="ar", negative_prompt=NEGATIVE)
    assert torch.equal(again.tokens, outputs[1].tokens)


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"label": 3}, "label"),
        ({}, "prompt"),
        ({"label": 3, "prompt": "a"}, "label"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "negative_prompt": "b", "cfg": 1.0}, "negative_prompt"),
    ],
    ids=str,
)
def test_bad_requests(settings, told, engine):
    with pytest.raises(ValueError, match=told):
        engine.check(Request(**settings))


@pytest.mark.parametrize("first", [0, 1])
def test_prompts_and_labels_in_one_engine(first, models, small_mar):
    """They choose the family; images in flight together are those that are made alone."""
    both = [MARModels(small_mar), VQModels(**models)]
    engine = Engine(both[first], both[1 - first], max_batch=2, device="cpu")
    prompt = Request(prompt=PROMPTS[0], method="ar")
    label = Request(1, 11, method="ar", num_iter=2, num_sampling_steps=25, cfg=2.0)
    assert engine.check(Request(1)).family == "MAR"
    outputs = engine.generate([label, prompt])
    assert [output.request.family for output in outputs] == ["MAR", "VQ"]
    assert relative_error(outputs[0].tokens, engine.generate(label)[0].tokens) < 1e-5
    assert torch.equal(outputs[1].tokens, engine.generate(prompt)[0].tokens)
    with pytest.raises(ValueError):
        engine.check(Request(prompt=PROMPTS[0], family="MAR"))


@pytest.mark.parametrize("text", [{"prompt": "a red fox"}, {"label": 1, "negative_prompt": "a red fox"}], ids=str)
def test_class_conditional_models_take_no_prompt(text, small_mar):
    for models in (VQModels(**toy_models()), MARModels(small_mar)):
        with pytest.raises(ValueError, match="prompt"):
            Engine(models, device="cpu").check(Request(**text))


def test_prompts_need_a_compatible_encoder(models):
    without = Engine(VQModels(**models | {"text_encoder": None}), device="cpu")
    with pytest.raises(ValueError, match="prompt"):
        without.check(Request(prompt="a"))
    wide = Words()
    wide.width = 8
    with pytest.raises(ValueError):
        Engine(VQModels(**models | {"text_encoder": wide}), device="cpu")
    with pytest.raises(ValueError, match="num_classes"):
        Engine(VQModels(**models | {"draft": toy_models(11, 9)["draft"]}), device="cpu")
    large = Words()
    large.bytes_to_load = 2**60  # memory is checked before the encoder is loaded
    with pytest.raises(ValueError, match="free"):
        Engine(VQModels(**models | {"text_encoder": large}), max_batch=1, device="cpu")


# ---- Text-to-image models from their files, and `cspd sample` with prompts


NAMES = ["00000_text-a-red-fox_seed5.png", "00001_text-blue_seed6.png", "00002_text-a-red-fox_seed7.png"]


def run(*args):
    return main(["sample", "--device", "cpu", "--method", "ar", *map(str, args)])


def test_all_files_are_found(text_checkpoint):
    files = checkpoint_files(text_checkpoint)
    assert {name: file and file.name for name, file in files.items()} == {
        "target": "t2i_small.pt",
        "draft": None,
        "eagle": None,
        "tokenizer": "vq_ds16_t2i.pt",
        "text_encoder": "flan-t5-xl",
    }
    output = cspd.load(text_checkpoint, device="cpu").sample(prompts="a red fox", method="ar")
    assert output.image.shape == (3, 8, 8) and output.class_name == "a red fox"
    assert (output.request.cfg, output.request.top_k) == (3.0, 100)
    assert repr(output.request).startswith("Request(prompt='a red fox', seed=0, method='ar'")


def test_each_target_has_its_own_tokenizer(tmp_path):
    """With class-conditional and text-to-image models in one directory."""
    for name in ("c2i_B_256.pt", "t2i_XL_stage1_256.pt", "vq_ds16_c2i.pt", "vq_ds16_t2i.pt"):
        (tmp_path / name).touch()
    for kind, name in (("c2i", "c2i_B_256.pt"), ("t2i", "t2i_XL_stage1_256.pt")):
        assert checkpoint_files(tmp_path / name)["tokenizer"].name == f"vq_ds16_{kind}.pt"


@pytest.mark.parametrize("name, pixels", [("t2i_XL_stage1_256.pt", 256), ("t2i_XL_stage2_512.pt", 512)])
def test_official_settings(name, pixels, text_checkpoint, tmp_path):
    saved = torch.load(text_checkpoint / "t2i_small.pt", weights_only=False)
    torch.save({"model": saved["model"]}, tmp_path / name)
    assert load_gpt(tmp_path / name).config.block_size == (pixels // 2) ** 2  # the bundled tokenizer has a stride of 2
    defaults = defaults_of(replace(gpt_spec("llamagen_xl_t2i").config, block_size=(pixels // 16) ** 2))
    assert defaults == VQDefaults(cfg=7.5, top_k=1000, image_size=pixels)


def test_models_are_saved_and_loaded(text_checkpoint, tmp_path):
    engine = cspd.load(text_checkpoint, device="cpu")
    engine.save_pretrained(tmp_path / "saved")
    again = cspd.load(tmp_path / "saved", text_encoder=text_checkpoint / "t5-ckpt" / "flan-t5-xl", device="cpu")
    own, saved = (each.runner.models["target"].state_dict() for each in (engine, again))
    assert own.keys() == saved.keys() and all(torch.equal(own[name], saved[name]) for name in own)
    assert again.runner.text_encoder.identity == engine.runner.text_encoder.identity


def test_sample_prompts(text_checkpoint, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("A red fox!\n  blue\n\n")
    command = ["--checkpoint", text_checkpoint, "--prompts", prompts, "--num", 3, "--seed", 5, "--out", out]
    assert run(*command) == 0
    assert sorted(path.name for path in out.glob("0*.png")) == NAMES
    record = json.loads((out / "samples.json").read_text())
    assert [image["request"]["prompt"] for image in record["images"]] == ["A red fox!", "blue", "A red fox!"]
    assert len(record["settings"]["text_encoder"]) == 64
    first = (out / NAMES[0]).read_bytes()
    (out / NAMES[1]).unlink()
    assert run(*command) == 0
    assert "1 " in capsys.readouterr().out and (out / NAMES[0]).read_bytes() == first
    prompts.write_text("a red fox\nblue\n")
    assert run(*command) == 2
    assert "prompt" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::cspd.discrete.text.Truncated")
def test_long_captions_are_wrapped(text_checkpoint, tmp_path):
    """They make the grid of images higher, but not wider."""
    sizes = []
    for text in ("a fox", "a fox " * 40):
        out = tmp_path / str(len(text))
        assert run("--checkpoint", text_checkpoint, "--prompt", text, "--negative-prompt", "", "--out", out) == 0
        with Image.open(out / "grid.png") as grid:
            sizes.append(grid.size)
    assert sizes[0][0] == sizes[1][0] and sizes[0][1] < sizes[1][1]


def test_bad_commands(text_checkpoint, tmp_path, capsys):
    without_encoder = tmp_path / "without_encoder"
    without_encoder.mkdir()
    for name in ("t2i_small.pt", "vq_ds16_t2i.pt"):
        shutil.copy(text_checkpoint / name, without_encoder / name)
    cases = [
        (small_vq_checkpoint(), ["--prompt", "a"], "prompt"),
        ("digits32", ["--prompt", "a"], "prompt"),
        (text_checkpoint, [], "label"),
        (text_checkpoint, ["--labels", "none"], "prompt"),
        (text_checkpoint, ["--prompts", tmp_path / "none.txt"], "none.txt"),
        (without_encoder, ["--prompt", "a"], "text encoder"),
        (small_vq_checkpoint(), ["--text-encoder", tmp_path], "text_encoder"),
        ("digits32", ["--text-encoder", tmp_path], "text_enc"),
        (text_checkpoint, ["--prompt", "a", "--text-encoder", tmp_path], str(tmp_path)),
    ]
    for checkpoint, args, message in cases:
        assert run("--checkpoint", checkpoint, *args, "--out", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("cspd: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        run("--prompt", "a", "--labels", "1")


def test_tensors_decide_the_architecture(tmp_path):
    """Also in a file with the name of another model."""
    weights = create_gpt("gpt_digits32_draft").state_dict()
    torch.save({"model": weights}, tmp_path / "t2i_XL_stage1_256.pt")
    assert load_gpt(tmp_path / "t2i_XL_stage1_256.pt").config.num_classes == 10
    with pytest.raises(CheckpointError, match="gpt_digits32_draft"):
        load_gpt(tmp_path / "t2i_XL_stage1_256.pt", "llamagen_xl_t2i")
