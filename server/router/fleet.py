"""The workers, the policy over them, and the requests that wait for one that can take them. No sockets.

Runs on one event loop. Whoever changes a worker calls changed(): the table of loads follows, and waiting requests are
woken in the order in which they came.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Collection

from jaxserve.server.router.settings import RouterSettings, check_worker, normalised
from jaxserve.server.router.worker import Worker

from jaxserve.routing.loads import LoadTable
from jaxserve.routing.page_index import PageIndex
from jaxserve.routing.policy import (
    Balance,
    CacheAware,
    GuessedPrefixes,
    Policy,
    Query,
    ToldPrefixes,
    make_policy,
)


class NoWorker(Exception):
    """No worker could take the request in time."""


class Fleet:
    """on_added, on_removed: told of workers that come and go (the proxy keeps connections and probes for them)."""

    def __init__(self, settings: RouterSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self.workers: dict[str, Worker] = {}
        self.loads = LoadTable()
        self.pages = PageIndex(clock) if settings.prefix_source == "events" else None
        self.policy = _policy(settings, self.pages)
        self._guesses = self.policy.index if isinstance(self.policy, CacheAware) else None
        self._waiting: collections.deque[_Waiter] = collections.deque()
        self._at_home: dict[str, asyncio.Future[None]] = {}  # done when a worker that requests must have has changed
        self._is_waking = False
        self._leaving: dict[str, asyncio.Event] = {}
        self.on_added: Callable[[Worker], None] = lambda worker: None
        self.on_removed: Callable[[Worker], None] = lambda worker: None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.workers.values())

    def add(self, url: str) -> Worker:
        """A new worker, or one that was being drained. It gets requests once a probe succeeds. Raises ValueError."""
        check_worker(url)
        name = normalised(url)
        worker = self.workers.get(name)
        if worker is None:
            settings = self._settings
            worker = self.workers[name] = Worker(
                name,
                breaker_failures=settings.breaker_failures,
                breaker_cooldown_s=settings.breaker_cooldown_s,
                probe_failures=settings.probe_failures,
                max_in_flight=settings.max_worker_in_flight,
                clock=self._clock,
            )
            self.on_added(worker)
        worker.is_draining = False
        self.changed(worker)
        return worker

    async def drain(self, name: str, timeout_s: float) -> int:
        """Send no more requests to a worker, wait until it has none, remove it. Returns how many were cut off after
        timeout_s. Raises KeyError for an unknown worker."""
        worker = self.workers[name]
        worker.is_draining = True
        self.changed(worker)
        empty = self._leaving.setdefault(name, asyncio.Event())
        if not worker.in_flight:
            empty.set()
        try:
            async with asyncio.timeout(timeout_s):
                await empty.wait()
        except TimeoutError:
            pass
        num_cut = worker.in_flight
        if worker.is_draining and self.workers.get(name) is worker:
            self.remove(name)
        return num_cut

    def remove(self, name: str) -> None:
        """Forget a worker at once; its requests are cut off. Raises KeyError for an unknown one."""
        worker = self.workers.pop(name)
        worker.is_draining = True
        self.loads.remove(name)
        self.policy.remove_worker(name)
        self._leaving.pop(name, None)
        self.changed(worker)
        self.on_removed(worker)

    def changed(self, worker: Worker) -> None:
        """Something about a worker is different now."""
        future = self._at_home.pop(worker.name, None)
        if future is not None and not future.done():
            future.set_result(None)
        if worker.is_available and self.workers.get(worker.name) is worker:
            self.loads.set(worker.name, worker.score)
            self._wake()
        else:
            self.loads.remove(worker.name)

    def cache_lost(self, worker: Worker) -> None:
        """A worker began anew: nothing that was sent to it is cached any more."""
        self.policy.remove_worker(worker.name)

    async def acquire(self, query: Query, excluded: Collection[str], deadline: float, *, home: str = "") -> Worker:
        """The worker that the policy chooses among those that can take the request now and are not excluded; waits
        for one (then also an excluded one will do) until the clock says `deadline`. Each needs one release(). home:
        the only worker that will do, whatever the policy says.

        Raises NoWorker: at once if only excluded ones could take it, else at the deadline.
        """
        if home:
            return await self._acquire_home(home, query, excluded, deadline)
        if not self._waiting and len(self.loads):
            name = self.policy.choose(query, self.loads, excluded)
            if name is None:
                raise NoWorker
            return self._take(name, query)
        left = deadline - self._clock()
        if left <= 0:
            raise NoWorker
        waiter = _Waiter(query, excluded)
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(left):
                return await waiter.worker
        except BaseException as error:
            if waiter.worker.done() and not waiter.worker.cancelled():
                self.release(waiter.worker.result(), succeeded=None)  # it came in the very moment
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            if isinstance(error, TimeoutError):
                raise NoWorker from None
            raise

    async def _acquire_home(self, name: str, query: Query, excluded: Collection[str], deadline: float) -> Worker:
        while name in self.workers and name not in excluded:
            if self.workers[name].takes_its_own:
                return self._take(name, query)
            changed = self._at_home.setdefault(name, asyncio.get_running_loop().create_future())
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock())):
                    await asyncio.shield(changed)
            except TimeoutError:
                break
        raise NoWorker

    def _take(self, name: str, query: Query) -> Worker:
        worker = self.workers[name]
        self._count_known(worker, query)
        self.policy.note_sent(query, name)
        worker.in_flight += 1
        worker.counts.requests += 1
        worker.breaker.passing()
        self.changed(worker)
        return worker

    def _count_known(self, worker: Worker, query: Query) -> None:
        """For the metrics: how much of the request the worker was believed to have."""
        if self._guesses is None or not query.prefix:
            return
        size = len(query.prefix)
        worker.counts.bytes_sent += size
        for share, workers, _ in self._guesses.match(query):
            if worker.name in workers:
                worker.counts.bytes_known += round(share * size)
                return

    def release(self, worker: Worker, *, succeeded: bool | None) -> None:
        """A request has left a worker; None: its end says nothing about the worker."""
        worker.in_flight -= 1
        if succeeded is None:
            worker.breaker.ended_without_verdict()
        elif succeeded:
            worker.breaker.succeeded()
        else:
            worker.counts.failures += 1
            worker.breaker.failed()
            if worker.breaker.state == "open" and worker.breaker.open_until is not None:
                pause = worker.breaker.open_until - self._clock()
                asyncio.get_running_loop().call_later(pause + 0.001, self.changed, worker)
        if not worker.in_flight and worker.name in self._leaving:
            self._leaving[worker.name].set()
        self.changed(worker)

    def _wake(self) -> None:
        """Give what has become available to those that wait, first come, first served."""
        if self._is_waking:
            return
        self._is_waking = True
        try:
            while self._waiting and len(self.loads):
                waiter = self._waiting.popleft()
                if waiter.worker.done():
                    continue
                name = self.policy.choose(waiter.query, self.loads, waiter.excluded)
                name = name or self.policy.choose(waiter.query, self.loads)
                assert name is not None
                waiter.worker.set_result(self._take(name, waiter.query))
        finally:
            self._is_waking = False


class _Waiter:
    __slots__ = ("excluded", "query", "worker")

    def __init__(self, query: Query, excluded: Collection[str]) -> None:
        self.query = query
        self.excluded = excluded
        self.worker: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()


def _policy(settings: RouterSettings, pages: PageIndex | None) -> Policy:
    if settings.policy != "cache_aware":
        return make_policy(settings.policy)
    guessed = GuessedPrefixes(settings.prefix_bytes)
    balance = Balance(
        min_share=settings.min_share, absolute=settings.balance_absolute, relative=settings.balance_relative
    )
    return CacheAware(guessed if pages is None else ToldPrefixes(pages, guessed), balance)
