"""How many requests a client may send: a token bucket each (RFC 2697's idea, counted in requests)."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

_MAX_CLIENTS = 65536


class RateLimit:
    """`per_second` on average, `burst` at once. The clients least recently seen are forgotten: by then their buckets
    are full again, unless more than _MAX_CLIENTS of them ask at the same time."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._clock = clock
        self._buckets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def take(self, client: str) -> float:
        """0 if the client may send one now, else the seconds until it may."""
        if not self._per_second:
            return 0.0
        now = self._clock()
        tokens, then = self._buckets.pop(client, (self._burst, now))
        tokens = min(self._burst, tokens + (now - then) * self._per_second)
        is_allowed = tokens >= 1.0
        self._buckets[client] = (tokens - 1.0 if is_allowed else tokens, now)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if is_allowed else (1.0 - tokens) / self._per_second
