"""The engine: requests in, outputs out, one step at a time.

step() dispatches step n + 1 before it reads the tokens of step n, so that the device has work while the host makes
text. An Engine belongs to one thread: engine_process runs it behind a socket, engine_thread beside a notebook.

What can go wrong is sorted by whom it concerns. A client's mistake, or an exception while the text of one request
is made, ends that request with FINISH_ERROR. An exception from the scheduler or the runner leaves their state
unknown: step() raises EngineCrash, and again whenever it is called afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from jaxserve.admission import Limits, RequestMaker
from jaxserve.cache.page_events import PageEvents
from jaxserve.config import EngineConfig
from jaxserve.constraining import Compiled, GrammarStage
from jaxserve.continuation import Deadlines, Group
from jaxserve.detokenizer import Detokenizer, TokenBytes
from jaxserve.embedding import Pooler, as_request
from jaxserve.engine_answers import Answers
from jaxserve.engine_steps import StepPipeline
from jaxserve.messages import (
    FINISH_ABORT,
    AbortRequest,
    AddEmbedding,
    AddRequest,
    EngineStats,
    FlushCache,
    ModelInfo,
    ReleaseKept,
    RequestOutput,
    Shutdown,
    ToEngine,
)
from jaxserve.sampling_params import InvalidParameter
from jaxserve.scheduler.decision import Runner
from jaxserve.scheduler.dp_balance import make_scheduler
from jaxserve.trace import StepTrace

logger = logging.getLogger(__name__)

STALL_SECONDS = 30.0  # without any decision while requests wait and nothing is in flight: a defect, not patience


class EngineCrash(RuntimeError):
    """The engine cannot go on. Everything in flight is lost."""


class Engine:
    """Schedules, runs and detokenises requests over one runner. Not thread-safe.

    runner     what computes; its geometry bounds everything. closed by close() if it has a close()
    tokenizer  bytes of tokens; ids of control tokens
    model      what front ends are told (EngineReady); its max_model_len and vocab_size are checked here
    clock      seconds, for arrivals and deadlines (the simulator gives a virtual one)
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: TokenBytes,
        config: EngineConfig,
        *,
        model: ModelInfo,
        clock: Callable[[], float] = time.monotonic,
        trace_capacity: int = 4096,
    ) -> None:
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self._runner = runner
        self._clock = clock
        self._detokenizer = Detokenizer(tokenizer)
        self.scheduler = make_scheduler(
            runner.geometry,
            policy=config.policy,
            prefix_cache=config.prefix_cache,
            deterministic=config.deterministic,
        )
        geometry = runner.geometry
        self.page_events: PageEvents | None = None
        if config.kv_events:
            ranks = getattr(self.scheduler, "ranks", (self.scheduler,))
            self.page_events = PageEvents.watching([rank.cache.tree for rank in ranks], geometry.num_pages)
        self._limits = Limits(
            vocab_size=model.vocab_size,
            max_model_len=min(model.max_model_len, geometry.max_model_len),
            max_cached_tokens=(geometry.num_pages - 1) * geometry.page_size,
            max_next_ids=max(1, geometry.max_num_samples - geometry.max_num_rows),
        )
        self._maker = RequestMaker(self._limits, frozenset(model.eos_token_ids), config.seed)
        self._grammars = GrammarStage(
            tokenizer,
            model.vocab_size,
            model.eos_token_ids,
            # K/V of a chunk may differ from that of single tokens in the last bit.
            may_jump=config.jump_forward and not config.deterministic,
        )
        self._steps = StepPipeline(
            runner, self.scheduler, self._grammars, depth=2 if config.overlap else 1, trace_capacity=trace_capacity
        )
        self._answers = Answers(self.scheduler)
        self._deadlines = Deadlines()
        self._failure: str | None = None
        self._closes_at: float | None = None
        self._stalled_since: float | None = None

    @property
    def trace(self) -> StepTrace:
        """When the last steps were dispatched and read."""
        return self._steps.trace

    def handle(self, message: ToEngine) -> None:
        """Take one message. Answers come with the next step(), a failure of the scheduler as well."""
        try:
            if isinstance(message, AddRequest | AddEmbedding):
                self.add(message)
            elif isinstance(message, AbortRequest):
                self.abort(message.request_id)
            elif isinstance(message, FlushCache):
                self.flush_cache()
            elif isinstance(message, ReleaseKept):
                self.release_kept(message.request_ids)
            elif isinstance(message, Shutdown):
                self.shutdown(message.drain_s)
        except Exception as error:
            self._crash(error)

    def add(self, message: AddRequest | AddEmbedding) -> None:
        """Queue a prompt, or answer each of its n continuations with FINISH_ERROR saying what is wrong with it."""
        try:
            self._check_open(message)
            now = self._clock()
            if isinstance(message, AddEmbedding):
                self._limits.check_embedding(message, self.model)
                self._admit(as_request(message), now, Pooler(message, self.model.pooling))
            else:
                if self.model.task != "generate":
                    raise InvalidParameter("model", self.model.name, "embeddings only: this model continues no text")
                self._limits.check(message)
                self._add_request(message, now)
        except InvalidParameter as mistake:
            self._answers.refuse(message, str(mistake), mistake.parameter)
        except Exception as error:
            logger.exception("request %s could not be queued", message.request_id)
            self._answers.refuse(message, f"the request could not be queued: {type(error).__name__}: {error}", None)

    def _check_runner(self) -> None:
        """Let a runner whose other hosts are gone say so, also while nothing runs."""
        check = getattr(self._runner, "check", None)
        if check is not None:
            check()

    def _check_open(self, message: AddRequest | AddEmbedding) -> None:
        """Raise InvalidParameter for an id in flight, a full queue or a shutdown (the last two will pass)."""
        if message.request_id in self._answers.groups or message.request_id in self._grammars:
            raise InvalidParameter("request_id", message.request_id, "an id that is not in flight")
        if self._closes_at is not None:
            raise InvalidParameter("engine", "a new request", "none, the engine is shutting down")
        if self.config.max_waiting:
            num_waiting = self.scheduler.stats().num_waiting
            if num_waiting >= self.config.max_waiting:
                raise InvalidParameter(
                    "max_waiting",
                    f"a request behind {num_waiting} others",
                    f"{self.config.max_waiting} in the queue",
                )

    def abort(self, request_id: str) -> None:
        """End a request with FINISH_ABORT. An id that is not in flight (any more) is no mistake."""
        group = self._answers.groups.get(request_id)
        if group is not None:
            self._answers.abort(group)
            return
        message = self._grammars.drop(request_id)
        if message is not None:
            self._answers.refuse(message, None, None, reason=FINISH_ABORT)

    def prepare_grammars(self) -> None:
        """Read the vocabulary for grammars now, so that no request waits for it."""
        self._grammars.prepare()

    def flush_cache(self) -> None:
        """Forget cached prefixes that nobody uses."""
        self.scheduler.flush_cache()

    def release_kept(self, request_ids: Iterable[str]) -> None:
        """Pages kept under these ids are not needed any more; nor will those of requests that still run be."""
        for request_id in request_ids:
            self.scheduler.release_kept(request_id)

    def shutdown(self, drain_s: float) -> None:
        """Refuse new requests; end what still runs after `drain_s` seconds. A second call can only shorten it."""
        closes_at = self._clock() + max(drain_s, 0.0)
        self._closes_at = closes_at if self._closes_at is None else min(closes_at, self._closes_at)

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do now."""
        return bool(
            self._answers.groups or not self._steps.is_empty or self._answers.outbox or self._grammars.is_waiting
        )

    @property
    def is_drained(self) -> bool:
        """After shutdown(): whether nothing is left to do."""
        return self._closes_at is not None and not self.has_work

    @property
    def is_stalled(self) -> bool:
        """Whether the last step() found nothing that could run; the loop should rest a moment before the next."""
        return self._stalled_since is not None or (self._grammars.is_waiting and not self._answers.groups)

    def step(self) -> list[RequestOutput]:
        """Dispatch what can run, read the oldest step in flight, and return what became known with it.

        Raises EngineCrash when the scheduler or the runner failed.
        """
        if self._failure is not None:
            raise EngineCrash(self._failure)
        try:
            self._check_runner()
            self._expire()
            for compiled in self._grammars.take_ready(self._clock()):
                self._take_compiled(compiled)
            while (events := self._steps.dispatch()) is not None:
                self._answers.take(events)
            self._watch_for_stalls()
            if not self._steps.is_empty:
                self._answers.take(self._steps.collect(self._answers.pool))
        except Exception as error:
            self._crash(error)
            raise EngineCrash(self._failure) from error
        if not self._answers.groups and self._steps.is_empty:
            self._steps.rest()
        return self._answers.take_outbox()

    def stats(self) -> EngineStats:
        """Gauges now and counters since the start."""
        scheduler = self.scheduler.stats()
        # Plain numbers: the scheduler may count with numpy's, which msgpack does not carry.
        return EngineStats(
            num_running=int(scheduler.num_running),
            num_waiting=int(scheduler.num_waiting),
            num_pages=int(scheduler.num_pages) - 1,  # page 0 is nobody's
            num_pages_held=int(scheduler.num_pages_held),
            num_pages_cached=int(scheduler.num_pages_cached),
            num_steps=self._steps.num_steps,
            num_prompt_tokens=int(scheduler.num_prompt_tokens),
            num_cached_tokens=int(scheduler.num_cached_tokens),
            num_computed_prefill_tokens=self._steps.num_prefill_tokens,
            num_output_tokens=self._answers.num_output_tokens,
            num_preemptions=int(scheduler.num_preemptions),
            num_finished=dict(self._answers.num_finished),
            num_compiles_after_warmup=int(getattr(self._runner, "compiles_after_warmup", 0)),
            num_forced_tokens=self._grammars.num_forced_tokens,
            num_jumped_tokens=self._grammars.num_jumped_tokens,
            num_grammars_cached=self._grammars.num_cached,
            step_seconds=self._steps.step_seconds,
            host_seconds=self._steps.host_seconds,
            num_reads_without_queue=self._steps.num_dry_reads,
        )

    def close(self) -> None:
        """Release the device. The engine cannot be used afterwards."""
        self._failure = self._failure or "the engine was closed"
        self._grammars.close()
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def _add_request(self, message: AddRequest, now: float) -> None:
        if message.params.grammar is None:
            self._admit(message, now)
            return
        compiled = self._grammars.submit(message, now)
        if compiled is not None:
            self._take_compiled(compiled)

    def _take_compiled(self, compiled: Compiled) -> None:
        message, arrival, error = compiled
        grammar = message.params.grammar
        if error is not None:
            self._answers.refuse(message, f"{grammar.parameter}: {error}", grammar.parameter)
            return
        try:
            self._admit(message, arrival)
        except Exception as error:
            logger.exception("request %s could not be queued", message.request_id)
            self._answers.refuse(message, f"the request could not be queued: {type(error).__name__}: {error}", None)

    def _admit(self, message: AddRequest, arrival: float, pooler: Pooler | None = None) -> None:
        requests = self._maker.make(message, arrival, pooling="" if pooler is None else pooler.pooling)
        if message.params.grammar is not None:
            self._grammars.constrain(requests, message.params.grammar)
        group = Group(message, pooler)
        group.join(requests, self._detokenizer)
        for num_added, request in enumerate(requests):
            try:
                self.scheduler.add(request)
            except Exception:
                for earlier in requests[:num_added]:
                    self.scheduler.abort(earlier.number)
                raise
        self._answers.join(group)
        if message.deadline_s is not None:
            self._deadlines.push(arrival + message.deadline_s, group)

    def _crash(self, error: Exception) -> None:
        logger.error("the engine cannot go on", exc_info=error)
        self._failure = f"{type(error).__name__}: {error}"

    def _expire(self) -> None:
        now = self._clock()
        self.scheduler.kept.expire(now)
        for group in self._deadlines.pop_due(now):
            if group.num_unfinished:
                limit = f"{group.message.deadline_s:g} s"
                self._answers.abort(group, error=f"deadline_s: not done after {limit}", parameter="deadline_s")
        if self._closes_at is not None and now >= self._closes_at:
            for group in list(self._answers.groups.values()):
                self._answers.abort(group, error="the engine is shutting down", parameter="engine")
            for message in self._grammars.drop_all():
                self._answers.refuse(message, "the engine is shutting down", "engine", reason=FINISH_ABORT)

    def _watch_for_stalls(self) -> None:
        """Raise if requests wait, nothing runs and nothing is decided for STALL_SECONDS."""
        if not self._steps.is_empty or not self._answers.groups:
            self._stalled_since = None
            return
        now = time.perf_counter()
        if self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since > STALL_SECONDS:
            raise RuntimeError(f"no step could be scheduled for {STALL_SECONDS:g} s: {self.scheduler.stats()}")
