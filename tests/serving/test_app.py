"""`cspd serve` over HTTP: clients get the engine's images while they are generated; limits, errors, cancelling."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from launching import wait_until
from PIL import Image
from serving import events, finished, link_of, pixels, run_command, served, status_of
from stores import small_checkpoint

import cspd
from cspd.cli import _parse, main
from cspd.serving import access, bodies, loop
from cspd.serving.gallery import Gallery

QUICK = {"num_iter": 3, "num_sampling_steps": 5, "first_timestep": 950, "cfg": 3.0}
ROOT = Path(__file__).parent.parent.parent
LONG = {"num_iter": 64, "num_sampling_steps": 100}  # many seconds


@pytest.fixture(scope="module")
def engine(engines):
    return engines["mar"]


@pytest.fixture(scope="module")
def site(engines):
    """A site that reports every round."""
    with pytest.MonkeyPatch.context() as patch, served(engines, most=4, most_each=2) as site:
        patch.setattr(loop, "PERIOD", 0.0)
        patch.setattr(loop, "SHARE", 1e9)
        patch.setattr(bodies, "MOST_UNREAD", 1000)
        yield site


def mask_of(part, side=32):
    mask = np.zeros((side, side), np.uint8)
    mask[part] = 255
    return Image.fromarray(mask)


def assert_is_image(event, output):
    """Batches round differently, so a pixel may differ by 1."""
    difference = pixels(event["image"]).astype(int) - np.asarray(output.pil())
    assert event["finished"] and np.abs(difference).max() <= 1


def test_images_are_the_engines_and_grow(site, engine):
    """Settings are read as on the command line. Both methods report progress, with the cost of committed tokens."""
    settings = {name: str(value) for name, value in QUICK.items()}
    told = list(events(site.make(methods=["ar", "dpm-solver++:head_calls=4"], seed="5", settings=settings)))
    for run, (method, own) in enumerate({"ar": {}, "dpm-solver++": {"head_calls": 4}}.items()):
        states = [event for event in told if event["run"] == run and "share" in event]
        shares = [event["share"] for event in states]
        assert len(states) >= 3 and shares == sorted(shares) and shares[-1] == 1
        committed = [sum(cost is not None for cost in event["token_cost"]) for event in states]
        assert committed == sorted(committed) and committed[-1] == 64
        output = engine.sample("three", seed=5, method=method, **QUICK, **own)
        last = states[-1]
        assert_is_image(last, output)
        assert last["token_cost"] == output.token_cost.tolist() and last["ran"] == repr(output.request)
        assert last["guarantee"] == output.stats.guarantee
        assert ["head calls", str(output.stats.head_calls)] in last["numbers"]


def test_a_browser_gets_the_exact_seed(site):
    """Its numbers are floats, so that 2**53 + 1 would be another seed."""
    answer = site.make(seed=str(2**53 + 1), settings=QUICK)
    *_, last = (json.loads(json.dumps(event), parse_int=float) for event in events(answer))
    assert last["settings"]["seed"] == "9007199254740993"


def test_the_predicted_divergence_is_shown(engine):
    output = engine.sample("three", method="calibrated", head_calls=3, num_iter=3, num_sampling_steps=5)
    shown = dict(loop.numbers(output, share=1.0))
    assert shown["predicted, nats per token"] == format(output.stats.divergence, ".3g")


def test_a_prompt_in_place_of_a_class(site, engines):
    texts = {"prompt": "a red fox", "negative_prompt": "blue"}
    (event,) = finished(site.make(model="texts", label=None, **texts))
    (output,) = engines["texts"].generate([cspd.Request(seed=5, method="ar", **texts)])
    assert_is_image(event, output)
    assert event["class_name"] == "a red fox" and event["ran"] == repr(output.request)


@pytest.mark.parametrize("model, settings, side, first_row", [("mar", QUICK, 32, 16), ("vq", {}, 16, 14)])
def test_a_part_is_regenerated(model, settings, side, first_row, site, engines):
    image, mask = Image.new("RGB", (side, side), "navy"), mask_of(np.s_[first_row:], side)
    links = {"picture": link_of(image), "mask": link_of(mask)}
    (event,) = finished(site.make(model=model, settings=settings, **links))
    (output,) = engines[model].generate([cspd.Request("three", 5, "ar", image=image, mask=mask, **settings)])
    assert_is_image(event, output)
    assert [cost is None for cost in event["token_cost"]] == output.token_cost.isnan().tolist()
    assert None in event["token_cost"]


@pytest.mark.parametrize("model, settings", [("mar", QUICK), ("vq", {})])
def test_clients_share_the_engines(model, settings, site, engines):
    """A second image, by the same model or another one, is finished while the first one is generated."""
    slow = QUICK | {"num_iter": 32}
    first = events(site.make("ann", seed=1, settings=slow))
    assert next(event for event in first if "share" in event)["share"] < 1
    (second,) = finished(site.make("bea", model=model, seed=2, settings=settings))
    assert_is_image(second, engines[model].sample("three", seed=2, method="ar", **settings))
    *_, first = first
    assert_is_image(first, engines["mar"].sample("three", seed=1, method="ar", **slow))


def test_models_share_the_slots(engines):
    """An image of another model waits for one of the four slots, with its place in the queue."""
    with served(engines, most=8, most_each=8) as site:
        running = [site.make(methods=["ar", "ar"], settings=LONG) for _ in range(2)]
        wait_until(lambda: site.status()["running"] == 4)
        waiting = events(site.make("bea", model="vq"))
        assert next(event for event in waiting if "position" in event)["position"] == 1
        status = site.status()
        assert (status["running"], status["waiting"]) == (4, 1)
        running.pop().close()
        *_, last = waiting
        assert_is_image(last, engines["vq"].sample("three", seed=5, method="ar"))
        running.pop().close()


def test_unread_previews_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(bodies, "MOST_UNREAD", 2)
    inbox = asyncio.Queue()
    for event in [{"share": 0.1}] * 9 + [{"share": 1, "finished": True}]:
        bodies._put(inbox, event)
    assert inbox.qsize() == 3


def test_limits_and_leaving(site):
    """Images of a client that closes the connection are cancelled, and others get their slots at once."""
    made = site.status()["made"]
    running = [site.make(client, methods=["ar", "ar"], settings=LONG) for client in ("ann", "bea")]
    assert all(next(events(answer)) for answer in running)
    status = site.status()
    assert status["running"] + status["waiting"] == 4
    for client, said in (("ann", "2 of your images"), ("eve", "4 images")):
        answer = site.make(client, settings=QUICK)
        assert answer.status == 429 and said in json.load(answer)["detail"]
    running.pop().close()
    wait_until(lambda: len(site.loop.jobs) == 2)
    assert "finished" in finished(site.make("eve", settings=QUICK))[0]
    running.pop().close()
    wait_until(lambda: not site.loop.jobs and not site.status()["running"])
    assert site.status()["made"] == made + 1


def test_an_invented_cookie_is_nobody(site):
    """Without a cookie from this server, a client is its address."""
    body = json.dumps({"model": "mar", "label": 3, "methods": ["ar", "ar"], "settings": LONG})
    running = site.ask("/api/images", body, Cookie="visitor=ann")
    assert next(events(running))
    assert site.ask("/api/images", body, Cookie=f"visitor=bea.{64 * '0'}").status == 429
    answer = site.ask("/api/models", Cookie="visitor=é")
    given = answer.headers["set-cookie"].partition(";")[0]
    assert site.ask("/api/models", Cookie=given).headers["set-cookie"] is None
    other = site.ask("/api/images", body, Cookie=given)
    assert next(events(other))
    for each in (running, other):
        each.close()
    wait_until(lambda: not site.loop.jobs)


def test_the_address_is_not_taken_from_a_header(site, capsys):
    """Anybody can send it; a client could have another address in each request."""
    handler = access.show_log()
    try:
        assert site.ask("/api/none", **{"X-Forwarded-For": "10.1.1.1"}).status == 404
    finally:
        access.LOG.removeHandler(handler)
    assert '"client": "127.0.0.1"' in capsys.readouterr().err


def test_places_and_addresses_are_not_shown(engines, tmp_path, monkeypatch):
    """Neither those of the models, nor those in errors."""
    (name,) = loop.public_names([str(tmp_path / "mar")])
    engine = engines["mar"]
    with served({name: engine}) as site:
        assert name == json.load(site.ask("/v1/models"))["data"][0]["id"] == "mar"
        (event,) = finished(site.make(settings=QUICK))
        png = base64.b64decode(event["image"].partition(",")[2])
        text = Image.open(io.BytesIO(png)).text["cspd"]
        folder = Path(engine.origins["MAR"]["checkpoint"])
        assert folder.is_absolute() and folder.name in text and str(folder) not in text
        broken = site.make(picture="data:image/png;base64,aGVsbG8=", mask=WHITE)
        assert broken.status == 400 and "0x" not in json.load(broken)["detail"]
        with monkeypatch.context() as patch:
            patch.setattr(site.engine.runners[name], "decode", lambda tokens: open(tmp_path / "missing"))
            (event,) = finished(site.make(settings=QUICK))
        assert "missing" in event["error"] and str(tmp_path) not in event["error"]


def test_names_of_checkpoints():
    named = loop.public_names(["digits32", "/a/x/final", "/b/y/final"])
    assert named == {"digits32": "digits32", "x/final": "/a/x/final", "y/final": "/b/y/final"}


def test_exhausted_memory_is_a_message(site, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(site.engine.runners["mar"], "prepare", lambda *given: torch.empty(2**60))
        answer = site.make(settings=QUICK)
        assert answer.status == 503 and "memory" in json.load(answer)["detail"]
        patch.setattr(site.engine.runners["mar"], "prepare", lambda *given: [][0])
        assert site.make(settings=QUICK).status == 500


# The gallery of the page.


def test_pictures_are_saved_in_the_gallery(engines, engine, tmp_path):
    """The newest one is listed first. Other PNGs, and files outside the folder, are not in it."""
    folder = tmp_path / "pictures"
    with served({"mar": engine, "texts": engines["texts"]}, gallery=Gallery(folder)) as site:
        assert json.load(site.ask("/api/pictures")) == {"is_saved": True, "pictures": []}
        (first,) = finished(site.make(settings=QUICK, seed=str(2**53 + 1)))
        (second,) = finished(site.make(model="texts", label=None, prompt="../a fox/ \u00e9"))
        os.utime(folder / first["file"], (1e9, 1e9))
        Image.new("RGB", (4, 4)).save(folder / "other.png")
        (folder / "broken.png").write_text("not an image")
        (tmp_path / "outside.png").write_bytes(_content(first))
        listed = json.load(site.ask("/api/pictures"))["pictures"]
        assert [each["file"] for each in listed] == [second["file"], first["file"]]
        assert listed[1]["settings"] == first["settings"] | {"family": "MAR"}
        assert listed[1]["settings"]["seed"] == "9007199254740993"
        assert len(json.load(site.ask("/api/pictures?num=1"))["pictures"]) == 1
        answer = site.ask(f"/api/pictures/{quote(second['file'])}")
        assert answer.headers["content-type"] == "image/png" and answer.read() == _content(second)
        for name in (
            "other.png",
            "missing.png",
            "..%2Foutside.png",
            "%2e%2e",
            "..%5coutside.png",
            f"{folder}/{first['file']}",
        ):
            assert site.ask(f"/api/pictures/{name}").status == 404, name
        for name in ("../outside.png", "other.png", str(tmp_path / "outside.png")):  # not by the routes alone
            with pytest.raises(FileNotFoundError):
                Gallery(folder).read(name)
        assert finished(site.make(settings=QUICK, seed=str(2**53 + 1)))[0]["file"] == first["file"]
        assert len([*folder.iterdir()]) == 4


def _content(event):
    return base64.b64decode(event["image"].partition(",")[2])


def test_the_gallery_needs_the_key(engine, tmp_path):
    with served({"mar": engine}, gallery=Gallery(tmp_path), key="secret") as site:
        engine.sample(0, method="ar", **QUICK).save(tmp_path / "a.png")
        for path in ("/api/pictures", "/api/pictures/a.png"):
            assert site.ask(path).status == 401
            assert site.ask(path, Authorization="Bearer secret").status == 200


def test_a_picture_that_cannot_be_saved_still_arrives(engine, tmp_path, capsys):
    (tmp_path / "file").touch()
    with served({"mar": engine}, gallery=Gallery(tmp_path / "file")) as site:
        (event,) = finished(site.make(settings=QUICK))
        assert event["file"] is None and event["image"] and "not saved" in capsys.readouterr().err
        assert json.load(site.ask("/api/pictures"))["pictures"] == []


def test_without_a_folder_nothing_is_saved(site):
    (event,) = finished(site.make(settings=QUICK))
    assert "file" not in event
    assert json.load(site.ask("/api/pictures")) == {"is_saved": False, "pictures": []}


WHITE = link_of(mask_of(np.s_[:]))
SMALL = link_of(Image.new("RGB", (16, 16), "white"))
BAD = [
    ({"label": "dragon"}, "label='dragon'"),
    ({"label": "1,2"}, "'1,2'"),
    ({"seed": "-1"}, "seed=-1"),
    ({"methods": ["eagle2"]}, "method='eagle2'"),
    ({"methods": ["ddim:head_calls=one"]}, "head_calls"),
    ({"methods": []}, "methods: "),
    ({"methods": ["ar"] * 3}, "methods: "),
    ({"settings": {"cfgs": 1}}, "cfgs"),
    ({"settings": {"class_labels": 1}}, "labels=.. of sample()"),
    ({"settings": {"image": "/etc/passwd", "mask": "/etc/passwd"}}, "image"),
    ({"settings": {"num_iter": 65}}, "num_iter"),
    ({"model": "gan"}, "gan"),
    ({"model": "texts"}, "label"),
    ({"label": None, "prompt": "a fox"}, "prompt"),
    ({"colour": "red"}, "colour: "),
    ({"picture": WHITE}, "mask"),
    ({"picture": "data:image/png;base64,AAAA", "mask": WHITE}, "picture"),
    ({"picture": link_of(Image.new("1", (5000, 5000))), "mask": WHITE}, "5000"),
    ({"model": "vq", "picture": SMALL, "mask": link_of(mask_of(np.s_[:2], 16))}, "raster order"),
]


@pytest.mark.parametrize("wanted, said", BAD, ids=range(len(BAD)))
def test_bad_input_is_a_message(wanted, said, site):
    answer = site.make(**wanted)
    message = json.load(answer)["detail"]
    assert answer.status == 400 and said in message and len(message) < 600
    assert not site.loop.jobs


def test_bad_bodies(site):
    no_label = '{"model": "mar", "methods": ["ar"]}'
    for body in ("", "{", "[]", '{"model": "mar"}', '{"model": ' + "[" * 10_000, no_label):
        answer = site.ask("/api/images", body)
        assert answer.status == 400 and json.load(answer)["detail"]
    answer = site.ask("/api/images", " " * (bodies.MOST_BYTES + 1), Connection="keep-alive")
    assert answer.status == 413 and "8 MiB" in json.load(answer)["detail"]


def test_the_description_of_the_models(site):
    mar, vq, texts = json.load(site.ask("/api/models", client=""))["models"]
    assert texts["name"] == "texts" and texts["classes"] == []
    assert mar["classes"][3] == "three" and vq["side"] == 8
    guarantees = {method["name"]: method["guarantee"] for method in mar["methods"]}
    expected = {each.name: each.guarantee for each in cspd.method.METHODS if each.family == "MAR"}
    assert expected.pop("mar-draft") and guarantees == expected  # the engine has no draft model
    assert {"name": "num_sampling_steps", "default": 100}.items() <= mar["options"][-1].items()
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        answer = site.ask(path)
        assert answer.status == 200 and answer.headers["content-type"].startswith(kind)
    assert site.ask("/../app.py").status == 404


@pytest.mark.parametrize("part", ["admit", "decode"])
def test_a_failed_round_is_reported(part, site, monkeypatch, capsys):
    """So is a failed preview; the images of other models go on."""
    other = events(site.make("bea", model="vq", methods=["ar"], seed=2))
    assert "advice" in next(other)
    with monkeypatch.context() as patch:
        patch.setattr(site.engine.runners["mar"], part, lambda given: 1 / 0)
        (event,) = finished(site.make(settings=QUICK))
    assert "division by zero" in event["error"] and "mar failed: ZeroDivisionError" in capsys.readouterr().err
    *_, last = other
    assert last["finished"]
    assert "finished" in finished(site.make(settings=QUICK))[0]


def test_both_methods_run_or_neither(site, monkeypatch):
    """If the second request cannot be queued, the first is cancelled."""
    scheduler = site.engine.scheduler
    queued, add = [], scheduler.add

    def full(sequence):
        if queued:
            raise ValueError("no room for it")
        queued.append(sequence)
        add(sequence)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "add", full)
        answer = site.make(methods=["ar", "ddim"], settings=QUICK)
        assert answer.status == 400 and "no room for it" in json.load(answer)["detail"]
    assert len(queued) == 1 and not len(scheduler) and not site.loop.jobs
    assert "finished" in finished(site.make(settings=QUICK))[0]


def test_the_command(capsys):
    """It prints the address of the page, and Ctrl-C ends it."""
    addresses = []

    def visit(address):
        addresses.append(address)
        assert status_of(f"{address}/api/status") == 200

    assert run_command(visit, "--checkpoint", small_checkpoint()) == 130
    said = capsys.readouterr()
    assert addresses[0] in said.out and said.err.count("\n") == 1


@pytest.mark.parametrize(
    "options, is_saved",
    [([], True), (["--out", "none"], False), (["--allowed-hosts", "gpu1"], False)],
)
def test_the_folder_of_the_command(options, is_saved, monkeypatch, tmp_path, capsys):
    """A server for this machine only saves pictures. The folder is made when there is one."""
    monkeypatch.chdir(tmp_path)
    told = []

    def visit(address):
        with urllib.request.urlopen(f"{address}/api/pictures") as answer:
            told.append(json.load(answer))

    assert run_command(visit, "--checkpoint", small_checkpoint(), *options) == 130
    assert told == [{"is_saved": is_saved, "pictures": []}] and not [*tmp_path.iterdir()]


def test_the_command_runs_without_its_streams(monkeypatch):
    """As after `>&-`."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    statuses = []

    def visit(address):
        statuses.append(status_of(f"{address}/api/status"))

    assert run_command(visit, "--checkpoint", small_checkpoint()) == 130
    assert statuses == [200]


