"""An approximate picture of what each worker has cached: a radix tree over bytes, from what was sent where. No jax.

Bytes are text in UTF-8 or token ids as int32: the tree does not care. It is a guess, since a worker evicts without
telling; PageIndex is the same thing from what workers tell. The idea of one tree with a set of workers at each node is
that of SGLang's router (sgl-router, "cache-aware load balancing", 2024).

Every node on the way to a node that a worker owns is owned by it too: only a worker's outermost nodes are evicted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator

import numpy as np

DEMAND_WINDOW = 256  # requests over which shares of demand are averaged, older ones counting less and less


def decayed(demand: float, num_requests: int) -> float:
    """A share of demand after so many requests without it."""
    return demand * math.exp(-num_requests / DEMAND_WINDOW)


class _Node:
    """One edge and its lower end. stamps: worker -> last use. num_below: worker -> children that it owns. demand: its
    share of recent requests when `demand_at` of them had come."""

    __slots__ = ("children", "demand", "demand_at", "edge", "end", "num_below", "parent", "stamps")

    def __init__(self, parent: _Node | None, edge: bytes, end: int) -> None:
        self.parent = parent
        self.edge = edge
        self.end = end
        self.children: dict[int, _Node] = {}
        self.stamps: dict[str, int] = {}
        self.num_below: dict[str, int] = {}
        self.demand = 0.0
        self.demand_at = 0


class PrefixTree:
    """capacity: bytes remembered of each worker; the least recently used are forgotten beyond that."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}; allowed: 1 or more bytes")
        self.capacity = capacity
        self._root = _Node(None, b"", 0)
        self._clock = 0
        self._ties = 0
        self._sizes: dict[str, int] = {}
        self._outermost: dict[str, list[tuple[int, int, _Node]]] = {}  # heaps of (stamp, tie, node); may be stale

    def size(self, worker: str) -> int:
        """Bytes remembered of a worker."""
        return self._sizes.get(worker, 0)

    def match(self, key: bytes) -> Iterator[tuple[int, Collection[str], float]]:
        """How much of `key` whom has: (bytes, workers, demand), longest first. Later workers include earlier ones.
        demand: which share of recent requests began with these bytes, 0 to 1.

        The tree must not be changed while this is read.
        """
        node, position, edge_match = self._descend(key)
        if edge_match:
            child = node.children[key[position]]
            yield position + edge_match, child.stamps, decayed(child.demand, self._clock - child.demand_at)
        while node.parent is not None:
            yield node.end, node.stamps, decayed(node.demand, self._clock - node.demand_at)
            node = node.parent

    def insert(self, key: bytes, worker: str) -> None:
        """`key` was sent to `worker`."""
        key = key[: self.capacity]
        if not key:
            return
        self._clock += 1
        node, position, edge_match = self._descend(key)
        if edge_match:
            node = self._split(node.children[key[position]], edge_match)
            position += edge_match
        if position < len(key):
            child = _Node(node, key[position:], len(key))
            node.children[key[position]] = child
            node = child
        self._own(node, worker)
        if self._sizes[worker] > self.capacity:
            self._evict(worker, self.capacity)

    def remove_worker(self, worker: str) -> None:
        """Forget all of a worker."""
        if worker in self._sizes:
            self._evict(worker, 0)
            del self._sizes[worker], self._outermost[worker]

    def _descend(self, key: bytes) -> tuple[_Node, int, int]:
        """The last node that `key` passes whole, its end, and how far key goes into the edge that follows."""
        node, position = self._root, 0
        while position < len(key):
            child = node.children.get(key[position])
            if child is None:
                return node, position, 0
            if not key.startswith(child.edge, position):
                return node, position, _common_length(child.edge, key, position)
            node, position = child, child.end
        return node, position, 0

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut the edge of `node`; returns the new upper node. The old object stays the lower one."""
        parent = node.parent
        assert parent is not None
        upper = _Node(parent, node.edge[:length], parent.end + length)
        upper.stamps = dict(node.stamps)
        upper.demand, upper.demand_at = node.demand, node.demand_at
        upper.num_below = dict.fromkeys(node.stamps, 1)
        parent.children[upper.edge[0]] = upper
        node.parent, node.edge = upper, node.edge[length:]
        upper.children[node.edge[0]] = node
        return upper

    def _own(self, node: _Node, worker: str) -> None:
        stamp = self._clock
        size = self._sizes.get(worker, 0)
        if worker not in node.stamps and worker not in node.num_below:
            # One entry each time a node becomes outermost. Its stamp may grow old: eviction renews it.
            self._push(node, worker, stamp)
        is_new = False
        while node.parent is not None:
            if is_new:
                node.num_below[worker] = node.num_below.get(worker, 0) + 1
            is_new = worker not in node.stamps
            node.stamps[worker] = stamp
            node.demand = decayed(node.demand, stamp - node.demand_at) + 1 / DEMAND_WINDOW
            node.demand_at = stamp
            size += len(node.edge) if is_new else 0
            node = node.parent
        self._sizes[worker] = size

    def _push(self, node: _Node, worker: str, stamp: int) -> None:
        self._ties += 1
        heapq.heappush(self._outermost.setdefault(worker, []), (stamp, self._ties, node))

    def _evict(self, worker: str, limit: int) -> None:
        heap = self._outermost[worker]
        while self._sizes[worker] > limit:
            stamp, _, node = heapq.heappop(heap)
            last_use = node.stamps.get(worker)
            if last_use is None or worker in node.num_below:
                continue
            if last_use != stamp:
                self._push(node, worker, last_use)
                continue
            self._disown(node, worker)

    def _disown(self, node: _Node, worker: str) -> None:
        """Of one of the worker's outermost nodes."""
        parent = node.parent
        assert parent is not None
        del node.stamps[worker]
        self._sizes[worker] -= len(node.edge)
        if not node.stamps:
            del parent.children[node.edge[0]]
        if parent.parent is None:
            return
        left = parent.num_below[worker] - 1
        if left:
            parent.num_below[worker] = left
        else:
            del parent.num_below[worker]
            self._push(parent, worker, parent.stamps[worker])


def _common_length(edge: bytes, key: bytes, position: int) -> int:
    """How many bytes of `edge` follow in `key` at `position`; they differ somewhere, or key ends."""
    size = min(len(edge), len(key) - position)
    differs = np.frombuffer(edge, np.uint8, size) != np.frombuffer(key, np.uint8, size, position)
    first = int(differs.argmax())
    return first if differs[first] else size
