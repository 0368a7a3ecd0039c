"""Who may use the page: its own visitors, not the pages of other sites that they have open, and who has the API key.

A page of another site can send requests here from a visitor's browser. Its name is in their Origin, or in their Host if
it has its name resolve to this machine (DNS rebinding). The address of this server must be in both.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cspd.parsing import shortened

LOCAL = ("localhost", "127.0.0.1", "::1")
ADDRESS = re.compile(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", re.ASCII | re.IGNORECASE)  # localhost:8000, [::1]
REMEDY = "if that is its own address, start cspd serve with --allowed-hosts and the name"
PRIVATE = "/api/"  # paths that need the API key; the page itself is the same everywhere, and asks for the key


class Access:
    """An ASGI application that answers only requests whose Host, Origin, content type and API key are right.

    Args:
        app: the application that is asked then.
        hosts: names and addresses that Host may have, beside those of `LOCAL`.
        origins: names and addresses that Origin may have where it differs from Host, as behind some proxies.
        any_address: Host may be any IP address, which no other site can have resolve to this machine.
        key: the API key, of ASCII characters; None: there is none.
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
        """The answer to a request that is refused."""
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
    """The name, or the IP address, of an address that may have a port; "" where it is none."""
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
    """As FastAPI's own errors."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"detail": detail}, status, headers)
