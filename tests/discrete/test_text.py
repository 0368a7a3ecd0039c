"""Text-to-image models and their text encoder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import relative_error
from graphs import replayed
from PIL import Image
from stores import small_vq_checkpoint
from texts import MOST, PROMPTS, Words, conditions, plain_codes, plain_guided, plain_logits, running, text_models
from toys import LENGTH, counts, draw, p_value, request_of, sequences, staggered, toy_models

import cspd
from cspd import Engine, MARModels, Request, VQModels, noise
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.discrete.drafts import _eagle_root
from cspd.discrete.registry import SamplingDefaults, create_gpt, defaults_of, gpt_spec, load_gpt
from cspd.discrete.rules import Filter, guide, probabilities
from cspd.noise import Purpose
from mar.tensors import CheckpointError

OTHER = "a grey sky over it"  # a negative prompt
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
    """One of each prompt, the last with a negative prompt."""
    settings = {"cfg": 2.5} | METHODS[method] | changes
    own = [request_of(method, label=None, prompt=text, seed=i, **settings) for i, text in enumerate(PROMPTS)]
    return [*own[:2], own[2].but(negative_prompt=OTHER)]


def test_a_whole_sequence(models):
    codes = torch.arange(8)
    for request in requests():
        for features, present in conditions(models["target"], request):
            expected = plain_logits(models["target"], features, present, codes)
            logits = models["target"](features[present].unsqueeze(0), codes.unsqueeze(0))[0]
            assert relative_error(logits, expected) < 1e-5


def test_a_padded_batch(models):
    """As texts are trained on: of unequal lengths, padded at the left, some replaced by the null caption."""
    codes = torch.arange(8)
    both = [condition for request in requests()[:2] for condition in conditions(models["target"], request)]
    features, present = (torch.stack(each) for each in zip(*both))
    logits = models["target"](features, codes.expand(4, -1), present)
    for own, condition in zip(logits, both):
        assert relative_error(own, plain_logits(models["target"], *condition, codes)) < 1e-5


@pytest.mark.parametrize("rounds", [(0, 3, 1), (2, 2, 2)], ids=str)
def test_a_ragged_batch(rounds, models):
    """Three texts of unequal length, each as far as it is, by one forward."""
    runner, started = running(models, requests(), rounds)
    with torch.inference_mode():
        batch = runner.batch_of(sorted(started, key=lambda sequence: sequence.slot))
        features = runner.features(batch, runner.last(batch, 1)[0])
        logits = guide(runner.target.output(features), batch.scale)[:, 0]
    for sequence in started:
        codes = runner.tokens[sequence.slot, : sequence.num_committed]
        expected = plain_guided(models["target"], sequence.request, codes)[-1]
        assert relative_error(logits[sequence.slot], expected) < 1e-5


def test_eagles_drafter_sees_the_text(models):
    """What it says at the root is what it says of the whole sequence, its inputs joined with the target's features."""
    runner, started = running(models, requests("eagle"), (0, 2, 1))
    target, drafter = models["target"], models["eagle"]
    with torch.inference_mode():
        batch = runner.batch_of(sorted(started, key=lambda sequence: sequence.slot))
        root = _eagle_root(runner, batch, 3)
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
    """The codes that the formulas make of `requests`: the likeliest, and by the requests' own draws with top-k."""
    place, none = torch.arange(9), torch.zeros(1, dtype=torch.int64)
    made = {"greedy": [], "sampled": []}
    for request in requests():
        u = noise.fine_uniform(torch.tensor(request.seed), Purpose.CODE, place, none, none)
        made["greedy"].append(plain_codes(models["target"], request))
        made["sampled"].append(plain_codes(models["target"], request.but(top_k=6), u))
    return made


@pytest.mark.parametrize("method", METHODS)
def test_codes_are_the_formulas(method, engine, formulas):
    """Of texts that join one after the other; greedy, and sampled by every method with same-image coupling."""
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


def test_a_draft_that_is_the_target_is_always_right(models):
    """It sees the text, the null caption and negative prompts too."""
    same = Engine(VQModels(**models | {"draft": models["target"]}), max_batch=3, device="cpu")
    for output in same.generate(requests("sd")):
        assert output.stats.alpha == 1


