"""Pages and prefixes together: match, lock, allocate or evict, insert, integrity check. No jax."""

from __future__ import annotations

import numpy as np

from jaxserve.cache.page_pool import PagePool
from jaxserve.cache.radix_tree import Handle, RadixTree


class PrefixCache:
    """The one owner of a PagePool and a RadixTree. The tree holds one reference to each of its pages.

    enabled=False: nothing is ever matched or inserted.
    """

    def __init__(self, num_pages: int, page_size: int, *, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size)

    @property
    def num_available(self) -> int:
        """Pages that allocate() can deliver now."""
        return self.pool.num_free + self.tree.num_evictable

    def match(self, namespace: str, tokens: np.ndarray, limit: int) -> Handle:
        """The longest cached prefix of at most `limit` tokens, not yet locked."""
        if not self.enabled or limit < self.page_size:
            return self.tree.root(namespace)
        return self.tree.match(namespace, tokens[: limit // self.page_size * self.page_size])

    def acquire(self, handle: Handle) -> None:
        """Lock a match and take a reference to each of its pages."""
        self.tree.lock(handle)
        self.pool.share(handle.pages)

    def allocate(self, count: int) -> np.ndarray | None:
        """int32 [count] pages with one reference each, evicting old prefixes if need be; None if too few exist.

        An evicted page becomes free at once: a request that uses a page of the tree has locked it (see extend).
        """
        missing = count - self.pool.num_free
        if missing > 0:
            if missing > self.tree.num_evictable:
                return None
            self.pool.free(self.tree.evict(missing))
        return self.pool.allocate(count)

    def extend(self, handle: Handle, tokens: np.ndarray, pages: np.ndarray) -> Handle | None:
        """Insert computed pages behind a locked handle; returns the new handle, locked in its place.

        `pages` stay referenced by the caller; the tree adds its own reference. None, and nothing changes, if the tree
        has these tokens already: locking its copies as well would bind twice the memory. The caller then keeps its
        pages to itself and leaves them to deposit() in the end. None as well if another request uses one of the pages:
        no lock of its own would cover them, and the tree counts what is not locked as available.
        """
        if self.pool.num_unshared(pages) < len(pages):
            return None
        end = self.tree.extend(handle, tokens, pages)
        if end is not None:
            self.pool.share(pages)
        return end

    def deposit(self, handle: Handle, tokens: np.ndarray, pages: np.ndarray) -> None:
        """Insert pages behind a locked handle without locking them: their owner is about to release them.

        Pages from the first one on that another request uses are left out; the last of their users may deposit them.
        """
        count = self.pool.num_unshared(pages)
        if count:
            known = self.tree.insert(handle, tokens[: count * self.page_size], pages[:count])[1]
            self.pool.share(pages[known:count])

    def flush(self) -> None:
        """Forget every prefix that no locked handle protects."""
        self.pool.free(self.tree.evict(self.tree.num_evictable))

    def check_integrity(self, held: dict[int, int]) -> None:
        """Raise RuntimeError unless every reference is accounted for; held: page -> references of requests."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        expected = np.zeros(self.pool.num_pages, np.int32)
        pages = self.tree.pages()
        if len(np.unique(pages)) != len(pages):
            raise RuntimeError("radix tree: a page stands in two places")
        expected[pages] += 1
        for page, count in held.items():
            expected[page] += count
        wrong = np.flatnonzero(expected != self.pool.references)
        if len(wrong):
            page = int(wrong[0])
            raise RuntimeError(
                f"{len(wrong)} pages with wrong reference counts; page {page}: "
                f"{self.pool.references[page]} recorded, {expected[page]} found"
            )
