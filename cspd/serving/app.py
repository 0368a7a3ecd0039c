"""The page and the HTTP API of `cspd serve`: who may use them, what a request may hold, and how it is answered."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import io
import ipaddress
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Collection, Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import fastapi
import numpy as np
import pydantic
import uvicorn
from fastapi.responses import StreamingResponse
from fastapi.staticfiles import StaticFiles
from PIL import Image, ImageOps
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cspd.engine import Engine
from cspd.method import GUARANTEES, METHODS, Method, ModelRunner, parse_method
from cspd.option import COMMON, DEFAULTS, LARGEST, Option
from cspd.plots import coloured
from cspd.request import FORMATS, Inpainting, Request
from cspd.serving.loop import EngineLoop, Full, Job
from cspd.terminal import label_of, shortened, value_of
from mar.checkpoint import lookup

# Access control: pages of other sites may not use this server, and the API needs the API key if there is one.
#
# A page of another site can send requests here from a user's browser. The site's name is then in Origin, or in Host if
# the site makes its name resolve to this machine (DNS rebinding). So both must have an address of this server.

LOCAL = ("localhost", "127.0.0.1", "::1")
ADDRESS = re.compile(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", re.ASCII | re.IGNORECASE)  # localhost:8000, [::1]
REMEDY = "if that is an address of this server, start cspd serve with --allowed-hosts and the name"
PRIVATE = "/api/"  # paths that need the API key; the page itself is public and asks for the key


class Access:
    """ASGI middleware that refuses requests with a wrong Host, Origin, content type or API key.

    Args:
        app: the application that answers the other requests.
        hosts: valid names and addresses in Host, in addition to `LOCAL`.
        origins: valid names and addresses in Origin if it differs from Host, as behind some proxies.
        any_address: any IP address is valid in Host: DNS rebinding needs a name.
        key: the API key, ASCII characters; None: no key is needed.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        any_address: bool = False,
        key: str | None = None,
    ) -> None:
        self._app = app
        self._hosts = {*LOCAL, *map(str.lower, hosts)}
        self._origins = {*map(str.lower, origins)}
        self._any_address = any_address
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to a refused request, or None if the request is allowed."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_host(host):
            return _error(403, f"this server does not answer as {shortened(host)}: {REMEDY}")
        if origin is not None and not self._is_origin(origin, host):
            return _error(403, f"pages of {shortened(origin)} may not use this server: {REMEDY}")
        if scope["path"].startswith(PRIVATE) and not self._has_key(headers):
            return _error(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")
        content_type = headers.get("content-type", "").partition(";")[0]
        if scope["method"] == "POST" and content_type.strip().lower() != "application/json":  # a form of another site
            return _error(415, "the body is not announced as JSON: send Content-Type: application/json")
        return None

    def _is_host(self, host: str) -> bool:
        name = _name(host)
        return name in self._hosts or (self._any_address and _is_address(name))

    def _is_origin(self, origin: str, host: str) -> bool:
        scheme, _, address = origin.lower().partition("://")
        is_own = address == host.lower() or _name(address) in self._origins
        return scheme in ("http", "https") and is_own

    def _has_key(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self._key)


def _name(address: str) -> str:
    """The name or IP address in an address, without its port; "" if the address is malformed."""
    found = ADDRESS.fullmatch(address)
    return (found[1] or found[2]).lower() if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _error(status: int, detail: str) -> JSONResponse:
    """An error in the format of FastAPI."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"detail": detail}, status, headers)


# From the body of an HTTP request to requests of the engine.

MOST_PIXELS = 1024 * 1024  # of an image: engines cache the last images as tensors
MOST_BYTES = 8 * 2**20  # of a request: PNGs of an image and a mask of `MOST_PIXELS` of noise take 6.7 MiB
MOST_SECONDS = 60.0  # for a request to arrive
MOST_PARTS = 2_000  # commas and brackets, a bound on the number of values: to validate millions takes minutes
MOST_CHARACTERS = 400  # of every text except images
MOST_METHODS = 2


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        raise ValueError(f"a text of {len(value):,} characters is too long: give at most {MOST_CHARACTERS}")
    return value


Text = Annotated[str, pydantic.AfterValidator(_short)]
Value = Annotated[int | float | bool | str | None, pydantic.AfterValidator(_short)]


class Asked(pydantic.BaseModel):
    """The body of POST /api/images: one image by each of one or several methods, with the same seed.

    Text is read as on the command line, and has at most `MOST_CHARACTERS` characters except for images.

    Attributes:
        model: name of a served model.
        label: class by number or name; "none" or null: an unconditional image.
        prompt, negative_prompt: for text-to-image models, in place of a label.
        methods: names, with options after a colon: "calibrated:head_calls=8".
        settings: settings of `cspd.request.Request` for all methods; empty ones take the default.
        picture, mask: images of one size as base64 data links; the white area of the mask is regenerated.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    model: Text
    label: Value = None
    prompt: Text | None = None
    negative_prompt: Text | None = None
    seed: Value = 0
    methods: list[Text] = pydantic.Field(min_length=1, max_length=MOST_METHODS)
    settings: dict[Text, Value] = {}
    picture: str | None = None
    mask: str | None = None


async def body_of(request: fastapi.Request) -> Asked:
    """The validated body of a request. Raises HTTPException if it is invalid, too large or too slow."""
    try:
        body = await asyncio.wait_for(_read(request), MOST_SECONDS)
    except ClientDisconnect:
        raise fastapi.HTTPException(400, "the connection was closed") from None
    except asyncio.TimeoutError:  # noqa: UP041 - another one in Python 3.10
        slow = f"the request did not arrive within {MOST_SECONDS:g} s: send less, or faster"
        raise fastapi.HTTPException(408, slow, {"Connection": "close"}) from None
    num_parts = sum(body.count(mark) for mark in b",[{")
    if num_parts > MOST_PARTS:
        raise fastapi.HTTPException(400, f"the request has more than {MOST_PARTS:,} commas and brackets: send fewer")
    try:
        return Asked.model_validate_json(body)
    except pydantic.ValidationError as invalid:
        first = invalid.errors()[0]
        field = ".".join(map(str, first["loc"]))[:60] or "the request"
        message = first["msg"].removeprefix("Value error, ")
        raise fastapi.HTTPException(400, f"{field}: {message}") from None


async def _read(request: fastapi.Request) -> bytearray:
    """Reads the body. uvicorn discards the rest of a body that is too large."""
    too_large = fastapi.HTTPException(413, f"the request has more than {MOST_BYTES / 2**20:g} MiB: send less")
    if int(request.headers.get("content-length", 0)) > MOST_BYTES:
        raise too_large
    body = bytearray()  # its length may be unknown, or wrong: it is counted as it arrives
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise too_large
    return body


def requests_of(asked: Asked) -> list[Request]:
    """A request for each method. Raises ValueError, TypeError or ArgumentTypeError on invalid values."""
    if asked.prompt is None and "label" not in asked.model_fields_set:
        raise ValueError(
            "neither label nor prompt is given: give label (null: unconditional), or prompt for a text-to-image model"
        )
    label: Any = label_of(asked.label) if isinstance(asked.label, str) else asked.label
    settings = {name: typed(value) for name, value in asked.settings.items() if value not in ("", None)}
    known = None
    if asked.picture is not None or asked.mask is not None:
        known = Inpainting.of(image_of("picture", asked.picture), image_of("mask", asked.mask))
    requests = []
    for text in asked.methods:
        name, options = parse_method(text)
        request = Request(
            label,
            typed(asked.seed),
            name,
            settings=settings | options,
            known=known,
            prompt=asked.prompt,
            negative_prompt=asked.negative_prompt,
        )
        requests.append(request)
    return requests


def typed(value: Value) -> Any:
    """A JSON value; text is parsed as on the command line."""
    return value_of(value) if isinstance(value, str) else value


def image_of(name: str, link: str | None) -> Image.Image | None:
    """The image of a data link. Raises ValueError if it cannot be read or is too large."""
    if link is None:
        return None
    try:
        content = base64.b64decode(link.partition(",")[2], validate=True)
        image = Image.open(io.BytesIO(content), formats=FORMATS)  # reads only its header
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"it has {image.width} by {image.height} pixels")
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a damaged image makes its reader raise almost anything
        limit = f"{MOST_PIXELS / 1e6:.2f} million pixels"
        raise ValueError(f"the {name} cannot be read ({error}): give a PNG of at most {limit} as a data link") from None


