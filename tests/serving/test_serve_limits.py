"""Clients of `cspd serve` that ask for too much: long texts, large or slow bodies. And a signal always ends it."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import resource
import select
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import free_port, start, wait_until
from serving import events, finished, message_of, served

from cspd.serving import bodies, connections, loop

LIMIT = 5.0  # seconds that any client may have to wait; most waits are milliseconds
QUICK = {"num_iter": 1, "num_sampling_steps": 2, "first_timestep": 950, "cfg": 1}
DIGITS = {"model": "digits32", "label": 3, "methods": ["ar"]}


@pytest.fixture(scope="module")
def site(engines):
    with served(engines) as site:
        yield site


@pytest.fixture
def quick(site):
    """The client of the test, and another one, are answered soon."""
    began = time.monotonic()
    yield
    assert site.ask("/api/status", client="bea").status == 200
    assert time.monotonic() - began < LIMIT


LONG = "a." * 30_000
TOO_LONG = [
    ({"model": "texts", "label": None, "prompt": LONG}, "prompt"),
    ({"label": "0-99999," * 600 + "1"}, "label"),
    ({"settings": {"cfg": "1" * 401}}, "settings.cfg"),
    ({"settings": {LONG: 1}}, "settings"),
    ({LONG: 1}, "a.a."),
]


@pytest.mark.parametrize("wanted, field", TOO_LONG, ids=range(len(TOO_LONG)))
def test_long_texts_are_refused(wanted, field, site, quick):
    answer = site.make(**wanted)
    message = json.load(answer)["detail"]
    assert answer.status == 400 and message.startswith(field) and len(message) < 200


def begun(site, *lines, path="/api/images"):
    """A connection that sent the first lines of a request."""
    connection = socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT)
    first = (f"POST {path} HTTP/1.1", f"Host: localhost:{site.port}", "Content-Type: application/json")
    connection.sendall("\r\n".join([*first, *lines, "", ""]).encode())
    return connection


def status_of(connection):
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def test_large_bodies_are_refused(site, quick):
    """Before they are sent, while they are sent, and if they do not end."""
    with begun(site, "Content-Length: 99999999999") as connection:
        assert status_of(connection) == 413
    with begun(site, f"Content-Length: {bodies.MOST_BYTES + 1}") as connection:
        connection.sendall(b" " * (bodies.MOST_BYTES + 1))
        assert status_of(connection) == 413
    part = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    with begun(site, "Transfer-Encoding: chunked") as connection:
        for _ in range(bodies.MOST_BYTES // 2**20 + 1):
            connection.sendall(part)
        assert status_of(connection) == 413


def test_slow_bodies_are_refused(site, monkeypatch, quick):
    monkeypatch.setattr(bodies, "MOST_SECONDS", 0.2)
    with begun(site, "Content-Length: 100") as connection:
        connection.sendall(b'{"model": ')
        assert status_of(connection) == 408
        assert connection.recv(1) == b""  # it is closed


def silent(site, sent=b""):
    connection = socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT)
    connection.sendall(sent)
    return connection


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_many_silent_connections_keep_nobody_out(site, monkeypatch):
    """As long as there is room they stay."""
    monkeypatch.setattr(connections, "FULL_SECONDS", 0.1)
    monkeypatch.setattr(site.server, "_most", 12)
    with contextlib.ExitStack() as opened:
        first = [opened.enter_context(silent(site, b"GET / HT")) for _ in range(8)]
        assert site.ask("/health").status == 200
        time.sleep(0.3)
        assert not select.select(first, [], [], 0)[0]
        for _ in range(20):
            opened.enter_context(silent(site))
        assert site.ask("/health").status == 200
        assert all(map(is_closed, first))


def test_clients_wait_while_all_connections_are_busy(site, monkeypatch):
    monkeypatch.setattr(site.server, "_most", 1)
    first = events(site.make("ann", settings=QUICK | {"num_iter": 16, "num_sampling_steps": 20}))
    assert next(first)
    made = site.loop.made
    assert site.ask("/health").status == 200
    assert site.loop.made == made + 1


def test_silent_connections_are_closed(site, monkeypatch, quick):
    """Nothing is sent; a header comes letter by letter; a body that nobody reads; a second request on a connection."""
    monkeypatch.setattr(bodies, "MOST_SECONDS", 0.4)
    head = f"GET /health HTTP/1.1\r\nHost: localhost:{site.port}\r\n".encode()
    begun = [silent(site, sent) for sent in (b"", head, head + b"Content-Length: 99\r\n\r\n", head + b"\r\n" + head)]
    left = {*begun}
    ended = time.monotonic() + LIMIT
    while left:
        assert time.monotonic() < ended
        time.sleep(0.05)
        for connection in [*left]:
            try:
                connection.sendall(b"a")
            except OSError:  # it is closed
                left.remove(connection)
                connection.close()


def test_answers_that_nobody_reads(site, monkeypatch):
    """The server reads no more requests of that connection, and closes it in the end."""
    some = f"GET /health HTTP/1.1\r\nHost: localhost:{site.port}\r\n\r\n".encode() * 1000
    with socket.socket() as connection:
        for end in (site.listener, connection):
            for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, kind, 4096)  # otherwise the system buffers megabytes
        connection.connect(("127.0.0.1", site.port))
        connection.settimeout(0.5)
        taken = 0
        with contextlib.suppress(TimeoutError):
            while taken < 2**18:
                taken += connection.send(some[taken % len(some) :])
        assert taken < 2**17
        monkeypatch.setattr(bodies, "MOST_SECONDS", 0.2)
        wait_until(lambda: not site.server.server_state.connections, LIMIT)


def test_large_headers_are_refused(site, quick):
    """Before they have arrived."""
    connection = silent(site, b"GET / HTTP/1.1\r\nHost: localhost\r\nA: ")
    with connection, pytest.raises(OSError):
        for _ in range(64):
            connection.sendall(b"a" * 2**20)


def test_a_broken_body_after_the_answer(site, caplog, quick):
    with begun(site, "Transfer-Encoding: chunked", path="/health") as connection:
        assert status_of(connection) == 404
        connection.sendall(b"no number\r\n")
        assert is_closed(connection)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_connections_leave_files_for_others():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, most in ((64, 32), (hard, connections.MOST_CONNECTIONS)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert connections.most_connections() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FIT = {"num_sampling_steps": 1000, "cfg": 2.25}  # `calibrated` is fitted to these settings for minutes
UNFITTED = {
    "/api/images": {"model": "mar", "label": 3, "methods": ["calibrated"], "settings": FIT},
    "/v1/images/generations": {"model": "mar", "prompt": "3", "method": "calibrated", **FIT},
}


@pytest.mark.parametrize("path", UNFITTED)
def test_a_calibration_that_nobody_waits_for_ends(path, site, monkeypatch):
    monkeypatch.setattr(bodies, "HEARTBEAT", 0.05)
    body = json.dumps(UNFITTED[path])
    with begun(site, f"Content-Length: {len(body)}", path=path) as connection:
        connection.sendall(body.encode())
        wait_until(lambda: site.loop.jobs, LIMIT)
        time.sleep(0.2)
        assert site.loop.jobs
    wait_until(lambda: not site.loop.jobs, LIMIT)
    assert "finished" in finished(site.make("bea", settings=QUICK))[0]


def posted(site, path, client, wanted):
    """The answer to a request, as it is sent by a thread."""
    answer = site.ask(path, json.dumps(wanted), client)
    return answer.status, message_of(answer)


def test_clients_that_wait_for_a_server_that_closes(engines):
    """One waits for a calibration of minutes, and two behind it: all are told at once, and so is who comes later."""
    quick = {"model": "mar", "label": 3, "methods": ["ar"], "settings": QUICK}
    asked = [("/api/images", quick), ("/v1/images/generations", {"model": "mar", "prompt": "3", "method": "ar"})]
    with served(engines) as site, ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(posted, site, "/api/images", "ann", UNFITTED["/api/images"])]
        wait_until(lambda: site.loop.jobs and site.loop._calls.empty(), LIMIT)
        waiting += [threads.submit(posted, site, path, "bea", wanted) for path, wanted in asked]
        wait_until(lambda: len(site.loop.jobs) == 3, LIMIT)
        site.loop.close()
        answers = [answer.result(LIMIT) for answer in waiting]
        answers.append(posted(site, "/api/images", "eve", quick))
        assert answers == [(503, loop.CLOSING)] * 4
        assert not site.loop.jobs


def test_a_request_that_comes_as_the_thread_ends(engines):
    """It was let in before the server began to close."""
    with served(engines) as site:
        assert site.ask("/health").status == 200
        site.loop.close()
        site.loop.join()
        site.loop.is_closing = False
        assert posted(site, "/api/images", "ann", DIGITS | {"model": "mar", "settings": QUICK}) == (503, loop.CLOSING)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_failed(engines, monkeypatch):
    """One image is running, and one request comes later."""
    with served(engines) as site:
        running = events(site.make(settings=QUICK | {"num_iter": 32, "num_sampling_steps": 100}))
        assert next(running)
        monkeypatch.setattr(site.engine, "run_round", lambda: [][0])
        *_, last = running
        assert last["error"] == loop.CLOSING
        assert site.make("bea", settings=QUICK).status == site.ask("/health").status == 503


def test_an_image_that_cannot_be_shown_is_its_own_error(site, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "png_text", lambda *given: [][0])
        (event,) = finished(site.make(settings=QUICK))
    assert "cannot be shown" in event["error"] and "IndexError" in capsys.readouterr().err
    assert "finished" in finished(site.make(settings=QUICK))[0]


@pytest.fixture(scope="module")
def calibrated_site(engines):
    with served(engines, calibrated_only=True) as site:
        yield site


OTHER = {"num_iter": 1, "num_sampling_steps": 5, "cfg": 1.25}
NEW = [
    {"methods": ["calibrated:head_calls=3"], "settings": OTHER},
    {"methods": ["speculative:window=2"], "settings": OTHER},
    {"methods": ["budget:budget=0.1"], "settings": OTHER},
    {"methods": ["gsd:budget=0.1"], "settings": {"cfg": 1.25}, "model": "vq"},
]


@pytest.mark.parametrize("wanted", NEW, ids=lambda wanted: wanted["methods"][0])
def test_new_calibrations_are_refused(wanted, calibrated_site):
    answer = calibrated_site.make(**wanted)
    assert answer.status == 400 and "cspd calibrate" in json.load(answer)["detail"]
    assert "finished" in finished(calibrated_site.make(**wanted | {"methods": ["ar"]}))[0]


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_always_ends_it(number, tmp_path):
    """One client does not read the rest of its image, and another one waits for a calibration."""
    port, log = free_port(), tmp_path / "log"
    options = ["--checkpoint", "digits32", "--device", "cpu", "--port", port]
    server = start(["serve", *options], log, XDG_CACHE_HOME=str(tmp_path))
    try:
        wait_until(lambda: " serves digits32" in log.read_text())
        clients = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2)]
        long = {"num_iter": 64, "num_sampling_steps": 1000}
        for client, method in zip(clients, ("ar", "calibrated")):
            body = json.dumps(DIGITS | {"methods": [method], "settings": long})
            client.request("POST", "/api/images", body, {"Content-Type": "application/json"})
            if method == "ar":
                stream = events(client.getresponse())
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


@pytest.mark.slow  # starts a process
def test_sigterm_finishes_the_images(tmp_path):
    """Clients that wait get their images, running and queued ones; one does not read its image."""
    port, log = free_port(), tmp_path / "log"
    options = ["--checkpoint", "digits32", "--device", "cpu", "--port", port, "--max-batch", "2"]
    server = start(["serve", *options], log, XDG_CACHE_HOME=str(tmp_path))
    settings = {"num_iter": 64, "num_sampling_steps": 100}
    body = json.dumps({"prompt": "three", "seed": 5, "method": "ar", **settings})

    def post(path, body):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
        client.request("POST", path, body, {"Content-Type": "application/json"})
        return client.getresponse()

    def status():
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
        client.request("GET", "/api/status")
        return json.load(client.getresponse())

    try:
        wait_until(lambda: " serves digits32" in log.read_text())
        with ThreadPoolExecutor(2) as threads:
            unread = post("/api/images", json.dumps(DIGITS | {"settings": settings | {"num_iter": 32}}))
            waiting = [threads.submit(lambda: json.load(post("/v1/images/generations", body))) for _ in range(2)]
            wait_until(lambda: status()["running"] == 2 and status()["waiting"] == 1)
            server.send_signal(signal.SIGTERM)
            images = [answer.result()["data"][0] for answer in waiting]
        assert all(image["seed"] == 5 and image["b64_json"] for image in images)
        assert unread.status == 200
        with pytest.raises(OSError):
            status()
        assert server.wait(60) == 128 + signal.SIGTERM
    finally:
        server.kill()
    said = log.read_text()
    assert "cspd: stopped\n" in said and "Traceback" not in said
