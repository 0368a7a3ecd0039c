"""The page of `cspd serve`, its API, and the process that serves it together with OpenAI's API (v1.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import fastapi
import numpy as np
import prometheus_client
import pydantic
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.types import Scope

from cspd.engine import Engine
from cspd.inpainting import Inpainting
from cspd.method import GUARANTEES, METHODS, Method, ModelRunner, parse_method
from cspd.option import COMMON, DEFAULTS, LARGEST_FLOAT, Option
from cspd.plots import coloured
from cspd.request import Request
from cspd.serving import v1
from cspd.serving.access import Access, Logged, Refusal, handle_error, path_of
from cspd.serving.bodies import (
    COOKIE,
    MOST_BYTES,
    Begun,
    Text,
    Value,
    address_of,
    begin,
    client_of,
    events_of,
    new_visitor,
    parse_json,
    picture_of,
    read,
    refusing,
    schema_of,
    typed,
)
from cspd.serving.connections import LimitedServer
from cspd.serving.gallery import Gallery
from cspd.serving.loop import EngineLoop, Jobs
from cspd.terminal import __version__, label_of, shortened
from mar.checkpoint import lookup

# What the page asks for.

MOST_METHODS = 2


class Asked(pydantic.BaseModel):
    """The body of POST /api/images: one image by each of one or several methods, with the same seed.

    Text is read as on the command line, and has at most `MOST_CHARACTERS` of `cspd.serving.bodies`, except for images.

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


def requests_of_page(asked: Asked) -> list[Request]:
    """A request for each method. Raises ValueError, TypeError or ArgumentTypeError on invalid values."""
    if asked.prompt is None and "label" not in asked.model_fields_set:
        raise ValueError(
            "neither label nor prompt is given: give label (null: unconditional), or prompt for a text-to-image model"
        )
    label: Any = label_of(asked.label) if isinstance(asked.label, str) else asked.label
    settings = {name: typed(value) for name, value in asked.settings.items() if value not in ("", None)}
    known = None
    if asked.picture is not None or asked.mask is not None:
        known = Inpainting.of(_image_of("picture", asked.picture), _image_of("mask", asked.mask))
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


def _image_of(name: str, link: str | None) -> Image.Image | None:
    return None if link is None else picture_of(name, link.encode())


# The description of the models, for the form of the page.

COLOURS = 32  # of a heat map


def about(engine: Engine) -> dict:
    """The description of the served models, methods and guarantees.

    Raises:
        ValueError: a text-to-image model has no text encoder.
    """
    fractions = np.linspace(0, 1, COLOURS)[None]  # an image of one row
    (colours,) = np.asarray(coloured(fractions))
    return {
        "models": [_model(engine, name) for name in engine.runners],
        "guarantees": GUARANTEES,
        "colours": [f"rgb({red} {green} {blue})" for red, green, blue in colours.tolist()],
        "slots": engine.num_slots,
        "machine": engine.describe(),
    }


def _model(engine: Engine, name: str) -> dict:
    runner = engine.runners[name]
    family = runner.family
    usual = engine.checked(_any_request(runner), name).request
    return {
        "family": family,
        "name": name,
        "image_size": runner.image_size,
        "side": math.isqrt(runner.seq_len),
        "classes": engine.classes_of(name),
        "options": [_option(option, getattr(usual, option.name)) for option in COMMON[family]],
        "methods": [_method(each) for each in METHODS if each.family == family and _has(engine, name, each)],
        "default": DEFAULTS[family],
        "rows": runner.in_raster_order,
    }


def _any_request(runner: ModelRunner, **settings: Any) -> Request:
    """A valid request for a model: with a class or with a prompt."""
    return Request(0, **settings) if runner.num_classes else Request(prompt="an image", **settings)


