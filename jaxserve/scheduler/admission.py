"""Which waiting requests start in a step: their order, what they wait for, whether the pool has room. No jax."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator

from jaxserve.request import Status
from jaxserve.scheduler import policy as policies
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.scheduler.kept import Prefix
from jaxserve.scheduler.pages import PageKeeper
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.queues import Queues
from jaxserve.scheduler.sequence import Sequence

MAX_CANDIDATES = 128  # waiting requests looked at in one step

_order = operator.attrgetter("order")


class Admission:
    """Counts each prompt, and what the cache had of it, when its first request starts."""

    def __init__(
        self, queues: Queues, pages: PageKeeper, geometry: CacheGeometry, policy: str, *, deterministic: bool
    ) -> None:
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self._queues = queues
        self._pages = pages
        self._cache = pages.cache
        self._geometry = geometry
        self._policy = policy
        self._deterministic = deterministic
        self._num_since_aged = 0  # admissions since the oldest waiting request went first, whatever its class

    def start(self, plan: StepPlan) -> Iterator[tuple[Sequence, int]]:
        """Start what may start, one by one: each has a row and the pages of its next tokens, so many as are given.
        The caller puts them into the step before it asks for the next: that one may find them in the cache."""
        queues = self._queues
        if not queues.waiting or not queues.rows or plan.free_tokens < 1:
            return
        if self._policy == "priority" and self._num_since_aged >= policies.ADMISSIONS_PER_AGED:
            self._promote_oldest()
        candidates = self._candidates()
        num_running = len(queues.running)
        yield from self._start_in_order(candidates, plan)
        if self._policy == "lpm" and len(queues.running) > num_running:
            policies.count_passed_over(candidates, [s for s in candidates if s.row >= 0])

    def count(self, sequence: Sequence, num_cached: int) -> None:
        """A sequence runs for the first time, or again."""
        if sequence.was_admitted:
            return
        sequence.was_admitted = True
        sequence.request.admitted = time.monotonic()
        parent = sequence.request.parent
        # n continuations have one prompt: all of them report what the first found, and it is counted once.
        sequence.request.num_cached_tokens = num_cached if parent is None else parent.num_cached_tokens
        if parent is None:
            self.num_prompt_tokens += sequence.request.num_prompt_tokens
            self.num_cached_tokens += num_cached

    def _promote_oldest(self) -> None:
        """Let the request that arrived first go before all others that wait, for good: it is not thrown out again."""
        self._num_since_aged = 0
        oldest, first = min(self._queues.waiting, key=_order), self._queues.waiting[-1]
        if oldest is not first:
            self._queues.unwait(oldest)
            oldest.set_key((first.key[0], min(first.key[1], oldest.order), oldest.order))
            self._queues.wait(oldest)

    def _start_in_order(self, candidates: list[Sequence], plan: StepPlan) -> Iterator[tuple[Sequence, int]]:
        queues = self._queues
        prefilling = [s for s in queues.running if s.num_computed < s.num_prompt]
        for sequence in candidates:
            if not queues.rows or plan.free_tokens < 1 or plan.free_samples < 1:
                return
            if sequence.request.is_finished or sequence.request.status is Status.RUNNING:
                continue  # started as a fork in this very step
            if sequence.num_pending or self._waits_for_parent(sequence):
                continue
            prefix = self._pages.match(sequence)
            if self._is_being_computed(sequence, prefix.num_tokens, prefilling):
                continue
            while not (size := self._start(sequence, prefix, plan)):
                missing = sequence.length - prefix.num_tokens
                if plan.chunk_of(sequence, missing) < 1 or not self._pages.kept.release_oldest():
                    return  # in order: later ones must not take the pages that this one waits for
                prefix = self._pages.match(sequence)
            yield sequence, size
            if sequence.num_computed < sequence.num_prompt:
                prefilling.append(sequence)

    def _candidates(self) -> list[Sequence]:
        first = self._queues.waiting[: -MAX_CANDIDATES - 1 : -1]
        if self._policy != "lpm":
            return first
        return policies.by_longest_prefix(first, lambda s: self._pages.match(s).num_tokens)

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        parent = sequence.request.parent
        other = self._queues.by_number.get(parent.number) if parent is not None else None
        if sequence.request.part.base in self._queues.keepers:
            return True  # the request whose pages it may use still runs
        return other is not None and not sequence.was_admitted and other.length == parent.num_prompt_tokens

    def _is_being_computed(self, sequence: Sequence, matched: int, prefilling: list[Sequence]) -> bool:
        """Whether a running prefill is about to compute the page after `matched`: then it is computed once."""
        if not self._cache.enabled:
            return False
        size, namespace = self._geometry.page_size, sequence.request.namespace
        end = (matched // size + 1) * size  # of that page
        if end > sequence.match_limit:
            return False
        return any(
            not other.keeps_to_itself and other.request.namespace == namespace and sequence.shares_prompt(other, end)
            for other in prefilling
        )

    def _start(self, sequence: Sequence, prefix: Prefix, plan: StepPlan) -> int:
        """Admit with its cached prefix, if the pool has room for it now. Returns the tokens to compute, 0 if not."""
        page_size = self._geometry.page_size
        self._pages.acquire(prefix)
        tokens = sequence.request.max_total_tokens if self._deterministic else sequence.length
        is_tail_shared = prefix.num_tokens % page_size != 0  # then its last page is copied
        need = -(-tokens // page_size) - len(prefix.pages) + is_tail_shared
        margin = 0
        if not self._deterministic:
            margin = policies.headroom_pages(len(self._queues.running), sequence.num_preemptions, page_size)
        size = plan.chunk_of(sequence, sequence.length - prefix.num_tokens)
        if size < 1 or need + margin > self._cache.num_available:
            self._pages.release(prefix)
            return 0
        self._queues.unwait(sequence)
        self._num_since_aged += 1
        self._pages.start(sequence, self._queues.rows.pop(), prefix)
        if self._deterministic:
            pages = self._cache.allocate(need)
            assert pages is not None
            sequence.add_pages(pages)
        self.count(sequence, prefix.num_tokens)
        self._queues.run(sequence)
        if not self._pages.grow(sequence, size, plan):
            raise RuntimeError(f"{self._cache.num_available} pages available, yet none for {size} tokens")
        sequence.is_miscounted = sequence.request.params.has_penalties
        if not sequence.is_prefilling:
            plan.reserve(1)  # preempted, and all but its last token found in the cache: a decoding row like others
        return size
