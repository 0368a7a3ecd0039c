"""`cspd serve` over HTTP: visitors get their own images, as the engine makes them; limits; bad input; leaving."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving import events, finished, link_of, pixels, run_command, served
from stores import small_checkpoint, small_vq_checkpoint
from texts import small_text_checkpoint

import cspd
from cspd.cli import main
from cspd.models import bundled_folder
from cspd.serving import app

QUICK = {"num_iter": 3, "num_sampling_steps": 5, "first_timestep": 950, "cfg": 3.0}
LONG = {"num_iter": 64, "num_sampling_steps": 300}  # many seconds
LOWER = np.s_[16:]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Small models of classes, the names of these, and a small model of texts."""
    engines = {}
    for name, checkpoint in (("mar", small_checkpoint()), ("vq", small_vq_checkpoint())):
        folder = tmp_path_factory.mktemp(name)
        for file in Path(checkpoint).glob("*.safetensors"):
            (folder / file.name).symlink_to(file.resolve())
        shutil.copy(bundled_folder("digits32") / "cspd.json", folder)
        engines[name] = cspd.load(folder, max_batch=4, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        folder = small_text_checkpoint(tmp_path_factory.mktemp("texts"), patch)
        engines["texts"] = cspd.load(folder, max_batch=4, device="cpu")
        yield engines


@pytest.fixture(scope="module")
def engine(engines):
    return engines["mar"]


@pytest.fixture(scope="module")
def site(engines):
    """One that tells of every round."""
    with pytest.MonkeyPatch.context() as patch, served(engines, most=4, most_each=2) as site:
        patch.setattr(app, "PERIOD", 0.0)
        patch.setattr(app, "SHARE", 1e9)
        patch.setattr(app, "MOST_UNREAD", 1000)
        yield site


def mask_of(part):
    mask = np.zeros((32, 32), np.uint8)
    mask[part] = 255
    return Image.fromarray(mask)


def until(condition):
    """Waits for what another thread does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_image_is_the_engines(site, engine):
    """Text is read as on the command line; what was shown on the way is of the same image."""
    settings = {name: str(value) for name, value in QUICK.items()}
    (event,) = finished(site.make(seed="5", settings=settings))
    (output,) = engine.sample("three", seed=5, method="ar", **QUICK)
    assert event["finished"] and np.array_equal(pixels(event["image"]), np.asarray(output.pil()))
    assert event["token_cost"] == output.token_cost.tolist() and event["guarantee"] == "exact"
    assert event["ran"] == repr(output.request) and ["head calls", "15"] in event["numbers"]


def test_two_methods_grow_side_by_side(site, engine):
    methods = ["ar", "dpm-solver++:head_calls=4"]
    told = list(events(site.make(methods=methods, settings=QUICK)))
    for run, method in enumerate(("ar", "dpm-solver++")):
        own = [event for event in told if event["run"] == run and "share" in event]
        shares = [event["share"] for event in own]
        assert len(own) >= 3 and shares == sorted(shares) and shares[-1] == 1
        for event in own:
            assert sum(cost is not None for cost in event["token_cost"]) == round(64 * event["share"])
        more = {"head_calls": 4} if run else {}
        (output,) = engine.sample("three", seed=5, method=method, **QUICK, **more)
        assert np.abs(pixels(own[-1]["image"]).astype(int) - np.asarray(output.pil())).max() <= 1  # rounding


def test_a_text_in_place_of_a_class(site, engines):
    texts = {"prompt": "a red fox", "negative_prompt": "blue"}
    (event,) = finished(site.make(model="texts", label=None, **texts))
    (output,) = engines["texts"].generate([cspd.Request(seed=5, method="ar", **texts)])
    assert np.array_equal(pixels(event["image"]), np.asarray(output.pil())) and event["class_name"] == "a red fox"
    assert event["ran"] == repr(output.request)


def test_a_part_is_made_anew(site, engine):
    picture = engine.sample("nine", seed=4, method="ar", **QUICK)[0].pil()
    mask = mask_of(LOWER)
    wanted = {"label": 9, "picture": link_of(picture), "mask": link_of(mask)}
    (event,) = finished(site.make(settings=QUICK, **wanted))
    (output,) = engine.generate([cspd.Request(9, 5, "ar", image=picture, mask=mask, **QUICK)])
    assert np.array_equal(pixels(event["image"]), np.asarray(output.pil()))
    assert event["token_cost"][:32] == [None] * 32 and None not in event["token_cost"][32:]


def test_vq_models_keep_rows_at_the_top(site, engines):
    mask = mask_of(np.s_[30:])
    picture = Image.new("RGB", (32, 32), "navy")
    wanted = {"model": "vq", "picture": link_of(picture), "mask": link_of(mask)}
    (event,) = finished(site.make(**wanted))
    (output,) = engines["vq"].generate([cspd.Request("three", 5, "ar", image=picture, mask=mask)])
    assert np.array_equal(pixels(event["image"]), np.asarray(output.pil()))
    answer = site.make(**wanted | {"mask": link_of(mask_of(np.s_[:2]))})
    assert answer.status == 400 and "raster order" in json.load(answer)["detail"]


def test_visitors_share_the_engine(site, engine):
    """The second comes while the image of the first is under way, and each gets her own."""
    first = events(site.make("ann", seed=1, settings=QUICK | {"num_iter": 16}))
    assert next(event for event in first if "share" in event)["share"] < 1
    (second,) = finished(site.make("bea", seed=2, settings=QUICK))
    *_, first = first
    for event, seed, num_iter in ((first, 1, 16), (second, 2, 3)):
        (output,) = engine.sample("three", seed=seed, method="ar", **QUICK | {"num_iter": num_iter})
        assert np.abs(pixels(event["image"]).astype(int) - np.asarray(output.pil())).max() <= 1


def test_models_take_turns(site, engines):
    """One image of each model at once: each is its own engine's, and the slow one does not hold up the other."""
    slow = events(site.make("ann", seed=1, settings=QUICK | {"num_iter": 64}))
    assert next(event for event in slow if "share" in event)["share"] < 1
    (quick,) = finished(site.make("bea", model="vq", seed=2))
    (output,) = engines["vq"].sample("three", seed=2, method="ar")
    assert np.array_equal(pixels(quick["image"]), np.asarray(output.pil()))
    *_, last = slow
    assert last["finished"]


def test_pictures_that_nobody_reads_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(app, "MOST_UNREAD", 2)
    inbox = asyncio.Queue()
    for event in [{"share": 0.1}] * 9 + [{"share": 1, "finished": True}]:
        app._put(inbox, event)
    assert inbox.qsize() == 3


def test_limits_and_leaving(site):
    """Requests of a visitor that closes the connection are cancelled: others have the room at once."""
    made = site.status()["made"]
    under_way = [site.make(visitor, methods=["ar", "ar"], settings=LONG) for visitor in ("ann", "bea")]
    assert all(next(events(answer)) for answer in under_way)
    status = site.status()
    assert status["running"] + status["waiting"] == 4
    for visitor, said in (("ann", "2 of your images are under way and 2 may be"), ("eve", "4 images are under way")):
        answer = site.make(visitor, settings=QUICK)
        assert answer.status == 429 and said in json.load(answer)["detail"]
    under_way.pop().close()
    until(lambda: len(site.loop.jobs) == 2)
    assert "finished" in finished(site.make("eve", settings=QUICK))[0]
    under_way.pop().close()
    until(lambda: not site.loop.jobs and not site.status()["running"])
    assert site.status()["made"] == made + 1


BLACK, WHITE = (link_of(mask_of(part)) for part in (np.s_[:0], np.s_[:]))
BAD = [
    ({"label": "dragon"}, "label='dragon' is the name of no class"),
    ({"label": 10}, "label=10 does not fit"),
    ({"seed": "-1"}, "seed=-1 does not fit"),
    ({"seed": "x" * 400}, "seed='xxxxx"),
    ({"methods": ["ra"]}, "method 'ra' is unknown"),
    ({"methods": ["eagle2"]}, "method='eagle2' does not decode MAR models"),
    ({"methods": ["ddim:head_calls=one"]}, "head_calls"),
    ({"methods": ["ddim:heads=1"]}, "heads"),
    ({"methods": []}, "methods: "),
    ({"methods": ["ar"] * 3}, "methods: "),
    ({"settings": {"cfg": "much"}}, "cfg"),
    ({"settings": {"cfgs": 1}}, "cfgs"),
    ({"settings": {"image": "/etc/passwd", "mask": "/etc/passwd"}}, "image"),
    ({"settings": {"num_iter": 65}}, "num_iter"),
    ({"model": "gan"}, "gan"),
    ({"model": "texts"}, "label"),
    ({"model": "texts", "label": None}, "prompt"),
    ({"label": None, "prompt": "a fox"}, "prompt"),
    (
        {"model": "texts", "label": None, "prompt": "a fox", "settings": {"cfg": 1}, "negative_prompt": "b"},
        "negative_p",
    ),
    ({"colour": "red"}, "colour: "),
    ({"picture": WHITE}, "mask"),
    ({"picture": "data:image/png;base64,AAAA", "mask": WHITE}, "picture"),
    ({"picture": "no link", "mask": WHITE}, "picture"),
    ({"picture": WHITE, "mask": BLACK}, "mask"),
    ({"picture": WHITE, "mask": link_of(Image.new("L", (8, 8)))}, "mask"),
    ({"picture": link_of(Image.new("1", (5000, 5000))), "mask": WHITE}, "5000"),
]


@pytest.mark.parametrize("wanted, said", BAD, ids=range(len(BAD)))
def test_bad_input_is_a_message(wanted, said, site):
    answer = site.make(**wanted)
    assert answer.status == 400
    message = json.load(answer)["detail"]
    assert said in message and len(message) < 600 and "Traceback" not in message
    assert not site.loop.jobs


def test_bodies_that_are_none_or_too_large(site):
    assert (
        "neither label nor prompt"
        in json.load(site.ask("/api/images", '{"model": "mar", "methods": ["ar"]}'))["detail"]
    )
    for body in ("", "{", "[]", '{"model": "mar"}', '{"model": ' + "[" * 10_000):
        answer = site.ask("/api/images", body)
        assert answer.status == 400 and json.load(answer)["detail"]
    answer = site.ask("/api/images", " " * (app.MOST_BYTES + 1), Connection="keep-alive")
    assert answer.status == 413 and "8 MiB" in json.load(answer)["detail"]


def test_what_the_page_is_told(site):
    answer = site.ask("/api/models", visitor="")
    about = json.load(answer)
    *of_classes, of_texts = about["models"]
    assert of_texts["name"] == "texts" and of_texts["classes"] == []
    assert {"ar", "sjd-pac"} <= {method["name"] for method in of_texts["methods"]}
    by_family = {model["family"]: model for model in of_classes}
    assert by_family["MAR"]["classes"][3] == "three" and by_family["VQ"]["side"] == 16
    guarantees = {method["name"]: method["guarantee"] for method in by_family["MAR"]["methods"]}
    known = {each.name: each.guarantee for each in cspd.method.METHODS if each.family == "MAR"}
    assert known.pop("cspd") and guarantees == known  # there is no draft model
    usual = {option["name"]: option["default"] for option in by_family["MAR"]["options"]}
    assert usual["num_sampling_steps"] == 100
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        answer = site.ask(path)
        assert answer.status == 200 and answer.headers["content-type"].startswith(kind)
    assert site.ask("/../app.py").status == 404


@pytest.mark.parametrize("part", ["admit", "decode"])
def test_a_round_that_fails_is_told(part, site, engines, monkeypatch, capsys):
    """So is a picture on the way that cannot be made; the images of other models go on."""
    other = events(site.make("bea", model="vq", methods=["ar"], seed=2))
    assert "advice" in next(other)
    with monkeypatch.context() as patch:
        patch.setattr(engines["mar"].runners["MAR"], part, lambda given: 1 / 0)
        (event,) = finished(site.make(settings=QUICK))
    assert "division by zero" in event["error"] and capsys.readouterr().err
    assert not len(engines["mar"].scheduler)
    *_, last = other
    assert last["finished"]
    assert "finished" in finished(site.make(settings=QUICK))[0]


def test_of_two_methods_both_run_or_none(site, engine, monkeypatch):
    """Where the second cannot be queued, the first is taken out again."""
    queued, add = [], engine.scheduler.add

    def full(sequence):
        if queued:
            raise ValueError("no room for it")
        queued.append(sequence)
        add(sequence)

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "add", full)
        answer = site.make(methods=["ar", "ddim"], settings=QUICK)
        assert answer.status == 400 and "no room for it" in json.load(answer)["detail"]
    assert len(queued) == 1 and not engine.scheduler.in_flight() and not len(engine.scheduler)
    assert not site.loop.jobs
    assert "finished" in finished(site.make(settings=QUICK))[0]


def test_the_command(capsys):
    """It says where the page is, and Ctrl-C ends it."""
    running, addresses = [], []

    def visit(address):
        addresses.append(address)
        with urllib.request.urlopen(f"{address}/api/status", timeout=30) as answer:
            running.append(json.load(answer)["running"])

    assert run_command(visit, "--checkpoint", small_checkpoint()) == 130
    said = capsys.readouterr()
    assert running == [0] and addresses[0] in said.out
    assert said.err.count("\n") == 1


def test_what_the_command_says_before_any_work(monkeypatch, capsys):
    missing = ["--checkpoint", "digits32", "digits64"]
    of_one = ["--port", "0", "--eagle", __file__]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = ["--port", str(taken.getsockname()[1])]
        for options, said in (
            (port, "--port"),
            (missing, "digits64"),
            (of_one, "--checkpoint"),
        ):
            assert main(["serve", *options]) == 2
            error = capsys.readouterr().err
            assert said in error and error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "cspd.serving.app")
    assert main(["serve"]) == 2
    assert "cspd[serve]" in capsys.readouterr().err
