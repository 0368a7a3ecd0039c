"""The page over HTTP: its files, what it asks for, and a stream of what becomes of that.

POST /api/images takes what `cspd.serving.asked.Asked` says and answers with server-sent events, JSON objects: what
`cspd.serving.shown.shown` knows of an image, and "run", by which of the methods it is. The last of a run is "finished",
or has an "error". The images of a visitor that closes the connection are cancelled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import fastapi
import uvicorn
from fastapi.responses import StreamingResponse
from fastapi.staticfiles import StaticFiles

from cspd.engine import Engine
from cspd.serving.access import Access
from cspd.serving.asked import MOST_BYTES, Asked, body_of, requests_of
from cspd.serving.runner import Full, Job, Runner
from cspd.serving.shown import about
from mar.registry import lookup

PAGE = Path(__file__).parent / "page"
VISITOR = "visitor"  # the cookie that tells visitors apart
HEARTBEAT = 1.0  # seconds between signs of life: so it is noticed soon that a visitor whose images wait has left
MOST_UNREAD = 4  # pictures on their way to a visitor; what comes while there are so many is left out
GRACE = 2  # seconds that connections have to end
PATIENCE = 4.0  # seconds from a signal to the end of the process, whatever runs


def make_app(engines: Mapping[str, Engine], most: int = 32, most_each: int = 4, **access: Any) -> fastapi.FastAPI:
    """The application. While it is served its `state.runner` runs the engines, which nobody else uses.

    Args:
        engines: each of one checkpoint, by its name. most, most_each: images under way, in all and of a visitor.
        access: who may use it, see `cspd.serving.access.Access`.

    Raises:
        ValueError: a model of texts has no text encoder.
    """
    runner = Runner(engines, most, most_each)
    description = about(engines) | {"most_bytes": MOST_BYTES}

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        runner.start()
        yield
        runner.close()
        runner.join()

    app = fastapi.FastAPI(title="cspd", lifespan=lifespan, openapi_url=None)
    app.add_middleware(Access, **access)
    app.state.runner = runner

    @app.get("/api/models")
    async def models(request: fastapi.Request, response: fastapi.Response) -> dict:
        if VISITOR not in request.cookies:
            response.set_cookie(VISITOR, secrets.token_hex(16), httponly=True, samesite="strict")
        return description

    @app.get("/api/status")
    async def status() -> dict:
        return runner.status()

    @app.post("/api/images")
    async def images(request: fastapi.Request, wanted: Annotated[Asked, fastapi.Depends(body_of)]) -> StreamingResponse:
        inbox: asyncio.Queue[dict] = asyncio.Queue()
        tell = functools.partial(_tell, asyncio.get_running_loop(), inbox)
        try:
            lookup(engines, wanted.model, "model")
            requests = await asyncio.to_thread(requests_of, wanted)
            tells = [functools.partial(tell, run) for run in range(len(requests))]
            jobs, started = runner.add(_visitor(request), wanted.model, requests, tells)
            advice = await asyncio.wrap_future(started)
        except Full as full:
            raise fastapi.HTTPException(429, str(full)) from None
        except (ValueError, TypeError, argparse.ArgumentTypeError) as bad:
            raise fastapi.HTTPException(400, str(bad)) from None
        except asyncio.CancelledError:  # by uvicorn, which ends
            raise fastapi.HTTPException(503, "the server is ending") from None
        events = _events(runner, jobs, inbox, advice)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return app


def _visitor(request: fastapi.Request) -> str:
    """Who asks: a browser by its cookie, a program by its address."""
    address = request.client.host if request.client else ""
    return request.cookies.get(VISITOR, address)


def _tell(loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue, run: int, event: dict) -> None:
    """Puts an event of a run into an inbox, from another thread than its loop's."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, and the server has ended
        loop.call_soon_threadsafe(_put, inbox, {"run": run, **event})


def _put(inbox: asyncio.Queue, event: dict) -> None:
    if _is_last(event) or inbox.qsize() < MOST_UNREAD:
        inbox.put_nowait(event)


def _is_last(event: dict) -> bool:
    return "finished" in event or "error" in event


async def _events(
    runner: Runner, jobs: Sequence[Job], inbox: asyncio.Queue, advice: Sequence[str | None]
) -> AsyncIterator[str]:
    """The events of some jobs as they come, as text; jobs that nobody reads the events of are cancelled."""
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
        runner.leave(jobs)


def _event(content: dict) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


class Server(uvicorn.Server):
    """uvicorn's, run on sockets that listen. It ends at once: open connections have nothing more to wait for then."""

    def __init__(self, app: fastapi.FastAPI) -> None:
        super().__init__(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=GRACE, ws="none"))
        self._runner: Runner = app.state.runner
        self._last_resort: threading.Timer | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal. If what runs then does not end in `PATIENCE` seconds, the process ends here."""
        try:
            super().run(sockets)
        finally:
            if self._last_resort:
                self._last_resort.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn has it; a closed terminal is heeded too, unless it is ignored, as under nohup."""
        with super().capture_signals(), contextlib.ExitStack() as restored:
            hangup = getattr(signal, "SIGHUP", None)  # Windows has none
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and hangup and signal.getsignal(hangup) is not signal.SIG_IGN:
                restored.callback(signal.signal, hangup, signal.signal(hangup, self.handle_exit))
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal; a second one ends the process at once."""
        if self.should_exit:
            os._exit(128 + sig)
        self._last_resort = threading.Timer(PATIENCE, _end_process, [sig])
        self._last_resort.daemon = True
        self._last_resort.start()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # connections that are cut off now are no errors
        self._runner.close()
        super().handle_exit(sig, frame)


def _end_process(sig: int) -> None:
    """Ends it while another thread computes: Python's own end would wait for that, or crash."""
    try:
        print("cspd: stopped", file=sys.stderr, flush=True)
    finally:  # the terminal may be gone
        os._exit(128 + sig)
