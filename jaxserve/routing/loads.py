"""How busy each worker is, with the least and the most busy at hand. No jax.

A fleet of a thousand workers is asked for its least busy one at every request, so nothing here looks at all of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable

WAITING_WEIGHT = 4  # a waiting request delays a new one more than a running one, which only shares its steps


def load_score(num_running: int, num_waiting: int) -> int:
    """What policies compare: 4 x waiting + running."""
    return WAITING_WEIGHT * num_waiting + num_running


class LoadTable:
    """The workers that may take a request now, by name, each with its score (a whole number, 0 or more).

    Among equally busy workers the one whose score changed longest ago comes first, so that ties go round.
    """

    def __init__(self) -> None:
        self._score: dict[str, int] = {}
        self._by_score: dict[int, dict[str, None]] = {}
        self._scores: list[int] = []  # distinct, ascending
        self._names: list[str] = []  # ascending
        self.version = 0  # changes when a worker is added or removed

    def __len__(self) -> int:
        return len(self._score)

    def __contains__(self, worker: str) -> bool:
        return worker in self._score

    @property
    def names(self) -> list[str]:
        """Ascending; not to be changed."""
        return self._names

    @property
    def lowest(self) -> int:
        return self._scores[0]

    @property
    def highest(self) -> int:
        return self._scores[-1]

    def score(self, worker: str) -> int:
        return self._score[worker]

    def set(self, worker: str, score: int) -> None:
        """Add a worker, or change its score."""
        old = self._score.get(worker)
        if old == score:
            return
        if old is None:
            bisect.insort(self._names, worker)
            self.version += 1
        else:
            self._take_out(worker, old)
        self._score[worker] = score
        group = self._by_score.get(score)
        if group is None:
            group = self._by_score[score] = {}
            bisect.insort(self._scores, score)
        group[worker] = None

    def remove(self, worker: str) -> None:
        """Does nothing if it is not here."""
        old = self._score.pop(worker, None)
        if old is not None:
            self._take_out(worker, old)
            del self._names[bisect.bisect_left(self._names, worker)]
            self.version += 1

    def least(self, excluded: Collection[str] = ()) -> str | None:
        """The least busy worker that is not excluded."""
        for score in self._scores:
            for worker in self._by_score[score]:
                if worker not in excluded:
                    return worker
        return None

    def nearly_least(self, slack: int, count: int, excluded: Collection[str] = ()) -> list[str]:
        """Up to `count` workers whose score is at most `slack` above the lowest of them, least busy first."""
        found: list[str] = []
        limit: int | None = None
        for score in self._scores:
            if limit is not None and score > limit:
                break
            for worker in self._by_score[score]:
                if worker not in excluded:
                    limit = score + slack if limit is None else limit
                    found.append(worker)
                    if len(found) == count:
                        return found
        return found

    def least_of(self, workers: Iterable[str], excluded: Collection[str] = ()) -> str | None:
        """The least busy one of some workers; those that are not here are passed over."""
        best, best_score = None, 0
        for worker in workers:
            score = self._score.get(worker)
            if score is not None and worker not in excluded and (best is None or score < best_score):
                best, best_score = worker, score
        return best

    def _take_out(self, worker: str, score: int) -> None:
        group = self._by_score[score]
        del group[worker]
        if not group:
            del self._by_score[score]
            del self._scores[bisect.bisect_left(self._scores, score)]