def test_others_beside_it_change_nothing(engine):
    """Texts of all lengths, guided or not, of several methods; slots are used again, and some codes are known."""
    asked = []
    for seed in range(8):
        method = ("ar", "eagle", "sd")[seed % 3]
        text = " ".join(str(number) for number in range(1 + seed % MOST))
        negative = {"negative_prompt": OTHER} if seed % 4 == 3 else {}
        known = {"image": torch.arange(9), "mask": torch.arange(9) >= seed - 4} if seed > 5 else {}
        cfg = 1.0 if seed % 4 == 2 else 3.0
        asked.append(Request(prompt=text, seed=seed, method=method, cfg=cfg, **METHODS[method], **negative, **known))
    alone = engine.with_slots(1)
    for request, output in zip(asked, engine.generate(asked)):
        assert torch.equal(output.tokens, alone.generate(request)[0].tokens)


def test_texts_and_classes_in_flight_together(models, small_mar):
    """Texts of three lengths by several methods, and a MAR's classes between them: each image is what it is alone."""
    engine = Engine(MARModels(small_mar), VQModels(**models), max_batch=3, device="cpu")
    quick = {"method": "ar", "num_iter": 2, "num_sampling_steps": 25, "cfg": 2.0}
    texts = [requests("sd")[0], requests("sjd-pac")[1], requests("eagle2")[2]]
    texts += [Request(prompt=PROMPTS[1], seed=7, method="ar", family="VQ")]
    asked = [Request(1, 11, **quick), *texts[:2], Request(3, 12, family="MAR", **quick), *texts[2:]]
    alone = engine.with_slots(1)
    for request, output in zip(asked, staggered(engine, asked)):
        single = alone.generate(request)[0]
        assert output.stats.backbone_calls == single.stats.backbone_calls
        if request.prompt is None:
            assert relative_error(output.tokens, single.tokens) < 1e-5
        else:
            assert torch.equal(output.tokens, single.tokens) and output.class_name == request.prompt


@pytest.mark.parametrize("method", ["eagle", "sjd-pac"])
def test_rounds_as_graphs_that_are_counted_late(method, models, engine):
    graphed = Engine(VQModels(**models), max_batch=3, device="cpu")
    graphed.runner.graphs, graphed.runner.late = replayed(), True
    asked = requests(method)
    for output, plain in zip(staggered(graphed, asked), engine.generate(asked)):
        assert torch.equal(output.tokens, plain.tokens)


def p_of(method, num, **changes):
    """Of a test that sequences follow the target's distribution, by the whole sequences' own probabilities."""
    models = text_models(codes=4, length=LENGTH, n_layer=1)
    request = request_of(method, **METHODS[method] | changes, label=None, prompt=PROMPTS[0])
    every = sequences()
    halves = []
    for features, present in conditions(models["target"], request):
        own = features[present].expand(len(every), -1, -1)
        halves.append(models["target"](own, every[:, :-1]))
    ones = torch.ones(len(every))
    logits = guide(torch.stack(halves), request.cfg * ones)
    kept = Filter(torch.tensor([request.top_k]), torch.tensor([2.0]), request.top_k) if request.top_k else None
    P = probabilities(logits, request.temperature * ones, kept)
    expected = P.double().gather(-1, every.unsqueeze(-1)).squeeze(-1).prod(1)
    return p_value(counts(draw(models, request, num)[0]), expected)


