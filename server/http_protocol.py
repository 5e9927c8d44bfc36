"""The HTTP connection with bounds that uvicorn's own has not: how long and how large headers may be, how long a client
may leave an answer unread, how many connections there are."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
HEADER_TIMEOUT_S = 20.0

_RESET = struct.pack("ii", 1, 0)
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose headers take longer than header_timeout_s (from its start, or from a request's first
    byte), are longer than max_header_bytes, or whose client lets an answer wait for write_timeout_s. More than
    max_connections at once are answered with 503."""

    header_timeout_s = HEADER_TIMEOUT_S
    max_header_bytes = MAX_HEADER_BYTES
    write_timeout_s = 120.0
    max_connections = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.max_connections and len(self.connections) > self.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._header_timer)
        self._stop(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self.max_header_bytes:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_headers:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._num_header_bytes = 0
        self._stop(self._header_timer)
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop(self._write_timer)
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._give_up_writing)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._write_timer)

    def _expect_headers(self) -> None:
        self._in_headers = True
        self._num_header_bytes = 0
        self._stop(self._header_timer)
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._give_up_reading)

    def _give_up_reading(self) -> None:
        if self._in_headers and not self.transport.is_closing():
            self.transport.close()

    def _give_up_writing(self) -> None:
        if not self.transport.is_closing():
            logger.warning("a client left its answer unread for %g s and is dropped", self.write_timeout_s)
            connection = self.transport.get_extra_info("socket")
            if connection is not None:
                # Closed with a reset: the kernel would go on offering what it still has to send.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def bounded(*, write_timeout_s: float, max_connections: int, header_timeout_s: float) -> type[asyncio.Protocol]:
    """The protocol with these bounds, for uvicorn.Config(http=...)."""
    bounds = {"write_timeout_s": write_timeout_s, "max_connections": max_connections}
    return type("HttpProtocol", (BoundedHttpProtocol,), {**bounds, "header_timeout_s": header_timeout_s})


def raise_file_limit(wanted: int) -> None:
    """Let this process have as many open connections as it may; the usual soft limit is 1024."""
    try:
        import resource
    except ImportError:  # not made for Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
