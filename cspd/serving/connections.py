"""The connections of `cspd serve`: how many at a time, and for how long a silent client keeps one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any, NamedTuple

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cspd.serving import bodies

MOST_CONNECTIONS = 1000
MOST_HEADER = 16 * 2**10  # bytes of a request's first line and headers
FULL_SECONDS = 1.0  # of silence, while other clients wait for a connection
RETRY = 0.1  # seconds between two looks whether there is room


class Look(NamedTuple):
    """What was seen of a connection whose client the server waits for.

    Attributes:
        request: the last one of the connection, or None. unsent: bytes that the client has not read yet.
        since: the moment of its last progress.
    """

    request: Any
    unsent: int
    since: float


class Protocol(H11Protocol):
    """A connection. Its requests are read one after the other; httptools would read all that a client has sent."""

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP; if it is in the body of a request with an answer, closes the connection instead."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()


class LimitedServer(uvicorn.Server):
    """A uvicorn server with limits that hold before any request is read, and so before the API key.

    It accepts as many connections as `most_connections`; further clients wait in the queue of the system. It closes a
    connection whose client sends no whole request, or reads nothing of its answer, for `MOST_SECONDS` of
    `cspd.serving.bodies`, or for `FULL_SECONDS` if there is no room for others. The headers of a request may have
    `MOST_HEADER` bytes.
    """

    def __init__(self, app: Any, **settings: Any) -> None:
        super().__init__(uvicorn.Config(app, http=Protocol, h11_max_incomplete_event_size=MOST_HEADER, **settings))
        self._most = most_connections()
        self._accepting: list[asyncio.Task] = []
        self._silent: dict[Any, Look] = {}  # by connection

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections at the sockets."""
        await super().startup(sockets=[])
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in sockets or []]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more, and waits for the answers."""
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second."""
        self._close_silent()
        return await super().on_tick(counter)

    async def _accept(self, listener: socket.socket) -> None:
        """Accepts connections while there is room."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(self.config.backlog)
        while True:
            if len(self.server_state.connections) >= self._most:
                await asyncio.sleep(RETRY)
                continue
            try:
                connection, _ = await loop.sock_accept(listener)
                await loop.connect_accepted_socket(self._protocol, connection)
            except OSError:  # no further file can be opened, or the client has left already
                await asyncio.sleep(RETRY)

    def _protocol(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _close_silent(self) -> None:
        """Closes the connections whose clients have been silent for too long."""
        connections: list[Any] = list(self.server_state.connections)
        patience = FULL_SECONDS if len(connections) >= self._most else bodies.MOST_SECONDS
        now = time.monotonic()
        silent = {}
        for connection in connections:
            request, unsent = connection.cycle, connection.transport.get_write_buffer_size()
            if request is not None and not request.response_complete and not unsent:
                continue  # the client waits for the server
            look = self._silent.get(connection, Look(request, unsent, now))
            # each byte that arrives counts only if it completes the headers of a request
            has_progress = look.request is not request or unsent < look.unsent
            silent[connection] = Look(request, unsent, now if has_progress else look.since)
            if now - silent[connection].since > patience:
                connection.transport.abort()
        self._silent = silent


def most_connections() -> int:
    """How many connections there may be: they take at most half of the files that the process may open."""
    with contextlib.suppress(ModuleNotFoundError):  # Windows has no such limit
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY:
            return min(MOST_CONNECTIONS, max(1, limit // 2))
    return MOST_CONNECTIONS
