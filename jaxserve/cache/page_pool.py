"""Free pages and reference counts. No jax."""

from __future__ import annotations

import numpy as np


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for."""


class PagePool:
    """Pages 1 .. num_pages - 1; page 0 is a dummy that belongs to nobody.

    A page is free exactly when its count is 0. A request counts once for every page it uses, the radix tree once for
    every page it keeps. Only the owner of a reference may release it.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: got {num_pages}; allowed: 2 or more (page 0 is a dummy)")
        self.num_pages = num_pages
        self.references = np.zeros(num_pages, np.int32)
        # A stack whose top is the lowest page first, then the page freed last: its memory is still warm.
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> np.ndarray:
        """int32 [count] pages with one reference each. Raises OutOfPages and changes nothing if there are fewer."""
        if count > self._num_free:
            raise OutOfPages(f"{count} pages asked for, {self._num_free} of {self.num_pages - 1} free")
        end = self._num_free
        pages = self._free[end - count : end][::-1].copy()
        self._num_free = end - count
        self.references[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Add one reference to each page (pages are distinct and in use)."""
        if len(pages):
            self.references[pages] += 1

    def release(self, pages: np.ndarray) -> None:
        """Take one reference from each page (pages are distinct); those without any become free."""
        if not len(pages):
            return
        left = self.references[pages]
        left -= 1
        if np.count_nonzero(left < 0):
            raise RuntimeError(f"pages released more often than referenced: {pages[left < 0][:8].tolist()}")
        self.references[pages] = left
        freed = pages[left == 0]
        end = self._num_free + len(freed)
        self._free[self._num_free : end] = freed[::-1]
        self._num_free = end

    def free(self, pages: np.ndarray) -> None:
        """Release pages of which the caller holds the only reference each (pages are distinct)."""
        end = self._num_free + len(pages)
        self.references[pages] = 0
        self._free[self._num_free : end] = pages[::-1]
        self._num_free = end

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the free pages are exactly the unreferenced ones, each listed once."""
        free = np.sort(self._free[: self._num_free])
        expected = np.flatnonzero(self.references[1:] == 0) + 1
        if self.references[0] != 0 or not np.array_equal(free, expected):
            raise RuntimeError(f"page pool: {len(free)} pages listed as free, {len(expected)} without references")
