"""What changes in the cached prefixes, told as page hashes: "stored" and "evicted". No jax.

A recorder hears of every page that enters or leaves a radix tree. Between two take()s only the outcome is kept, so
that nobody has to read fast; several trees (of attention ranks) may share a recorder, and a page counts as stored
while any of them has it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.cache.page_hashes import hash_pages, namespace_hash
from jaxserve.cache.radix_tree import RadixTree


class PageEvents:
    """take() gives (stored, evicted) since the last one; the same page is never in both."""

    def __init__(self) -> None:
        self._copies: dict[int, int] = {}
        self._changes: dict[int, bool] = {}  # page -> whether it was stored before the first change

    @classmethod
    def watching(cls, trees: Iterable[RadixTree], num_pages: int) -> PageEvents:
        """A recorder of empty trees."""
        events = cls()
        for tree in trees:
            events.watch(tree, num_pages)
        return events

    def watch(self, tree: RadixTree, num_pages: int) -> None:
        """Hear of a tree that is empty."""
        tree.listener = _TreeListener(self, tree.page_size, num_pages)

    def take(self) -> tuple[list[int], list[int]]:
        stored, evicted = [], []
        for page, was_stored in self._changes.items():
            is_stored = page in self._copies
            if is_stored and not was_stored:
                stored.append(page)
            elif was_stored and not is_stored:
                evicted.append(page)
        self._changes.clear()
        return stored, evicted

    def _stored(self, page: int) -> None:
        copies = self._copies.get(page, 0)
        self._changes.setdefault(page, copies > 0)
        self._copies[page] = copies + 1

    def _evicted(self, page: int) -> None:
        copies = self._copies[page]
        self._changes.setdefault(page, True)
        if copies == 1:
            del self._copies[page]
        else:
            self._copies[page] = copies - 1


class _TreeListener:
    """Knows the hash of every page of one tree, by its number in the pool."""

    def __init__(self, events: PageEvents, page_size: int, num_pages: int) -> None:
        self._events = events
        self._page_size = page_size
        self._hashes = np.zeros(num_pages, np.uint64)

    def stored(self, parent: int | str, tokens: np.ndarray, pages: np.ndarray) -> None:
        before = namespace_hash(parent) if isinstance(parent, str) else int(self._hashes[parent])
        hashes = hash_pages(before, tokens, self._page_size)
        self._hashes[pages] = hashes
        for page in hashes:
            self._events._stored(page)

    def evicted(self, pages: np.ndarray) -> None:
        for page in self._hashes[pages].tolist():
            self._events._evicted(page)
