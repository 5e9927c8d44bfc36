"""One scheduler for all data ranks: where a request goes, and steps that keep the ranks together. No jax.

Every rank has rows, pages and a radix tree of its own (a Scheduler); a step of the device computes all ranks at once.
So this part decides three things only:

* Placement. A request goes to the rank of least cost

      cost = 4 * waiting + running - 4 * matched / max_step_tokens

  A waiting request stands for a prompt still to be computed and weighs four running ones; a cached prefix that saves
  a full step of prefill is worth one waiting request. All ranks share the device's time, so the cost counts requests,
  not seconds. Continuations of one prompt go to the same rank, where they share its pages, and so do the parts of a
  program that build on kept pages.
* Moves. A request that its rank cannot start now moves to a rank that can and has nothing else waiting, if that rank's
  cost is below that of waiting on: queues are filled when requests arrive, not when others leave.
* Balance. All ranks wait for the one with the most tokens. While others decode, a prompt is computed in chunks of
  about the ranks' mean load, but no less than a quarter of a full step (`token_limit`).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxserve.request import Request, TokenEvent
from jaxserve.scheduler.decision import CacheGeometry, RankedDecision, RankedResult
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.stats import SchedulerStats

WAITING_WEIGHT = 4
LEAST_SHARE = 4  # a chunk beside decoding ranks is at least 1 / LEAST_SHARE of a full step
NUM_RECENT = 8  # prompts placed last on a rank that count as cached there: they will be


def token_limit(demands: list[tuple[int, int]], max_step_tokens: int) -> int:
    """Tokens that prefill may fill a rank's step up to, from each rank's (decoding rows, prompt tokens wanted).

    The full step when no rank decodes without having a prompt of its own to compute: then nobody waits in vain.
    """
    if not any(decodes and not prefill for decodes, prefill in demands):
        return max_step_tokens
    loads = [min(max_step_tokens, decodes + prefill) for decodes, prefill in demands]
    mean = -(-sum(loads) // len(loads))
    most_decodes = max(decodes for decodes, _ in demands)
    return min(max_step_tokens, max(mean, max_step_tokens // LEAST_SHARE, most_decodes + 1))


class RankedScheduler:
    """What the engine sees of several ranks: the interface of Scheduler with ranked decisions and results."""

    def __init__(
        self, geometry: CacheGeometry, *, policy: str = "fcfs", prefix_cache: bool = True, deterministic: bool = False
    ) -> None:
        self.geometry = geometry
        self.ranks = tuple(
            Scheduler(geometry, policy=policy, prefix_cache=prefix_cache, deterministic=deterministic)
            for _ in range(geometry.num_ranks)
        )
        self._rank_of: dict[int, int] = {}
        self._recent: tuple[deque[Request], ...] = tuple(deque(maxlen=NUM_RECENT) for _ in self.ranks)
        self._prefix_cache = prefix_cache
        self._num_steps = self.num_moves = 0

    @property
    def has_work(self) -> bool:
        return any(rank.has_work for rank in self.ranks)

    def add(self, request: Request) -> None:
        """Queue a request on a rank. Raises ValueError as Scheduler.add."""
        home = None if request.parent is None else self._rank_of.get(request.parent.number)
        if home is None and request.part.base:
            home = next((index for index, rank in enumerate(self.ranks) if rank.keeps(request.part.base)), None)
        self._add(request, self.place(request) if home is None else home)

    def place(self, request: Request) -> int:
        """The rank of least cost; the lowest of equals."""
        return min(range(len(self.ranks)), key=lambda rank: self.cost(request, rank))

    def cost(self, request: Request, rank: int) -> float:
        """What placing a request on a rank costs (see above); in whose queue it is, with its own wait."""
        scheduler = self.ranks[rank]
        saved = self._matched(request, rank) / self.geometry.max_step_tokens
        return WAITING_WEIGHT * (scheduler.num_waiting - saved) + scheduler.num_running

    def abort(self, number: int) -> Request | None:
        rank = self._rank_of.pop(number, None)
        return None if rank is None else self.ranks[rank].abort(number)

    def finish(self, number: int, reason: str, stop_reason: int | str | None) -> None:
        rank = self._rank_of.pop(number, None)
        if rank is not None:
            self.ranks[rank].finish(number, reason, stop_reason)

    def find(self, number: int) -> Request | None:
        """A request that has not ended."""
        rank = self._rank_of.get(number)
        return None if rank is None else self.ranks[rank].find(number)

    def extend(self, number: int, tokens: list[int]) -> list[TokenEvent]:
        """Take tokens that a grammar forces; see Scheduler.extend."""
        return self._forget_ended(self.ranks[self._rank_of[number]].extend(number, tokens))

    def schedule(self) -> RankedDecision | None:
        """Decide the next step of every rank. None: no rank can run before a result is applied."""
        self._move_waiting()
        limit = token_limit([rank.demand() for rank in self.ranks], self.geometry.max_step_tokens)
        decisions = tuple(rank.schedule(limit) for rank in self.ranks)
        if all(decision is None for decision in decisions):
            return None
        self._num_steps += 1
        return RankedDecision(self._num_steps, decisions)

    def apply(self, decision: RankedDecision, result: RankedResult) -> list[TokenEvent]:
        """Take the tokens of a collected step, rank after rank."""
        events: list[TokenEvent] = []
        for rank, planned, sampled in zip(self.ranks, decision.ranks, result.ranks, strict=True):
            if planned is None:
                continue
            if sampled is None:
                raise RuntimeError(f"step {decision.step_id}: a rank had work and the runner returned nothing for it")
            events.extend(rank.apply(planned, sampled))
        return self._forget_ended(events)

    def _forget_ended(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            if event.request.is_finished:
                self._rank_of.pop(event.request.number, None)
        return events

    @property
    def kept(self) -> _AllKept:
        return _AllKept(self.ranks)

    def release_kept(self, name: str) -> None:
        """Pages kept under this name are not needed any more, wherever they are."""
        for rank in self.ranks:
            rank.release_kept(name)

    def flush_cache(self) -> None:
        for rank in self.ranks:
            rank.flush_cache()

    def stats(self) -> SchedulerStats:
        """Sums over the ranks; their dummy pages count as one."""
        parts = [rank.stats() for rank in self.ranks]
        total = {name: sum(getattr(part, name) for part in parts) for name in SchedulerStats.__dataclass_fields__}
        total["num_pages"] -= len(parts) - 1
        return SchedulerStats(**total)

    def check_integrity(self) -> None:
        """Raise RuntimeError if a rank lost something, or a request is not where it was put."""
        for rank in self.ranks:
            rank.check_integrity()
        found = sum(rank.num_waiting + rank.num_running for rank in self.ranks)
        if found != len(self._rank_of):
            raise RuntimeError(f"{len(self._rank_of)} requests placed, {found} on the ranks")

    def _add(self, request: Request, rank: int) -> None:
        self.ranks[rank].add(request)
        self._rank_of[request.number] = rank
        self._recent[rank].append(request)

    def _matched(self, request: Request, rank: int) -> int:
        """Tokens of the prompt that the rank has cached, or will have once it has computed what was placed there."""
        if not self._prefix_cache:
            return 0
        limit, size = request.num_prompt_tokens - 1, self.geometry.page_size
        found = self.ranks[rank].cache.match(request.namespace, request.prompt, limit).num_tokens
        for other in self._recent[rank]:
            if other is not request and other.namespace == request.namespace and not other.is_finished:
                found = max(found, min(_common(other.prompt, request.prompt), limit) // size * size)
        return found

    def _move_waiting(self) -> None:
        """Let ranks that have nothing waiting and a free row take over what waits elsewhere."""
        for taker, scheduler in enumerate(self.ranks):
            if scheduler.num_waiting or not scheduler.has_free_row:
                continue
            giver = max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].num_waiting)
            request = self.ranks[giver].first_untouched()
            if request is None or self._could_start(request, giver) or not self._could_start(request, taker):
                continue
            if self.cost(request, taker) < self.cost(request, giver):
                self.ranks[giver].withdraw(request.number)
                self._add(request, taker)
                self.num_moves += 1

    def _could_start(self, request: Request, rank: int) -> bool:
        tokens = request.max_total_tokens if self.ranks[rank].deterministic else request.num_prompt_tokens
        return (
            self.ranks[rank].has_free_row
            and -(-tokens // self.geometry.page_size) <= self.ranks[rank].cache.num_available
        )


class _AllKept:
    """The kept prefixes of all ranks."""

    def __init__(self, ranks: tuple[Scheduler, ...]) -> None:
        self._ranks = ranks

    def expire(self, now: float) -> None:
        for rank in self._ranks:
            rank.kept.expire(now)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two arrays of tokens."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


def make_scheduler(
    geometry: CacheGeometry, *, policy: str, prefix_cache: bool, deterministic: bool
) -> Scheduler | RankedScheduler:
    """The scheduler of an engine with this geometry."""
    make = Scheduler if geometry.num_ranks == 1 else RankedScheduler
    return make(geometry, policy=policy, prefix_cache=prefix_cache, deterministic=deterministic)
