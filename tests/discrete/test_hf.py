"""Models of `transformers`: their rounds and their directories."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch
from conftest import relative_error
from hf import (
    GUIDANCE,
    OF_CHAMELEON,
    PROMPTS,
    SIDE,
    WORDS,
    chameleon_decoder,
    drafter_of,
    generated,
    guided_logits,
    hf_of,
    model_of,
    plain_codes,
    saved,
    tokenizer_of,
)
from safetensors.torch import load_file, save_file
from texts import next_logits, running, uniforms
from toys import counts, draw, p_value, request_of, sequences, staggered

import cspd
from cspd import Engine, MARModels, Request, VQModels
from cspd import device as cspd_device
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from mar.tensors import CheckpointError

ARCHITECTURES = ["janus", "chameleon", "lumina_mgpt", "emu3"]
SLOW = pytest.mark.slow
METHODS = {  # with trees and windows that go beyond the end of a row and of the image
    "ar": {},
    "sd": {"gamma": 6},
    "eagle": {"gamma": 5, "coupling": "same-image"},
    "eagle2": {"gamma": 6},
    "sjd": {"window": 5},
    "mc-sjd": {"window": 9},
    "sjd-pac": {"window": 12, "pd_k": 3, "pd_d": 3},
    "gsd": {"window": 6},
    "speculative": {"window": 7, "draft": "jacobi"},
}
OTHERS = [name for name in METHODS if name not in ("ar", "sjd-pac")]
SAME = 1e-4  # p-values


class Case:
    """An architecture's tiny model, and an engine over it with a smaller draft model and an EAGLE drafter."""

    def __init__(self, architecture: str) -> None:
        self.model = model_of(architecture)
        self.target, self.texts, self.image = hf_of(self.model)
        draft = hf_of(model_of(architecture, seed=1, num_hidden_layers=1, hidden_size=16))[0]
        eagle = drafter_of(self.target)
        self.models = {"target": self.target, "draft": draft, "eagle": eagle, "text_encoder": self.texts}
        self.engine = Engine(VQModels(**self.models), max_batch=3, device="cpu")

    @functools.cached_property
    def generated(self):
        """Greedy codes by the model's own `generate`."""
        return [generated(self.model, self.image, self.prompts(own), own.cfg) for own in requests()]

    def prompts(self, request: Request):
        """The tokens of a request's prompt, and those of its unconditional branch."""
        own = self.texts.features(request.prompt, 99, None)
        if request.negative_prompt is not None:
            return own, self.texts.features(request.negative_prompt, 99, None)
        return own, self.texts.null(own, 99)


# Emu3 is in the fast set, since it has every feature: groups of query heads, a shared vocabulary, row ends
@pytest.fixture(scope="module", params=[*(pytest.param(name, marks=SLOW) for name in ARCHITECTURES[:3]), "emu3"])
def case(request):
    return Case(request.param)


def requests(method="ar", **changes):
    settings = {"cfg": GUIDANCE, "temperature": 1.0, "top_p": 1.0, "top_k": 0, **METHODS[method], **changes}
    return [Request(prompt=text, seed=i, method=method, **settings) for i, text in enumerate(PROMPTS)]


@pytest.mark.parametrize("method", ["ar", "sjd-pac", *(pytest.param(name, marks=SLOW) for name in OTHERS)])
def test_greedy_codes_are_those_of_its_own_generate(method, case):
    made = case.engine.generate(requests(method, temperature=0.0))
    for output, codes in zip(made, case.generated):
        assert torch.equal(output.tokens, codes)
        assert output.stats.backbone_calls <= len(codes)  # no forward pass for the end of a row


def test_sampled_codes_are_those_of_its_own_layers(case):
    """One by one and in a batch, with the request's own uniform draws, the last one with a negative prompt."""
    own = requests()
    own[2] = own[2].but(negative_prompt="lowres")
    for request, output in zip(own, staggered(case.engine, own)):
        draws = uniforms(request.seed, case.image.side**2)
        expected = plain_codes(case.model, case.image, case.prompts(request), request.cfg, draws)
        assert torch.equal(output.tokens, expected)
        alone = case.engine.generate([request])[0]
        assert torch.equal(alone.tokens, expected)


