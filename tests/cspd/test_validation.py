"""Bad input gets one error that names the value and the fix, before any work, and harms nobody else."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import standin
import torch

from cspd import Engine, MARModels, Request
from cspd.device import Precision, free_bytes, pick_device
from cspd.files import parse_json
from cspd.masked.runner import MARRunner, bytes_per_slot, check_memory, usual_tokens
from cspd.method import choose, find, method_names
from mar.checkpoint import MARS, create_mar, defaults_of
from mar.model import MAR, MARConfig
from mar.vae import AutoencoderKL, KLConfig

SPEC = MARS["mar_digits32_draft"]  # 64 tokens, 10 classes
QUICK = {"method": "ar", "num_iter": 4, "num_sampling_steps": 3}
TINY = dict(embed_dim=8, depth=1, num_heads=1, class_num=3, buffer_size=1, diffloss_w=8, diffloss_d=1)
nan, inf = math.nan, math.inf

OF_MAR = method_names(["MAR"])
BAD = {
    "label": (-1, 10, True, 1.0, 1.5, "3", [], 10**21),
    "seed": (-1, 2**63, 0.5, 1.0, {}),
    "num_iter": (0, 65, -4, 8.0, True),
    "num_sampling_steps": (1, 1001, 0, 10.5),
    "cfg": (nan, -1, inf, "3", True, [], 1j, 1e39, 10**400),
    "temperature": (-1, nan, inf, "1"),
    "method": ("magic", "", 3, [], {}, *sorted(set(method_names()) - set(OF_MAR))),
    "top_k": (5,),
    "top_p": (0.9,),
    "rule": ("exact",),
    "family": ("VQ",),
    "cfg_schedule": ("cosine", ""),
    "window": (-1, 4, 2.0, True, "2"),
    "draft": ("magic", "", True, [], {}, [1, 2]),
}
LIMITS = [
    *({"label": value} for value in (0, 9)),
    *({"seed": value} for value in (0, 2**63 - 1)),
    *({"num_iter": value} for value in (1, 64)),
    *({"num_sampling_steps": value} for value in (2, 1000)),
    *({"cfg": value} for value in (1, 1.0, 20.0)),
    *({"temperature": value} for value in (0, 2.5)),
    *({"cfg_schedule": value} for value in ("linear", "constant")),
    *({"method": name, "draft": None, **find(name, "MAR").fill(Request(0)).settings} for name in OF_MAR),
    *({"window": value} for value in (0, 32)),
    {"window": 2, "num_sampling_steps": 2},
    {"window": 0, "temperature": 0},
    {"draft": "frozen"},
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
    return MARRunner.check(sizes, *choose(request, ["MAR"]))


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


@pytest.mark.parametrize("option, value", [("window", 8), ("window", 0), ("draft", "frozen")])
def test_an_option_of_another_method(option, value):
    with pytest.raises(ValueError, match=option):
        resolve(Request(3, method="ar", **{option: value}), SPEC.config)


def test_no_window_is_above_32():
    with pytest.raises(ValueError, match="window"):
        resolve(Request(3, num_sampling_steps=100, window=33), SPEC.config)


def test_a_window_needs_noise():
    with pytest.raises(ValueError, match="window"):
        resolve(Request(3, temperature=0, window=1), SPEC.config)


@pytest.mark.parametrize("changes", [{"temperature": 0}, {"num_sampling_steps": 2}], ids=str)
def test_no_window_where_nothing_can_be_drafted(changes, engine, monkeypatch):
    monkeypatch.setattr("cspd.heads.tuning.measured_costs", None)  # no need to time anything
    resolved = engine.resolve(Request(3, **changes))
    assert (resolved.method, resolved.window, resolved.draft) == ("speculative", 0, "calibrated")


def test_a_window_that_is_given_stays(engine, monkeypatch):
    monkeypatch.setattr("cspd.heads.tuning.measured_costs", None)
    assert [engine.resolve(Request(3, window=window)).window for window in (0, 5)] == [0, 5]


@pytest.mark.parametrize(
    "field, value, kept",
    [
        ("label", np.int64(3), 3),
        ("label", torch.tensor(3), 3),
        ("seed", np.uint8(200), 200),
        ("cfg", np.float32(2.5), 2.5),
        ("cfg", torch.tensor(2.5), 2.5),
        ("cfg", Fraction(5, 2), 2.5),
        ("temperature", Decimal("0.5"), 0.5),
        ("num_iter", np.array(8), 8),
        ("draft", np.str_("frozen"), "frozen"),
    ],
)
def test_numbers_of_others_are_kept_as_pythons_own(field, value, kept):
    """So that they run, and can be written as JSON."""
    request = resolve(request_with(field, value), SPEC.config)
    assert getattr(request, field) == kept and type(getattr(request, field)) is type(kept)
    assert json.loads(json.dumps(request.to_dict()))[field] == kept


@pytest.mark.parametrize("value", [3, 2**64, 10**38])
def test_settings_that_are_floats_are_kept_as_floats(value):
    """Whole numbers beyond 2^64 are none that arrays take, and records take none beyond 20 digits."""
    given = Request(3, cfg=value)
    checked = resolve(given, SPEC.config)
    assert type(checked.cfg) is float and checked.cfg == float(value)
    assert given == Request(3, cfg=float(value)) and hash(given) == hash(Request(3, cfg=float(value)))
    for request in (given, checked):
        assert parse_json(json.dumps(request.to_dict()))["cfg"] == checked.cfg


def test_bad_request_harms_nobody(model, engine):
    good = [Request(label, seed=label, **QUICK) for label in range(3)]
    tickets = [engine.add_request(request) for request in good]
    outputs = engine.step()
    for field, value, _ in BAD:
        with pytest.raises(ValueError, match=field):
            engine.add_request(request_with(field, value))
    assert len(engine.scheduler) == 3
    while len(engine.scheduler):
        outputs |= engine.step()
    assert all(torch.isfinite(output.tokens).all() for output in outputs.values())
    undisturbed = Engine(MARModels(model), max_batch=2, device="cpu").generate(good)
    assert all(torch.equal(outputs[ticket].tokens, other.tokens) for ticket, other in zip(tickets, undisturbed))


def test_generate_refuses_before_any_work(engine):
    requests = [Request(0, **QUICK), Request(99), Request(1, **QUICK), Request(2, cfg=nan)]
    with pytest.raises(ValueError, match="label") as caught:
        engine.generate(requests)
    assert "request 0" not in str(caught.value) and "request 2" not in str(caught.value)
    assert not len(engine.scheduler) and not engine.runner.order.any()
    assert len(engine.generate(requests[:1])) == 1


@pytest.mark.parametrize("seed", ["1", None, 1.0, [1], True, -1])
def test_the_seed_of_many_is_checked_first(seed, engine):
    with pytest.raises(ValueError, match="seed"):
        engine.sample([1, 2], seed=seed, **QUICK)


@pytest.mark.parametrize("every", [0, -1, 0.5, "1", None, True])
def test_every_is_a_count(every, engine):
    request = Request(0, **QUICK)
    for call in (engine.stream, engine.generate):
        with pytest.raises(ValueError, match="every"):
            call([request], on_progress=lambda *_: None, every=every)
    assert len(engine.generate(request, on_progress=lambda *_: None, every=np.int64(2))) == 1


@pytest.mark.parametrize("wrong", [{}, None, 5, "ar"], ids=str)
def test_no_request(wrong, engine):
    with pytest.raises(ValueError, match=re.escape(repr(wrong))):
        engine.generate([wrong])
    for call in (engine.add_request, engine.generate) if wrong in (None, 5) else (engine.add_request,):
        with pytest.raises(ValueError):
            call(wrong)
    assert len(engine.generate(Request(0, **QUICK))) == 1


@pytest.mark.parametrize(
    "changes, name",
    [({"img_size": 16}, "seq_len"), ({"vae_embed_dim": 8}, "token_dim"), ({"class_num": 12}, "class_num")],
)
def test_draft_of_other_tokens(changes, name, model):
    draft = MAR(dataclasses.replace(SPEC.config, **changes))
    _ours, _theirs = getattr(SPEC.config, name), getattr(draft.config, name)
    with pytest.raises(ValueError, match=name):
        Engine(MARModels(model, draft), device="cpu")


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"embed_dim": 4, "ch_mult": (1, 1, 1)}, "channels"),
        ({"embed_dim": 16, "ch_mult": (1, 1)}, "stride"),
    ],
)
def test_autoencoder_of_other_latents(sizes, message, model):
    vae = AutoencoderKL(KLConfig(ch=32, num_res_blocks=1, **sizes))
    with pytest.raises(ValueError, match=message):
        Engine(MARModels(model, vae=vae), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_no_cuda(device, model):
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="CUDA"):
        Engine(MARModels(model), device=device)


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_cuda_is_one_device(device):
    """Whatever becomes the current one later."""
    with standin.cuda():
        assert pick_device(device) == standin.DEVICE


@pytest.mark.parametrize("device", ["gpu", "tpu9", "meta", "cpu:x", ""])
def test_no_such_device(device, model):
    with pytest.raises(ValueError, match="device"):
        Engine(MARModels(model), device=device)


@pytest.mark.parametrize("precision", ["fp8", "FP32", None, []])
def test_unknown_precision(precision, model):
    with pytest.raises(ValueError, match=re.escape(f"precision={precision!r}: choose one of fp32, tf32, bf16")):
        Engine(MARModels(model), device="cpu", precision=precision)


def test_a_precision_of_another_device(model):
    other = Precision("bf16", torch.device("cuda:1"))
    with pytest.raises(ValueError):
        Engine(MARModels(model), device="cpu", precision=other)


@pytest.mark.parametrize("max_batch", [0, -1, 1.5, True, "8", [], 10**22])
def test_max_batch_is_a_count(max_batch, model):
    with pytest.raises(ValueError, match=re.escape(f"max_batch={max_batch!r} does not fit")):
        Engine(MARModels(model), max_batch=max_batch, device="cpu")


def test_too_many_slots():
    """A million slots of this model's tokens alone are 4 TB: to allocate them first would be another error."""
    model = MAR(MARConfig(img_size=256, vae_stride=1, **TINY))
    with pytest.raises(
        ValueError,
        match="max_batch",
    ) as caught:
        Engine(MARModels(model), max_batch=10**6, device="cpu")
    fits = int(re.search(r"use max_batch <= (\d+)", str(caught.value))[1])
    per_slot = bytes_per_slot(model, usual_tokens(model))
    assert 1 <= fits <= 1.5 * free_bytes(torch.device("cpu")) / per_slot  # others use memory meanwhile
    assert per_slot > model.config.seq_len * model.config.token_dim * 4
    check_memory(model, -(-fits // 2), usual_tokens(model), torch.device("cpu"))


@pytest.mark.parametrize("name, cfg", [("mar_base", 2.9), ("mar_large", 3.0), ("mar_huge", 3.2)])
def test_published_defaults(name, cfg):
    config = MARS[name].config
    published = {
        "num_iter": 64,
        "cfg": cfg,
        "cfg_schedule": "linear",
        "temperature": 1.0,
        "num_sampling_steps": 100,
        "family": "MAR",
    }
    assert resolve(Request(7, method="ar"), config) == Request(7, method="ar", **published)
    published |= {"method": "speculative", "draft": "calibrated", "window": None}  # the engine chooses the window
    assert resolve(Request(7), config) == Request(7, **published)
    unguided = published | {"cfg": 1, "temperature": 0.95}
    assert resolve(Request(7, cfg=1), config) == Request(7, **unguided)
    assert resolve(Request(7, cfg=1, temperature=0.8), config).temperature == 0.8


def test_default_iterations_fit_the_sequence():
    config = MARConfig(img_size=64, vae_stride=16)
    assert resolve(Request(0), config).num_iter == 16


def test_engine_takes_its_targets_defaults(engine):
    """An official size would sample at temperature 0.95 without guidance, the bundled ones at 1."""
    output = engine.generate([Request(1, cfg=1, **QUICK)])[0]
    assert output.request == Request(1, cfg=1, cfg_schedule="linear", temperature=1.0, family="MAR", **QUICK)


def test_a_request_knows_its_settings_before_anything_else_is_imported():
    code = "from cspd import Request; print(Request(3, cfg=2.0, window=4).cfg)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "2.0\n", ran.stderr