# The description of the models, for the form of the page.

COLOURS = 32  # of a heat map


def about(engines: Mapping[str, Engine]) -> dict:
    """The description of the served models, methods and guarantees.

    Args:
        engines: by name of their checkpoint, one each.

    Raises:
        ValueError: a text-to-image model has no text encoder.
    """
    fractions = np.linspace(0, 1, COLOURS)[None]  # an image of one row
    (colours,) = np.asarray(coloured(fractions))
    first = next(iter(engines.values()))
    return {
        "models": [_model(engine, name) for name, engine in engines.items()],
        "guarantees": GUARANTEES,
        "colours": [f"rgb({red} {green} {blue})" for red, green, blue in colours.tolist()],
        "slots": first.num_slots,
        "machine": first.describe(),
    }


def _model(engine: Engine, name: str) -> dict:
    ((family, runner),) = engine.runners.items()
    usual = engine.check(_any_request(runner, family=family))
    return {
        "family": family,
        "name": name,
        "image_size": runner.image_size,
        "side": math.isqrt(runner.seq_len),
        "classes": [engine.name_of(Request(label, family=family)) for label in range(runner.num_classes)],
        "options": [_option(option, getattr(usual, option.name)) for option in COMMON[family]],
        "methods": [_method(each) for each in METHODS if each.family == family and _has(engine, runner, each)],
        "default": DEFAULTS[family],
        "rows": family == "VQ",
    }