@pytest.mark.parametrize("method", [pytest.param("eagle", marks=SLOW), "eagle2"])
def test_drafted_images_are_those_of_ar(method, case):
    """Sampled, in a ragged batch, and some tokens are accepted; also with given rows."""
    own = requests(method)
    outputs = staggered(case.engine, own)
    for output, plain in zip(outputs, case.engine.generate(requests("ar"))):
        assert torch.equal(output.tokens, plain.tokens)
    assert sum(output.stats.backbone_calls for output in outputs) < len(own) * case.image.side**2
    for count in (4, 6):  # a whole row, and part of the next one
        given = {"image": outputs[0].tokens, "mask": torch.arange(case.image.side**2) >= count}
        assert torch.equal(case.engine.generate([own[0].but(**given)])[0].tokens, outputs[0].tokens)


@pytest.mark.parametrize("rounds", [(0, 3, 1), (4, 4, 4), (8, 2, 13)], ids=str)
def test_logits_in_slots_are_those_without_a_cache(rounds, case):
    """Three prompts of unequal length and unequal progress, some at the beginning of a row."""
    runner, started = running(case.models, [case.engine.resolve(request) for request in requests()], rounds)
    with torch.inference_mode():
        logits = next_logits(runner, started)
        for sequence in started:
            request = sequence.request
            codes = runner.tokens[sequence.slot, : sequence.num_committed].unsqueeze(0)
            expected = guided_logits(case.model, case.image, case.prompts(request), codes, request.cfg)[0]
            assert relative_error(logits[sequence.slot], expected) < 1e-5
    assert runner.cache("target").tensor.shape[3] == 2  # key heads, for four heads of queries


@pytest.mark.slow
def test_methods_side_by_side(case, small_mar):
    """Different methods, with and without guidance, in flight together with an image of a MAR."""
    engine = Engine(MARModels(small_mar), VQModels(**case.models), max_batch=3, device="cpu")
    own = [requests("sjd-pac")[2], requests("ar", cfg=1.0)[0], requests("sd")[1], requests("speculative")[0]]
    label = Request(1, method="ar", num_iter=3, num_sampling_steps=50, cfg=2.0)
    for request, output in zip(own, staggered(engine, [*own, label])):
        assert torch.equal(output.tokens, case.engine.generate([request])[0].tokens)


