"""From the body of an HTTP request to jobs, and the events of these jobs: what the page's API and OpenAI's share."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import hmac
import io
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import fastapi
import pydantic
from PIL import Image, ImageOps, UnidentifiedImageError
from starlette.requests import ClientDisconnect

from cspd.inpainting import FORMATS
from cspd.request import Request
from cspd.serving.access import Refusal
from cspd.serving.loop import Closing, Full, Job, Jobs, public
from cspd.terminal import is_out_of_memory, value_of

# Bodies.

MOST_PIXELS = 1024 * 1024  # of an image: an engine caches the last images as tensors
MOST_BYTES = 8 * 2**20  # of a request: PNGs of an image and a mask of `MOST_PIXELS` of noise take 6.7 MiB
MOST_SECONDS = 60.0  # for a request to arrive
MOST_PARTS = 2_000  # commas and brackets, a bound on the number of values: to validate millions takes minutes
MOST_CHARACTERS = 400  # of every text except images

Model = TypeVar("Model", bound=pydantic.BaseModel)


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        raise ValueError(f"a text of {len(value):,} characters is too long: give at most {MOST_CHARACTERS}")
    return value


Text = Annotated[str, pydantic.AfterValidator(_short)]
Value = Annotated[int | float | bool | str | None, pydantic.AfterValidator(_short)]


async def read(request: fastapi.Request, kind: str = "application/json") -> bytes:
    """The body of a request. Raises Refusal if it is of another kind, too large or too slow."""
    announced = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if announced != kind:  # a form of another site cannot send JSON
        raise Refusal(415, f"the body is not announced as {kind}: send Content-Type: {kind}")
    try:
        return bytes(await asyncio.wait_for(_read(request), MOST_SECONDS))
    except ClientDisconnect:
        raise Refusal(400, "the connection was closed") from None
    except asyncio.TimeoutError:  # noqa: UP041 - another one in Python 3.10
        slow = f"the request did not arrive within {MOST_SECONDS:g} s: send less, or faster"
        raise Refusal(408, slow, headers={"Connection": "close"}) from None


async def _read(request: fastapi.Request) -> bytearray:
    """Reads the body. uvicorn discards the rest of a body that is too large."""
    too_large = Refusal(413, f"the request has more than {MOST_BYTES / 2**20:g} MiB: send less")
    if int(request.headers.get("content-length", 0)) > MOST_BYTES:
        raise too_large
    body = bytearray()  # its length may be unknown, or wrong: it is counted as it arrives
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise too_large
    return body


def parse_json(model: type[Model], body: bytes) -> Model:
    """The validated body of JSON. Raises Refusal if it is invalid."""
    num_parts = sum(body.count(mark) for mark in b",[{")
    if num_parts > MOST_PARTS:
        raise Refusal(400, f"the request has more than {MOST_PARTS:,} commas and brackets: send fewer")
    with _naming_fields():
        return model.model_validate_json(body)


def parse_fields(model: type[Model], fields: dict[str, Any]) -> Model:
    """The validated fields of a form. Raises Refusal if one is invalid."""
    with _naming_fields():
        return model.model_validate(fields)


@contextlib.contextmanager
def _naming_fields() -> Iterator[None]:
    try:
        yield
    except pydantic.ValidationError as invalid:
        first = invalid.errors()[0]
        names = [str(part) for part in first["loc"]]
        field = ".".join(names)[:60]
        message = first["msg"].removeprefix("Value error, ")
        raise Refusal(400, f"{field or 'the request'}: {message}", param=names[0] if names else None) from None


def schema_of(model: type[pydantic.BaseModel], kind: str = "application/json") -> dict:
    """The description of a body for OpenAPI: FastAPI knows none of a body that it does not read itself."""
    return {"requestBody": {"content": {kind: {"schema": model.model_json_schema()}}, "required": True}}


def typed(value: Value) -> Any:
    """A JSON value; text is parsed as on the command line."""
    return value_of(value) if isinstance(value, str) else value


def picture_of(name: str, content: bytes) -> Image.Image:
    """The image of a file's content or of a data link. Raises ValueError if it cannot be read or is too large."""
    try:
        if content.startswith(b"data:"):
            content = base64.b64decode(content.partition(b",")[2], validate=True)
        image = Image.open(io.BytesIO(content), formats=FORMATS)  # reads only its header
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"it has {image.width} by {image.height} pixels")
        return ImageOps.exif_transpose(image)
    except Exception as error:  # a damaged image makes its reader raise almost anything
        limit = f"{MOST_PIXELS / 1e6:.2f} million pixels"
        why = "it is not an image file" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(
            f"the {name} cannot be read ({why}): give a PNG of at most {limit}, as a file or data link"
        ) from None


