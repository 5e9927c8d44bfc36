"""Prefixes kept for the next request of a program: pages that no request owns, until they are released. No jax.

A kept prefix holds whole pages and the partly filled last one, whose tokens the tree cannot share. It is a hint:
nobody's tokens depend on it. When pages run out, kept prefixes go before any request is thrown out, least recently
used first, and leave their full pages to the tree; so they cannot be what a full pool waits for.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.cache.radix_tree import Handle


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence may start with: the pages of its first num_tokens tokens.

    handle  the part in the tree, not yet locked; the pages behind it come from a kept prefix
    pages   int32 [ceil(num_tokens / page_size)]; the last one is partly used if num_tokens is no multiple
    """

    handle: Handle
    pages: np.ndarray
    num_tokens: int


@dataclasses.dataclass(slots=True)
class Kept:
    """tokens int32 [n] whose K/V lies in pages; handle is locked, every page referenced once."""

    namespace: str
    tokens: np.ndarray
    pages: np.ndarray
    handle: Handle
    lease_s: float
    expires: float | None = None  # None: the lease begins at the next expire()


class KeptPrefixes:
    """By name, least recently used first. Names are unique while their prefix is kept."""

    def __init__(self, cache: PrefixCache, page_size: int, *, deterministic: bool) -> None:
        self._cache = cache
        self._page_size = page_size
        self._deterministic = deterministic
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def keep(self, name: str, kept: Kept) -> None:
        """Take a reference to each page and lock the handle. A prefix of that name is replaced."""
        self._cache.pool.share(kept.pages)
        self._cache.tree.lock(kept.handle)
        self.release(name)
        self._kept[name] = kept

    def extend(self, handle: Handle, name: str, namespace: str, tokens: np.ndarray) -> Prefix:
        """The tree's match of int32 `tokens`, or what the kept prefix `name` has beyond it."""
        kept = self._kept.get(name) if name else None
        if kept is None or kept.namespace != namespace:
            return Prefix(handle, handle.pages, handle.num_tokens)
        self._kept[name] = self._kept.pop(name)  # most recently used
        kept.expires = None
        size = min(len(kept.tokens), len(tokens))
        differs = kept.tokens[:size] != tokens[:size]
        first = int(differs.argmax()) if size else 0
        shared = first if size and differs[first] else size
        if self._deterministic:
            shared -= shared % self._page_size  # all pages of a request are its own before it starts
        if shared <= handle.num_tokens:
            return Prefix(handle, handle.pages, handle.num_tokens)
        more = kept.pages[handle.num_tokens // self._page_size : -(-shared // self._page_size)]
        return Prefix(handle, np.concatenate((handle.pages, more)), shared)

    def release(self, name: str) -> None:
        """Give the pages back, the full ones to the tree. A name that is not kept (any more) is no mistake."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        start, end = kept.handle.num_tokens, len(kept.tokens) // self._page_size * self._page_size
        if end > start:
            pages = kept.pages[start // self._page_size : end // self._page_size]
            self._cache.deposit(kept.handle, kept.tokens[start:end], pages)
        self._cache.pool.release(kept.pages)
        self._cache.tree.unlock(kept.handle)

    def release_oldest(self) -> bool:
        """Make room; False if nothing is kept."""
        if not self._kept:
            return False
        self.release(next(iter(self._kept)))
        return True

    def release_all(self) -> None:
        while self.release_oldest():
            pass

    def expire(self, now: float) -> None:
        """Release what was not used for its lease. `now` in seconds of any clock."""
        for name, kept in list(self._kept.items()):
            if kept.expires is None:
                kept.expires = now + kept.lease_s
            elif kept.expires <= now:
                self.release(name)

    def references(self) -> list[np.ndarray]:
        """The pages of each kept prefix, for the integrity check."""
        return [kept.pages for kept in self._kept.values()]