def distribution(model, image, prompts, cfg, codes):
    """The probability of every sequence, float64."""
    every = sequences(codes, image.side**2)
    total = torch.zeros(len(every), dtype=torch.float64)
    for i in range(every.shape[1]):
        log_p = guided_logits(model, image, prompts, every[:, :i], cfg).double().log_softmax(1)
        total += log_p.gather(1, every[:, i : i + 1])[:, 0]
    return total.exp()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sjd", "sjd-pac", "sd", "eagle"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whole_sequences_follow_its_distribution(architecture, method):
    """All 256 images of 2 times 2 tokens."""
    tiny = {"codes": 4, "side": 2}
    more = tiny | {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
    more |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = model_of(architecture, **more)
    target, texts, image = hf_of(model, **tiny)
    models = {"target": target, "text_encoder": texts, "eagle": drafter_of(target)}
    models["draft"] = hf_of(model_of(architecture, 1, **more), **tiny)[0]
    settings = {"window": 4, "pd_k": 2, "pd_d": 2} if method == "sjd-pac" else {"window": 3}
    settings = {"gamma": 3} if method in ("sd", "eagle") else settings
    request = request_of(method, label=None, prompt="blue", cfg=2.0, **settings)
    own = texts.features("blue", 99, None)
    expected = distribution(model, image, (own, texts.null(own, 99)), 2.0, 4)
    codes, _ = draw(models, request, 6000, batch=2000)
    assert p_value(counts(codes), expected) > SAME
    assert p_value(counts(codes), expected.roll(1)) < SAME  # it can fail


# ---- Directories of models


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function from the name of an architecture to its directory."""
    root = tmp_path_factory.mktemp("hf")
    return functools.cache(lambda name: saved(root, name))


def loaded(folder, **more):
    return cspd.load(folder, device="cpu", max_batch=2, **more)


def request(prompt=PROMPTS[0], **more):
    return cspd.Request(prompt=prompt, **{"method": "ar", "temperature": 0.0, "cfg": GUIDANCE, **more})


@pytest.mark.parametrize("name", ["janus", *(pytest.param(name, marks=SLOW) for name in ARCHITECTURES[1:])])
def test_a_directory(name, folder_of):
    """Tokens and pixels are those of the model that was saved, and the defaults those of its authors."""
    engine, model = loaded(folder_of(name)), model_of(name)
    output = engine.generate([request()])[0]
    if name not in OF_CHAMELEON:
        pooled = engine.generate([request(method="sjd", rule="lantern", k=3, delta=0.2, temperature=1.0)])[0]
        assert ((pooled.tokens >= 0) & (pooled.tokens < 16)).all()
    texts, image = hf_of(model)[1:]
    own = texts.features(PROMPTS[0], 99, None)
    assert torch.equal(output.tokens, generated(model, image, (own, texts.null(own, 99)), GUIDANCE))
    if name in OF_CHAMELEON:
        assert output.image.shape == (3, 2 * SIDE, 2 * SIDE)  # `test_chameleons_pixels` has their values
    else:
        codes = output.tokens.view(1, SIDE, SIDE)
        vq = model.model.vqmodel
        pixels = vq.decode(codes if name == "emu3" else codes.flatten(1))[0]
        assert torch.allclose(output.image, (pixels / 2 + 0.5).clamp(0, 1), atol=1e-5)
    defaults = {"janus": (5.0, 1.0, 0, 1.0), "chameleon": (3.0, 0.7, 0, 0.9), "emu3": (3.0, 1.0, 2048, 1.0)}
    defaults["lumina_mgpt"] = (4.0, 1.0, 2000, 1.0)
    filled = engine.check(cspd.Request(prompt="blue"))
    assert (filled.cfg, filled.temperature, filled.top_k, filled.top_p) == defaults[name]
    assert checkpoint_files(folder_of(name))["target"] == folder_of(name) / "config.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["janus", "chameleon", "emu3"])
def test_tokens_are_those_of_its_own_processor(name):
    import transformers

    tokenizer = tokenizer_of(name)
    images = {
        "janus": "JanusImageProcessorPil",
        "chameleon": "ChameleonImageProcessorPil",
        "emu3": "Emu3ImageProcessor",
    }
    options = {
        "janus": {"generation_mode": "image"},
        "chameleon": {},
        "emu3": {"return_for_image_generation": True, "image_area": (8 * SIDE) ** 2},
    }
    processor_class = getattr(transformers, f"{name.capitalize()}Processor")
    processor = processor_class(getattr(transformers, images[name])(), tokenizer)
    expected = processor(text=PROMPTS[0], return_tensors="pt", **options[name])["input_ids"][0].tolist()
    if name == "chameleon":  # its processor leaves the start of an image to the model
        expected.append(tokenizer.get_vocab()["<boi>"])
    texts = hf_of(model_of(name))[1]
    assert texts.features(PROMPTS[0], 99, None).tolist() == expected


def test_tokens_of_lumina_mgpt():
    """The authors' turn, the separator, and the beginning of an image of 8 by 8 pixels, 4 by 4 tokens."""
    texts = hf_of(model_of("lumina_mgpt"))[1]
    asked = "<s> Generate an image of 8x8 according to the following prompt :".split()
    begun = ["<boi>", "<reserved08802>", "<reserved08802>"]  # 8800 + 4 / 2
    expected = [*asked, "blue", "<reserved08706>", *begun]
    own = texts.features("blue", 99, None)
    assert texts.tokenizer.convert_ids_to_tokens(own.tolist()) == expected
    assert texts.tokenizer.convert_ids_to_tokens(texts.null(own, 99).tolist()) == begun


def test_a_chat_template_is_applied():
    texts = hf_of(model_of("janus"))[1]
    texts.tokenizer.chat_template = "{% for m in messages %}old {{ m['content'][0]['text'] }} ship{% endfor %}"
    numbers = texts.tokenizer.get_vocab()
    expected = [numbers[word] for word in ["<s>", "old", *PROMPTS[0].split(), "ship", "<boi>"]]
    assert texts.features(PROMPTS[0], 99, None).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bf16(name, folder_of):
    engine = loaded(folder_of(name), precision="bf16")
    runner = engine.runner
    outputs = engine.generate([request(method=method, temperature=1.0) for method in ("ar", "sjd-pac")])
    assert all(((output.tokens >= 0) & (output.tokens < 16)).all() for output in outputs)
    parameters = runner.target.named_parameters()
    types = {each.dtype for name, each in parameters if each.dim() == 2 and "vqmodel" not in name}
    assert types == {torch.bfloat16} == {runner.cache("target").tensor.dtype}
    assert runner.precision.prepare(runner.target) is runner.target


@pytest.mark.slow
def test_weights_keep_their_type(tmp_path):
    engine = loaded(saved(tmp_path, "janus", dtype=torch.bfloat16))
    assert engine.runner.target.own_type == torch.bfloat16
    assert engine.runner.models["tokenizer"].vqmodel.dtype == torch.float32
    assert engine.generate([request()])[0].image.shape == (3, 2 * SIDE, 2 * SIDE)


@pytest.mark.slow
def test_a_draft_model(folder_of, tmp_path):
    small = saved(tmp_path, "emu3", seed=1, num_hidden_layers=1, hidden_size=16)
    engine = loaded(folder_of("emu3"), draft=small)
    made = engine.generate([request(method="sd", gamma=3)])[0]
    assert torch.equal(made.tokens, engine.generate([request()])[0].tokens)
    assert made.stats.draft_backbone_calls > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_CHAMELEON)
