"""Which tokens are computed next: waiting and running requests, step by step. No jax.

Two steps may be in flight: schedule() for step n + 1 is called before apply() of step n. A running request is then
assumed to go on; its newest token is LAST_TOKEN, known to the device alone. The device runs steps in order, so a page
given back by apply() may be written by any later step.

Requests are served in the order of a key (arrival, or priority then arrival). The first of them can take pages from
all others (preemption by recomputation), and add() refuses what could not run alone: so it always advances, finishes,
and makes room for the next. What has been preempted keeps its key and is admitted again only when its whole prefix
and room for the growth of all running requests are available, twice as much after each preemption: two requests
cannot throw each other out in turn.
"""

from __future__ import annotations

import bisect
import operator
import time

from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.config import POLICIES
from jaxserve.messages import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from jaxserve.request import Request, Status, TokenEvent
from jaxserve.scheduler import policy as policies
from jaxserve.scheduler import results
from jaxserve.scheduler.decision import CacheGeometry, StepDecision, StepResult
from jaxserve.scheduler.kept import KeptPrefixes, Prefix
from jaxserve.scheduler.pages import PageKeeper
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.stats import SchedulerStats, check_pages, check_rows

MAX_CANDIDATES = 128  # waiting requests looked at in one step
MAX_PROGRAMS = 4096  # of which the order is remembered, least recently used forgotten

_key, _reverse_key, _order = map(operator.attrgetter, ("key", "reverse_key", "order"))


