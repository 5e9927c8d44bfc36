"""The admin API: workers that come, go and are drained while the router serves.

GET /workers · POST /workers {"url"} · POST /workers/drain {"url", "timeout_s"} · DELETE /workers?url=
"""

from __future__ import annotations

import asyncio
import math
import urllib.parse
from typing import Any

import msgspec
from jaxserve.server.errors import ApiError, invalid_value
from jaxserve.server.router.fleet import Fleet
from jaxserve.server.router.settings import RouterSettings, normalised
from jaxserve.server.router.worker import Worker

_MAX_BODY = 65536


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    timeout_s: float | None = None


class AdminApi:
    """Answers with (status, document). Raises ApiError."""

    def __init__(self, settings: RouterSettings, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self._drains: set[asyncio.Task[int]] = set()

    async def __call__(self, method: str, path: str, query: bytes, receive: Any) -> tuple[int, Any]:
        if path == "/workers" and method == "GET":
            return 200, {"workers": [describe(worker) for worker in self._fleet.workers.values()]}
        if path == "/workers" and method == "POST":
            return self._add(await _read(receive))
        if path == "/workers/drain" and method == "POST":
            return self._drain(await _read(receive))
        if path == "/workers" and method == "DELETE":
            values = urllib.parse.parse_qs(query.decode("latin-1")).get("url", [])
            if len(values) != 1:
                raise ApiError(400, "url: missing; give it in the query: /workers?url=...", param="url")
            worker = self._known(values[0])
            self._fleet.remove(worker.name)
            return 200, {"removed": worker.name}
        raise ApiError(404, f"{method} {path[:100]}: no such path", code="not_found")

    def _add(self, request: _Request) -> tuple[int, Any]:
        is_new = normalised(request.url) not in self._fleet.workers
        try:
            worker = self._fleet.add(request.url)
        except ValueError as error:
            raise ApiError(400, str(error), param="url", code="invalid_value") from None
        return 201 if is_new else 200, describe(worker)

    def _drain(self, request: _Request) -> tuple[int, Any]:
        worker = self._known(request.url)
        timeout_s = self._settings.drain_s if request.timeout_s is None else request.timeout_s
        if not math.isfinite(timeout_s) or timeout_s < 0:
            raise invalid_value("timeout_s", timeout_s, "seconds, 0 or more")
        task = asyncio.create_task(self._fleet.drain(worker.name, timeout_s))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        worker.is_draining = True
        return 202, describe(worker)

    def _known(self, url: str) -> Worker:
        worker = self._fleet.workers.get(normalised(url))
        if worker is None:
            known = ", ".join(self._fleet.workers) or "none"
            raise ApiError(404, f"url: got {url[:100]!r}; known: {known}", param="url", code="worker_not_found")
        return worker


def describe(worker: Worker) -> dict[str, Any]:
    """One worker for people and programs."""
    report = worker.report
    return {
        "url": worker.name,
        "state": worker.state,
        "why": worker.why_not_ready,
        "in_flight": worker.in_flight,
        "score": worker.score,
        "requests": worker.counts.requests,
        "failures": worker.counts.failures,
        "running": report.num_running,
        "waiting": report.num_waiting,
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_cached_tokens,
    }


async def _read(receive: Any) -> _Request:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _MAX_BODY:
            raise ApiError(413, f"body: allowed: at most {_MAX_BODY} bytes")
        if not message.get("more_body"):
            break
    try:
        return msgspec.json.decode(body, type=_Request)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"body: {error}", code="invalid_type") from None
