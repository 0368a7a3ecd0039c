"""Images by the shapes of OpenAI's API, so that programs written for it can use `cspd serve`.

The shapes are those of https://platform.openai.com/docs/api-reference/images, as in the package `openai`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal

import fastapi
import pydantic
import python_multipart  # noqa: F401 - starlette imports it only once a form arrives
from fastapi.responses import StreamingResponse
from PIL import ImageOps
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from cspd.inpainting import Inpainting
from cspd.method import parse_method
from cspd.request import Request, requests_of
from cspd.serving.access import Refusal, error_body
from cspd.serving.bodies import (
    MOST_BYTES,
    Begun,
    Text,
    Value,
    begin,
    client_of,
    events_of,
    is_last,
    parse_fields,
    parse_json,
    picture_of,
    read,
    refusing,
    schema_of,
    typed,
)
from cspd.serving.loop import Jobs
from cspd.terminal import label_of, shortened

MOST_IMAGES = 10  # of a request, as in OpenAI's API
MOST_PARTIAL = 3
FORM = "multipart/form-data"
MOST_FIELDS = 100  # of a form
SEEDS = 2**31  # the seed of a request without one is below this
INPUT = {"input_tokens": 0, "input_tokens_details": {"image_tokens": 0, "text_tokens": 0}}  # they are not counted


class Generation(pydantic.BaseModel):
    """The body of POST /v1/images/generations. All further fields are settings, such as `cfg`, `num_iter` or `top_k`.

    Attributes:
        prompt: of a text-to-image model; for a class-conditional model a class by number or name, or "none".
        model: name of a served model; the first one by default.
        n: number of images; image i has the seed `seed` + i.
        size: "auto", or the size of the model's images, such as "256x256".
        response_format: "url" gives a data link.
        stream: answer with server-sent events, `partial_images` unfinished images among them.
        seed: by default a random one, which the answer has.
        method: name, with options after a colon: "calibrated:head_calls=8".
        negative_prompt: for text-to-image models.
        quality, background, output_format, moderation, user, safety_identifier: of OpenAI's API, without effect.
    """

    model_config = pydantic.ConfigDict(extra="allow", coerce_numbers_to_str=True)
    __pydantic_extra__: dict[str, Value] = pydantic.Field(init=False)

    prompt: Text
    model: Text | None = None
    n: int | None = pydantic.Field(None, ge=1, le=MOST_IMAGES)
    size: Text | None = None
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None
    partial_images: int | None = pydantic.Field(None, ge=0, le=MOST_PARTIAL)
    seed: Value = None
    method: Text | None = None
    negative_prompt: Text | None = None
    quality: Literal["auto", "standard"] | None = None
    background: Literal["auto", "opaque"] | None = None
    output_format: Literal["png"] | None = None
    moderation: Literal["auto", "low"] | None = None
    user: Text | None = None
    safety_identifier: Text | None = None


class Edit(Generation):
    """The form of POST /v1/images/edits: the fields of a generation, and images as files or data links.

    Attributes:
        image: the image. Without a mask, its transparent area is regenerated.
        mask: an image of its size. Its transparent area is regenerated; the white one if nothing is transparent.
    """

    image: bytes
    mask: bytes | None = None


class Picture(pydantic.BaseModel):
    """A generated image.

    Attributes:
        b64_json: the PNG. url: the PNG as a data link.
        seed: gives the same image again. guarantee: of the method, see `cspd methods`.
        seconds: of the image's rounds. ran: the request with all settings, as it is written in Python.
    """

    b64_json: str | None = None
    url: str | None = None
    seed: int
    guarantee: str
    seconds: float
    ran: str


class Pictures(pydantic.BaseModel):
    """The answer with all images."""

    created: int
    data: list[Picture]
    size: str
    background: str = "opaque"
    output_format: str = "png"
    usage: dict[str, Any]


class Served(pydantic.BaseModel):
    """A served model."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "cspd"