def test_errors_of_the_command_come_before_any_work(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, said in (
            (["--port", str(taken.getsockname()[1])], "--port"),
            (["--checkpoint", "digits32", "digits64"], "digits64"),
            (["--port", "0", "--eagle", __file__], "--checkpoint"),
        ):
            assert main(["serve", *options]) == 2
            error = capsys.readouterr().err
            assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("package", ["uvicorn", "python_multipart"])
def test_a_missing_package_is_named_at_the_start(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("app", "connections", "v1"):  # as if none was imported before
        monkeypatch.delitem(sys.modules, f"cspd.serving.{module}")
        monkeypatch.delattr(f"cspd.serving.{module}")
    assert main(["serve", "--checkpoint", "digits64"]) == 2
    said = capsys.readouterr().err
    assert package in said and "[serve]" in said


def test_the_container_starts_the_server_and_checks_its_health(engines, monkeypatch):
    """Its Dockerfile has JSON arrays after CMD: the first is of HEALTHCHECK."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    health, command = [json.loads(line.split("CMD ")[1]) for line in lines if "CMD [" in line]
    args = _parse(command)
    assert (args.command, args.host, args.port) == ("serve", "0.0.0.0", 8000)
    assert "USER 1000" in lines
    with served(engines) as site:
        _, *code = [word.replace("127.0.0.1:8000", site.address.removeprefix("http://")) for word in health]
        assert subprocess.run([sys.executable, *code]).returncode == 0
    assert subprocess.run([sys.executable, *code], stderr=subprocess.DEVNULL).returncode != 0
    for line in lines:
        if line.startswith("COPY "):
            assert all((ROOT / file).exists() for file in line.split()[1:-1])