def test_chameleons_pixels(name, folder_of, tmp_path):
    folder = shutil.copytree(folder_of(name), tmp_path / "with" / folder_of(name).name)
    vq_model = model_of(name).model.vqmodel
    if name == "chameleon":
        decoder, before = chameleon_decoder(folder / "vqgan.ckpt", {"encoder.other": torch.ones(1)})
    else:  # the weights of Lumina-mGPT lack the VQ model
        decoder, before = chameleon_decoder(folder / "vqgan.ckpt", vq_model.state_dict())
        weights = load_file(folder / "model.safetensors")
        without = {key: value for key, value in weights.items() if "vqmodel" not in key}
        save_file(without, folder / "model.safetensors", metadata={"format": "pt"})
    engine = loaded(folder)
    output = engine.generate([request()])[0]
    vectors = vq_model.quantize.embedding.weight[output.tokens]
    pixels = decoder(before(vectors.T.view(1, 8, SIDE, SIDE)))[0]
    assert torch.allclose(output.image, (pixels / 2 + 0.5).clamp(0, 1), atol=1e-5)
    (folder / "vqgan.ckpt").rename(tmp_path / "vqgan.ckpt")
    elsewhere = loaded(folder, vae=tmp_path / "vqgan.ckpt")
    assert torch.equal(elsewhere.generate([request()])[0].image, output.image)
    with pytest.raises(CheckpointError, match=r"vqgan\.ckpt"):
        loaded(folder)
    save_file({"decoder.conv_in.weight": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError):
        loaded(folder_of(name), vae=tmp_path / "other.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes, told",
    [
        ("janus", {"model_type": "qwen9"}, "qwen9"),
        ("chameleon", {"vocabulary_map": {"<image>": 7}}, "vocabulary_map"),
        ("chameleon", {"max_position_embeddings": 16}, "max_position_embeddings"),
        ("lumina_mgpt", {}, "Lumina-mGPT"),  # in a directory of another name
    ],
)
def test_bad_configurations(name, changes, told, folder_of, tmp_path):
    folder = shutil.copytree(folder_of(name), tmp_path / "folder")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=told):
        loaded(folder)


def changed(folder, name, **changes):
    """A folder with some settings of a file replaced."""
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | changes))
    return folder


@pytest.mark.parametrize(
    "name, settings",
    [
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}),
        ("config.json", {"auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}),
    ],
)
def test_code_in_a_directory_is_neither_run_nor_asked_about(name, settings, folder_of, tmp_path, monkeypatch):
    folder = changed(shutil.copytree(folder_of("janus"), tmp_path / "janus"), name, **settings)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail("asked"))
    try:
        loaded(folder)
    except CheckpointError as refused:
        assert "trust" not in str(refused)
    assert not (tmp_path / "trap").exists()


def test_chameleon_without_its_decoder_is_refused_before_its_weights_are_read(folder_of, tmp_path, monkeypatch):
    folder = shutil.copytree(folder_of("chameleon"), tmp_path / "chameleon")
    (folder / "vqgan.ckpt").unlink()
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *args, **more: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=r"vqgan\.ckpt"):
        loaded(folder)


