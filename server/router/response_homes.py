"""Stored responses live in the worker that made them: requests that name one go there.

The router reads the ids of responses as it hands them on. Of an id that it has not seen (another router handed it on,
or this one was restarted) it asks all workers once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec
from jaxserve.server.router.fleet import Fleet
from jaxserve.server.router.settings import RouterSettings
from jaxserve.server.router.upstream import UpstreamError, UpstreamPool
from jaxserve.server.router.worker import Worker

from jaxserve.routing.homes import Homes

CREATE_PATH = "/v1/responses"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_ANSWERED_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_HEAD_BYTES = 4096  # the id stands at the beginning of an answer, whole or in events


class _Named(msgspec.Struct):
    previous_response_id: str | None = None


_decode = msgspec.json.Decoder(_Named).decode


class ResponseHomes:
    """pool_of: connections to a worker."""

    def __init__(self, settings: RouterSettings, fleet: Fleet, pool_of: Callable[[Worker], UpstreamPool]) -> None:
        self._settings = settings
        self._fleet = fleet
        self._pool_of = pool_of
        self._homes = Homes()

    async def find(self, path: str, body: bytes, authorization: bytes) -> str:
        """The name of the worker that has the response which a request is about; empty: none has, or it is about
        none. Any worker can then answer, if only that there is no such response."""
        name = named_response(path, body)
        if not name:
            return ""
        home = self._homes.find(name)
        if not home:
            home = await self._ask_all(name, authorization)
            if home:
                self._homes.note(name, home)
        return home

    def reader(self, path: str, worker: Worker) -> Callable[[bytes], None] | None:
        """What shall be called with each piece of an answer to a request for `path`; None: nothing."""
        return id_reader(lambda name: self._homes.note(name, worker.name)) if path == CREATE_PATH else None

    def remove_worker(self, worker: Worker) -> None:
        self._homes.remove_worker(worker.name)

    async def _ask_all(self, name: str, authorization: bytes) -> str:
        workers = [worker for worker in self._fleet.workers.values() if worker.is_ready]
        if len(workers) == 1:
            return workers[0].name
        answers = await asyncio.gather(*(self._has(worker, name, authorization) for worker in workers))
        return next((worker.name for worker, has_it in zip(workers, answers) if has_it), "")

    async def _has(self, worker: Worker, name: str, authorization: bytes) -> bool:
        headers = [(b"authorization", authorization)] if authorization else []
        try:
            status, _ = await self._pool_of(worker).request(
                "GET", f"{CREATE_PATH}/{name}", headers=headers, timeout_s=self._settings.probe_timeout_s
            )
        except UpstreamError:
            return False
        return status == 200


def named_response(path: str, body: bytes) -> str:
    """The id of the stored response that a request is about; empty: none. /v1/responses/ID[/...], or a body's
    previous_response_id."""
    if not path.startswith(CREATE_PATH):
        return ""
    name: str | None = path[len(CREATE_PATH) + 1 :].partition("/")[0]
    if not name or name == "input_tokens":
        try:
            name = _decode(body).previous_response_id
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""
    return name if name and _ID.fullmatch(name) else ""


def id_reader(note: Callable[[str], None]) -> Callable[[bytes], None]:
    """A function to be called with each piece of an answer that makes a response; note() gets its id."""
    seen: bytes | None = b""

    def read(piece: bytes) -> None:
        nonlocal seen
        if seen is None:
            return
        seen += piece[:_HEAD_BYTES]
        found = _ANSWERED_ID.search(seen)
        if found:
            note(found[1].decode("ascii"))
        if found or len(seen) >= _HEAD_BYTES:
            seen = None

    return read
