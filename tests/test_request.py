"""Requests: bad settings, the given part of an image, and values that are not finite."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import json
import math
import os
import pickle
import re
import resource
import shutil
import sys
import types
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import standin
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from stores import small_checkpoint
from toys import toy_models

from cspd import Engine, MARModels, Request, VQModels, noise
from cspd.cli import main
from cspd.device import Precision, all_bytes, describe, free_bytes, peak_bytes, pick_device, precision_of
from cspd.inpainting import Inpainting, Resized, placed
from cspd.masked.orders import cosine
from cspd.masked.runner import MARRunner, bytes_per_slot, check_memory, usual_tokens
from cspd.method import choose, find, method_names, parse_method, with_method
from cspd.request import RoundStats
from mar.checkpoint import MARS, create_mar, create_vae, defaults_of
from mar.model import MAR, MARConfig
from mar.vae import AutoencoderKL, KLConfig

SPEC = MARS["mar_digits32_draft"]  # 64 tokens, 10 classes
QUICK = {"method": "ar", "num_iter": 4, "num_sampling_steps": 3}
TINY = dict(embed_dim=8, depth=1, num_heads=1, class_num=3, buffer_size=1, diffloss_w=8, diffloss_d=1)
nan, inf = math.nan, math.inf

OF_MAR = method_names(["MAR"])
BAD = {
    "label": (-1, 10, True, 1.5, "3", []),
    "seed": (-1, 2**63, 0.5, {}),
    "num_iter": (0, 65, 8.0, True),
    "num_sampling_steps": (1, 1001, 10.5),
    "cfg": (nan, -1, inf, "3", True, [], 1j, 1e39),
    "temperature": (-1, nan, "1"),
    "method": ("magic", "", 3, [], *sorted(set(method_names()) - set(OF_MAR))),
    "top_k": (5,),
    "rule": ("exact",),
    "family": ("VQ",),
    "cfg_schedule": ("cosine",),
    "window": (-1, 4, 2.0, True, "2"),
    "draft": ("magic", True, [1, 2]),
}
TOGETHER = [  # settings that are valid one by one
    {"method": "ar", "window": 8},
    {"method": "ar", "window": 0},
    {"num_sampling_steps": 100, "window": 33},
    {"temperature": 0, "window": 1},
]
LIMITS = [
    *({"label": value} for value in (0, 9)),
    *({"seed": value} for value in (0, 2**63 - 1)),
    *({"num_iter": value} for value in (1, 64)),
    *({"num_sampling_steps": value} for value in (2, 1000)),
    *({"cfg": value} for value in (1, 20.0)),
    *({"temperature": value} for value in (0, 2.5)),
    *({"method": name, "draft": None, **find(name, "MAR").fill(Request(0)).settings} for name in OF_MAR),
    {"window": 32},
    {"window": 2, "num_sampling_steps": 2},
    {"window": 0, "temperature": 0},
    {"draft": "frozen", "cfg_schedule": "constant"},
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = create_mar("mar_digits32_draft")
    for parameter in model.head.parameters():  # a new head is zero and would not look at anything
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def engine(model):
    return Engine(MARModels(model), max_batch=2, device="cpu")


def resolve(request, config):
    """As a model runner of a model of these sizes would check it; no model is needed for that."""
    sizes = SimpleNamespace(seq_len=config.seq_len, num_classes=config.class_num, defaults=defaults_of(config))
    sizes.models, sizes.config = {"draft": config}, config
    return MARRunner.complete(sizes, *choose(request, ["MAR"]))


def request_with(field, value):
    return dataclasses.replace(Request(3, num_iter=4, num_sampling_steps=3), **{field: value})


@pytest.mark.parametrize("field, value", [(field, value) for field in BAD for value in BAD[field]], ids=str)
def test_bad_field(field, value):
    with pytest.raises(ValueError, match=rf"\b{field}=") as caught:
        resolve(request_with(field, value), SPEC.config)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("changes", LIMITS, ids=str)
def test_limits_are_good(changes):
    complete = {"num_iter": 8, "cfg": 2.0, "cfg_schedule": "linear", "temperature": 0.9, "num_sampling_steps": 50}
    settings = {"label": 3, "method": "speculative", "draft": "calibrated", "family": "MAR"}
    request = Request(**settings | complete | changes)
    assert resolve(request, SPEC.config) == request


@pytest.mark.parametrize("settings", TOGETHER, ids=str)
def test_settings_that_do_not_go_together(settings):
    with pytest.raises(ValueError, match="window"):
        resolve(Request(3, **settings), SPEC.config)


@pytest.mark.parametrize(
    "changes, window",
    [({"temperature": 0}, 0), ({"num_sampling_steps": 2}, 0), ({"window": 5}, 5)],
    ids=str,
)
def test_a_window_that_needs_no_measurement(changes, window, engine, monkeypatch):
    """It is given, or nothing can be drafted."""
    monkeypatch.setattr("cspd.continuous.tuning.head_times", None)
    resolved = engine.resolve(Request(3, **changes))
    assert (resolved.method, resolved.window, resolved.draft) == ("speculative", window, "calibrated")


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("label", np.int64(3), 3),
        ("seed", torch.tensor(200), 200),
        ("cfg", np.float32(2.5), 2.5),
        ("cfg", Fraction(5, 2), 2.5),
        ("cfg", 3, 3.0),
        ("temperature", Decimal("0.5"), 0.5),
        ("num_iter", np.array(8), 8),
        ("draft", np.str_("frozen"), "frozen"),
    ],
)
def test_numbers_become_pythons_own(field, value, expected):
    """So that they run, and can be written as JSON."""
    request = resolve(request_with(field, value), SPEC.config)
    assert getattr(request, field) == expected and type(getattr(request, field)) is type(expected)
    assert json.loads(json.dumps(request.to_dict()))[field] == expected


def test_generate_refuses_before_any_work(engine):
    good, bad = Request(0, **QUICK), Request(99)
    with pytest.raises(ValueError, match="request 1: label=99") as caught:
        engine.generate([good, bad, good, Request(2, cfg=nan)])
    assert "request 3: cfg=nan" in str(caught.value)
    assert "request 0" not in str(caught.value) and "request 2" not in str(caught.value)
    assert not len(engine.scheduler) and not engine.runner.order.any()
    ticket = engine.add_request(good)
    with pytest.raises(ValueError, match="label"):
        engine.add_request(bad)
    outputs = {}
    while len(engine.scheduler):
        outputs |= engine.step()
    assert outputs.keys() == {ticket}


@pytest.mark.parametrize("seed", ["1", None, 1.0, -1])
def test_the_seed_of_several_images_is_checked(seed, engine):
    with pytest.raises(ValueError, match="seed"):
        engine.sample([1, 2], seed=seed, **QUICK)


@pytest.mark.parametrize("every", [0, 0.5, None])
def test_every_is_a_count(every, engine):
    with pytest.raises(ValueError, match="every"):
        engine.stream([Request(0, **QUICK)], on_progress=lambda *_: None, every=every)


@pytest.mark.parametrize("wrong", [None, 5, "ar"], ids=str)
def test_something_that_is_not_a_request(wrong, engine):
    for call, argument in ((engine.generate, [wrong]), (engine.add_request, wrong)):
        with pytest.raises(ValueError, match=re.escape(repr(wrong))):
            call(argument)
    assert len(engine.generate(Request(0, **QUICK))) == 1


@pytest.mark.parametrize(
    "changes, name",
    [({"img_size": 16}, "seq_len"), ({"vae_embed_dim": 8}, "token_dim"), ({"class_num": 12}, "class_num")],
)
def test_a_draft_model_of_other_tokens(changes, name, model):
    draft = MAR(dataclasses.replace(SPEC.config, **changes))
    with pytest.raises(ValueError, match=name):
        Engine(MARModels(model, draft), device="cpu")


@pytest.mark.parametrize(
    "sizes, message",
    [({"embed_dim": 4, "ch_mult": (1, 1, 1)}, "channels"), ({"embed_dim": 16, "ch_mult": (1, 1)}, "stride")],
)
def test_an_autoencoder_of_other_latents(sizes, message, model):
    vae = AutoencoderKL(KLConfig(ch=32, num_res_blocks=1, **sizes))
    with pytest.raises(ValueError, match=message):
        Engine(MARModels(model, vae=vae), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_no_cuda(model):
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="CUDA"):
        Engine(MARModels(model), device="cuda:0")


def test_a_mac_computes_on_its_cpu(model, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ValueError, match=r"mps.*float64.*cpu"):
        Engine(MARModels(model), device="mps")


@pytest.mark.filterwarnings("error")
def test_an_old_gpu_warns_of_bfloat16(monkeypatch):
    """And of nothing else, without Triton's kernels."""
    with standin.cuda():
        for capability, emulates in (((7, 5), True), ((8, 0), False)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
            precision_of("fp32", standin.DEVICE)
            with pytest.warns(UserWarning, match="bf16") if emulates else contextlib.nullcontext():
                own = precision_of("bf16", standin.DEVICE)
            precision_of(own, standin.DEVICE)  # of another engine: no second warning
        monkeypatch.undo()


def test_a_gpu_that_this_torch_was_not_built_for(monkeypatch):
    with standin.cuda(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90a", "compute_120"])
        with pytest.raises(ValueError, match="cuda:0"):
            pick_device("cuda:0")
        with pytest.warns(UserWarning, match="CPU"):
            assert pick_device("auto").type == "cpu"
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 1))
        assert pick_device("auto") == torch.device("cuda", 0)
        patch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a"])  # of ROCm
        assert pick_device("auto") == torch.device("cuda", 0)


