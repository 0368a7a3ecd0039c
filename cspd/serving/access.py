"""Who may use the HTTP API of `cspd serve`, how errors are answered, and the log of the requests."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import secrets
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping

import fastapi
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cspd.terminal import shortened

# Errors. The page reads {"detail": message}; programs read the shape of OpenAI's API.

PAGE_API = "/api/"  # the paths of the page's own API


class Refusal(HTTPException):
    """An answer that tells an error.

    Args:
        status: of HTTP. message: what is wrong, and what to do.
        param: the name of the field that is wrong. code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict:
    """An error as in OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer_error(scope: Scope, error: Exception) -> JSONResponse:
    """The answer to a request that raised an error."""
    status, message, headers = 500, "the server failed: see the messages in its terminal", None
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
    if path_of(scope).startswith(PAGE_API):
        return JSONResponse({"detail": message}, status, headers)
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return JSONResponse(error_body(status, message, param, code), status, headers)


def path_of(scope: Scope) -> str:
    """The path of a request inside the application, without the prefix of its server, such as Ray Serve."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


async def handle_error(request: fastapi.Request, error: Exception) -> JSONResponse:
    """`answer_error` as an exception handler of FastAPI."""
    return answer_error(request.scope, error)


# Access control: pages of other sites may not use this server, and the API needs the API key if there is one.
#
# A page of another site can send requests here from a user's browser. The site's name is then in Origin, or in Host if
# the site makes its name resolve to this machine (DNS rebinding). So both must have an address of this server, except
# for what everybody may read: the probes, and the page, which shows why the API refuses.

LOCAL = ("localhost", "127.0.0.1", "::1")
ADDRESS = re.compile(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", re.ASCII | re.IGNORECASE)  # localhost:8000, [::1]
REMEDY = "if that is an address of this server, start cspd serve with --allowed-hosts and the name"
PRIVATE = (PAGE_API, "/v1/", "/metrics")  # paths of the APIs; all others are public


class Access:
    """ASGI middleware that refuses requests to the APIs with a wrong Host, Origin or API key.

    It turns HEAD into GET, because FastAPI adds no HEAD to a route of GET; the server leaves the body out.

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
        app = self._app if refusal is None else answer_error(scope, refusal)
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        """The answer to a refused request, or None if the request is allowed."""
        if not path_of(scope).startswith(PRIVATE):
            return None
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_host(host):
            return Refusal(403, f"this server does not answer as {shortened(host)}: {REMEDY}")
        if origin is not None and not self._is_origin(origin, host):
            return Refusal(403, f"pages of {shortened(origin)} may not use this server: {REMEDY}")
        if not self._has_key(headers):
            remedy = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
            return Refusal(401, remedy, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
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


# The log: a line of JSON for each request that generates images, and for each error.

LOG = logging.getLogger("cspd.serving")
NO_FRAMES = "frame-ancestors 'none'"  # pages of other sites may not show this one in a frame
SECURITY = {  # headers of every answer
    "Content-Security-Policy": f"default-src 'self'; img-src 'self' data:; base-uri 'none'; {NO_FRAMES}",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
}
DOCS = "/docs"  # it loads its script from a public site
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def show_log() -> logging.Handler:
    """Shows the log on the error stream, by the returned handler."""
    handler = logging.StreamHandler()
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    return handler


@contextlib.contextmanager
def logging_requests() -> Iterator[None]:
    """Shows the log on the error stream inside the block."""
    handler = show_log()
    try:
        yield
    finally:
        LOG.removeHandler(handler)


class Logged:
    """ASGI middleware that gives each request an id, and writes lines of JSON to the logger `cspd.serving`.

    It also adds the headers `SECURITY` to each answer.

    The id is the one of the request's X-Request-ID, or a new one. The answer has it in the same header.

    Args:
        app: the application.
        count: called with the status of each answer.
    """

    def __init__(self, app: ASGIApp, count: Callable[[int], object]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        began = time.monotonic()
        status = None
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": request_id,
            "client": (scope.get("client") or [None])[0],
            "method": scope["method"],
            "path": scope["path"],
        }

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY | {"X-Request-ID": request_id})
                if scope["path"].endswith(DOCS):
                    headers["Content-Security-Policy"] = NO_FRAMES
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server is shutting down
            if status is not None:
                raise
            ending = Refusal(503, "the server is shutting down: try again in a moment")
            await answer_error(scope, ending)(scope, receive, send_with_id)
        except Exception as error:  # a bug of ours: the log has its place
            entry["error"] = traceback.format_exc()
            if status is None:
                await answer_error(scope, error)(scope, receive, send_with_id)
        finally:
            status = status or 499  # as in nginx: the client left before the answer began
            self._count(status)
            if scope["method"] == "POST" or status >= 400 or "error" in entry:
                LOG.info(json.dumps(entry | {"status": status, "seconds": round(time.monotonic() - began, 3)}))