def _has(engine: Engine, name: str, method: Method) -> bool:
    """Whether the engine has all models that a method needs."""
    try:
        engine.checked(_any_request(engine.runners[name], method=method.name), name)
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
        "text": option.kind is str,
        "integer": option.kind is int,
        "low": option.low if option.above is None else option.above,
        "high": None if option.high == LARGEST_FLOAT else option.high,
        "default": default,
        "only_with": option.only_with,
    }


# The application.
#
# POST /api/images takes an `Asked` and answers with server-sent events. Each is a JSON object: the content of
# `cspd.serving.loop.shown`, and "run", the index of its method. The last event of a run has "finished" or an "error".
# If a client closes the connection, its images are cancelled.

PAGE = Path(__file__).parent / "page"
MOST_LISTED = 1_000  # pictures in an answer
GRACE = 2  # seconds that connections have to end
PATIENCE = 4.0  # seconds that the process has to end, after a signal or, on SIGTERM, after the last image


def make_app(
    engine: Engine,
    most: int = 32,
    most_each: int = v1.MOST_IMAGES,
    calibrated_only: bool = False,
    gallery: Gallery | None = None,
    **access: Any,
) -> fastapi.FastAPI:
    """The application. While it is served, its `state.jobs` runs the engine; no other thread may use it.

    Args:
        engine: the names of its models are those that clients see.
        most, most_each: maximum number of unfinished images, of all clients and of each client.
        calibrated_only: as in `EngineLoop`.
        gallery: where pictures of the page are saved; None: the server keeps none.
        access: arguments of `Access`.

    Raises:
        ValueError: a text-to-image model has no text encoder.
    """
    loop = EngineLoop(engine, most, most_each, calibrated_only)
    loop.about = about(engine)
    return app_of(loop, gallery, **access)


def app_of(jobs: Jobs, gallery: Gallery | None = None, **access: Any) -> fastapi.FastAPI:
    """The application over jobs, which it starts and closes. The other arguments are as in `make_app`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(jobs.start)
        yield
        jobs.close()
        await asyncio.to_thread(jobs.join)

    app = fastapi.FastAPI(
        title="cspd",
        version=__version__,
        servers=[{"url": "."}],  # where this description is, also under the prefix of a proxy
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        exception_handlers={HTTPException: handle_error},
        dependencies=[fastapi.Depends(HTTPBearer(auto_error=False))],  # so that /docs asks for the API key
    )
    app.add_middleware(Access, **access)
    app.add_middleware(Logged, count=lambda status: jobs.metrics.answers.labels(status).inc())
    app.state.jobs = jobs

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the thread of the engine runs; if not, the server must be started again."""
        return _health(jobs.is_alive())

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether new requests are taken."""
        return _health(jobs.is_alive() and not jobs.is_closing)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        text = prometheus_client.generate_latest(jobs.metrics.registry)
        return PlainTextResponse(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url="openapi.json", title="cspd")  # FastAPI's own has /openapi.json

    v1.add_routes(app, jobs)

    _add_page(app, jobs, gallery)
    return app


def _add_page(app: fastapi.FastAPI, jobs: Jobs, gallery: Gallery | None) -> None:
    """Adds the page, and what it asks for."""

    @app.get("/api/models")
    async def models(request: fastapi.Request, response: fastapi.Response) -> dict:
        address = address_of(request)
        if client_of(request) == address:  # without a valid cookie
            response.set_cookie(COOKIE, new_visitor(address), httponly=True, samesite="strict")
        return jobs.about | {"most_bytes": MOST_BYTES, "most_each": jobs.most_each}

    @app.get("/api/status")
    async def status() -> dict:
        return jobs.status()

    @app.get("/api/pictures")
    def pictures(num: int = 24) -> dict:
        """The newest pictures of the gallery; "is_saved": whether there is one."""
        found = [] if gallery is None else gallery.newest(max(1, min(num, MOST_LISTED)))
        return {"is_saved": gallery is not None, "pictures": found}

    @app.get("/api/pictures/{name}")
    def picture(name: str) -> Response:
        with contextlib.suppress(FileNotFoundError):
            if gallery is not None:
                return Response(gallery.read(name), media_type="image/png")
        raise Refusal(404, f"the gallery has no picture {shortened(name)}")

    @app.post("/api/images", openapi_extra=schema_of(Asked))
    async def images(request: fastapi.Request) -> StreamingResponse:
        asked = parse_json(Asked, await read(request))
        with refusing():
            names = {model["name"]: model for model in jobs.about["models"]}
            lookup(names, asked.model, "model")
            requests = await asyncio.to_thread(requests_of_page, asked)
            begun = await begin(jobs, client_of(request), asked.model, requests, has_left=request.is_disconnected)
        events = _events(jobs, begun, gallery)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    app.mount("/", Page(directory=PAGE, html=True))


class Page(StaticFiles):
    """The files of the page, after all other routes: a path without a file is an unknown route."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The answer with a file. Raises Refusal if there is none."""
        try:
            return await super().get_response(path, scope)
        except HTTPException:
            remedy = "see /docs for all routes"
            if path_of(scope).startswith(("/images/", "/models")):
                remedy = "those of OpenAI's API begin with /v1: end the base_url of the client with /v1"
            what = f"{scope['method']} {shortened(path_of(scope))}"
            raise Refusal(404, f"{what} is not a route of this server: {remedy}") from None


