"""HTTP/1.1 to workers: kept-open connections that hand on what arrives, piece by piece.

A general client costs more per streamed piece than the router may cost per request. One timer watches all connections
of a pool.
"""

from __future__ import annotations

import asyncio
import collections
import ssl
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any, cast

import httptools

Headers = list[tuple[bytes, bytes]]

_IDLE_S = 10.0  # shorter than workers keep idle connections (20 s), so that we close first
_HIGH_WATER = 256 * 1024  # bytes that wait for a slow client before the worker is made to wait
_SWEEP_S = 0.1


class UpstreamError(Exception):
    """The worker did not answer, or not to the end.

    was_reused   the connection had served before and was closed before anything came: it may have been the worker's
                 keep-alive limit, and says nothing about the worker
    """

    def __init__(self, reason: str, *, was_reused: bool = False) -> None:
        super().__init__(reason)
        self.was_reused = was_reused


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time: send(), head(), then read() until it gives b""."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._num_served = 0
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self.deadline: float | None = None
        self.status = 0
        self.headers: Headers = []
        self._has_head = self._is_complete = self._has_data = False
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_paused = self._keeps_alive = False
        self._error: UpstreamError | None = None

    # ---------------------------------------------------------------- exchange

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send a request; the answer's head must come within timeout_s."""
        assert self._transport is not None
        self._transport.write(data)
        self.deadline = time.monotonic() + timeout_s

    async def head(self) -> None:
        """Wait until status and headers are there. Raises UpstreamError."""
        while not self._has_head:
            await self._wait()

    async def read(self, idle_timeout_s: float) -> bytes:
        """All that has arrived since the last call, at least one byte; b"" at the end. Raises UpstreamError."""
        while not self._chunks and not self._is_complete:
            self.deadline = time.monotonic() + idle_timeout_s
            await self._wait()
        chunks, self._chunks, self._size = self._chunks, [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def finish(self) -> None:
        """The exchange is over: keep the connection for another if it was read to its end, else close it."""
        was_read = self._is_complete and not self._chunks and self._error is None
        if not was_read or not self._keeps_alive or self._transport is None or self._transport.is_closing():
            self.close()
            return
        self._num_served += 1
        self._reset()
        self._parser = httptools.HttpResponseParser(self)
        self._pool.put_back(self)

    def fail(self, reason: str) -> None:
        """End the exchange from outside (timeouts, a client that left)."""
        if self._error is None and not self._is_complete:
            self._error = UpstreamError(reason)
        self._wake()
        self.close()

    def close(self) -> None:
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._chunks:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._has_data = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"the answer is not HTTP: {error}")
            return
        if self._size > _HIGH_WATER and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        if not self._is_complete and self._error is None:
            reused = self._num_served > 0 and not self._has_data
            reason = "the connection was closed" if error is None else f"the connection was lost: {error}"
            self._error = UpstreamError(reason, was_reused=reused)
        self._wake()

    # ---------------------------------------------------------------- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []  # 100 Continue and its like: the answer follows
        else:
            self._has_head = True

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()  # the parser forgets it right after
            self.deadline = None


class UpstreamPool:
    """Connections to one worker. Everything on one event loop."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host = parts.hostname or ""
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._connect_timeout_s = connect_timeout_s
        self.host_header = parts.netloc.encode("ascii")
        self._idle: collections.deque[Connection] = collections.deque()
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def connection(self, *, fresh: bool = False) -> Connection:
        """An open connection, a used one if there is one (fresh: never). Raises UpstreamError."""
        if self._is_closed:
            raise UpstreamError("the worker was removed")
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
        if self._idle and not fresh:
            connection = self._idle.pop()
        else:
            connection = await self._connect()
        self._busy.add(connection)
        return connection

    async def request(
        self, method: str, path: str, *, headers: Sequence[tuple[bytes, bytes]] = (), timeout_s: float
    ) -> tuple[int, bytes]:
        """A whole exchange without a body to send: (status, body). Raises UpstreamError."""
        connection = await self.connection(fresh=True)
        try:
            connection.send(request_head(method, path.encode(), self.host_header, headers, 0), timeout_s)
            await connection.head()
            pieces = []
            while piece := await connection.read(timeout_s):
                pieces.append(piece)
            return connection.status, b"".join(pieces)
        finally:
            connection.close()

    def put_back(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if self._is_closed:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self._busy.discard(connection)
        try:
            self._idle.remove(connection)
        except ValueError:
            pass

    def close(self, reason: str = "the worker was removed") -> None:
        """End all exchanges and close all connections."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._busy, *self._idle]:
            connection.fail(reason)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connecting: Any = loop.create_connection(lambda: Connection(self), self._host, self._port, ssl=self._ssl)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await connecting
        except TimeoutError:
            raise UpstreamError("it does not accept connections") from None
        except OSError as error:
            raise UpstreamError(f"it cannot be connected to: {error.strerror or error}") from None
        return connection

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in [c for c in self._busy if c.deadline is not None and c.deadline < now]:
            connection.fail("it did not answer in time")
        while self._idle and now - self._idle[0].idle_since > _IDLE_S:
            self._idle[0].close()
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)


def request_head(
    method: str, target: bytes, host: bytes, headers: Sequence[tuple[bytes, bytes]], content_length: int
) -> bytes:
    """The head of a request. Header names and values must hold no line breaks (a parsed request's never do)."""
    lines = [method.encode("ascii") + b" " + target + b" HTTP/1.1\r\nhost: " + host]
    lines += [name + b": " + value for name, value in headers]
    if content_length or method != "GET":
        lines.append(b"content-length: %d" % content_length)
    return b"\r\n".join(lines) + b"\r\n\r\n"