def _any_request(runner: ModelRunner, **settings: Any) -> Request:
    """A valid request for a model: with a class or with a prompt."""
    return Request(0, **settings) if runner.num_classes else Request(prompt="an image", **settings)


def _has(engine: Engine, runner: ModelRunner, method: Method) -> bool:
    """Whether the engine has all models that a method needs."""
    try:
        engine.check(_any_request(runner, method=method.name, family=method.family))
    except ValueError:
        return False
    return True


def _method(method: Method) -> dict:
    return {
        "name": method.name,
        "guarantee": method.guarantee,
        "summary": method.summary,
        "token_cost": method.token_cost,
        "options": [_option(option, option.default) for option in method.options],
    }


def _option(option: Option, default: object) -> dict:
    words = ["true", "false"] if option.kind is bool else None
    return {
        "name": option.name,
        "help": f"{option.help} ({option.range})",
        "words": words if isinstance(option.kind, type) else list(option.kind),
        "integer": option.kind is int,
        "low": option.low if option.above is None else option.above,
        "high": None if option.high == LARGEST else option.high,
        "default": default,
        "only_with": option.only_with,
    }


# The application: the page's files, and the API.
#
# POST /api/images takes an `Asked` and answers with server-sent events. Each is a JSON object: the content of
# `cspd.serving.loop.shown`, and "run", the index of its method. The last event of a run has "finished" or an "error".
# If a client closes the connection, its images are cancelled.

PAGE = Path(__file__).parent / "page"
COOKIE = "visitor"  # the name of the cookie that identifies a client
HEARTBEAT = 1.0  # seconds between comments in a stream: they show soon that a waiting client has left
MOST_UNREAD = 4  # events on their way to a client; while there are more, previews are skipped
GRACE = 2  # seconds that connections have to end
PATIENCE = 4.0  # maximum seconds from a signal to the end of the process


def make_app(engines: Mapping[str, Engine], most: int = 32, most_each: int = 4, **access: Any) -> fastapi.FastAPI:
    """The application. While it is served, its `state.loop` runs the engines; no other thread may use them.

    Args:
        engines: by name of their checkpoint, one each.
        most, most_each: maximum number of unfinished images, of all clients and of each client.
        access: arguments of `Access`.

    Raises:
        ValueError: a text-to-image model has no text encoder.
    """
    loop = EngineLoop(engines, most, most_each)
    description = about(engines) | {"most_bytes": MOST_BYTES, "most_each": most_each}

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        loop.start()
        yield
        loop.close()
        loop.join()

    app = fastapi.FastAPI(title="cspd", lifespan=lifespan, openapi_url=None)
    app.add_middleware(Access, **access)
    app.state.loop = loop

    @app.get("/api/models")
    async def models(request: fastapi.Request, response: fastapi.Response) -> dict:
        if COOKIE not in request.cookies:
            response.set_cookie(COOKIE, secrets.token_hex(16), httponly=True, samesite="strict")
        return description

    @app.get("/api/status")
    async def status() -> dict:
        return loop.status()

    @app.post("/api/images")
    async def images(request: fastapi.Request, asked: Annotated[Asked, fastapi.Depends(body_of)]) -> StreamingResponse:
        # the thread of the engines puts the events of all runs into one inbox, which the answer reads
        inbox: asyncio.Queue[dict] = asyncio.Queue()
        tell = functools.partial(_tell, asyncio.get_running_loop(), inbox)
        try:
            lookup(engines, asked.model, "model")
            requests = await asyncio.to_thread(requests_of, asked)
            tells = [functools.partial(tell, run) for run in range(len(requests))]
            # all requests are accepted before the answer begins, so that a bad one gets an HTTP error
            jobs, future = loop.add(_client(request), asked.model, requests, tells)
            advice = await asyncio.wrap_future(future)
        except Full as full:
            raise fastapi.HTTPException(429, str(full)) from None
        except (ValueError, TypeError, argparse.ArgumentTypeError) as bad:
            raise fastapi.HTTPException(400, str(bad)) from None
        except asyncio.CancelledError:  # uvicorn is shutting down
            raise fastapi.HTTPException(503, "the server is shutting down") from None
        events = _events(loop, jobs, inbox, advice)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return app