def _health(is_well: bool) -> JSONResponse:
    return JSONResponse({"status": "ok" if is_well else "unavailable"}, 200 if is_well else 503)


async def _events(jobs: Jobs, begun: Begun, gallery: Gallery | None) -> AsyncIterator[str]:
    """The events of some jobs as text. Finished pictures are saved in the gallery; "file" is their name there."""
    async with contextlib.aclosing(events_of(jobs, begun)) as events:
        async for event in events:
            if gallery is not None and event is not None and "finished" in event and event["image"] is not None:
                event["file"] = await asyncio.to_thread(gallery.save, event)
            yield ": waiting\n\n" if event is None else _event(event)  # a comment, or an event


def _event(content: dict) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


# The process: it finishes its images after SIGTERM, and ends soon after any other signal.


class Server(LimitedServer):
    """The server of `cspd serve`.

    On SIGTERM it takes no new connections, finishes all unfinished images and ends. On Ctrl-C and SIGHUP it ends within
    `PATIENCE` seconds, even if the engine is in the middle of a round. A second signal ends it at once.

    Args:
        app: the application.
        proxies: addresses and networks whose X-Forwarded-For tells the client's address.
    """

    def __init__(self, app: fastapi.FastAPI, proxies: Sequence[str] = ()) -> None:
        super().__init__(
            app,
            log_level="error",
            timeout_graceful_shutdown=GRACE,
            ws="none",
            forwarded_allow_ips=[*proxies],
        )
        self._loop: EngineLoop = app.state.jobs
        self._has_ended = threading.Event()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal."""
        try:
            super().run(sockets)
        finally:
            self._has_ended.set()

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
        drains = sig == signal.SIGTERM
        # a round, or a calibration, may take minutes, and a thread that computes cannot be stopped
        threading.Thread(target=self._last_resort, args=[sig, drains], daemon=True).start()
        if drains:
            self.config.timeout_graceful_shutdown = None  # unlimited: the last resort ends it
            self._loop.drain()
        else:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # interrupted connections are not errors now
            self._loop.close()
        super().handle_exit(sig, frame)

    def _last_resort(self, sig: int, drains: bool) -> None:
        """Ends the process if it does not end by itself."""
        if drains:
            self._loop.join()
        if not self._has_ended.wait(PATIENCE):
            _end_process(sig)


def _end_process(sig: int) -> None:
    """Ends the process while another thread computes: a normal exit would wait for that thread, or crash."""
    try:
        print("cspd: stopped", file=sys.stderr, flush=True)
    finally:  # the terminal may be gone
        os._exit(128 + sig)