@pytest.mark.parametrize(
    "method, num, changes",
    [
        ("sjd-pac", 800, {"top_k": 3}),
        *[pytest.param(method, 5_000, {}, marks=pytest.mark.slow) for method in METHODS],
        *[pytest.param(method, 5_000, {"negative_prompt": OTHER}, marks=pytest.mark.slow) for method in METHODS],
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
    outputs = engine.sample(prompts=PROMPTS[:2], seed=3, method="ar", negative_prompt=OTHER)
    asked = [(output.request.prompt, output.request.seed, output.request.negative_prompt) for output in outputs]
    assert asked == [(PROMPTS[0], 3, OTHER), (PROMPTS[1], 4, OTHER)]
    (again,) = engine.sample(prompts=PROMPTS[1], seed=4, method="ar", negative_prompt=OTHER)
    assert torch.equal(again.tokens, outputs[1].tokens)


BAD = {
    "a class": (Request(3), "label"),
    "nothing": (Request(), "prompt"),
    "both": (Request(3, prompt="a"), "label"),
    "no text": (Request(prompt=5), "prompt"),
    "no negative text": (Request(prompt="a", negative_prompt=b"b"), "negative_prompt"),
    "nothing to lead away from": (Request(prompt="a", negative_prompt="b", cfg=1.0), "negative_prompt"),
}


@pytest.mark.parametrize("request_, told", BAD.values(), ids=BAD)
def test_what_is_no_request_of_a_text(request_, told, engine):
    with pytest.raises(ValueError, match=told):
        engine.check(request_)


@pytest.mark.parametrize("first", [0, 1])
def test_a_request_goes_to_the_models_that_take_what_it_gives(first, models, small_mar):
    both = [MARModels(small_mar), VQModels(**models)]
    engine = Engine(both[first], both[1 - first], max_batch=1, device="cpu")
    assert engine.check(Request(prompt=PROMPTS[0], method="ar")).family == "VQ"
    assert engine.check(Request(1, method="ar")).family == engine.check(Request(1)).family == "MAR"
    with pytest.raises(ValueError):
        engine.check(Request(prompt=PROMPTS[0], family="MAR"))


@pytest.mark.parametrize("text", [{"prompt": "a red fox"}, {"label": 1, "negative_prompt": "a red fox"}], ids=str)
def test_models_of_classes_take_no_text(text, small_mar):
    for models in (VQModels(**toy_models()), MARModels(small_mar)):
        with pytest.raises(ValueError, match="prompt"):
            Engine(models, device="cpu").check(Request(**text))


def test_a_text_needs_an_encoder_that_fits(models):
    without = Engine(VQModels(**models | {"text_encoder": None}), device="cpu")
    with pytest.raises(ValueError, match="prompt"):
        without.check(Request(prompt="a"))
    wide = Words()
    wide.width = 8
    with pytest.raises(ValueError):
        Engine(VQModels(**models | {"text_encoder": wide}), device="cpu")
    with pytest.raises(ValueError, match="num_classes"):
        Engine(VQModels(**models | {"draft": toy_models(11, 9)["draft"]}), device="cpu")


def test_room_for_the_text_encoder():
    """It is loaded when a text comes; that it fits is known before."""
    encoder = Words()
    encoder.bytes_to_load = 2**60
    with pytest.raises(ValueError):
        Engine(VQModels(**text_models() | {"text_encoder": encoder}), max_batch=1, device="cpu")


# ---- Models of texts from their files, and `cspd sample` of prompts: folders, names, resuming, errors


NAMES = ["00000_text-a-red-fox_seed5.png", "00001_text-blue_seed6.png", "00002_text-a-red-fox_seed7.png"]


@pytest.fixture(scope="module")
def folder(text_checkpoint):
    return text_checkpoint


def run(*args):
    return main(["sample", "--device", "cpu", "--method", "ar", *map(str, args)])


def test_all_files_are_found(folder):
    files = checkpoint_files(folder)
    assert {name: file and file.name for name, file in files.items()} == {
        "target": "t2i_small.pt",
        "draft": None,
        "eagle": None,
        "tokenizer": "vq_ds16_t2i.pt",
        "text_encoder": "flan-t5-xl",
    }
    (output,) = cspd.load(folder, device="cpu").sample(prompts="a red fox", method="ar")
    assert output.image.shape == (3, 8, 8) and output.class_name == "a red fox"
    assert (output.request.cfg, output.request.top_k) == (3.0, 100)
    assert repr(output.request).startswith("Request(prompt='a red fox', seed=0, method='ar'")


def test_each_target_has_its_own_tokenizer(folder, tmp_path):
    """Where models of classes and of texts lie side by side."""
    for name in ("c2i_B_256.pt", "t2i_XL_stage1_256.pt", "vq_ds16_c2i.pt", "vq_ds16_t2i.pt"):
        (tmp_path / name).touch()
    for kind, name in (("c2i", "c2i_B_256.pt"), ("t2i", "t2i_XL_stage1_256.pt")):
        assert checkpoint_files(tmp_path / name)["tokenizer"].name == f"vq_ds16_{kind}.pt"


@pytest.mark.parametrize("name, pixels", [("t2i_XL_stage1_256.pt", 256), ("t2i_XL_stage2_512.pt", 512)])
def test_published_settings(name, pixels, folder, tmp_path):
    shutil.copy(folder / "t2i_small.pt", tmp_path / name)
    assert load_gpt(tmp_path / name).config.block_size == (pixels // 2) ** 2  # of the bundled tokenizer's stride of 2
    defaults = defaults_of(replace(gpt_spec("llamagen_xl_t2i").config, block_size=(pixels // 16) ** 2))
    assert defaults == SamplingDefaults(cfg=7.5, top_k=1000, image_size=pixels)


def test_models_are_saved_and_loaded(folder, tmp_path):
    engine = cspd.load(folder, device="cpu")
    engine.save_pretrained(tmp_path / "saved")
    again = cspd.load(tmp_path / "saved", text_encoder=folder / "t5-ckpt" / "flan-t5-xl", device="cpu")
    own, saved = (each.runner.models["target"].state_dict() for each in (engine, again))
    assert own.keys() == saved.keys() and all(torch.equal(own[name], saved[name]) for name in own)
    assert again.runner.text_encoder.identity == engine.runner.text_encoder.identity


def test_prompts_into_a_folder(folder, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("A red fox!\n  blue\n\n")
    command = ["--checkpoint", folder, "--prompts", prompts, "--num", 3, "--seed", 5, "--out", out]
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


def test_long_captions_are_wrapped(folder, tmp_path):
    """The grid is higher by as many lines, and no wider."""
    heights = []
    for text in ("a fox", "a fox " * 40):
        out = tmp_path / str(len(text))
        with pytest.warns() if len(text) > 9 else pytest.MonkeyPatch.context():
            assert run("--checkpoint", folder, "--prompt", text, "--negative-prompt", "", "--out", out) == 0
        with Image.open(out / "grid.png") as grid:
            heights.append(grid.size)
    assert heights[0][0] == heights[1][0] and heights[0][1] < heights[1][1]


def test_bad_commands(folder, tmp_path, capsys):
    (tmp_path / "no_encoder").mkdir()
    for name in ("t2i_small.pt", "vq_ds16_t2i.pt"):
        shutil.copy(folder / name, tmp_path / "no_encoder" / name)
    told = {
        ("--checkpoint", small_vq_checkpoint(), "--prompt", "a"): "prompt",
        ("--checkpoint", "digits32", "--prompt", "a"): "prompt",
        ("--checkpoint", folder): "label",
        ("--checkpoint", folder, "--labels", "none"): "prompt",
        ("--checkpoint", folder, "--prompt", "a", "--negative-prompt", "b", "--cfg", 1): "negative_prompt",
        (
            "--checkpoint",
            folder,
            "--prompts",
            tmp_path / "none.txt",
        ): "none.txt",
        ("--checkpoint", tmp_path / "no_encoder", "--prompt", "a"): "text encoder",
        ("--checkpoint", small_vq_checkpoint(), "--text-encoder", tmp_path): "text_encoder",
        ("--checkpoint", "digits32", "--text-encoder", tmp_path): "text_enc",
        ("--checkpoint", folder, "--prompt", "a", "--text-encoder", tmp_path): str(tmp_path),
    }
    for args, message in told.items():
        assert run(*args, "--out", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("cspd: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        run("--prompt", "a", "--labels", "1")


def test_a_checkpoint_of_another_architecture(folder, tmp_path):
    weights = create_gpt("gpt_digits32_draft").state_dict()
    torch.save({"model": weights}, tmp_path / "t2i_XL_stage1_256.pt")
    assert load_gpt(tmp_path / "t2i_XL_stage1_256.pt").config.num_classes == 10  # known by its tensors
    with pytest.raises(CheckpointError, match="gpt_digits32_draft"):
        load_gpt(tmp_path / "t2i_XL_stage1_256.pt", "llamagen_xl_t2i")
    assert Path(folder / "t2i_small.pt").exists()
