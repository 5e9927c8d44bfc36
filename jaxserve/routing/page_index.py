"""Which pages each worker has, from what workers tell (KV events). No jax.

What was sent to a worker counts as cached there for a while before the worker says so: requests with one prefix that
arrive together go together.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from jaxserve.routing.prefix_tree import DEMAND_WINDOW, decayed

EXPECTED_S = 10.0  # how long a page is believed to be on its way


class PageIndex:
    """Pages are named by cache.page_hashes. Bounded by what the workers hold and what was sent within EXPECTED_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: dict[int, dict[str, float]] = {}  # page -> worker -> when it is no longer believed
        self._pages: dict[str, set[int]] = {}  # worker -> pages, as told or expected
        self._demand: dict[int, tuple[float, int]] = {}  # page -> share when so many requests had come
        self._num_sent = 0
        self._expected: collections.deque[tuple[float, str, Sequence[int]]] = collections.deque()

    def num_pages(self, worker: str) -> int:
        return len(self._pages.get(worker, ()))

    def match(self, pages: Sequence[int]) -> Iterator[tuple[int, Collection[str], float]]:
        """How many leading `pages` whom has: (pages, workers, demand), longest first; each worker once. demand: which
        share of recent requests began with these pages, 0 to 1."""
        for count, workers in self._match(pages):
            demand, then = self._demand.get(pages[count - 1], (0.0, 0))
            yield count, workers, decayed(demand, self._num_sent - then)

    def _match(self, pages: Sequence[int]) -> Iterator[tuple[int, Collection[str]]]:
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
        self._num_sent += 1
        own = self._pages.setdefault(worker, set())
        for page in pages:
            owners = self._owners.setdefault(page, {})
            if owners.get(worker) != math.inf:
                owners[worker] = until
                own.add(page)
            demand, then = self._demand.get(page, (0.0, 0))
            self._demand[page] = (decayed(demand, self._num_sent - then) + 1 / DEMAND_WINDOW, self._num_sent)
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
                self._demand.pop(page, None)