def _client(request: fastapi.Request) -> str:
    """The client of a request: a browser by its cookie, a program by its address."""
    address = request.client.host if request.client else ""
    return request.cookies.get(COOKIE, address)


def _tell(event_loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue, run: int, event: dict) -> None:
    """Puts an event of a run into an inbox, from a thread other than the event loop's."""
    with contextlib.suppress(RuntimeError):  # the event loop is closed: the server has ended
        event_loop.call_soon_threadsafe(_put, inbox, {"run": run, **event})


def _put(inbox: asyncio.Queue, event: dict) -> None:
    if _is_last(event) or inbox.qsize() < MOST_UNREAD:
        inbox.put_nowait(event)


def _is_last(event: dict) -> bool:
    return "finished" in event or "error" in event


async def _events(
    loop: EngineLoop, jobs: Sequence[Job], inbox: asyncio.Queue, advice: Sequence[str | None]
) -> AsyncIterator[str]:
    """The events of some jobs as text. If the reader leaves, the jobs are cancelled."""
    num_unfinished = len(jobs)
    try:
        for run, text in enumerate(advice):
            yield _event({"run": run, "advice": text})
        while num_unfinished:
            try:
                event = await asyncio.wait_for(inbox.get(), HEARTBEAT)
            except asyncio.TimeoutError:  # noqa: UP041 - another one in Python 3.10
                yield ": waiting\n\n"  # a comment
                continue
            num_unfinished -= _is_last(event)
            yield _event(event)
    finally:
        loop.leave(jobs)


def _event(content: dict) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


# The process: a signal always ends it soon.


class Server(uvicorn.Server):
    """A uvicorn server that ends soon after a signal, even if the engines are in the middle of a round."""

    def __init__(self, app: fastapi.FastAPI) -> None:
        super().__init__(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=GRACE, ws="none"))
        self._loop: EngineLoop = app.state.loop
        self._last_resort: threading.Timer | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal. The process ends at most `PATIENCE` seconds later."""
        try:
            super().run(sockets)
        finally:
            if self._last_resort:
                self._last_resort.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Also handles SIGHUP, a closed terminal, unless it is ignored, as under nohup."""
        with super().capture_signals(), contextlib.ExitStack() as restored:
            hangup = getattr(signal, "SIGHUP", None)  # Windows has none
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and hangup and signal.getsignal(hangup) is not signal.SIG_IGN:
                previous = signal.signal(hangup, self.handle_exit)
                restored.callback(signal.signal, hangup, previous)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal; a second one ends the process at once."""
        if self.should_exit:
            os._exit(128 + sig)
        # a round, or a calibration, may take minutes, and a thread that computes cannot be stopped
        self._last_resort = threading.Timer(PATIENCE, _end_process, [sig])
        self._last_resort.daemon = True
        self._last_resort.start()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # interrupted connections are not errors now
        self._loop.close()
        super().handle_exit(sig, frame)


def _end_process(sig: int) -> None:
    """Ends the process while another thread computes: a normal exit would wait for that thread, or crash."""
    try:
        print("cspd: stopped", file=sys.stderr, flush=True)
    finally:  # the terminal may be gone
        os._exit(128 + sig)
