"""Which pages the engine has cached, and GET /kv_events, which tells routers: all of them first, then every change.

An event is `data: {"stored": [...], "evicted": [...]}`; the first one also holds `"is_snapshot": true` and the page
size, and a later snapshot (after a restart of the engine) makes all before it void. Pages are named by
jaxserve/cache/page_hashes.py. A slow reader gets the outcome of what it missed, not a backlog.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import msgspec

QUIET_S = 10.0  # after which a comment shows that the connection lives


class KVEvent(msgspec.Struct, omit_defaults=True):
    """One event. is_snapshot: what was known before is void."""

    stored: list[int] = []
    evicted: list[int] = []
    is_snapshot: bool = False
    page_size: int = 0


class CachedPages:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._pages: set[int] = set()
        self._readers: set[_Reader] = set()

    def __len__(self) -> int:
        return len(self._pages)

    def change(self, stored: Iterable[int], evicted: Iterable[int]) -> None:
        """Pages came and went; no page is in both."""
        stored, evicted = list(stored), list(evicted)
        self._pages.difference_update(evicted)
        self._pages.update(stored)
        for reader in self._readers:
            reader.change(stored, evicted)

    def clear(self) -> None:
        """The engine is gone, and its cache with it."""
        self._pages.clear()
        for reader in self._readers:
            reader.restart()

    async def events(self, page_size: int) -> AsyncIterator[bytes]:
        """The stream of one reader, until it is closed."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                event = reader.take(self._pages, page_size)
                if event is not None:
                    yield b"data: " + msgspec.json.encode(event) + b"\n\n"
                try:
                    async with asyncio.timeout(QUIET_S):
                        await reader.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._readers.discard(reader)


class _Reader:
    def __init__(self) -> None:
        self._changes: dict[int, bool] = {}  # page -> whether it is stored now
        self._needs_all = True
        self._has_news = asyncio.Event()

    def change(self, stored: list[int], evicted: list[int]) -> None:
        if not self._needs_all:
            self._changes.update(dict.fromkeys(evicted, False))
            self._changes.update(dict.fromkeys(stored, True))
        self._has_news.set()

    def restart(self) -> None:
        self._changes.clear()
        self._needs_all = True
        self._has_news.set()

    async def wait(self) -> None:
        await self._has_news.wait()

    def take(self, pages: set[int], page_size: int) -> KVEvent | None:
        self._has_news.clear()
        if self._needs_all:
            self._needs_all = False
            return KVEvent(stored=list(pages), is_snapshot=True, page_size=page_size)
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        return KVEvent(
            stored=[page for page, is_stored in changes.items() if is_stored],
            evicted=[page for page, is_stored in changes.items() if not is_stored],
        )
