"""A page that is really served, on this machine, and visitors of it."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np
from launching import free_port, wait_until
from PIL import Image

from cspd.cli import main
from cspd.serving.app import Server, make_app


class Site:
    """A server and what a visitor, known by a cookie, can do with it."""

    def __init__(self, app, port):
        self.loop, self.port = app.state.loop, port
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path, body=None, visitor="ann", method=None, **headers):
        """The answer, whose events come as they are read. Headers of None are left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        how = {"Cookie": f"visitor={visitor}", "Connection": "close", "Content-Type": "application/json"}
        how = {name: value for name, value in (how | headers).items() if value is not None}
        connection.request(method or ("GET" if body is None else "POST"), path, body, how)
        return connection.getresponse()

    def make(self, visitor="ann", **wanted):
        body = {"model": "mar", "label": "three", "seed": 5, "methods": ["ar"], **wanted}
        return self.ask("/api/images", json.dumps(body), visitor)

    def status(self):
        return json.load(self.ask("/api/status"))


@contextlib.contextmanager
def served(engines, **how) -> Iterator[Site]:
    """A site of engines by name, for as long as it is needed. `how`: limits, and who may use it."""
    app = make_app(engines, **how)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Site(app, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


def run_command(visit: Callable[[str], None], *options: str) -> int:
    """The exit status of `cspd serve`, in this thread, which Ctrl-C ends when `visit(address)` has in another one."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"

    def is_there():
        try:
            return urllib.request.urlopen(address, timeout=30)
        except OSError:  # nobody listens yet
            return False

    def visit_and_stop():
        try:
            wait_until(is_there)
            visit(address)
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    visitor = threading.Thread(target=visit_and_stop)
    visitor.start()
    status = main(["serve", "--port", str(port), "--device", "cpu", *options])
    visitor.join()
    return status


def events(answer) -> Iterator[dict]:
    """The events of an answer."""
    assert answer.status == 200, answer.read()
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def finished(answer) -> list[dict]:
    """The last event of each run."""
    last = {event["run"]: event for event in events(answer)}
    return [last[run] for run in sorted(last)]


def link_of(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def pixels(link: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))))