def test_memory_of_windows(monkeypatch):
    """Which has neither /proc nor sysconf; ctypes calls its function."""

    def fill(status):
        assert status[0] == ctypes.sizeof(status) == 64
        status[1] = 2**34

    kernel32 = types.SimpleNamespace(GlobalMemoryStatusEx=fill)
    with monkeypatch.context() as windows:
        windows.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=kernel32), raising=False)
        windows.setattr(sys, "platform", "win32")
        windows.setattr(Path, "read_text", lambda path: open(os.path.join(path, "missing")))
        windows.delattr("os.sysconf")
        found = free_bytes(torch.device("cpu")), peak_bytes(torch.device("cpu"))
    assert found == (2**34, 0)


def test_memory_if_no_file_can_be_opened():
    """As in a server with many clients."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    device = torch.device("cpu")
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = free_bytes(device), peak_bytes(device), len(describe(device))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == (all_bytes(device), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 3)


@pytest.mark.parametrize("device, index", [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_cuda_is_one_device(device, index):
    """Whatever becomes the current one later."""
    with standin.cuda():
        assert pick_device(device) == torch.device("cuda", index)


@pytest.mark.parametrize(
    "setting, value",
    [
        *(("device", value) for value in ("gpu", "meta", "cpu:x", "")),
        *(("precision", value) for value in ("fp8", None)),
        pytest.param("precision", Precision("bf16", torch.device("cuda:1")), id="precision-of another device"),
        *(("max_batch", value) for value in (0, 1.5, True, "8", 10**22)),
    ],
    ids=str,
)
def test_bad_settings_of_an_engine(setting, value, model):
    with pytest.raises(ValueError, match=setting):
        Engine(MARModels(model), **{"device": "cpu", setting: value})


def test_too_many_slots():
    """A million slots of this model's tokens alone are 4 TB: to allocate them first would be another error."""
    model = MAR(MARConfig(img_size=256, vae_stride=1, **TINY))
    with pytest.raises(ValueError, match="max_batch") as caught:
        Engine(MARModels(model), max_batch=10**6, device="cpu")
    fits = int(re.search(r"use max_batch <= (\d+)", str(caught.value))[1])
    per_slot = bytes_per_slot(model, usual_tokens(model))
    assert 1 <= fits <= 1.5 * free_bytes(torch.device("cpu")) / per_slot  # others use memory meanwhile
    assert per_slot > model.config.seq_len * model.config.token_dim * 4
    check_memory(model, -(-fits // 2), usual_tokens(model), torch.device("cpu"))


@pytest.mark.parametrize("name, cfg", [("mar_base", 2.9), ("mar_large", 3.0), ("mar_huge", 3.2)])
def test_published_defaults(name, cfg):
    config = MARS[name].config
    published = {"num_iter": 64, "cfg": cfg, "cfg_schedule": "linear", "temperature": 1.0, "num_sampling_steps": 100}
    published |= {"family": "MAR"}
    assert resolve(Request(7, method="ar"), config) == Request(7, method="ar", **published)
    published |= {"method": "speculative", "draft": "calibrated"}  # the engine chooses the window
    assert resolve(Request(7), config) == Request(7, **published)
    assert resolve(Request(7, cfg=1), config) == Request(7, **published | {"cfg": 1, "temperature": 0.95})
    assert resolve(Request(7, cfg=1, temperature=0.8), config).temperature == 0.8


def test_default_iterations_fit_the_sequence():
    config = MARConfig(img_size=64, vae_stride=16)
    assert resolve(Request(0), config).num_iter == 16


def test_an_engine_takes_its_targets_defaults(engine):
    """Without guidance an official size would sample at temperature 0.95, and the bundled ones at 1."""
    resolved = engine.resolve(Request(1, cfg=1, **QUICK))
    assert resolved == Request(1, cfg=1, cfg_schedule="linear", temperature=1.0, family="MAR", **QUICK)


# ---- The given part of an image


IMAGE = torch.rand(3, 12, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.zeros(12, 8, dtype=torch.bool)
MASK[2:5, 1:3] = True


def test_files_images_and_tensors_are_the_same(tmp_path):
    rounded = (IMAGE * 255).round().byte()
    image, mask = Image.fromarray(rounded.permute(1, 2, 0).numpy()), Image.fromarray(MASK.numpy())
    pixels = rounded / 255
    image.save(tmp_path / "image.png")
    mask.convert("RGB").save(tmp_path / "mask.png")
    images = [image, tmp_path / "image.png", str(tmp_path / "image.png"), pixels, pixels.numpy(), pixels.double()]
    masks = [mask, tmp_path / "mask.png", MASK, MASK.numpy(), MASK.float(), MASK.int(), MASK.to(torch.bfloat16)]
    masks += [MASK.numpy().astype(kind) for kind in (np.uint16, ">i8")]
    (known,) = {Inpainting.of(image, mask) for image in images for mask in masks}
    assert torch.equal(known.mask, MASK) and torch.allclose(known.image, pixels) and len(repr(known)) < 60
    assert known != Inpainting.of(image, 0.5) != Inpainting.of(image, 0.25) and known != Inpainting.of(1 - pixels, mask)


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_grey_values_of_16_bits_are_scaled(suffix, tmp_path):
    """Pillow's own conversion makes white of everything from 256 on."""
    grey = np.linspace(0, 65535, 96).astype(np.uint16).reshape(12, 8)
    Image.fromarray(grey).save(tmp_path / f"grey.{suffix}")
    for source in (tmp_path / f"grey.{suffix}", Image.fromarray(grey)):
        known = Inpainting.of(source, source)
        assert (known.image - torch.from_numpy(grey / 65535)).abs().max() <= 0.5 / 255 + 1e-6
        assert (known.mask.numpy() == (grey >= 128 * 257 - 128)).all()


def test_a_pipe_is_no_image(tmp_path):
    """Opening it would wait for somebody who writes to it."""
    os.mkfifo(tmp_path / "image.png")
    with pytest.raises(ValueError, match="ordinary"):
        Inpainting.of(tmp_path / "image.png", MASK)


def test_requests_are_compared_pickled_and_recorded():
    request = Request(3, image=IMAGE, mask=MASK)
    image, mask = IMAGE.clone(), MASK.clone()
    same = Request(3, image=image, mask=mask)
    image.zero_(), mask.fill_(True)  # a request has its own copies
    assert request == same and hash(request) == hash(same) and len(repr(request)) < 100
    assert request != Request(3) and request != request.but(mask=~MASK)
    assert request.but(seed=1).known is request.known and pickle.loads(pickle.dumps(request)) == request
    assert json.loads(json.dumps(request.to_dict()))["known"] == request.known.digest
    assert Request(**Request(3).to_dict()) == Request(3)


@pytest.mark.parametrize(
    "image, mask, advice",
    [
        (IMAGE, None, "mask"),
        (None, MASK, "image"),
        (IMAGE, MASK.T, "mask"),
        (IMAGE * 2, MASK, "image"),
        (7, MASK, "image"),
        (MASK, IMAGE, "image"),
        (MASK.flatten(), MASK.flatten(), "image"),
        (MASK.flatten().numpy(), MASK.flatten(), "image"),
        (Image.new("F", (8, 12), 0.5), MASK, "mode F"),
        (IMAGE, Image.new("I", (8, 12), 70000), "mode I"),
        (IMAGE, MASK.float() * 2, "mask"),
        (IMAGE, 1.5, "mask"),
        (IMAGE, True, "mask"),
        (IMAGE, float("nan"), "mask"),
    ],
)
def test_bad_images_and_masks(image, mask, advice):
    with pytest.raises(ValueError, match=advice):
        Request(3, image=image, mask=mask)


def test_an_image_is_cropped_to_its_middle_and_resized():
    known = Inpainting.of(IMAGE, MASK)
    fitted = known.fitted(4)
    means = IMAGE[:, 2:10].unflatten(1, (4, 2)).unflatten(3, (4, 2)).mean((2, 4))
    assert fitted.image.shape == (3, 4, 4) and (fitted.image - means).abs().max() < 0.3
    assert fitted.mask.nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]], "generated if any pixel is"
    assert fitted.name == known.digest and fitted.fitted(4) is fitted
    with pytest.warns(Resized):
        assert known.to_encode(4).shape == (1, 3, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted.to_encode(4).min() >= -1


def test_an_image_in_a_box():
    """The area around it is generated, and has the pixels of its border."""
    known = placed(IMAGE, (2, 4, 8, 12), 16)
    assert torch.allclose(known.image[:, 4:, 2:10], IMAGE, atol=1e-6)
    assert not known.mask[4:, 2:10].any() and known.mask.sum() == 256 - 96
    assert torch.equal(known.image[:, :, 0], known.image[:, :, 2])
    for box in ((-1, 0, 4, 4), (0, 0, 0, 4), (9, 0, 8, 4), (0, 16, 4, 1)):
        with pytest.raises(ValueError):
            placed(IMAGE, box, 16)


def test_pasting_leaves_what_is_far_from_the_mask():
    image = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(256).view(16, 16) == 0
    generated = torch.arange(16) == 0
    pasted = Inpainting.of(image, mask).pasted(torch.ones(3, 16, 16), generated)
    assert torch.equal(pasted[:, 6:], image[:, 6:]) and torch.equal(pasted[:, :, 6:], image[:, :, 6:])
    assert (pasted[:, :2, :2] == 1).all()
    assert (pasted[:, 3:5, 0] - image[:, 3:5, 0]).min() > 0, "they blend"


# ---- Numbers that are not finite are an error of their own request, which is named


FINITE = {"num_iter": 4, "num_sampling_steps": 4, "family": "MAR"}
MAR_SETTINGS = [
    {"method": "ar"},
    {"method": "speculative", "window": 3, "draft": "frozen"},
    {"method": "speculative", "window": 3},
    {"method": "mar-draft", "gamma": 8, "prefill": 0.8},
    {"method": "mar-draft", "gamma": 4, "prefill": 0.8, "verify": "sequential"},
    {"method": "mar-draft", "gamma": 8, "prefill": 0.8, "chains": "speculative", "window": 3, "draft": "frozen"},
]
VQ_SETTINGS = [{"method": name} for name in method_names(["VQ"]) if name not in ("speculative", "sjd-pac")]
VQ_SETTINGS += [{"method": "sjd-pac", "window": 7, "pd_k": 3, "pd_d": 2}]
VQ_SETTINGS += [{"method": "speculative", "window": 5, "draft": draft} for draft in ("jacobi", "eagle-dynamic")]
VQ_SETTINGS += [{"method": name, "temperature": 0} for name in ("ar", "sd", "eagle", "eagle2", "sjd")]
DAMAGED = 2  # the label whose weights are damaged


def planted(embedding, value):
    """The class embedding's weights with one label's replaced."""
    with torch.inference_mode(False), torch.no_grad():
        embedding.weight[DAMAGED] = value


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


@pytest.mark.parametrize("settings", MAR_SETTINGS, ids=str)
def test_a_damaged_label_of_mar_affects_no_other(settings, damaged_mar):
    requests = [Request(label, seed=label, **FINITE, **settings) for label in (0, 1, DAMAGED, 4)]
    made = outputs_by_label(Engine(damaged_mar, max_batch=4, device="cpu"), requests)
    error = made.pop(DAMAGED).error
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


@pytest.mark.parametrize("settings", VQ_SETTINGS, ids=str)
def test_a_damaged_label_of_vq_affects_no_other(settings, damaged_vq):
    """Neither beside it, nor after it in its slot."""
    engine = Engine(VQModels(**damaged_vq), max_batch=3, device="cpu")
    requests = [Request(label, seed=label, family="VQ", **settings) for label in (0, DAMAGED, 1)]
    made = outputs_by_label(engine, requests)
    assert made[DAMAGED].error
    assert made[DAMAGED].image is None and (made[DAMAGED].tokens == -1).all()
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
    for output in engine.generate([Request(DAMAGED, method="sd"), Request(DAMAGED, method="mar-draft", **FINITE)]):
        assert output.error is None and output.stats.alpha == 0


@pytest.mark.parametrize("settings", [{"cfg": 1e38}, {"temperature": 1e20}], ids=str)
def test_settings_that_explode_are_reported_last(settings, small_mar):
    engine = Engine(MARModels(small_mar, vae=create_vae("kl_digits32")), max_batch=2, device="cpu")
    good = Request(1, seed=5, method="ar", **FINITE)
    bad = Request(2, seed=7, method="ar", **FINITE, **settings)
    seen = []
    with pytest.raises(FloatingPointError) as caught:
        for index, output in engine.stream([bad, good, bad, good]):
            seen.append(index)
            assert output.image.isfinite().all()
    assert sorted(seen) == [1, 3]
    message = str(caught.value)
    assert "0, 2" in message and "label=2" in message


def test_the_error_names_the_first_token_in_generation_order(small_mar):
    """Step noise becomes infinite at one position: the iteration is the one that the schedule has it in."""

    class OneBad:
        initial, order = staticmethod(noise.initial), staticmethod(noise.order)

        @staticmethod
        def steps(seed, position, step, channels, index):
            drawn = noise.steps(seed, position, step, channels, index)
            return torch.where((position == 37).unsqueeze(-1), torch.inf, drawn)

    engine = Engine(MARModels(small_mar), max_batch=1, device="cpu", noise=OneBad())
    output = outputs_by_label(engine, [Request(1, seed=3, method="ar", **FINITE)])[1]
    rank = noise.order(torch.tensor([3]), 64)[0].tolist().index(37)
    after, _ = cosine(4, 64)
    iteration = 1 + sum(64 - left <= rank for left in after.tolist())
    assert iteration > 1 and f"token {rank + 1} of 64 in generation order, in iteration {iteration}:" in output.error


@pytest.mark.parametrize("bias", [math.nan, math.inf, 1e30])
def test_an_image_that_is_not_finite_is_the_autoencoders_fault(bias, small_mar):
    torch.manual_seed(0)
    vae = create_vae("kl_digits32")
    with torch.no_grad():
        vae.decoder.conv_out.bias.fill_(bias)
    engine = Engine(MARModels(small_mar, vae=vae), max_batch=1, device="cpu")
    output = outputs_by_label(engine, [Request(3, method="ar", **FINITE)])[3]
    if math.isfinite(bias):
        assert output.error is None and (output.image == 1).all()  # huge is white
    else:
        assert output.image is None and "autoencoder's weights" in output.error


def test_a_command_reports_it_in_one_line(tmp_path, capfd):
    """And writes the other images."""
    source, damaged, out = Path(small_checkpoint()), tmp_path / "damaged", tmp_path / "out"
    damaged.mkdir()
    shutil.copy(source / "vae.safetensors", damaged)
    weights = load_file(source / "target.safetensors")
    embedding = weights["class_emb.weight"].float()
    embedding[DAMAGED] = 1e30
    save_file(weights | {"class_emb.weight": embedding}, damaged / "target.safetensors")
    settings = ["--method", "ar", "--device", "cpu", "--num-iter", "2", "--num-sampling-steps", "2"]
    assert main(["sample", "--checkpoint", str(damaged), *settings, "--labels", "1-3", "--out", str(out)]) == 2
    last_line = capfd.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith("cspd: ") and "label=2" in last_line
    images = {path.name for path in out.rglob("0*.png")}
    assert images == {"00000_label1_seed0.png", "00002_label3_seed2.png"}


def test_statistics_are_four_lines_to_read():
    engine = Engine(VQModels(**toy_models(length=16)), max_batch=1, device="cpu")
    stats = engine.sample(1, draft="jacobi", window=4, cfg=2.0).stats
    lines = str(stats).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["guarantee", "calls", "drafts", "seconds"]
    assert max(map(len, lines)) < 100 and "[" not in str(stats)
    assert f"{stats.backbone_calls} target" in lines[1] and f"{stats.alpha:.1%}" in lines[2]
    assert stats.to_dict()["by_lag"] == stats.by_lag  # the rest
    measured = RoundStats("approximate", backbone_calls=8, head_calls=80, head_calls_per_token=10.0, difference=0.049)
    assert "80 of the head, 10.0 per token" in str(measured) and "0.049 standard" in str(measured)


@pytest.mark.parametrize("name", ["class_labels", "labels"])
def test_other_names_of_the_class(name):
    """diffusers' name, and that of `Engine.sample` in a request."""
    with pytest.raises(TypeError, match=f"'{name}': .*labels=.* label="):
        Request(settings={name: 3})


def test_a_methods_earlier_name_is_its_present_one():
    assert Request(0, method="cspd") == Request(0, method="mar-draft") == with_method(Request(0), "cspd")
    assert find("cspd", "MAR").name == "mar-draft" and parse_method("cspd:gamma=3") == ("mar-draft", {"gamma": 3})


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"method": "disa", "upper": "x"}, "upper"),
        ({"method": "disa", "upper": 3, "lower": 5}, "upper=3"),
        ({"method": "calibrated", "head_calls": 30, "num_sampling_steps": 20}, "num_sampling_steps=20"),
        ({"method": "calibrated", "head_calls": 30, "num_sampling_steps": "x"}, "num_sampling_steps"),
        ({"method": "calibrated", "divergence": 0.1, "temperature": 0}, "temperature"),
        ({"method": "speculative", "window": 4, "temperature": 0}, "temperature"),
        ({"method": "speculative", "window": 0.0}, "window"),
        ({"method": "calibrated", "audit": 1e-6}, "audit"),
        ({"method": "budget", "budget": 0.3, "temperature": 0.0}, "temperature"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_named(settings, named, engine):
    with pytest.raises(ValueError, match=named):
        engine.check(Request(0, **settings))


def test_what_is_off_goes_with_everything(engine):
    for settings in ({"method": "speculative", "window": 0}, {"method": "calibrated", "audit": 0}):
        assert engine.check(Request(0, temperature=0.0, **settings)).temperature == 0
