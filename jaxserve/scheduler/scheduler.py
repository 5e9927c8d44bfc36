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

from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.config import POLICIES
from jaxserve.messages import FINISH_ABORT, FINISH_LENGTH
from jaxserve.request import Request, TokenEvent
from jaxserve.scheduler import policy as policies
from jaxserve.scheduler import results
from jaxserve.scheduler.admission import Admission
from jaxserve.scheduler.decision import CacheGeometry, StepDecision, StepResult
from jaxserve.scheduler.kept import KeptPrefixes
from jaxserve.scheduler.pages import PageKeeper
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.queues import Queues
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.stats import SchedulerStats, check_pages

MAX_PROGRAMS = 4096  # of which the order is remembered, least recently used forgotten


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
        self._queues = Queues(geometry.max_num_rows, self._pages)
        self._admission = Admission(self._queues, self._pages, geometry, policy, deterministic=deterministic)
        self._programs: dict[str, int] = {}  # program -> order of its first request
        self._num_added = 0
        self._num_steps = 0
        self._prefilled_last = False
        self._prefill_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queues.waiting or self._queues.running)

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def has_free_row(self) -> bool:
        return bool(self._queues.rows)

    def demand(self) -> tuple[int, int]:
        """(rows that decode, tokens of prompts that could be computed now, at most those of one full step)."""
        prefilling = [s.num_missing for s in self._queues.running if s.is_prefilling]
        tokens, limit = sum(prefilling), self.geometry.max_step_tokens
        for sequence in reversed(self._queues.waiting[-len(self._queues.rows) :] if self._queues.rows else ()):
            if tokens >= limit:
                break
            tokens += sequence.length
        return len(self._queues.running) - len(prefilling), min(tokens, limit)

    def first_untouched(self) -> Request | None:
        """The first waiting request that has never run here and has nothing to do with others here."""
        for sequence in reversed(self._queues.waiting):
            request = sequence.request
            is_alone = request.parent is None and request.number not in self._queues.children and not request.part.base
            if is_alone and not sequence.was_admitted:
                return request
        return None

    def keeps(self, name: str) -> bool:
        """Whether a prefix of that name is kept here, or will be."""
        return name in self._queues.keepers or name in self.kept

    def withdraw(self, number: int) -> None:
        """Forget a waiting request, as if it had never been added. Only for first_untouched()."""
        self._queues.withdraw(number)

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
        if request.number in self._queues.by_number:
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
        self._queues.add(Sequence(request, self._num_added, key))

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
        sequence = self._queues.by_number.get(number)
        if sequence is None:
            return None
        self._queues.end(sequence, FINISH_ABORT, None)
        return sequence.request

    def finish(self, number: int, reason: str, stop_reason: int | str | None) -> None:
        """The text of a request has ended (a stop string). Does nothing if it has ended already."""
        sequence = self._queues.by_number.get(number)
        if sequence is not None:
            self._queues.end(sequence, reason, stop_reason)

    def schedule(self, max_tokens: int | None = None) -> StepDecision | None:
        """Decide the next step and take it as done. None: nothing can run before a result is applied.

        max_tokens: prefill fills the step up to so many tokens only (None: up to the geometry's bound).
        """
        plan = StepPlan(self.geometry, max_tokens)
        num_decoding = sum([s.is_decoding for s in self._queues.running])
        may_prefill = True
        if self.deterministic and num_decoding:
            # Prefill and decode are different programs there and take turns.
            may_prefill = not self._prefilled_last
        if may_prefill:
            plan.reserve(num_decoding if not self.deterministic else 0)
            self._plan_running(plan, decode=not self.deterministic)
            for sequence, size in self._admission.start(plan):
                self._compute(sequence, size, plan)
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
        find = self._queues.by_number.get
        for i, (work, token) in enumerate(zip(decision.samples, result.token_ids.tolist())):
            sequence = find(work.request_id)
            if sequence is None:
                continue
            if work.is_score:
                events.append(results.take_score(sequence, work, result, i))
                if work.position == sequence.num_prompt and not sequence.num_unscored_next:
                    self._queues.end(sequence, FINISH_LENGTH, None)
            elif work.position >= sequence.num_known:  # else a forced token, taken by extend() before it was computed
                events.append(results.take_token(sequence, result, i, token))
                self._end_at(sequence, token)
        return events

    def find(self, number: int) -> Request | None:
        """A request that has not ended."""
        sequence = self._queues.by_number.get(number)
        return None if sequence is None else sequence.request

    def extend(self, number: int, tokens: list[int]) -> list[TokenEvent]:
        """Take tokens that a grammar forces: the first is what the step in flight samples, the others are computed
        with it as one chunk. Ends the request like apply()."""
        sequence = self._queues.by_number[number]
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
            self._queues.end(sequence, reason, stop)
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
        number = self._queues.keepers.pop(name, None)
        if number is not None:
            self._queues.by_number[number].request.keep_as = ""
        self.kept.release(name)

    def stats(self) -> SchedulerStats:
        free, cached = self.cache.pool.num_free, self.cache.tree.num_evictable
        return SchedulerStats(
            num_running=len(self._queues.running),
            num_waiting=len(self._queues.waiting),
            num_pages=self.geometry.num_pages,
            num_pages_held=self.geometry.num_pages - 1 - free - cached,
            num_pages_cached=cached,
            num_pages_free=free,
            num_prompt_tokens=self._admission.num_prompt_tokens,
            num_cached_tokens=self._admission.num_cached_tokens,
            num_computed_prefill_tokens=self._prefill_tokens,
            num_preemptions=self._queues.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError if a page, a row or a request is lost or held twice."""
        held = [s.pages[: s.num_pages] for s in self._queues.running] + self.kept.references()
        check_pages(self.cache, held)
        self._queues.check_integrity()

    # ------------------------------------------------------------------ running requests

    def _plan_running(self, plan: StepPlan, *, decode: bool = True, prefill: bool = True) -> None:
        for sequence in self._queues.running[:]:
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
            victim = self._queues.running[-1]
            if victim is sequence:
                break
            if victim.is_decoding:  # it is younger, so its turn in this step has not come
                plan.unreserve()
            self._queues.preempt(victim)
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
        queues = self._queues
        children = queues.children.pop(parent.request.number, ())
        if self.deterministic:
            return  # a fork has no pages reserved for its output: it is admitted like any request
        for child in children:
            if child.request.is_finished or child.was_admitted or not queues.rows or plan.free_samples < 1:
                continue
            queues.unwait(child)
            self._pages.share(parent, child, queues.rows.pop())
            self._admission.count(child, 0)
            queues.run(child)
            plan.add_fork(child)
