"""Visitors of `cspd serve` who ask for too much: long texts, large bodies, slow ones. And a signal always ends it."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time

import pytest
from launching import free_port, start, wait_until
from serving import events, finished, served
from stores import small_checkpoint
from texts import small_text_checkpoint

import cspd
from cspd.serving import app

LIMIT = 5.0  # seconds that nobody may have to wait longer; most waits are milliseconds
DIGITS = {"model": "digits32", "label": 3, "methods": ["ar"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    engines = {"mar": cspd.load(small_checkpoint(), max_batch=1, device="cpu")}
    with pytest.MonkeyPatch.context() as patch:
        folder = small_text_checkpoint(tmp_path_factory.mktemp("texts"), patch)
        engines["texts"] = cspd.load(folder, max_batch=1, device="cpu")
        with served(engines) as site:
            yield site


@pytest.fixture
def quick(site):
    """Whatever a test asks for, it has an answer soon, and so has another visitor."""
    began = time.monotonic()
    yield
    assert site.ask("/api/status", visitor="bea").status == 200
    assert time.monotonic() - began < LIMIT


LONG = "a." * 30_000
TOO_LONG = [
    ({"model": "texts", "label": None, "prompt": LONG}, "prompt"),
    ({"model": "texts", "label": None, "prompt": "a fox", "negative_prompt": LONG}, "negative_prompt"),
    ({"label": "0-99999," * 600 + "1"}, "label"),
    ({"seed": "1" * 401}, "seed"),
    ({"settings": {"cfg": "1" * 401}}, "settings.cfg"),
    ({"settings": {LONG: 1}}, "settings"),
    ({LONG: 1}, "a.a."),
]


@pytest.mark.parametrize("wanted, place", TOO_LONG, ids=range(len(TOO_LONG)))
def test_long_texts_are_refused(wanted, place, site, quick):
    answer = site.make(**wanted)
    message = json.load(answer)["detail"]
    assert answer.status == 400 and message.startswith(place) and len(message) < 200


@pytest.mark.parametrize("label", ["0-99999", "1,2", "0-9", "three,"])
def test_one_class_is_wanted(label, site):
    answer = site.make(label=label)
    assert answer.status == 400 and repr(label) in json.load(answer)["detail"]


def begun(site, *lines):
    """A connection that sent the first lines of a request."""
    connection = socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT)
    first = ("POST /api/images HTTP/1.1", f"Host: localhost:{site.port}", "Content-Type: application/json")
    connection.sendall("\r\n".join([*first, *lines, "", ""]).encode())
    return connection


def status_of(connection):
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def test_large_bodies_are_refused_before_they_are_sent(site, quick):
    with begun(site, "Content-Length: 99999999999") as connection:
        assert status_of(connection) == 413
    with begun(site, f"Content-Length: {app.MOST_BYTES + 1}") as connection:
        connection.sendall(b" " * (app.MOST_BYTES + 1))  # all the same
        assert status_of(connection) == 413


def test_a_body_without_end_is_refused(site, quick):
    part = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    with begun(site, "Transfer-Encoding: chunked") as connection:
        for _ in range(app.MOST_BYTES // 2**20 + 1):
            connection.sendall(part)
        assert status_of(connection) == 413


def test_slow_bodies_are_given_up(site, monkeypatch, quick):
    monkeypatch.setattr(app, "MOST_SECONDS", 0.2)
    with begun(site, "Content-Length: 100") as connection:
        connection.sendall(b'{"model": ')
        assert status_of(connection) == 408
        assert connection.recv(1) == b""  # it is closed


def test_connections_that_say_nothing(site):
    """Many of one client do not keep others out."""
    connections = [socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT) for _ in range(300)]
    try:
        assert site.ask("/api/status").status == 200
        quick = {"num_iter": 1, "num_sampling_steps": 2, "first_timestep": 950, "cfg": 1}
        assert "finished" in finished(site.make(label=3, settings=quick))[0]
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_whatever_runs(number, tmp_path):
    """An image is under way, whose visitor does not read on, and another visitor waits for a calibration."""
    port, log = free_port(), tmp_path / "log"
    options = ["--checkpoint", "digits32", "--device", "cpu", "--port", port]
    server = start(["serve", *options], log, XDG_CACHE_HOME=str(tmp_path))
    try:
        wait_until(lambda: " serves digits32" in log.read_text())
        visitors = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2)]
        long = {"num_iter": 64, "num_sampling_steps": 1000}
        for visitor, method in zip(visitors, ("ar", "calibrated")):
            body = json.dumps(DIGITS | {"methods": [method], "settings": long})
            visitor.request("POST", "/api/images", body, {"Content-Type": "application/json"})
            if method == "ar":
                stream = events(visitor.getresponse())
                assert next(event for event in stream if "share" in event)
        wait_until(lambda: "fitting the calibration" in log.read_text())
        began = time.monotonic()
        server.send_signal(number)
        assert server.wait(60) == 128 + number
        assert time.monotonic() - began < 5
    finally:
        server.kill()
    said = log.read_text()
    assert "cspd: stopped\n" in said and "Traceback" not in said
