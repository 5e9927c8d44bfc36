"""Which worker gets a request: policies as pure objects. They know no sockets and no clock. No jax.

The proxy, Ray Serve and the simulator use the same objects.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from jaxserve.routing.loads import LoadTable
from jaxserve.routing.page_index import PageIndex
from jaxserve.routing.prefix_tree import PrefixTree


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """What a policy may know of a request.

    prefix    bytes whose common beginnings are worth something: text or int32 token ids, behind what keeps tenants
              apart
    session   whatever shall stay together (a session's or user's key); empty: none
    pages     hashes of the prompt's whole pages, if the router knows tokens
    """

    prefix: bytes = b""
    session: str = ""
    pages: Sequence[int] | None = None


class Policy(Protocol):
    """Not thread-safe. Workers are names; only those in the table can be chosen."""

    name: str

    def choose(self, query: Query, loads: LoadTable, excluded: Collection[str] = ()) -> str | None:
        """A worker of the table that is not excluded; None if there is none."""
        ...

    def note_sent(self, query: Query, worker: str) -> None:
        """The request was sent to `worker`, chosen by this policy or not."""
        ...

    def remove_worker(self, worker: str) -> None:
        """The worker has gone, or has lost its cache."""
        ...


class _Stateless:
    def note_sent(self, query: Query, worker: str) -> None:
        pass

    def remove_worker(self, worker: str) -> None:
        pass


class RoundRobin(_Stateless):
    """One after another, by name."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = ""

    def choose(self, query: Query, loads: LoadTable, excluded: Collection[str] = ()) -> str | None:
        names = loads.names
        start = bisect.bisect_right(names, self._last)
        for place in range(len(names)):
            worker = names[(start + place) % len(names)]
            if worker not in excluded:
                self._last = worker
                return worker
        return None


class Random(_Stateless):
    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, query: Query, loads: LoadTable, excluded: Collection[str] = ()) -> str | None:
        names = _allowed(loads, excluded)
        return names[self._random.randrange(len(names))] if names else None


class LeastLoad(_Stateless):
    """The lowest score (4 x waiting + running)."""

    name = "load"

    def choose(self, query: Query, loads: LoadTable, excluded: Collection[str] = ()) -> str | None:
        return loads.least(excluded)


class PowerOfTwo(_Stateless):
    """The less busy of two at random (Mitzenmacher, 2001): nearly as even as the least busy of all, and routers that
    do not know of each other do not all run to the same worker."""

    name = "power_of_two"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, query: Query, loads: LoadTable, excluded: Collection[str] = ()) -> str | None:
        names = _allowed(loads, excluded)
        if len(names) < 2:
            return names[0] if names else None
        first = self._random.randrange(len(names))
        second = (first + 1 + self._random.randrange(len(names) - 1)) % len(names)
        return loads.least_of((names[first], names[second]))


class ConsistentHash:
    """A session stays on its worker; when one goes, only its sessions move (Karger et al., 1997).

    Requests without a session follow the first `prefix_bytes` of their prefix.
    """

    name = "consistent_hash"
    _POINTS = 64

    def __init__(self, prefix_bytes: int = 1024) -> None:
        self._prefix_bytes = prefix_bytes
        self._ring: list[tuple[int, str]] = []
        self._version: tuple[int, int] = (-1, -1)

    def choose(self, query: Query, loads: LoadTable, excluded: Collection[str] = ()) -> str | None:
        version = (id(loads), loads.version)
        if version != self._version:
            self._ring = sorted((point, worker) for worker in loads.names for point in _points(worker, self._POINTS))
            self._version = version
        key = query.session.encode() if query.session else query.prefix[: self._prefix_bytes]
        start = bisect.bisect(self._ring, (_hash(key), ""))
        for place in range(len(self._ring)):
            worker = self._ring[(start + place) % len(self._ring)][1]
            if worker not in excluded:
                return worker
        return None

    def note_sent(self, query: Query, worker: str) -> None:
        pass

    def remove_worker(self, worker: str) -> None:
        pass


class Match(NamedTuple):
    """`share` of a request, from 0 to 1, that `workers` have cached; `demand`: the share of recent requests that began
    with the same."""

    share: float
    workers: Collection[str]
    demand: float


class PrefixIndex(Protocol):
    """Who has how much of a request cached."""

    def match(self, query: Query) -> Iterable[Match]:
        """Longest first."""
        ...

    def note_sent(self, query: Query, worker: str) -> None: ...

    def remove_worker(self, worker: str) -> None: ...

    def size(self, worker: str) -> int:
        """How much is known of a worker, in the index's own unit."""
        ...


class GuessedPrefixes:
    """PrefixIndex from what was sent where: needs nothing from workers. capacity: bytes remembered of each."""

    def __init__(self, capacity: int) -> None:
        self._tree = PrefixTree(capacity)

    def match(self, query: Query) -> Iterable[Match]:
        total = len(query.prefix)
        for length, workers, demand in self._tree.match(query.prefix):
            if length < MIN_MATCH_BYTES:
                break
            yield Match(length / total, workers, demand)

    def note_sent(self, query: Query, worker: str) -> None:
        self._tree.insert(query.prefix, worker)

    def remove_worker(self, worker: str) -> None:
        self._tree.remove_worker(worker)

    def size(self, worker: str) -> int:
        return self._tree.size(worker)