# Jobs and their events. The thread of the engine puts the events of all jobs into an inbox, which the answer reads.

COOKIE = "visitor"  # the name of the cookie that identifies a client
HEARTBEAT = 1.0  # seconds between two looks whether a waiting client has left
MOST_UNREAD = 4  # events on their way to a client; while there are more, previews are skipped


class Begun(NamedTuple):
    """The jobs of an HTTP request, the inbox of their events, and the advice on each of them."""

    jobs: list[Job]
    inbox: asyncio.Queue[dict]
    advice: Sequence[str | None]


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turns the errors of a client's wishes into answers."""
    try:
        yield
    except Full as full:
        raise Refusal(429, str(full), code="rate_limit_exceeded", headers={"Retry-After": str(full.seconds)}) from None
    except Closing as closing:
        raise Refusal(503, str(closing)) from None
    except (ValueError, TypeError, argparse.ArgumentTypeError) as bad:
        raise Refusal(400, public(str(bad))) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise Refusal(503, "the server's memory is exhausted: try again in a moment") from None


async def _stays() -> bool:
    """For clients whose leaving cancels the task that waits for them."""
    return False


async def begin(
    jobs: Jobs,
    client: str,
    model: str,
    requests: Sequence[Request],
    wants_previews: bool = True,
    has_left: Callable[[], Awaitable[bool]] = _stays,
) -> Begun:
    """Begins to generate images: all of them, or none if one is bad.

    Raises as `Jobs.add`, ValueError, and Refusal if the client leaves before they are accepted.
    """
    inbox: asyncio.Queue[dict] = asyncio.Queue()
    tell = functools.partial(_tell, asyncio.get_running_loop(), inbox)
    tells = [functools.partial(tell, run) for run in range(len(requests))]
    # all requests are accepted before the answer begins, so that a bad one gets an HTTP error
    begun, future = jobs.add(client, model, requests, tells, wants_previews)
    advice = asyncio.wrap_future(future)
    try:
        while not (await asyncio.wait([advice], timeout=HEARTBEAT))[0]:
            if await has_left():
                raise Refusal(400, "the connection was closed")
        return Begun(begun, inbox, advice.result())
    except BaseException:
        advice.cancel()
        jobs.leave(begun)
        raise


async def events_of(jobs: Jobs, begun: Begun) -> AsyncGenerator[dict | None, None]:
    """The advice on begun jobs and their events, each with "run", the index of its job.

    None after each `HEARTBEAT` without an event.

    If the reader leaves, the jobs are cancelled.
    """
    num_unfinished = len(begun.jobs)
    try:
        for run, advice in enumerate(begun.advice):
            yield {"run": run, "advice": advice}
        while num_unfinished:
            try:
                event = await asyncio.wait_for(begun.inbox.get(), HEARTBEAT)
            except asyncio.TimeoutError:  # noqa: UP041 - another one in Python 3.10
                yield None
                continue
            num_unfinished -= is_last(event)
            yield event
    finally:
        jobs.leave(begun.jobs)


def is_last(event: dict) -> bool:
    """Whether an event is the last one of its job."""
    return "finished" in event or "error" in event


def _tell(event_loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue, run: int, event: dict) -> None:
    """Puts an event of a run into an inbox, from a thread other than the event loop's."""
    with contextlib.suppress(RuntimeError):  # the event loop is closed: the server has ended
        event_loop.call_soon_threadsafe(_put, inbox, {"run": run, **event})


def _put(inbox: asyncio.Queue, event: dict) -> None:
    if is_last(event) or inbox.qsize() < MOST_UNREAD:
        inbox.put_nowait(event)


_SECRET = secrets.token_bytes(32)


def new_visitor(address: str) -> str:
    """A cookie for a browser at an address. It is signed: an invented one would be another client each time."""
    name = secrets.token_hex(16)
    return f"{name}.{_signature(name, address)}"


def is_visitor(cookie: str, address: str) -> bool:
    """Whether this server gave a cookie to this address."""
    name, _, signature = cookie.partition(".")
    return secrets.compare_digest(signature.encode(), _signature(name, address).encode())


def _signature(name: str, address: str) -> str:
    return hmac.new(_SECRET, f"{name} {address}".encode(), "sha256").hexdigest()


def address_of(request: fastapi.Request) -> str:
    """The address that a request came from."""
    return request.client.host if request.client else ""


def client_of(request: fastapi.Request) -> str:
    """The client of a request: a browser by its cookie, a program by its address."""
    cookie, address = request.cookies.get(COOKIE, ""), address_of(request)
    return cookie if is_visitor(cookie, address) else address
