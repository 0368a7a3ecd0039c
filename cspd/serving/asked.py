"""What a visitor asks for, from the body of her request to the engine's requests."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Annotated, Any

import fastapi
import pydantic
from PIL import Image, ImageOps
from starlette.requests import ClientDisconnect

from cspd.known import FORMATS, Known
from cspd.lookup import parse_method
from cspd.parsing import label_of, value_of
from cspd.sequence import Request

MOST_PIXELS = 1024 * 1024  # of a picture: engines remember the last ones as numbers
MOST_BYTES = 8 * 2**20  # of a request: PNGs of a picture and a mask of so many pixels of noise take 6.7 MiB
MOST_SECONDS = 60.0  # for a request to arrive
MOST_PARTS = 2_000  # commas and brackets of a request, which bound its values: checking millions takes minutes
MOST_CHARACTERS = 400  # of every text but pictures
MOST_METHODS = 2


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        raise ValueError(f"a text of {len(value):,} characters is too long: give at most {MOST_CHARACTERS}")
    return value


Text = Annotated[str, pydantic.AfterValidator(_short)]
Value = Annotated[int | float | bool | str | None, pydantic.AfterValidator(_short)]


class Asked(pydantic.BaseModel):
    """An image by one method or several, of the same seed. Text is read as on the command line.

    Attributes:
        model: one that is served, by name. label: class, by number or name; "none" or null: no class.
        prompt, negative_prompt: of a model of texts, in place of a label.
        methods: names, with options after a colon if need be: "calibrated:head_calls=8".
        settings: of `cspd.sequence.Request`, for all methods; empty ones are left open.
        picture, mask: data links (base64) of pictures of one size: white in the mask is made anew. All other texts have
            at most `MOST_CHARACTERS` characters.
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
    """What the body of a request asks for. Raises HTTPException if it is too large, or slow, or is something else."""
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
    """The body. Of one that is too large the rest is not kept: uvicorn throws it away."""
    too_large = fastapi.HTTPException(413, f"the request has more than {MOST_BYTES / 2**20:g} MiB: give less")
    if int(request.headers.get("content-length", 0)) > MOST_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise too_large
    return body


def requests_of(asked: Asked) -> list[Request]:
    """A request for each method. Raises ValueError, TypeError or ArgumentTypeError on what no engine would take."""
    if asked.prompt is None and "label" not in asked.model_fields_set:
        raise ValueError(
            "neither label nor prompt is given: give label (null: no class), or prompt to a model of texts"
        )
    label: Any = label_of(asked.label) if isinstance(asked.label, str) else asked.label
    settings = {name: typed(value) for name, value in asked.settings.items() if value not in ("", None)}
    known = None
    if asked.picture is not None or asked.mask is not None:
        known = Known.of(picture_of("picture", asked.picture), picture_of("mask", asked.mask))
    texts = {"prompt": asked.prompt, "negative_prompt": asked.negative_prompt}
    requests = []
    for text in asked.methods:
        name, options = parse_method(text)
        own = {**settings, **options}
        requests.append(Request(label, typed(asked.seed), name, settings=own, known=known, **texts))
    return requests


def typed(value: Value) -> Any:
    """A value as JSON has it, or as text of it."""
    return value_of(value) if isinstance(value, str) else value


def picture_of(name: str, link: str | None) -> Image.Image | None:
    """The picture of a data link. Raises ValueError where it cannot be read, or is too large."""
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
