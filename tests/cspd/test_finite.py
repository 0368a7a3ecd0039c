"""Numbers that are not finite are an error of the request that has them: it is named, and no other is harmed."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stores import CACHE, small_checkpoint
from toys import toy_models

from cspd import Engine, MARModels, Request, VQModels, noise
from cspd.cli import main
from cspd.masked.orders import cosine
from cspd.method import method_names
from mar.checkpoint import create_vae

QUICK = {"num_iter": 4, "num_sampling_steps": 4, "family": "MAR"}
OF_MAR = [
    {"method": "ar"},
    {"method": "speculative", "window": 3, "draft": "frozen"},
    {"method": "speculative", "window": 3},
    {"method": "cspd", "gamma": 8, "prefill": 0.8},
    {"method": "cspd", "gamma": 4, "prefill": 0.8, "verify": "sequential"},
    {"method": "cspd", "gamma": 8, "prefill": 0.8, "chains": "speculative", "window": 3, "draft": "frozen"},
]
OF_VQ = [{"method": name} for name in method_names(["VQ"]) if name != "speculative"]
OF_VQ = [each | ({"window": 7, "pd_k": 3, "pd_d": 2} if each["method"] == "sjd-pac" else {}) for each in OF_VQ]
OF_VQ += [{"method": "speculative", "window": 5, "draft": draft} for draft in ("jacobi", "eagle-dynamic")]
OF_VQ += [{"method": name, "temperature": 0} for name in ("ar", "sd", "eagle", "eagle2", "sjd")]
BAD = 2  # the label whose weights are damaged


def planted(embedding, value):
    """The class embedding's weights with one label's replaced."""
    with torch.inference_mode(False), torch.no_grad():
        embedding.weight[BAD] = value


def outputs_by_label(engine, requests):
    """All outputs, failed ones too, of requests that differ in their labels."""
    for request in requests:
        engine.add_request(request)
    made = {}
    while len(engine.scheduler):
        made |= {output.request.label: output for output in engine.step().values()}
    return made


@pytest.fixture(scope="module", params=[math.nan, pytest.param(1e30, marks=pytest.mark.slow)], ids=str)
def damaged_mar(request, small_mar):
    model = copy.deepcopy(small_mar)
    planted(model.class_emb, request.param)
    return MARModels(model, copy.deepcopy(small_mar))


@pytest.mark.parametrize("settings", OF_MAR, ids=str)
def test_a_damaged_label_of_mar_harms_no_other(settings, damaged_mar):
    requests = [Request(label, seed=label, **QUICK, **settings) for label in (0, 1, BAD, 4)]
    made = outputs_by_label(Engine(damaged_mar, max_batch=4, device="cpu"), requests)
    error = made.pop(BAD).error
    without = outputs_by_label(Engine(damaged_mar, max_batch=4, device="cpu"), requests[:2] + requests[3:])
    for label, output in made.items():
        expected = without[label].tokens
        assert output.error is None
        assert (output.tokens - expected).abs().max() < 1e-3 * expected.abs().max()
    assert "label" in error


@pytest.fixture(scope="module")
def damaged_vq():
    models = toy_models(codes=9, length=16)
    planted(models["target"].cls_embedding.embedding_table, math.nan)
    return models


@pytest.mark.parametrize("settings", OF_VQ, ids=str)
def test_a_damaged_label_of_vq_harms_no_other(settings, damaged_vq):
    """Neither beside it, nor after it in its slot."""
    engine = Engine(VQModels(**damaged_vq), max_batch=3, device="cpu")
    requests = [Request(label, seed=label, family="VQ", **settings) for label in (0, BAD, 1)]
    made = outputs_by_label(engine, requests)
    assert made[BAD].error
    assert made[BAD].image is None and (made[BAD].tokens == -1).all()
    good = [requests[0], requests[2], *(Request(0, seed=9 + i, family="VQ", **settings) for i in range(3))]
    afterwards = engine.generate(good[2:])
    undisturbed = Engine(VQModels(**damaged_vq), max_batch=5, device="cpu").generate(good)
    for output, expected in zip([made[0], made[1], *afterwards], undisturbed):
        assert output.error is None and torch.equal(output.tokens, expected.tokens)


def test_a_damaged_draft_only_drafts_nothing(small_mar):
    """The target decides alone."""
    models = toy_models(codes=9, length=16)
    planted(models["draft"].cls_embedding.embedding_table, math.nan)
    draft = copy.deepcopy(small_mar)
    planted(draft.class_emb, math.nan)
    engine = Engine(VQModels(**models), MARModels(small_mar, draft), max_batch=2, device="cpu")
    requests = [Request(BAD, seed=1, method="sd"), Request(BAD, seed=1, method="cspd", **QUICK)]
    for output in engine.generate(requests):
        assert output.error is None and output.stats.alpha == 0


@pytest.mark.parametrize("settings", [{"cfg": 1e38}, {"temperature": 1e20}], ids=str)
def test_settings_that_explode_name_the_place(settings, small_mar):
    engine = Engine(MARModels(small_mar, vae=create_vae("kl_digits32")), max_batch=2, device="cpu")
    good, bad = Request(1, seed=5, method="ar", **QUICK), Request(2, seed=7, method="ar", **QUICK, **settings)
    seen = []
    with pytest.raises(FloatingPointError) as caught:
        for index, output in engine.stream([bad, good, bad, good]):
            seen.append(index)
            assert output.image.isfinite().all()
    assert sorted(seen) == [1, 3]
    message = str(caught.value)
    assert "0, 2" in message and "label=2" in message
    with pytest.raises(FloatingPointError):
        engine.generate([bad] * 5)
    assert len(engine.generate(good)) == 1


def test_the_place_is_the_first_token_in_generation_order(small_mar):
    """Step noise becomes infinite at one position: the iteration is the one that the schedule has it in."""

    class OneBad:
        initial, order = staticmethod(noise.initial), staticmethod(noise.order)

        @staticmethod
        def steps(seed, position, step, channels, index):
            drawn = noise.steps(seed, position, step, channels, index)
            return torch.where((position == 37).unsqueeze(-1), torch.inf, drawn)

    engine = Engine(MARModels(small_mar), max_batch=1, device="cpu", noise=OneBad())
    output = outputs_by_label(engine, [Request(1, seed=3, method="ar", **QUICK)])[1]
    rank = noise.order(torch.tensor([3]), 64)[0].tolist().index(37)
    after, _ = cosine(4, 64)
    iteration = 1 + sum(64 - left <= rank for left in after.tolist())
    assert iteration > 1 and f"token {rank + 1} of 64 in generation order, in iteration {iteration}:" in output.error


@pytest.mark.parametrize("bias", [math.nan, math.inf])
def test_an_image_that_is_not_finite_is_the_autoencoders(bias, small_mar):
    torch.manual_seed(0)
    vae = create_vae("kl_digits32")
    with torch.no_grad():
        vae.decoder.conv_out.bias.fill_(bias)
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=1, device="cpu")
    output = outputs_by_label(engine, [Request(3, method="ar", **QUICK)])[3]
    assert output.image is None and "look at the autoencoder's weights" in output.error


def test_huge_is_not_an_error(small_mar):
    torch.manual_seed(0)
    vae = create_vae("kl_digits32")
    with torch.no_grad():
        vae.decoder.conv_out.bias.fill_(1e30)
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=1, device="cpu")
    assert (engine.generate(Request(3, method="ar", **QUICK))[0].image == 1).all()  # white


@pytest.fixture(scope="module")
def damaged_checkpoint():
    """A small checkpoint, label 2 of which makes no image."""
    folder = CACHE / "damaged_mar"
    folder.mkdir()
    source = Path(small_checkpoint())
    weights = load_file(source / "target.safetensors")
    weights["class_emb.weight"] = weights["class_emb.weight"].float()
    weights["class_emb.weight"][BAD] = 1e30
    save_file(weights, folder / "target.safetensors")
    (folder / "vae.safetensors").write_bytes((source / "vae.safetensors").read_bytes())
    return str(folder)


@pytest.mark.parametrize("command", ["sample", "evaluate", "compare"])
def test_commands_say_so_in_one_line(command, damaged_checkpoint, tmp_path, capfd):
    settings = ["--checkpoint", damaged_checkpoint, "--device", "cpu", "--num-iter", "2", "--num-sampling-steps", "2"]
    method = ["--methods", "ar"] if command == "compare" else ["--method", "ar"]
    run = [command, *settings, *method, "--labels", "1-3", "--num", "3", "--out", str(tmp_path)]
    assert main(run) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("cspd: ") and "label=2" in said
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    if command == "sample":
        assert {"00000_label1_seed0.png", "00002_label3_seed2.png"} <= names
        assert "00001_label2_seed1.png" not in names
    else:
        assert not any(name.endswith(".npz") for name in names)
