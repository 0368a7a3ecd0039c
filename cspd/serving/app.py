"""The page and the HTTP API of `cspd serve`, and the thread that runs rounds for all clients."""

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
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
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
from cspd.files import link_of
from cspd.method import GUARANTEES, METHODS, Method, ModelRunner, parse_method
from cspd.option import COMMON, DEFAULTS, Option
from cspd.plots import coloured
from cspd.request import FORMATS, Inpainting, Output, Request, png_of
from cspd.terminal import label_of, shortened, value_of
from mar.checkpoint import lookup

# Access control: pages of other sites may not use this server, and the API needs the API key if there is one.
#
# A page of another site can send requests here from a user's browser. Its name is then in Origin, or in Host if it
# makes its name resolve to this machine (DNS rebinding). Both must therefore have an address of this server.

LOCAL = ("localhost", "127.0.0.1", "::1")
ADDRESS = re.compile(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", re.ASCII | re.IGNORECASE)  # localhost:8000, [::1]
REMEDY = "if that is its own address, start cspd serve with --allowed-hosts and the name"
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
        if scope["method"] == "POST" and _kind(headers) != "application/json":
            return _error(415, "the body is not announced as JSON: send Content-Type: application/json")
        return None

    def _is_host(self, host: str) -> bool:
        name = _name(host)
        return name in self._hosts or (self._any_address and _is_address(name))

    def _is_origin(self, origin: str, host: str) -> bool:
        scheme, _, address = origin.lower().partition("://")
        return scheme in ("http", "https") and (address == host.lower() or _name(address) in self._origins)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if self._key is None:
            return True
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


def _kind(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


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
        picture, mask: images of one size as base64 data links; white in the mask marks the area to regenerate.
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
    if sum(body.count(mark) for mark in b",[{") > MOST_PARTS:
        raise fastapi.HTTPException(400, f"the request has more than {MOST_PARTS:,} commas and brackets: send fewer")
    try:
        return Asked.model_validate_json(body)
    except pydantic.ValidationError as bad:
        first = bad.errors()[0]
        place = ".".join(map(str, first["loc"]))[:60] or "the request"
        raise fastapi.HTTPException(400, f"{place}: {first['msg'].removeprefix('Value error, ')}") from None


async def _read(request: fastapi.Request) -> bytearray:
    """Reads the body. uvicorn discards the rest of a body that is too large."""
    too_large = fastapi.HTTPException(413, f"the request has more than {MOST_BYTES / 2**20:g} MiB: send less")
    if int(request.headers.get("content-length", 0)) > MOST_BYTES:
        raise too_large
    body = bytearray()
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
        known = Inpainting.of(picture_of("picture", asked.picture), picture_of("mask", asked.mask))
    texts = {"prompt": asked.prompt, "negative_prompt": asked.negative_prompt}
    requests = []
    for text in asked.methods:
        name, options = parse_method(text)
        own = {**settings, **options}
        requests.append(Request(label, typed(asked.seed), name, settings=own, known=known, **texts))
    return requests


def typed(value: Value) -> Any:
    """A JSON value; text is parsed as on the command line."""
    return value_of(value) if isinstance(value, str) else value


def picture_of(name: str, link: str | None) -> Image.Image | None:
    """The image of a data link. Raises ValueError if it cannot be read or is too large."""
    if link is None:
        return None
    try:
        content = base64.b64decode(link.partition(",")[2], validate=True)
        picture = Image.open(io.BytesIO(content), formats=FORMATS)
        width, height = picture.size
        if width * height <= MOST_PIXELS:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # a damaged picture makes its reader raise almost anything
        raise ValueError(f"the {name} cannot be read ({error}): give a PNG as a data link") from None
    raise ValueError(f"the {name} has {width} by {height} pixels: give one of {MOST_PIXELS / 1e6:.1f} million at most")


# The content for the page: the models and methods, and the state of an image.

COLOURS = 32  # of a heat map
NUMBERS = {  # statistics to show: their titles and formats
    "iterations": ("iterations", ".0f"),
    "backbone_calls": ("backbone calls", ".0f"),
    "lazy_backbone_calls": ("lazy backbone calls", ".0f"),
    "head_calls": ("head calls", ".0f"),
    "head_calls_per_token": ("head calls per token", ".1f"),
    "draft_backbone_calls": ("draft backbone calls", ".0f"),
    "draft_head_calls": ("draft head calls", ".0f"),
    "step_compression": ("tokens per forward pass", ".2f"),
    "alpha": ("drafts accepted", ".1%"),
    "bound": ("bound on total variation", ".3g"),
    "difference": ("difference from the full chain", ".3f"),
    "divergence": ("divergence, nats per token", ".3f"),
    "audit": ("audited, nats per token", ".3f"),
}


def shown(output: Output, share: float) -> dict:
    """The state of an image for the page, finished or not.

    Args:
        share: the committed fraction of its tokens, 0..1.

    Returns:
        "share"; "image", a data link; "token_cost", a list with None for NaN; "guarantee"; "seconds" of its rounds, and
        "images_per_second" from them; "numbers", a list of [name, text]; "ran", the request with all defaults;
        "class_name".
    """
    seconds = sum(output.stats.seconds.values())
    return {
        "share": share,
        "image": None if output.image is None else link_of(png_of(output.pil())),
        "token_cost": [round(cost, 2) if math.isfinite(cost) else None for cost in output.token_cost.tolist()],
        "guarantee": output.stats.guarantee,
        "seconds": seconds,
        "images_per_second": share / seconds if seconds else 0.0,
        "numbers": numbers(output, share),
        "ran": repr(output.request),
        "class_name": output.class_name,
    }


def numbers(output: Output, share: float) -> list[tuple[str, str]]:
    """The statistics that apply to an image, as (title, text)."""
    found = []
    for name, (title, form) in NUMBERS.items():
        value = getattr(output.stats, name)
        if name == "head_calls_per_token" and share < 1:
            continue  # a mean over all tokens
        if value or (name == "alpha" and value is not None):
            found.append((title, format(value, form)))
    window = output.request.window
    if window is not None:
        found.append(("window", str(window) if window else "0, nothing is drafted"))
    return found


def about(engines: Mapping[str, Engine]) -> dict:
    """The description of the served models, methods and guarantees.

    Args:
        engines: by name of their checkpoint, one each.

    Raises:
        ValueError: a text-to-image model has no text encoder.
    """
    colours = np.asarray(coloured(np.linspace(0, 1, COLOURS)[None]))[0]
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
    usual = engine.check(_any(runner, family=family))
    return {
        "family": family,
        "name": name,
        "image_size": runner.image_size,
        "side": math.isqrt(runner.seq_len),
        "classes": [engine.name_of(Request(label, family=family)) for label in range(runner.num_classes)],
        "options": [_option(option, usual) for option in COMMON[family]],
        "methods": [_method(each) for each in METHODS if each.family == family and _has(engine, runner, each)],
        "default": DEFAULTS[family],
        "rows": family == "VQ",
    }


def _any(runner: ModelRunner, **how: Any) -> Request:
    """A valid request for a model: with a class or with a prompt."""
    return Request(0, **how) if runner.num_classes else Request(prompt="a picture", **how)


def _has(engine: Engine, runner: ModelRunner, method: Method) -> bool:
    """Whether the engine has all models that a method needs."""
    try:
        engine.check(_any(runner, method=method.name, family=method.family))
    except ValueError:
        return False
    return True


def _method(method: Method) -> dict:
    return {
        "name": method.name,
        "guarantee": method.guarantee,
        "summary": method.summary,
        "token_cost": method.token_cost,
        "options": {option.name: f"{option.range}: {option.help}" for option in method.options},
    }


def _option(option: Option, usual: Request) -> dict:
    words = None if isinstance(option.kind, type) else list(option.kind)
    return {
        "name": option.name,
        "help": f"{option.help} ({option.range})",
        "words": words,
        "default": getattr(usual, option.name),
    }


# The thread that runs the rounds of all clients' requests, and reports their progress.

PERIOD = 0.1  # minimum seconds between two reports of progress
SHARE = 0.2  # maximum fraction of the time that these reports take
MINUTE = 60.0  # seconds over which images per second are counted
Tell = Callable[[dict], None]


class Full(Exception):
    """More requests are under way than are allowed."""


@dataclass(eq=False)
class Job:
    """A client's request to a model. The thread of `EngineLoop` calls `tell` with its events."""

    model: str
    request: Request
    visitor: str
    tell: Tell
    ticket: int = -1


class EngineLoop:
    """Runs engines for many clients in one thread, a round of each in turn. No other thread uses the engines.

    Public methods are for other threads. They queue their work, which is done between two turns; private methods belong
    to the thread of the loop.

    Args:
        engines: by model name. most, most_each: maximum number of unfinished requests, in all and per client.

    Attributes:
        jobs: the unfinished jobs. made: number of finished images.
    """

    def __init__(self, engines: Mapping[str, Engine], most: int, most_each: int) -> None:
        self.engines, self.most, self.most_each = engines, most, most_each
        self.jobs: set[Job] = set()
        self.made = 0
        self._finished: deque[float] = deque(maxlen=10_000)  # times of the last images
        self._under_way: dict[str, dict[int, Job]] = {name: {} for name in engines}  # jobs by ticket
        self._wishes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_open = True
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the current round of each model; unfinished jobs get an error.

        A signal handler may call it.
        """
        self._wishes.put(self._close)

    def join(self) -> None:
        """Waits for the thread to end."""
        self._thread.join()

    def add(
        self, visitor: str, model: str, requests: Sequence[Request], tells: Sequence[Tell]
    ) -> tuple[list[Job], Future]:
        """Adds requests to the engine of a model: all of them, or none if one is bad.

        Returns:
            The jobs, and a future of the advice on each resolved request, see `cspd.method.Method`.

        Raises:
            Full: too many requests are unfinished.
        """
        own = sum(job.visitor == visitor for job in list(self.jobs))
        if own + len(requests) > self.most_each:
            raise Full(f"{own} of your images are under way and {self.most_each} may be: wait for one, or stop one")
        if len(self.jobs) + len(requests) > self.most:
            raise Full(f"{len(self.jobs)} images are under way and {self.most} may be: try again in a moment")
        jobs = [Job(model, request, visitor, tell) for request, tell in zip(requests, tells)]
        self.jobs.update(jobs)
        started: Future = Future()
        self._wishes.put(lambda: self._start(jobs, started))
        return jobs, started

    def leave(self, jobs: Collection[Job]) -> None:
        """Cancels the unfinished ones of some jobs."""
        self._wishes.put(lambda: self._cancel(jobs))

    def status(self) -> dict[str, float]:
        """Numbers of running and waiting requests and of finished images, and images per second in the last minute."""
        schedulers = [engine.scheduler for engine in self.engines.values()]
        running = sum(len(scheduler) - len(scheduler.waiting) for scheduler in schedulers)
        lately = sum(moment > time.monotonic() - MINUTE for moment in list(self._finished))
        return {
            "running": running,
            "waiting": max(0, len(self.jobs) - running),
            "made": self.made,
            "images_per_second": lately / MINUTE,
        }

    def _run(self) -> None:
        while self._is_open:
            if not any(self._under_way.values()) or not self._wishes.empty():
                self._wishes.get()()  # waits if there is nothing to run
                continue
            for model, jobs in self._under_way.items():
                if jobs:
                    self._round(model)
            self._look()

    def _start(self, jobs: Sequence[Job], started: Future) -> None:
        if not started.set_running_or_notify_cancel():  # the client has left
            self.jobs.difference_update(jobs)
            return
        try:
            prepared = [self.engines[job.model].prepare(job.request) for job in jobs]
            for job, each in zip(jobs, prepared):
                job.ticket = self.engines[job.model].add_request(each)
                self._under_way[job.model][job.ticket] = job
        except Exception as error:
            self._cancel([job for job in jobs if job.ticket in self._under_way[job.model]])
            self.jobs.difference_update(jobs)
            started.set_exception(error)
            return
        started.set_result([each.method.advice(each.request) for each in prepared])

    def _cancel(self, jobs: Collection[Job]) -> None:
        for job in self.jobs.intersection(jobs):
            self.engines[job.model].cancel(job.ticket)
            self._end(job)

    def _round(self, model: str) -> None:
        jobs = self._under_way[model]
        try:
            for ticket, output in self.engines[model].step().items():
                if ticket in jobs:  # the client may have left while the image was being decoded
                    self._finish(jobs[ticket], output)
        except Exception as error:
            self._fail(model, error)

    def _finish(self, job: Job, output: Output) -> None:
        if output.error:
            self._end(job, {"error": output.error})
            return
        event = shown(output, 1.0) | {"finished": True}
        self.made += 1
        self._finished.append(time.monotonic())
        self._end(job, event)

    def _look(self) -> None:
        """Reports the progress of running images, at most every `PERIOD` seconds."""
        began = time.monotonic()
        if began < self._next_look:
            return
        for model, jobs in self._under_way.items():
            engine = self.engines[model]
            own = [sequence for sequence in engine.scheduler.in_flight() if sequence.ticket in jobs]
            try:
                outputs = engine.so_far(own)
            except Exception as error:  # for example, out of memory for previews
                self._fail(model, error)
                continue
            for sequence, output in zip(own, outputs):
                jobs[sequence.ticket].tell(shown(output, sequence.fraction_done))
        now = time.monotonic()
        self._next_look = now + max(PERIOD, (now - began) / SHARE)

    def _end(self, job: Job, event: dict | None = None) -> None:
        del self._under_way[job.model][job.ticket]
        self.jobs.discard(job)
        if event is not None:
            job.tell(event)

    def _fail(self, model: str, error: Exception) -> None:
        """Drops the jobs of a model that failed. The other models go on."""
        print(f"cspd: {model} failed: {error!r}", file=sys.stderr)
        self._drop(model, f"the model failed: {error}: try again; if memory is short, serve with a smaller --max-batch")

    def _drop(self, model: str, why: str) -> None:
        for job in list(self._under_way[model].values()):
            self.engines[model].cancel(job.ticket)
            self._end(job, {"error": why})

    def _close(self) -> None:
        self._is_open = False
        for model in self.engines:
            self._drop(model, "the server is shutting down")


# The page over HTTP: its files, and the API.
#
# POST /api/images takes an `Asked` and answers with server-sent events. Each is a JSON object: the content of `shown`,
# and "run", the index of its method. The last event of a run has "finished" or an "error". If a client closes the
# connection, its images are cancelled.

PAGE = Path(__file__).parent / "page"
VISITOR = "visitor"  # the cookie that identifies a client
HEARTBEAT = 1.0  # seconds between comments in a stream: they show soon that a waiting client has left
MOST_UNREAD = 4  # events on their way to a client; while there are more, previews are skipped
GRACE = 2  # seconds that connections have to end
PATIENCE = 4.0  # maximum seconds from a signal to the end of the process


def make_app(engines: Mapping[str, Engine], most: int = 32, most_each: int = 4, **access: Any) -> fastapi.FastAPI:
    """The application. While it is served, its `state.loop` runs the engines; no other thread may use them.

    Args:
        engines: by name of their checkpoint, one each.
        most, most_each: maximum number of unfinished images, in all and per client.
        access: arguments of `Access`.

    Raises:
        ValueError: a text-to-image model has no text encoder.
    """
    loop = EngineLoop(engines, most, most_each)
    description = about(engines) | {"most_bytes": MOST_BYTES}

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
        if VISITOR not in request.cookies:
            response.set_cookie(VISITOR, secrets.token_hex(16), httponly=True, samesite="strict")
        return description

    @app.get("/api/status")
    async def status() -> dict:
        return loop.status()

    @app.post("/api/images")
    async def images(request: fastapi.Request, wanted: Annotated[Asked, fastapi.Depends(body_of)]) -> StreamingResponse:
        inbox: asyncio.Queue[dict] = asyncio.Queue()
        tell = functools.partial(_tell, asyncio.get_running_loop(), inbox)
        try:
            lookup(engines, wanted.model, "model")
            requests = await asyncio.to_thread(requests_of, wanted)
            tells = [functools.partial(tell, run) for run in range(len(requests))]
            jobs, started = loop.add(_visitor(request), wanted.model, requests, tells)
            advice = await asyncio.wrap_future(started)
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


def _visitor(request: fastapi.Request) -> str:
    """The client of a request: a browser by its cookie, a program by its address."""
    address = request.client.host if request.client else ""
    return request.cookies.get(VISITOR, address)


def _tell(loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue, run: int, event: dict) -> None:
    """Puts an event of a run into an inbox, from a thread other than the event loop's."""
    with contextlib.suppress(RuntimeError):  # the event loop is closed: the server has ended
        loop.call_soon_threadsafe(_put, inbox, {"run": run, **event})


def _put(inbox: asyncio.Queue, event: dict) -> None:
    if _is_last(event) or inbox.qsize() < MOST_UNREAD:
        inbox.put_nowait(event)


def _is_last(event: dict) -> bool:
    return "finished" in event or "error" in event


async def _events(
    loop: EngineLoop, jobs: Sequence[Job], inbox: asyncio.Queue, advice: Sequence[str | None]
) -> AsyncIterator[str]:
    """The events of some jobs as text. If the reader leaves, the jobs are cancelled."""
    unfinished = len(jobs)
    try:
        for run, text in enumerate(advice):
            yield _event({"run": run, "advice": text})
        while unfinished:
            try:
                event = await asyncio.wait_for(inbox.get(), HEARTBEAT)
            except asyncio.TimeoutError:  # noqa: UP041 - another one in Python 3.10
                yield ": waiting\n\n"  # a comment
                continue
            unfinished -= _is_last(event)
            yield _event(event)
    finally:
        loop.leave(jobs)


def _event(content: dict) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


class Server(uvicorn.Server):
    """A uvicorn server that ends soon after a signal, whatever the engines are doing."""

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
        """Handles SIGHUP, a closed terminal, too, unless it is ignored, as under nohup."""
        with super().capture_signals(), contextlib.ExitStack() as restored:
            hangup = getattr(signal, "SIGHUP", None)  # Windows has none
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and hangup and signal.getsignal(hangup) is not signal.SIG_IGN:
                restored.callback(signal.signal, hangup, signal.signal(hangup, self.handle_exit))
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal; a second one ends the process at once."""
        if self.should_exit:
            os._exit(128 + sig)
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