TEXT = {
    "no heads": {"num_attention_heads": 0},
    "text in place of a number": {"hidden_size": "32"},
    "too many layers": {"num_hidden_layers": 10**9},
    "fewer layers than its weights": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("what", TEXT)
def test_absurd_configurations(what, folder_of, tmp_path):
    folder = shutil.copytree(folder_of("janus"), tmp_path / "janus")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    changed(folder, "config.json", text_config=text | TEXT[what])
    with pytest.raises(CheckpointError, match=f"{folder}|num_hidden_layers"):
        loaded(folder)


def test_more_codes_than_any_vocabulary_has(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("chameleon"), tmp_path / "chameleon")
    vq = json.loads((folder / "config.json").read_text())["vq_config"]
    with pytest.raises(CheckpointError, match="vocabulary_map"):
        loaded(changed(folder, "config.json", vq_config=vq | {"num_embeddings": 10**15}))


@pytest.mark.parametrize("dtype", ["float7", "int8", 5, {"text_config": "float16"}])
def test_odd_types_in_a_configuration(dtype, folder_of, tmp_path):
    folder = changed(shutil.copytree(folder_of("janus"), tmp_path / "janus"), "config.json", dtype=dtype)
    with pytest.raises(CheckpointError, match=str(folder)):
        loaded(folder)


def test_values_of_a_directory_that_are_not_finite(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("janus"), tmp_path / "janus")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="NaN"):
        loaded(folder)


@pytest.mark.slow
def test_bad_files_and_arguments(folder_of, tmp_path):
    for name, told in (("tokenizer.json", "tokenizer"), ("model.safetensors", "weights")):
        folder = shutil.copytree(folder_of("emu3"), tmp_path / told)
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=told):
            loaded(folder)
    for name, value in {"arch": "vq16", "text_encoder": "t5", "compiled": True, "vae": "vae.ckpt"}.items():
        with pytest.raises(ValueError, match=name):
            loaded(folder_of("janus"), **{name: value})
    with pytest.raises(CheckpointError):
        loaded(folder_of("janus"), draft=tmp_path / "nothing")
    with pytest.raises(ValueError):
        loaded(folder_of("janus"), draft=folder_of("emu3"))


@pytest.mark.slow
def test_a_run_is_resumed_with_the_same_files_only(folder_of, tmp_path, capsys):
    """The weights of the target and of a draft model are compared too."""
    target, draft = (shutil.copytree(folder_of("emu3"), tmp_path / name) for name in ("target", "draft"))
    command = ["sample", "--checkpoint", target, "--draft-checkpoint", draft, "--method", "sd", "--gamma", 3]
    command += ["--prompt", "blue", "--device", "cpu", "--out", tmp_path / "out"]
    for _ in range(2):
        assert main([*map(str, command)]) == 0
    assert capsys.readouterr().out
    for folder in (draft, target):
        weights = folder / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole)  # changes the time of the file only
        assert main([*map(str, command)]) == 0
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert main([*map(str, command)]) == 2
        assert "folder" in capsys.readouterr().err
        weights.write_bytes(whole)


def test_memory_is_checked_before_weights_are_read(folder_of, monkeypatch):
    monkeypatch.setattr(cspd_device, "free_bytes", lambda device: 2**16)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *args, **more: pytest.fail("read"))
    with pytest.raises(ValueError, match="--precision bf16"):
        loaded(folder_of("janus"))
    with pytest.raises(ValueError, match="max_batch") as caught:
        loaded(folder_of("janus"), precision="bf16")
    assert "--precision" not in str(caught.value)


def test_bad_requests(folder_of):
    engine = loaded(folder_of("janus"))
    long = " ".join(WORDS * 9)
    for bad in (request(long), request(negative_prompt=long), cspd.Request(3)):
        with pytest.raises(ValueError):
            engine.check(bad)
    engine.runner.text_encoder.tokenizer.pad_token = None
    with pytest.raises(ValueError, match="negative_prompt"):
        engine.check(request())
    as_advised = [request(cfg=1.0), request(negative_prompt="blue")]
    assert len(engine.generate(as_advised)) == 2
