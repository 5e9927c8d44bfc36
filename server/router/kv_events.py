"""What workers tell of their caches: GET /kv_events of each, into the fleet's PageIndex."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from jaxserve.server.cached_pages import KVEvent
from jaxserve.server.router.fleet import Fleet
from jaxserve.server.router.proxy import Proxy
from jaxserve.server.router.settings import RouterSettings
from jaxserve.server.router.upstream import Headers, UpstreamError, request_head
from jaxserve.server.router.worker import Worker

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_SILENCE_S = 30.0  # workers send a comment at least this often


_decode = msgspec.json.Decoder(KVEvent).decode


class KVEventReader:
    """One task for each worker, if the router listens at all."""

    def __init__(self, settings: RouterSettings, fleet: Fleet, proxy: Proxy, headers: Headers) -> None:
        self._fleet = fleet
        self._proxy = proxy
        self._headers = headers
        self._timeout_s = settings.connect_timeout_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.page_size: int | None = None  # of the workers, once one has told

    def start(self, worker: Worker) -> None:
        if self._fleet.pages is not None:
            self._tasks[worker.name] = asyncio.create_task(self._run(worker), name=f"events {worker.name}")

    def stop(self, worker: Worker) -> None:
        task = self._tasks.pop(worker.name, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, worker: Worker) -> None:
        while True:
            try:
                await self._listen(worker)
            except UpstreamError as error:
                logger.debug("%s: events: %s", worker.name, error)
            except Exception:
                logger.exception("the events of %s cannot be read", worker.name)
            await asyncio.sleep(_RETRY_S)

    async def _listen(self, worker: Worker) -> None:
        pool = self._proxy.pool(worker)
        connection = await pool.connection(fresh=True)
        try:
            connection.send(request_head("GET", b"/kv_events", pool.host_header, self._headers, 0), self._timeout_s)
            await connection.head()
            if connection.status != 200:
                raise UpstreamError(f"status {connection.status}: was it started with --kv-events?")
            rest = b""
            while piece := await connection.read(_SILENCE_S):
                *blocks, rest = (rest + piece).split(b"\n\n")
                for block in blocks:
                    if block.startswith(b"data: "):
                        self._take(worker, _decode(block[6:]))
        finally:
            connection.close()

    def _take(self, worker: Worker, event: KVEvent) -> None:
        pages = self._fleet.pages
        assert pages is not None
        if event.is_snapshot:
            pages.remove_worker(worker.name)
            if event.page_size:
                self.page_size = event.page_size
        pages.evicted(worker.name, event.evicted)
        pages.stored(worker.name, event.stored)