class Scheduler:
    """Single-threaded. Requests are told apart by Request.number."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        policy: str = "fcfs",
        prefix_cache: bool = True,
        deterministic: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy: got {policy!r}; allowed: {', '.join(POLICIES)}")
        self.geometry = geometry
        self.policy = policy
        self.deterministic = deterministic
        self.cache = PrefixCache(geometry.num_pages, geometry.page_size, enabled=prefix_cache)
        self._pages = PageKeeper(self.cache, geometry.page_size, deterministic=deterministic)
        self._sequences: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []  # last first: the next one to run stands at the end
        self._running: list[Sequence] = []  # in the order of their keys
        self._rows = list(range(geometry.max_num_rows - 1, -1, -1))
        self._children: dict[int, list[Sequence]] = {}  # parent's number -> forks that have not started
        self._keepers: dict[str, int] = {}  # keep_as of requests that have not ended -> their number
        self._programs: dict[str, int] = {}  # program -> order of its first request
        self._num_added = 0
        self._num_since_aged = 0  # admissions since the oldest waiting request went first, whatever its class
        self._num_steps = 0
        self._prefilled_last = False
        self._prompt_tokens = self._cached_tokens = self._prefill_tokens = self._preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_free_row(self) -> bool:
        return bool(self._rows)

    def demand(self) -> tuple[int, int]:
        """(rows that decode, tokens of prompts that could be computed now, at most those of one full step)."""
        prefilling = [s.num_missing for s in self._running if s.is_prefilling]
        tokens, limit = sum(prefilling), self.geometry.max_step_tokens
        for sequence in reversed(self._waiting[-len(self._rows) :] if self._rows else ()):
            if tokens >= limit:
                break
            tokens += sequence.length
        return len(self._running) - len(prefilling), min(tokens, limit)

    def first_untouched(self) -> Request | None:
        """The first waiting request that has never run here and has nothing to do with others here."""
        for sequence in reversed(self._waiting):
            request = sequence.request
            is_alone = request.parent is None and request.number not in self._children and not request.part.base
            if is_alone and not sequence.was_admitted:
                return request
        return None

    def keeps(self, name: str) -> bool:
        """Whether a prefix of that name is kept here, or will be."""
        return name in self._keepers or name in self.kept

    def withdraw(self, number: int) -> None:
        """Forget a waiting request, as if it had never been added. Only for first_untouched()."""
        sequence = self._sequences.pop(number)
        self._keepers.pop(sequence.request.keep_as, None)
        self._unwait(sequence)

    def add(self, request: Request) -> None:
        """Queue a request; the parent of a fork comes first.

        Raises ValueError if the pool or the context could not hold its prompt and one token. max_total_tokens is cut
        to what they can hold. Prompt scores of n continuations are those of the first; the others ask for none.
        """
        usable = (self.geometry.num_pages - 1) * self.geometry.page_size
        if request.num_prompt_tokens + 1 > usable:
            raise ValueError(
                f"prompt: got {request.num_prompt_tokens} tokens; allowed: at most {usable - 1}, since the cache has "
                f"{self.geometry.num_pages - 1} pages of {self.geometry.page_size} tokens"
            )
        if request.number in self._sequences:
            raise ValueError(f"request number {request.number} is in use")
        limit = min(request.max_total_tokens, usable, self.geometry.max_model_len)
        if request.num_prompt_tokens >= limit + bool(request.part.next_ids):
            raise ValueError(
                f"prompt: got {request.num_prompt_tokens} tokens; allowed: at most {limit - 1}, since prompt and "
                f"output may have {limit} together"
            )
        request.max_total_tokens = limit
        self._num_added += 1
        key = policies.order_key(self.policy, request, self._num_added, self._program_order(request))
        sequence = Sequence(request, self._num_added, key)
        self._sequences[request.number] = sequence
        if request.parent is not None and request.parent.number in self._sequences:
            self._children.setdefault(request.parent.number, []).append(sequence)
            sequence.num_scored = request.num_prompt_tokens
        if request.keep_as:
            self._keepers[request.keep_as] = request.number
        self._wait(sequence)

    def _program_order(self, request: Request) -> int:
        program = request.part.program
        if not program:
            return self._num_added
        order = self._programs.pop(program, self._num_added)
        self._programs[program] = order
        if len(self._programs) > MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return order

    def abort(self, number: int) -> Request | None:
        """End a request in any state; None if it is not here. What is in flight for it is dropped."""
        sequence = self._sequences.get(number)
        if sequence is None:
            return None
        self._end(sequence, FINISH_ABORT, None)
        return sequence.request

    def finish(self, number: int, reason: str, stop_reason: int | str | None) -> None:
        """The text of a request has ended (a stop string). Does nothing if it has ended already."""
        sequence = self._sequences.get(number)
        if sequence is not None:
            self._end(sequence, reason, stop_reason)

    def schedule(self, max_tokens: int | None = None) -> StepDecision | None:
        """Decide the next step and take it as done. None: nothing can run before a result is applied.

        max_tokens: prefill fills the step up to so many tokens only (None: up to the geometry's bound).
        """
        plan = StepPlan(self.geometry, max_tokens)
        num_decoding = sum([s.is_decoding for s in self._running])
        may_prefill = True
        if self.deterministic and num_decoding:
            # Prefill and decode are different programs there and take turns.
            may_prefill = not self._prefilled_last
        if may_prefill:
            plan.reserve(num_decoding if not self.deterministic else 0)
            self._plan_running(plan, decode=not self.deterministic)
            self._admit(plan)
        if self.deterministic and plan.is_empty:
            plan = StepPlan(self.geometry, max_tokens)
            plan.reserve(num_decoding)
            self._plan_running(plan, prefill=False)
        self._prefilled_last = plan.num_prefill_rows > 0
        if plan.is_empty:
            return None
        self._num_steps += 1
        self._prefill_tokens += plan.num_prefill_tokens
        return plan.decision(self._num_steps)

    def apply(self, decision: StepDecision, result: StepResult) -> list[TokenEvent]:
        """Take the tokens of a collected step, in order of dispatch. Ends the requests that stop."""
        events: list[TokenEvent] = []
        find = self._sequences.get
        for i, (work, token) in enumerate(zip(decision.samples, result.token_ids.tolist())):
            sequence = find(work.request_id)
            if sequence is None:
                continue
            if work.is_score:
                events.append(results.take_score(sequence, work, result, i))
                if work.position == sequence.num_prompt and not sequence.num_unscored_next:
                    self._end(sequence, FINISH_LENGTH, None)
            elif work.position >= sequence.num_known:  # else a forced token, taken by extend() before it was computed
                events.append(results.take_token(sequence, result, i, token))
                self._end_at(sequence, token)
        return events

    def find(self, number: int) -> Request | None:
        """A request that has not ended."""
        sequence = self._sequences.get(number)
        return None if sequence is None else sequence.request

    def extend(self, number: int, tokens: list[int]) -> list[TokenEvent]:
        """Take tokens that a grammar forces: the first is what the step in flight samples, the others are computed
        with it as one chunk. Ends the request like apply()."""
        sequence = self._sequences[number]
        if sequence.num_pending != 1:
            raise RuntimeError(f"request {number}: {sequence.num_pending} tokens in flight before forced ones, not 1")
        events = []
        for place, token in enumerate(tokens):
            events.append(results.take_forced(sequence, token))
            if self._end_at(sequence, token, is_last=place == len(tokens) - 1):
                break
        sequence.is_miscounted = len(tokens) > 1 and sequence.request.params.has_penalties
        return events

    def _end_at(self, sequence: Sequence, token: int, *, is_last: bool = True) -> bool:
        """End a sequence whose newest token is its last."""
        reason, stop = results.token_stop(sequence, token, is_last=is_last)
        if reason is not None:
            self._end(sequence, reason, stop)
        return reason is not None

    def flush_cache(self) -> None:
        """Forget the prefixes that no running request uses."""
        self.kept.release_all()
        self.cache.flush()

    @property
    def kept(self) -> KeptPrefixes:
        return self._pages.kept

    def release_kept(self, name: str) -> None:
        """Pages kept under this name, or to be kept when their request ends, are not needed any more."""
        number = self._keepers.pop(name, None)
        if number is not None:
            self._sequences[number].request.keep_as = ""
        self.kept.release(name)

    def stats(self) -> SchedulerStats:
        free, cached = self.cache.pool.num_free, self.cache.tree.num_evictable
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=self.geometry.num_pages,
            num_pages_held=self.geometry.num_pages - 1 - free - cached,
            num_pages_cached=cached,
            num_pages_free=free,
            num_prompt_tokens=self._prompt_tokens,
            num_cached_tokens=self._cached_tokens,
            num_computed_prefill_tokens=self._prefill_tokens,
            num_preemptions=self._preemptions,
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError if a page, a row or a request is lost or held twice."""
        held = [s.pages[: s.num_pages] for s in self._running] + self.kept.references()
        check_pages(self.cache, held)
        check_rows(self._rows + [s.row for s in self._running], self.geometry.max_num_rows)
        known = sorted(id(s) for s in self._sequences.values())
        if known != sorted(map(id, self._waiting + self._running)):
            raise RuntimeError(f"{len(known)} requests, {len(self._waiting)} waiting, {len(self._running)} running")

    # ------------------------------------------------------------------ running requests

    def _plan_running(self, plan: StepPlan, *, decode: bool = True, prefill: bool = True) -> None:
        for sequence in self._running[:]:
            if sequence.row < 0:
                continue  # preempted by an older one in this very step
            if sequence.is_decoding:
                if decode:
                    if self._pages.has_room(sequence) or self._fit(sequence, 1, plan):
                        self._compute(sequence, 1, plan)
                    else:
                        plan.unreserve()
            elif prefill and sequence.is_prefilling:
                size = plan.chunk_for(sequence)
                if size > 0:
                    size = self._fit(sequence, size, plan)
                if size > 0:
                    self._compute(sequence, size, plan)

    def _fit(self, sequence: Sequence, size: int, plan: StepPlan) -> int:
        """Get pages for the next `size` tokens, taking them from younger requests if need be.

        Returns how many of the tokens have room: fewer, or none, if only older requests hold what is missing.
        """
        while True:
            if self._pages.grow(sequence, size, plan):
                return size
            if self.kept.release_oldest():
                continue
            victim = self._running[-1]
            if victim is sequence:
                break
            self._preempt(victim)
            if victim.is_decoding:
                plan.unreserve()
        while size > 1:
            size = min(size - 1, self._pages.room(sequence))
            if size > 0 and self._pages.grow(sequence, size, plan):
                return size
        return 0

    def _compute(self, sequence: Sequence, size: int, plan: StepPlan) -> None:
        """Put the next `size` tokens of a sequence, whose pages are there, into the step."""
        if sequence.is_miscounted:
            plan.reset_row(sequence)
            sequence.is_miscounted = False
        if not sequence.is_prefilling:
            plan.add_decode(sequence)
            return
        ends = plan.add_chunk(sequence, size)
        self._pages.insert(sequence, min(sequence.num_computed, sequence.num_prompt))
        if ends and sequence.length == sequence.num_prompt + 1:
            self._fork(sequence, plan)

    def _fork(self, parent: Sequence, plan: StepPlan) -> None:
        """Start the other continuations of a prompt: they share its pages and sample from the same logits.

        Those for which no row or sample is left start later like any request, from the cached prefix.
        """
        children = self._children.pop(parent.request.number, ())
        if self.deterministic:
            return  # a fork has no pages reserved for its output: it is admitted like any request
        for child in children:
            if child.request.is_finished or child.was_admitted or not self._rows or plan.free_samples < 1:
                continue
            self._unwait(child)
            self._pages.share(parent, child, self._rows.pop())
            self._count_admission(child, 0)
            self._run(child)
            plan.add_fork(child)

    # ------------------------------------------------------------------ waiting requests

    def _admit(self, plan: StepPlan) -> None:
        if not self._waiting or not self._rows or plan.free_tokens < 1:
            return
        if self.policy == "priority" and self._num_since_aged >= policies.ADMISSIONS_PER_AGED:
            self._promote_oldest()
        candidates = self._candidates()
        num_running = len(self._running)
        self._admit_in_order(candidates, plan)
        if self.policy == "lpm" and len(self._running) > num_running:
            policies.count_passed_over(candidates, [s for s in candidates if s.row >= 0])

    def _promote_oldest(self) -> None:
        """Let the request that arrived first go before all others that wait, for good: it is not thrown out again."""
        self._num_since_aged = 0
        oldest, first = min(self._waiting, key=_order), self._waiting[-1]
        if oldest is not first:
            self._unwait(oldest)
            oldest.set_key((first.key[0], min(first.key[1], oldest.order), oldest.order))
            self._wait(oldest)

    def _admit_in_order(self, candidates: list[Sequence], plan: StepPlan) -> None:
        prefilling = [s for s in self._running if s.num_computed < s.num_prompt]
        for sequence in candidates:
            if not self._rows or plan.free_tokens < 1 or plan.free_samples < 1:
                return
            if sequence.request.is_finished or sequence.request.status is Status.RUNNING:
                continue  # started as a fork in this very step
            if sequence.num_pending or self._waits_for_parent(sequence):
                continue
            prefix = self._pages.match(sequence)
            if self._is_being_computed(sequence, prefix.num_tokens, prefilling):
                continue
            while not self._start(sequence, prefix, plan):
                if plan.chunk_of(sequence, sequence.length - prefix.num_tokens) < 1 or not self.kept.release_oldest():
                    return  # in order: later ones must not take the pages that this one waits for
                prefix = self._pages.match(sequence)
            if sequence.num_computed < sequence.num_prompt:
                prefilling.append(sequence)

    def _candidates(self) -> list[Sequence]:
        first = self._waiting[: -MAX_CANDIDATES - 1 : -1]
        if self.policy != "lpm":
            return first
        return policies.by_longest_prefix(first, lambda s: self._pages.match(s).num_tokens)

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        parent = sequence.request.parent
        other = self._sequences.get(parent.number) if parent is not None else None
        if sequence.request.part.base in self._keepers:
            return True  # the request whose pages it may use still runs
        return other is not None and not sequence.was_admitted and other.length == parent.num_prompt_tokens

    def _is_being_computed(self, sequence: Sequence, matched: int, prefilling: list[Sequence]) -> bool:
        """Whether a running prefill is about to compute the page after `matched`: then it is computed once."""
        if not self.cache.enabled:
            return False
        size, namespace = self.geometry.page_size, sequence.request.namespace
        end = (matched // size + 1) * size  # of that page
        if end > sequence.match_limit:
            return False
        return any(
            not other.keeps_to_itself and other.request.namespace == namespace and sequence.shares_prompt(other, end)
            for other in prefilling
        )

    def _start(self, sequence: Sequence, prefix: Prefix, plan: StepPlan) -> bool:
        """Admit with its cached prefix, if the pool has room for it now."""
        page_size = self.geometry.page_size
        self._pages.acquire(prefix)
        tokens = sequence.request.max_total_tokens if self.deterministic else sequence.length
        is_tail_shared = prefix.num_tokens % page_size != 0  # then its last page is copied
        need = -(-tokens // page_size) - len(prefix.pages) + is_tail_shared
        margin = 0
        if not self.deterministic:
            margin = policies.headroom_pages(len(self._running), sequence.num_preemptions, page_size)
        size = plan.chunk_of(sequence, sequence.length - prefix.num_tokens)
        if size < 1 or need + margin > self.cache.num_available:
            self._pages.release(prefix)
            return False
        self._unwait(sequence)
        self._num_since_aged += 1
        self._pages.start(sequence, self._rows.pop(), prefix)
        if self.deterministic:
            pages = self.cache.allocate(need)
            assert pages is not None
            sequence.add_pages(pages)
        self._count_admission(sequence, prefix.num_tokens)
        self._run(sequence)
        if not self._pages.grow(sequence, size, plan):
            raise RuntimeError(f"{self.cache.num_available} pages available, yet none for {size} tokens")
        sequence.is_miscounted = sequence.request.params.has_penalties
        if not sequence.is_prefilling:
            plan.reserve(1)  # preempted, and all but its last token found in the cache: a decoding row like others
        self._compute(sequence, size, plan)
        return True

    def _count_admission(self, sequence: Sequence, num_cached: int) -> None:
        if sequence.was_admitted:
            return
        sequence.was_admitted = True
        sequence.request.admitted = time.monotonic()
        parent = sequence.request.parent
        # n continuations have one prompt: all of them report what the first found, and it is counted once.
        sequence.request.num_cached_tokens = num_cached if parent is None else parent.num_cached_tokens
        if parent is None:
            self._prompt_tokens += sequence.request.num_prompt_tokens
            self._cached_tokens += num_cached

    # ------------------------------------------------------------------ changes of state

    def _preempt(self, sequence: Sequence) -> None:
        self._preemptions += 1
        sequence.num_preemptions += 1
        self._leave(sequence)
        sequence.request.status = Status.WAITING
        self._wait(sequence)

    def _end(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        request = sequence.request
        if request.keep_as:
            self._keepers.pop(request.keep_as, None)
        if request.status is Status.RUNNING:
            if request.keep_as and reason in (FINISH_STOP, FINISH_LENGTH):
                self._pages.keep(sequence)
            self._leave(sequence)
        else:
            self._unwait(sequence)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._sequences[request.number]
        orphans = self._children.pop(request.number, ())
        heir = next((child for child in orphans if not child.request.is_finished), None)
        if heir is not None:
            heir.num_scored = sequence.num_scored  # the scores that are still missing are its business now

    def _leave(self, sequence: Sequence) -> None:
        self._pages.give_back(sequence)
        self._rows.append(sequence.row)
        sequence.row = -1
        del self._running[bisect.bisect_left(self._running, sequence.key, key=_key)]

    def _run(self, sequence: Sequence) -> None:
        bisect.insort(self._running, sequence, key=_key)

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=_reverse_key)

    def _unwait(self, sequence: Sequence) -> None:
        del self._waiting[bisect.bisect_left(self._waiting, sequence.reverse_key, key=_reverse_key)]
