"""One request on its way through the router: read, choose a worker, send, hand on the answer piece by piece.

A request may be tried on another worker until the first byte of an answer's body has been handed on; after that a
failure is told to the client (in a stream as an error event). Refusals (a connection that is not accepted, 503) may
go on until queue_timeout_s; workers that break while they have the request count against max_attempts, since the
request may be what breaks them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxserve.server.errors import SERVER_ERROR, ApiError, unavailable
from jaxserve.server.router.fleet import Fleet, NoWorker
from jaxserve.server.router.metrics import RouterMetrics
from jaxserve.server.router.queries import query_of
from jaxserve.server.router.response_homes import ResponseHomes
from jaxserve.server.router.settings import RouterSettings
from jaxserve.server.router.upstream import Connection, Headers, UpstreamError, UpstreamPool, request_head
from jaxserve.server.router.worker import Worker

from jaxserve.routing.policy import Query

logger = logging.getLogger(__name__)

Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]

_NOT_FORWARDED = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"x-request-id",
        b"x-forwarded-for",
    )
)  # fmt: skip
_NOT_RETURNED = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer", b"server"))
_REFUSALS = frozenset((502, 503, 504))
_NOT_READY_CODES = (b'"starting"', b'"restarting"', b'"shutting_down"')
_BROKE_CODES = (b'"engine_unavailable"', b'"aborted"')
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0


class ClientLeft(Exception):
    """Nobody waits for the answer."""


@dataclasses.dataclass(slots=True)
class Exchange:
    """One client's request. target: path with query string. headers: those to be sent on. home: the only worker that
    can serve it; empty: any."""

    method: str
    target: bytes
    headers: Headers
    body: bytes
    query: Query
    request_id: str
    send: Send
    path: str = ""
    home: str = ""
    has_started: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    """Why an attempt came to nothing before anything was handed on. broke: the worker had the request and failed."""

    reason: str
    broke: bool
    answer: tuple[int, Headers, bytes] | None = None


class Proxy:
    """Sends requests of clients to the fleet's workers."""

    def __init__(self, settings: RouterSettings, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics
        self._pools: dict[str, UpstreamPool] = {}
        self.num_open = 0
        # (path, body, authorization) -> hashes of the prompt's pages, where workers tell what they have cached
        self.homes = ResponseHomes(settings, fleet, self.pool)
        self.read_pages: Callable[[str, bytes, bytes], Awaitable[Sequence[int] | None]] | None = None

    def pool(self, worker: Worker) -> UpstreamPool:
        pool = self._pools.get(worker.name)
        if pool is None:
            pool = UpstreamPool(worker.name, connect_timeout_s=self._settings.connect_timeout_s)
            self._pools[worker.name] = pool
        return pool

    def remove_worker(self, worker: Worker) -> None:
        pool = self._pools.pop(worker.name, None)
        if pool is not None:
            pool.close()
        self.homes.remove_worker(worker)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close("the router is shutting down")

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """An ASGI application for the paths that are passed on. Raises ApiError while nothing has been sent."""
        if self.num_open >= self._settings.max_in_flight:
            raise unavailable(f"{self.num_open} requests are under way, no more are taken", code="queue_full")
        start = time.perf_counter()
        self.num_open += 1
        try:
            exchange = await self._read(scope, receive, send)
            await self._until_client_leaves(receive, self._serve(exchange, start))
        except ClientLeft:
            self._metrics.num_clients_left += 1
        finally:
            self.num_open -= 1

    async def _read(self, scope: dict[str, Any], receive: Receive, send: Send) -> Exchange:
        headers: Headers = []
        authorization, session, request_id, length = b"", "", "", 0
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"x-session-id":
                session = value.decode("latin-1")
            elif name == b"x-request-id":
                request_id = value.decode("latin-1")
            elif name == b"content-length":
                length = int(value)
            if name not in _NOT_FORWARDED:
                headers.append((name, value))
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        headers.append((b"x-request-id", request_id.encode("latin-1")))
        if scope.get("client"):
            headers.append((b"x-forwarded-for", scope["client"][0].encode("ascii")))
        body = await self._read_body(receive, length) if scope["method"] != "GET" else b""
        query = query_of(body, authorization=authorization, session=session)
        if self.read_pages is not None and body:
            pages = await self.read_pages(scope["path"], body, authorization)
            query = dataclasses.replace(query, pages=pages)
        home = await self.homes.find(scope["path"], body, authorization)
        target = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        return Exchange(scope["method"], target, headers, body, query, request_id, send, scope["path"], home)

    async def _read_body(self, receive: Receive, length: int) -> bytes:
        limit = self._settings.max_body_bytes
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    if max(size, length) > limit:
                        raise ApiError(413, f"body: got {max(size, length)} bytes; allowed: at most {limit}")
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    piece = message.get("body", b"")
                    size += len(piece)
                    pieces.append(piece)
                    if not message.get("more_body"):
                        return b"".join(pieces)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from None

    async def _until_client_leaves(self, receive: Receive, work: Any) -> None:
        """Run `work`; raise ClientLeft, with the work cancelled, if the client goes first."""
        task = asyncio.current_task()
        assert task is not None
        has_left = False

        async def watch() -> None:
            nonlocal has_left
            while (await receive())["type"] != "http.disconnect":
                pass
            has_left = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await work
        except asyncio.CancelledError:
            if not has_left:
                raise
            task.uncancel()
            raise ClientLeft from None
        finally:
            watcher.cancel()

    async def _serve(self, exchange: Exchange, start: float) -> None:
        deadline = time.monotonic() + self._settings.queue_timeout_s
        tried: set[str] = set()
        num_broken, pause = 0, _FIRST_PAUSE_S
        failure: _Failure | None = None
        while True:
            try:
                worker = await self._fleet.acquire(exchange.query, tried, deadline, home=exchange.home)
            except NoWorker:
                if tried and time.monotonic() + pause < deadline:
                    # All were tried: again, after a pause.
                    tried.clear()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LAST_PAUSE_S)
                    continue
                self._metrics.num_unserved += 1
                await self._give_up(exchange, failure)
                return
            self._metrics.observe_overhead(time.perf_counter() - start)
            failure = await self._attempt(exchange, worker)
            if failure is None:
                return
            logger.warning("request %s: %s: %s", exchange.request_id, worker.name, failure.reason)
            worker.counts.retries += 1
            tried.add(worker.name)
            num_broken += failure.broke
            if num_broken >= self._settings.max_attempts:
                self._metrics.num_unserved += 1
                await self._give_up(exchange, failure)
                return

    async def _attempt(self, exchange: Exchange, worker: Worker) -> _Failure | None:
        """None when the request has been answered, well or not; else why it may be tried elsewhere."""
        verdict: bool | None = None  # on the worker
        connection: Connection | None = None
        try:
            try:
                connection, piece = await self._first_piece(exchange, worker)
            except _Unreachable as error:
                worker.unreachable(str(error))  # probes see to that; the circuit is for those that can be reached
                return _Failure(str(error), broke=False)
            except UpstreamError as error:
                verdict = False
                return _Failure(str(error), broke=True)
            if connection.status in _REFUSALS:
                failure = await self._refusal(connection, piece)
                verdict = None if b'"queue_full"' in failure.answer[2] else False  # type: ignore[index]
                if any(code in failure.answer[2] for code in _NOT_READY_CODES):  # type: ignore[index]
                    worker.unreachable("it says that it is not ready")
                return failure
            verdict = await self._hand_on(exchange, worker, connection, piece)
            return None
        finally:
            if connection is not None:
                connection.finish()
            self._fleet.release(worker, succeeded=verdict)

    async def _first_piece(self, exchange: Exchange, worker: Worker) -> tuple[Connection, bytes]:
        """Send the request; the connection with the answer's head, and the first piece of its body."""
        pool = self.pool(worker)
        head = request_head(
            exchange.method, exchange.target, pool.host_header, exchange.headers, len(exchange.body)
        )  # fmt: skip
        is_fresh = False
        while True:
            try:
                connection = await pool.connection(fresh=is_fresh)
            except UpstreamError as error:
                raise _Unreachable(str(error)) from None
            try:
                connection.send(head + exchange.body, self._settings.first_byte_timeout_s)
                await connection.head()
                return connection, await connection.read(self._settings.idle_timeout_s)
            except UpstreamError as error:
                connection.close()
                if not error.was_reused or is_fresh:
                    raise
                is_fresh = True
            except BaseException:
                connection.close()  # the worker sees that nobody waits any more
                raise

    async def _refusal(self, connection: Connection, piece: bytes) -> _Failure:
        body = piece
        try:
            while piece and len(body) < 65536:
                piece = await connection.read(self._settings.idle_timeout_s)
                body += piece
        except UpstreamError:
            pass
        broke = any(code in body for code in _BROKE_CODES)
        return _Failure(f"status {connection.status}", broke, (connection.status, connection.headers, body))

    async def _hand_on(self, exchange: Exchange, worker: Worker, connection: Connection, piece: bytes) -> bool:
        """Everything from here on goes to the client. Returns whether the worker did well."""
        send = exchange.send
        headers = [(name, value) for name, value in connection.headers if name not in _NOT_RETURNED]
        if not any(name == b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", exchange.request_id.encode("latin-1")))
        headers.append((b"x-jaxserve-worker", worker.name.encode("ascii")))
        status = connection.status
        exchange.has_started = True
        read = self.homes.reader(exchange.path, worker) if exchange.method == "POST" and status == 200 else None
        await send({"type": "http.response.start", "status": status, "headers": headers})
        try:
            last = piece
            while piece:
                last = piece
                if read is not None:
                    read(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await connection.read(self._settings.idle_timeout_s)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except UpstreamError as error:
            logger.warning("request %s: %s: %s, after it had begun", exchange.request_id, worker.name, error)
            self._metrics.num_cut += 1
            await self._tell_cut(send, headers, last, str(error))
            return False
        return status != 500

    async def _tell_cut(self, send: Send, headers: Headers, last: bytes, reason: str) -> None:
        """In a stream an event says it. Other answers are left without an end, which clients see as an error."""
        is_stream = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)
        if not is_stream:
            return
        fault = ApiError(
            502, f"the worker was lost while it answered: {reason}", kind=SERVER_ERROR, code="worker_lost"
        )  # fmt: skip
        event = b"data: " + fault.encode() + b"\n\n"
        if not last.endswith(b"\n\n"):
            event = b"\n\n" + event
        await send({"type": "http.response.body", "body": event, "more_body": False})

    async def _give_up(self, exchange: Exchange, failure: _Failure | None) -> None:
        if failure is not None and failure.answer is not None:
            status, headers, body = failure.answer
            kept = [(n, v) for n, v in headers if n in (b"content-type", b"retry-after")]
        else:
            reason = "no worker is ready" if failure is None else f"no worker could answer: {failure.reason}"
            fault = unavailable(reason, retry_after=5, code="no_worker")
            status, body = 503, fault.encode()
            kept = [(b"content-type", b"application/json"), (b"retry-after", b"5")]
        kept += [(b"content-length", b"%d" % len(body)), (b"x-request-id", exchange.request_id.encode("latin-1"))]
        await exchange.send({"type": "http.response.start", "status": status, "headers": kept})
        await exchange.send({"type": "http.response.body", "body": body, "more_body": False})


class _Unreachable(Exception):
    """No connection to the worker: the request has not been sent."""
