"""Responses that later requests may read or continue: in memory, bounded in number and bytes, apart by tenant."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from typing import Any

import msgspec
from jaxserve.server.errors import ApiError, shown
from jaxserve.server.response_types import ResponseObject


@dataclasses.dataclass(kw_only=True)
class StoredResponse:
    """messages: the conversation up to and with this response, without instructions. task: while it generates."""

    response: ResponseObject
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    task: asyncio.Task[None] | None = None
    num_bytes: int = 0


class ResponseStore:
    """The oldest finished responses go when there are too many. Everything runs on the event loop's thread."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: collections.OrderedDict[tuple[str, str], StoredResponse] = collections.OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a response, or what has become of one that is kept."""
        key = (tenant, stored.response.id)
        old = self._stored.pop(key, None)
        if old is not None:
            self._num_bytes -= old.num_bytes
        encode = msgspec.json.encode
        stored.num_bytes = sum(len(encode(part)) for part in (stored.response, stored.items, stored.messages))
        if stored.num_bytes > self._max_bytes:
            return
        self._stored[key] = stored
        self._num_bytes += stored.num_bytes
        self._evict()

    def get(self, tenant: str, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """Raises ApiError 404, also for another tenant's."""
        stored = self._stored.get((tenant, response_id))
        if stored is None:
            raise ApiError(
                404,
                f"{param}: got {shown(response_id)}; there is no such response (it was not stored, was deleted, or "
                "had to make room)",
                param=param,
                code="response_not_found",
            )
        return stored

    def holds(self, tenant: str, response_id: str) -> bool:
        return (tenant, response_id) in self._stored

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response, and stop it if it still generates. Raises ApiError 404."""
        stored = self.get(tenant, response_id)
        del self._stored[tenant, response_id]
        self._num_bytes -= stored.num_bytes
        if stored.task is not None:
            stored.task.cancel()

    def close(self) -> None:
        """Stop what still generates."""
        for stored in self._stored.values():
            if stored.task is not None:
                stored.task.cancel()

    def _evict(self) -> None:
        excess = len(self._stored) - self._max_responses
        if excess <= 0 and self._num_bytes <= self._max_bytes:
            return
        for key, stored in list(self._stored.items()):
            if len(self._stored) <= self._max_responses and self._num_bytes <= self._max_bytes:
                return
            if stored.task is None:
                del self._stored[key]
                self._num_bytes -= stored.num_bytes
