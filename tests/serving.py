"""A page that is really served, on this machine, and visitors of it."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator

import numpy as np
from PIL import Image

from cspd.serving.app import Server, make_app


class Site:
    """A server and what a visitor, known by a cookie, can do with it."""

    def __init__(self, app, port):
        self.runner, self.port = app.state.runner, port
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path, body=None, visitor="ann"):
        """The answer, whose events come as they are read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        how = {"Cookie": f"visitor={visitor}", "Connection": "close"}
        connection.request("GET" if body is None else "POST", path, body, how)
        return connection.getresponse()

    def make(self, visitor="ann", **wanted):
        body = {"model": "mar", "label": "three", "seed": 5, "methods": ["ar"], **wanted}
        return self.ask("/api/images", json.dumps(body), visitor)

    def status(self):
        return json.load(self.ask("/api/status"))


@contextlib.contextmanager
def served(engines, **limits) -> Iterator[Site]:
    """A site of engines by name, for as long as it is needed."""
    app = make_app(engines, **limits)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Site(app, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


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
