"""Free pages and reference counts. No jax.

Most calls are about a few pages, so what counts is the fixed price of a numpy call: indexing by intp costs a fifth of
indexing by int32, and an operand that is an array half of a Python number.
"""

from __future__ import annotations

import numpy as np

_ZERO, _ONE = np.array(0, np.int32), np.array(1, np.int32)


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
        self.references[pages.astype(np.intp)] = _ONE
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Add one reference to each page (pages are distinct and in use)."""
        if len(pages):
            index = pages.astype(np.intp)
            self.references[index] = self.references[index] + _ONE

    def release(self, pages: np.ndarray) -> None:
        """Take one reference from each page (pages are distinct); those without any become free."""
        if not len(pages):
            return
        index = pages.astype(np.intp)
        left = self.references[index] - _ONE
        lowest = left.item(left.argmin())
        if lowest < 0:
            raise RuntimeError(f"pages released more often than referenced: {pages[left < 0][:8].tolist()}")
        self.references[index] = left
        if lowest == 0:
            self._push(pages[left == _ZERO])

    def free(self, pages: np.ndarray) -> None:
        """Release pages of which the caller holds the only reference each (pages are distinct)."""
        self.references[pages.astype(np.intp)] = _ZERO
        self._push(pages)

    def num_unshared(self, pages: np.ndarray) -> int:
        """How many leading pages (of at least one, all in use) have one reference only."""
        references = self.references[pages.astype(np.intp)]
        if references.item(references.argmax()) <= 1:
            return len(pages)
        return int((references > _ONE).argmax())

    def _push(self, pages: np.ndarray) -> None:
        end = self._num_free + len(pages)
        self._free[self._num_free : end] = pages[::-1]
        self._num_free = end

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the free pages are exactly the unreferenced ones, each listed once."""
        free = np.sort(self._free[: self._num_free])
        expected = np.flatnonzero(self.references[1:] == 0) + 1
        if self.references[0] != 0 or not np.array_equal(free, expected):
            raise RuntimeError(f"page pool: {len(free)} pages listed as free, {len(expected)} without references")