class ToldPrefixes:
    """PrefixIndex from KV events; for requests whose tokens are unknown, and for workers that tell nothing, it is
    GuessedPrefixes."""

    def __init__(self, pages: PageIndex, guessed: GuessedPrefixes) -> None:
        self.pages = pages
        self._guessed = guessed

    def match(self, query: Query) -> Iterable[Match]:
        if query.pages is None:
            return self._guessed.match(query)
        total = len(query.pages)
        return (Match(count / total, workers, demand) for count, workers, demand in self.pages.match(query.pages))

    def note_sent(self, query: Query, worker: str) -> None:
        if query.pages is None:
            self._guessed.note_sent(query, worker)
        else:
            self.pages.expect(worker, query.pages)

    def remove_worker(self, worker: str) -> None:
        self.pages.remove_worker(worker)
        self._guessed.remove_worker(worker)

    def size(self, worker: str) -> int:
        return self.pages.num_pages(worker)


@dataclasses.dataclass(frozen=True, slots=True)
class Balance:
    """When load outweighs a cached prefix.

    min_share     a match shorter than this share of the request is none: it would draw everything that begins with
                  the same few words to one worker
    absolute, relative   a worker is left alone while its score exceeds the lowest one by more than `absolute` and
                  is more than `relative` times it
    slack         workers whose scores differ by no more than this count as equally busy: when a new prefix is placed,
                  and for prefixes in great demand
    hot_share     a prefix is in great demand if it would take more than this share of an even load from each of the
                  workers that have it
    """

    min_share: float = 0.3
    absolute: int = 32
    relative: float = 1.5
    slack: int = 2
    hot_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share: got {self.min_share}; allowed: 0 to 1")
        for name, low in (("absolute", 0), ("relative", 1), ("slack", 0), ("hot_share", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: {low} or more")

    def is_overloaded(self, score: int, lowest: int, *, is_hot: bool = False) -> bool:
        if is_hot:
            return score - lowest > self.slack
        return score - lowest > self.absolute and score > self.relative * lowest


class CacheAware:
    """The worker with the longest cached prefix, unless it is overloaded; without one, the least busy.

    The rule of balance is that of SGLang's router, applied to the worker in question instead of the busiest of all:
    that one worker is busy is no reason to leave the cache of another. A prefix in great demand thereby spreads over
    as many workers as it keeps busy.
    """

    name = "cache_aware"

    def __init__(self, index: PrefixIndex, balance: Balance | None = None) -> None:
        self.index = index
        self.balance = balance or Balance()

    def choose(self, query: Query, loads: LoadTable, excluded: Collection[str] = ()) -> str | None:
        least = loads.least(excluded)
        if least is None:
            return None
        lowest = loads.score(least)
        for share, workers, demand in self.index.match(query):
            if share < self.balance.min_share:
                break
            best = loads.least_of(workers, excluded)
            if best is None:
                continue
            # It would take more than hot_share of an even load from each of its workers.
            is_hot = demand * len(loads) > self.balance.hot_share * len(workers)
            if not self.balance.is_overloaded(loads.score(best), lowest, is_hot=is_hot):
                return best
        return self._place_new(loads, excluded)

    def _place_new(self, loads: LoadTable, excluded: Collection[str]) -> str:
        candidates = loads.nearly_least(self.balance.slack, _MAX_CANDIDATES, excluded)
        return min(candidates, key=self.index.size)

    def note_sent(self, query: Query, worker: str) -> None:
        self.index.note_sent(query, worker)

    def remove_worker(self, worker: str) -> None:
        self.index.remove_worker(worker)


DEFAULT_CAPACITY = 1 << 24  # bytes of prefixes remembered of each worker
MIN_MATCH_BYTES = 64  # about a page of 16 tokens, as ids or as text: less cannot be cached
_MAX_CANDIDATES = 16

_MAKERS: dict[str, Callable[[], Policy]] = {
    "cache_aware": lambda: CacheAware(GuessedPrefixes(DEFAULT_CAPACITY)),
    "load": LeastLoad,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
    "random": Random,
    "consistent_hash": ConsistentHash,
}
POLICY_NAMES = tuple(_MAKERS)


def make_policy(name: str) -> Policy:
    """A policy with its defaults. Raises ValueError for an unknown name."""
    if name not in _MAKERS:
        raise ValueError(f"policy: got {name!r}; allowed: {', '.join(POLICY_NAMES)}")
    return _MAKERS[name]()


def _allowed(loads: LoadTable, excluded: Collection[str]) -> list[str]:
    return [worker for worker in loads.names if worker not in excluded] if excluded else loads.names


def _points(worker: str, count: int) -> list[int]:
    return [_hash(f"{worker}#{number}".encode()) for number in range(count)]


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