class ServedList(pydantic.BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[Served]


def add_routes(app: fastapi.FastAPI, jobs: Jobs) -> None:
    """Adds the routes under /v1 to an application whose jobs these are."""
    started = int(time.time())
    answers: dict[str, Any] = {"response_model": Pictures, "response_model_exclude_none": True}

    @app.get("/v1/models")
    async def list_models() -> ServedList:
        return ServedList(data=[Served(id=model["name"], created=started) for model in jobs.about["models"]])

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Served:
        return Served(id=_model(jobs, name)["name"], created=started)

    @app.post("/v1/images/generations", openapi_extra=schema_of(Generation), **answers)
    async def generate(request: fastapi.Request) -> Any:
        asked = parse_json(Generation, await read(request))
        return await _answer(request, jobs, asked, "image_generation")

    @app.post("/v1/images/edits", openapi_extra=schema_of(Edit, FORM), **answers)
    async def edit(request: fastapi.Request) -> Any:
        body = await read(request, FORM)  # of another site, it has that site's name in Origin
        with refusing():
            fields = await fields_of(request.headers, body)
        return await _answer(request, jobs, parse_fields(Edit, fields), "image_edit")


async def fields_of(headers: Headers, body: bytes) -> dict[str, str | bytes]:
    """The fields of a form; files as bytes. A list of files has the name `image[]`.

    Raises ValueError if the form is damaged, has too many fields, or has one twice.
    """

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        parser = MultiPartParser(headers, stream(), max_files=MOST_FIELDS, max_fields=MOST_FIELDS)
        parser.max_part_size = MOST_BYTES  # a data link is a field, not a file
        form = await parser.parse()
    except MultiPartException as error:
        raise ValueError(f"the form cannot be read ({error.message}): send multipart/form-data") from None
    fields: dict[str, str | bytes] = {}
    for name, value in form.multi_items():
        name = name.removesuffix("[]")
        if name in fields:
            raise ValueError(f"the form has {shortened(name)} twice: send one")
        fields[name] = value if isinstance(value, str) else await value.read()
    return fields


def _model(jobs: Jobs, name: str | None) -> dict:
    """The description of a served model, by default of the first one. Raises Refusal if it is unknown."""
    models = {model["name"]: model for model in jobs.about["models"]}
    if name is None:
        name = next(iter(models))
    if name not in models:
        message = f"unknown model {shortened(name)}: this server has {', '.join(models)}"
        raise Refusal(404, message, param="model", code="model_not_found")
    return models[name]


def requests_of_v1(asked: Generation, model: dict) -> list[Request]:
    """The requests for the engine. Raises ValueError, TypeError or ArgumentTypeError on invalid values."""
    method, options = (None, {}) if asked.method is None else parse_method(asked.method)
    settings = {name: typed(value) for name, value in asked.__pydantic_extra__.items() if value not in ("", None)}
    more = {
        "settings": settings | options,
        "known": _known(asked) if isinstance(asked, Edit) else None,
        "negative_prompt": asked.negative_prompt,
    }
    seed = secrets.randbelow(SEEDS) if asked.seed in (None, "") else typed(asked.seed)
    num = asked.n or 1
    if not model["classes"]:
        return requests_of(None, asked.prompt, seed, num, method, more)
    return requests_of(label_of(asked.prompt), None, seed, num, method, more)


def _known(asked: Edit) -> Inpainting:
    """The given part of the image."""
    image = picture_of("image", asked.image)
    mask = image if asked.mask is None else picture_of("mask", asked.mask)
    alpha = mask.convert("RGBA").getchannel("A")
    is_opaque = alpha.getextrema() == (255, 255)
    if not is_opaque:
        return Inpainting.of(image, ImageOps.invert(alpha))
    if asked.mask is None:
        raise ValueError("mask is missing: give a mask, or an image with a transparent area, which is regenerated")
    return Inpainting.of(image, mask)


async def _answer(request: fastapi.Request, jobs: Jobs, asked: Generation, kind: str) -> Any:
    """The answer to a request: the images, or a stream of events whose names begin with `kind`."""
    model = _model(jobs, asked.model)
    size = "{0}x{0}".format(model["image_size"])
    if asked.size not in (None, "", "auto", size):
        raise Refusal(
            400, f"size={shortened(asked.size)}: {model['name']} makes images of {size}: leave it out", "size"
        )
    num_partial = (asked.partial_images or 0) if asked.stream else 0
    try:
        with refusing():
            requests = await asyncio.to_thread(requests_of_v1, asked, model)
            client, has_left = client_of(request), request.is_disconnected
            begun = await begin(jobs, client, model["name"], requests, num_partial > 0, has_left)
    except Refusal as refusal:
        refusal.param = _named(str(refusal.detail), asked)
        raise
    if asked.stream:
        stream = _stream(jobs, begun, kind, num_partial, size)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    last = await _last_events(request, jobs, begun)
    pictures = [_picture(event, asked.response_format == "url") for event in last]
    num_tokens = sum(event["num_tokens"] for event in last)
    return Pictures(created=int(time.time()), data=pictures, size=size, usage=_usage(num_tokens))


def _named(message: str, asked: Generation) -> str | None:
    """The field that an engine's message begins with, such as "cfg=-1 is invalid", if the client gave it."""
    found = re.match(r"(\w+)=", message)
    if not found:
        return None
    name = "prompt" if found[1] == "label" else found[1]
    return name if name in asked.model_dump(exclude_none=True) else None


async def _last_events(request: fastapi.Request, jobs: Jobs, begun: Begun) -> list[dict]:
    """The last event of each job. Raises Refusal if one failed. If the client leaves, the jobs are cancelled."""
    last: dict[int, dict] = {}
    async with contextlib.aclosing(events_of(jobs, begun)) as events:
        async for event in events:
            if event is None:
                if await request.is_disconnected():
                    raise Refusal(400, "the connection was closed")
            elif "error" in event:
                raise Refusal(503 if jobs.is_closing else 500, event["error"])
            elif is_last(event):
                last[event["run"]] = event
    return [last[run] for run in sorted(last)]


def _picture(event: dict, as_link: bool) -> Picture:
    link = event["image"]
    about = {name: event[name] for name in ("seed", "guarantee", "seconds", "ran")}
    return Picture(url=link, **about) if as_link else Picture(b64_json=_base64(link), **about)


def _base64(link: str) -> str:
    """The content of a data link."""
    return link.partition(",")[2]


def _usage(num_tokens: int) -> dict[str, Any]:
    """Counts generated tokens only."""
    return {**INPUT, "output_tokens": num_tokens, "total_tokens": num_tokens}


async def _stream(jobs: Jobs, begun: Begun, kind: str, num_partial: int, size: str) -> AsyncIterator[str]:
    """The events of the jobs as text: partial images at equal distances, and each finished image."""
    num_sent = dict.fromkeys(range(len(begun.jobs)), 0)
    async with contextlib.aclosing(events_of(jobs, begun)) as events:
        async for event in events:
            if event is None:
                yield ": waiting\n\n"  # a comment
                continue
            run = event["run"]
            if "error" in event:
                yield _event("error", error_body(503 if jobs.is_closing else 500, event["error"]))
                continue
            if "share" not in event:
                continue  # advice
            content = {
                "b64_json": _base64(event["image"]),
                "created_at": int(time.time()),
                "size": size,
                "quality": "auto",
                "background": "opaque",
                "output_format": "png",
                "seed": event["seed"],
            }
            if is_last(event):
                more = {"usage": _usage(event["num_tokens"]), "guarantee": event["guarantee"], "ran": event["ran"]}
                yield _event(f"{kind}.completed", content | more)
            elif num_sent[run] < num_partial and event["share"] >= (num_sent[run] + 1) / (num_partial + 1):
                yield _event(f"{kind}.partial_image", content | {"partial_image_index": num_sent[run]})
                num_sent[run] += 1


def _event(name: str, content: dict) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **content}, allow_nan=False)}\n\n"
