"""Which pages each worker has, from what workers tell (KV events). No jax.

What was sent to a worker counts as cached there for a while before the worker says so: requests with one prefix that
arrive together go together.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

EXPECTED_S = 10.0  # how long a page is believed to be on its way


class PageIndex:
    """Pages are named by cache.page_hashes. Bounded by what the workers hold and what was sent within EXPECTED_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: dict[int, dict[str, float]] = {}  # page -> worker -> when it is no longer believed
        self._pages: dict[str, set[int]] = {}  # worker -> pages, as told or expected
        self._expected: collections.deque[tuple[float, str, Sequence[int]]] = collections.deque()

    def num_pages(self, worker: str) -> int:
        return len(self._pages.get(worker, ()))

    def match(self, pages: Sequence[int]) -> Iterator[tuple[int, Collection[str]]]:
        """How many leading `pages` whom has: (pages, workers), longest first; each worker once."""
        self._expire()
        found: list[tuple[int, Collection[str]]] = []
        workers: Collection[str] = ()
        for count, page in enumerate(pages):
            owners = self._owners.get(page)
            if owners is None:
                left: Collection[str] = ()
            elif count == 0:
                left = list(owners)
            else:
                left = [worker for worker in workers if worker in owners]
            if len(left) < len(workers):
                found.append((count, [worker for worker in workers if worker not in left]))
            workers = left
            if not workers:
                break
        if workers:
            found.append((len(pages), workers))
        return reversed(found)

    def stored(self, worker: str, pages: Iterable[int]) -> None:
        """The worker has cached these."""
        own = self._pages.setdefault(worker, set())
        for page in pages:
            self._owners.setdefault(page, {})[worker] = math.inf
            own.add(page)

    def evicted(self, worker: str, pages: Iterable[int]) -> None:
        """The worker has these no longer."""
        own = self._pages.get(worker)
        if own is not None:
            for page in pages:
                self._drop(worker, page, own)

    def expect(self, worker: str, pages: Sequence[int]) -> None:
        """A request with these was sent to the worker."""
        self._expire()
        until = self._clock() + EXPECTED_S
        own = self._pages.setdefault(worker, set())
        for page in pages:
            owners = self._owners.setdefault(page, {})
            if owners.get(worker) != math.inf:
                owners[worker] = until
                own.add(page)
        self._expected.append((until, worker, pages))

    def remove_worker(self, worker: str) -> None:
        """Forget all of a worker (it has gone, or begins anew)."""
        own = self._pages.pop(worker, set())
        for page in list(own):
            self._drop(worker, page, own)

    def _expire(self) -> None:
        now = self._clock()
        while self._expected and self._expected[0][0] <= now:
            _, worker, pages = self._expected.popleft()
            own = self._pages.get(worker)
            if own is None:
                continue
            for page in pages:
                until = self._owners.get(page, {}).get(worker)
                if until is not None and until <= now:
                    self._drop(worker, page, own)

    def _drop(self, worker: str, page: int, own: set[int]) -> None:
        own.discard(page)
        owners = self._owners.get(page)
        if owners is not None:
            owners.pop(worker, None)
            if not owners:
                del self._owners[page]
