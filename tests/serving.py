"""A site that is really served, on this machine, and its clients."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np
from launching import free_port, wait_until
from PIL import Image

from cspd.cli import main
from cspd.engine import Engine
from cspd.files import link_of as link_of_png
from cspd.pixels import png_of
from cspd.serving.app import Server, make_app
from cspd.serving.bodies import COOKIE, new_visitor


class Site:
    """A server, and requests of clients, which a cookie identifies."""

    def __init__(self, app, server, listener):
        self.engine = app.state.jobs.engine
        self.loop, self.server, self.listener = app.state.jobs, server, listener
        self.port = port = listener.getsockname()[1]
        self.cookies: dict[str, str] = {}  # by client
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path, body=None, client="ann", method=None, **headers):
        """The answer, whose events come as they are read. Headers of None are left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        cookie = self.cookies.setdefault(client, new_visitor("127.0.0.1"))
        usual = {"Cookie": f"{COOKIE}={cookie}", "Connection": "close", "Content-Type": "application/json"}
        sent = {name: value for name, value in (usual | headers).items() if value is not None}
        connection.request(method or ("GET" if body is None else "POST"), path, body, sent)
        return connection.getresponse()

    def make(self, client="ann", **wanted):
        body = {"model": "mar", "label": "three", "seed": 5, "methods": ["ar"], **wanted}
        return self.ask("/api/images", json.dumps(body), client)

    def status(self):
        return json.load(self.ask("/api/status"))


def together(engines) -> Engine:
    """One engine with the models of several, by name."""
    models = [each for engine in engines.values() for each in engine._models]
    engine = Engine(*models, names=engines, max_batch=4, device="cpu")
    for name, each in engines.items():
        (engine.origins[name],) = each.origins.values()
    return engine


@contextlib.contextmanager
def served(engines, proxies=(), prefix="", **settings) -> Iterator[Site]:
    """Serves the models of engines, by name, together; proxies as in `Server`, settings as in `make_app`."""
    app = make_app(together(engines), **settings)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(app, proxies)
    server.config.root_path = prefix
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Site(app, server, listener)
    finally:
        server.should_exit = True
        thread.join()


def run_command(visit: Callable[[str], None], *options: str) -> int:
    """The exit status of `cspd serve` in this thread; Ctrl-C ends it after `visit(address)` in another thread."""
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

    client = threading.Thread(target=visit_and_stop)
    client.start()
    status = main(["serve", "--port", str(port), "--device", "cpu", *options])
    client.join()
    return status


def status_of(address: str, headers: dict[str, str] | None = None) -> int:
    """The HTTP status of a GET request."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers or {}), timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


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


def message_of(answer) -> str:
    """The message of an error, of the page's API or of OpenAI's."""
    body = json.load(answer)
    return body["detail"] if "detail" in body else body["error"]["message"]


def link_of(image: Image.Image) -> str:
    return link_of_png(png_of(image))


def pixels(link: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))))
