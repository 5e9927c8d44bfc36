"""Which worker has something that only one can have: a stored response, by its id. No sockets, no clock. No jax."""

from __future__ import annotations

import collections


class Homes:
    """The newest `capacity` ids and their workers; what is used is remembered longer. Not thread-safe."""

    def __init__(self, capacity: int = 100_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}; allowed: 1 or more")
        self._capacity = capacity
        self._workers: collections.OrderedDict[str, str] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def note(self, name: str, worker: str) -> None:
        """`worker` has what is called `name`."""
        self._workers[name] = worker
        self._workers.move_to_end(name)
        if len(self._workers) > self._capacity:
            self._workers.popitem(last=False)

    def find(self, name: str) -> str:
        """Its worker; empty if nobody knows."""
        worker = self._workers.get(name, "")
        if worker:
            self._workers.move_to_end(name)
        return worker

    def remove_worker(self, worker: str) -> None:
        """The worker has gone, and everything that it had."""
        for name in [name for name, owner in self._workers.items() if owner == worker]:
            del self._workers[name]
