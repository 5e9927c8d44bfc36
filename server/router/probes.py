"""Questions to workers: are you ready, how busy are you. One task for each worker."""

from __future__ import annotations

import asyncio
import logging
import random

from jaxserve.server.router.fleet import Fleet
from jaxserve.server.router.proxy import Proxy
from jaxserve.server.router.settings import RouterSettings
from jaxserve.server.router.upstream import Headers, UpstreamError
from jaxserve.server.router.worker import Worker, WorkerReport

logger = logging.getLogger(__name__)

_NAMES = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:prefix_cache_queries_total": "num_prompt_tokens",
    "vllm:prefix_cache_hits_total": "num_cached_tokens",
    "vllm:kv_cache_usage_perc": "cache_usage",
    "vllm:gpu_cache_usage_perc": "cache_usage",
    "process_start_time_seconds": "process_start",
    "jaxserve_engine_restarts_total": "engine_restarts",
}


def read_metrics(text: str) -> dict[str, float]:
    """The figures of interest in a Prometheus text, samples of one name added up. Other servers' names that mean the
    same are understood as well."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        field = _NAMES.get(name)
        if field is None:
            continue
        try:
            found[field] = found.get(field, 0.0) + float(line.rpartition(" ")[2])
        except ValueError:
            continue
    return found


class Probes:
    """start() and stop() for each worker; the outcomes go to the fleet."""

    def __init__(self, settings: RouterSettings, fleet: Fleet, proxy: Proxy) -> None:
        self._settings = settings
        self._fleet = fleet
        self._proxy = proxy
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lives: dict[str, tuple[float, float]] = {}
        key = settings.worker_key
        self.headers: Headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

    def start(self, worker: Worker) -> None:
        self._tasks[worker.name] = asyncio.create_task(self._run(worker), name=f"probe {worker.name}")

    def stop(self, worker: Worker) -> None:
        self._lives.pop(worker.name, None)
        task = self._tasks.pop(worker.name, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, worker: Worker) -> None:
        interval = self._settings.probe_interval_s
        while True:
            try:
                await self.probe(worker)
            except Exception:
                logger.exception("a probe of %s failed", worker.name)
            # Spread, so that many routers (and many workers) do not ask at the same moment.
            await asyncio.sleep(interval * random.uniform(0.9, 1.1))

    async def probe(self, worker: Worker) -> None:
        """Ask once."""
        was_ready = worker.is_ready
        problem = await self._ask_ready(worker)
        worker.probed(problem)
        if problem is None:
            await self._ask_load(worker)
        if worker.is_ready != was_ready:
            logger.info("%s: %s", worker.name, "ready" if worker.is_ready else f"not ready: {worker.why_not_ready}")
        self._fleet.changed(worker)

    async def _ask_ready(self, worker: Worker) -> str | None:
        try:
            status, body = await self._get(worker, "/ready")
            if status == 404:
                status, body = await self._get(worker, "/health")  # servers that know only this
        except UpstreamError as error:
            return str(error)
        return None if status == 200 else f"status {status}: {body[:100].decode(errors='replace')}"

    async def _ask_load(self, worker: Worker) -> None:
        try:
            status, body = await self._get(worker, "/metrics")
        except UpstreamError:
            return
        if status != 200:
            return
        figures = read_metrics(body.decode(errors="replace"))
        life = (figures.pop("process_start", 0.0), figures.pop("engine_restarts", 0.0))
        if self._lives.setdefault(worker.name, life) != life:
            logger.info("%s: its engine is a new one, its cache is empty", worker.name)
            self._lives[worker.name] = life
            self._fleet.cache_lost(worker)
        usage = figures.pop("cache_usage", 0.0)
        worker.reported(WorkerReport(**{name: int(value) for name, value in figures.items()}, cache_usage=usage))

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        return await self._proxy.pool(worker).request(
            "GET", path, headers=self.headers, timeout_s=self._settings.probe_timeout_s
        )
