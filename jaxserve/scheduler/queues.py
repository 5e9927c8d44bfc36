"""Who waits, who runs and on which row; every change between the two. No jax."""

from __future__ import annotations

import bisect
import operator

from jaxserve.messages import FINISH_LENGTH, FINISH_STOP
from jaxserve.request import Status
from jaxserve.scheduler.pages import PageKeeper
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.stats import check_rows

_key, _reverse_key = operator.attrgetter("key"), operator.attrgetter("reverse_key")


class Queues:
    """The sequences of one scheduler, which alone changes them.

    by_number  all that have not ended
    waiting    last first: the next one to run stands at the end
    running    in the order of their keys
    rows       free ones
    children   parent's number -> forks that have not started
    keepers    keep_as of requests that have not ended -> their number
    """

    def __init__(self, max_num_rows: int, pages: PageKeeper) -> None:
        self.by_number: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.rows = list(range(max_num_rows - 1, -1, -1))
        self.children: dict[int, list[Sequence]] = {}
        self.keepers: dict[str, int] = {}
        self.num_preemptions = 0
        self._max_num_rows = max_num_rows
        self._pages = pages

    def add(self, sequence: Sequence) -> None:
        """A new request waits."""
        request = sequence.request
        self.by_number[request.number] = sequence
        if request.parent is not None and request.parent.number in self.by_number:
            self.children.setdefault(request.parent.number, []).append(sequence)
            sequence.num_scored = request.num_prompt_tokens
        if request.keep_as:
            self.keepers[request.keep_as] = request.number
        self.wait(sequence)

    def withdraw(self, number: int) -> None:
        """Forget a waiting request, as if it had never been added."""
        sequence = self.by_number.pop(number)
        self.keepers.pop(sequence.request.keep_as, None)
        self.unwait(sequence)

    def run(self, sequence: Sequence) -> None:
        """A sequence that was given a row stands among the running ones."""
        bisect.insort(self.running, sequence, key=_key)

    def wait(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_reverse_key)

    def unwait(self, sequence: Sequence) -> None:
        del self.waiting[bisect.bisect_left(self.waiting, sequence.reverse_key, key=_reverse_key)]

    def preempt(self, sequence: Sequence) -> None:
        """A running request gives up row and pages, and waits again."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._leave(sequence)
        sequence.request.status = Status.WAITING
        self.wait(sequence)

    def end(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        """A request in any state is finished."""
        request = sequence.request
        if request.keep_as:
            self.keepers.pop(request.keep_as, None)
        if request.status is Status.RUNNING:
            if request.keep_as and reason in (FINISH_STOP, FINISH_LENGTH):
                self._pages.keep(sequence)
            self._leave(sequence)
        else:
            self.unwait(sequence)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self.by_number[request.number]
        orphans = self.children.pop(request.number, ())
        heir = next((child for child in orphans if not child.request.is_finished), None)
        if heir is not None:
            heir.num_scored = sequence.num_scored  # the scores that are still missing are its business now

    def check_integrity(self) -> None:
        """Raise RuntimeError if a row or a request is lost or held twice."""
        check_rows(self.rows + [s.row for s in self.running], self._max_num_rows)
        known = sorted(id(s) for s in self.by_number.values())
        if known != sorted(map(id, self.waiting + self.running)):
            raise RuntimeError(f"{len(known)} requests, {len(self.waiting)} waiting, {len(self.running)} running")

    def _leave(self, sequence: Sequence) -> None:
        self._pages.give_back(sequence)
        self.rows.append(sequence.row)
        sequence.row = -1
        del self.running[bisect.bisect_left(self.running, sequence.key, key=_key)]
