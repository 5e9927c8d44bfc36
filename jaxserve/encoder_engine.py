"""The engine of an encoder: texts in, vectors out, one batch of texts a step. No jax.

Offers what engine.Engine offers to those that run it (engine_loop, engine_thread). There are no pages, no
prefixes and no continuation: a text is computed whole, beside others of its length bucket that wait with it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.detokenizer import TokenBytes
from jaxserve.embedding import check_embedding, embedding_output
from jaxserve.engine import EngineCrash
from jaxserve.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_STOP,
    POOLINGS,
    AbortRequest,
    AddEmbedding,
    AddRequest,
    EngineStats,
    ModelInfo,
    RequestOutput,
    Shutdown,
    ToEngine,
    num_outputs,
)
from jaxserve.sampling_params import InvalidParameter
from jaxserve.trace import StepTrace

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Text:
    """One text that waits. token_ids int32 [num_tokens], pooling one of POOLINGS (what runner.run takes)."""

    message: AddEmbedding
    token_ids: np.ndarray
    pooling: str
    length: int
    due: float


class BatchRunner(Protocol):
    """The device; implemented by runner.encoder.EncoderRunner."""

    max_model_len: int

    def length_of(self, num_tokens: int) -> int: ...

    def batches(self, length: int) -> tuple[int, ...]: ...

    def run(self, work: list[Any]) -> np.ndarray: ...


class EncoderEngine:
    """Not thread-safe: one thread owns it. See engine.Engine for the meaning of the methods they share."""

    is_stalled = False
    page_events = None  # there are no pages to tell of

    def __init__(
        self,
        runner: BatchRunner,
        tokenizer: TokenBytes,
        config: EngineConfig,
        *,
        model: ModelInfo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.trace = StepTrace(1)  # stays empty: nothing overlaps here
        self._runner = runner
        self._clock = clock
        self._waiting: dict[str, Text] = {}  # in the order of arrival
        self._outbox: list[RequestOutput] = []
        self._failure: str | None = None
        self._closes_at: float | None = None
        self._finished: Counter[str] = Counter()
        self._num_steps = self._num_tokens = 0
        self._step_seconds = 0.0

    def handle(self, message: ToEngine) -> None:
        """Take one message. Answers come with the next step()."""
        if isinstance(message, AddRequest | AddEmbedding):
            self.add(message)
        elif isinstance(message, AbortRequest):
            self.abort(message.request_id)
        elif isinstance(message, Shutdown):
            self.shutdown(message.drain_s)
        # The others concern pages, of which there are none.

    def add(self, message: AddRequest | AddEmbedding) -> None:
        """Queue a text, or answer with FINISH_ERROR saying what is wrong with it."""
        try:
            text = self._checked(message)
        except InvalidParameter as mistake:
            count = num_outputs(message)
            self._finished[FINISH_ERROR] += count
            for index in range(count):
                self._outbox.append(
                    RequestOutput(
                        request_id=message.request_id, index=index, finish_reason=FINISH_ERROR,
                        num_prompt_tokens=len(message.prompt), error=str(mistake), parameter=mistake.parameter,
                    )
                )  # fmt: skip
            return
        self._waiting[message.request_id] = text

    def abort(self, request_id: str) -> None:
        """End a text with FINISH_ABORT. An id that does not wait (any more) is no mistake."""
        if request_id in self._waiting:
            self._end_early(request_id)

    def flush_cache(self) -> None:
        """Nothing is cached."""

    def shutdown(self, drain_s: float) -> None:
        """Refuse new texts; end what still waits after `drain_s` seconds. A second call can only shorten it."""
        closes_at = self._clock() + max(drain_s, 0.0)
        self._closes_at = closes_at if self._closes_at is None else min(closes_at, self._closes_at)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._outbox)

    @property
    def is_drained(self) -> bool:
        return self._closes_at is not None and not self.has_work

    def step(self) -> list[RequestOutput]:
        """Compute one batch: the oldest text and those after it that share its length bucket. Raises EngineCrash when
        the device failed, and again whenever it is called afterwards."""
        if self._failure is not None:
            raise EngineCrash(self._failure)
        self._expire()
        batch = self._next_batch()
        if batch:
            start = time.perf_counter()
            try:
                vectors = self._runner.run(batch)
            except Exception as error:
                logger.error("the engine cannot go on", exc_info=error)
                self._failure = f"{type(error).__name__}: {error}"
                raise EngineCrash(self._failure) from error
            self._num_steps += 1
            self._step_seconds += time.perf_counter() - start
            for text, vector in zip(batch, vectors, strict=True):
                del self._waiting[text.message.request_id]
                self._num_tokens += len(text.token_ids)
                self._finished[FINISH_STOP] += 1
                self._outbox.append(embedding_output(text.message, vector))
        outputs, self._outbox = self._outbox, []
        return outputs

    def stats(self) -> EngineStats:
        """Gauges now and counters since the start."""
        return EngineStats(
            num_waiting=len(self._waiting),
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_tokens,
            num_computed_prefill_tokens=self._num_tokens,
            num_finished=dict(self._finished),
            num_compiles_after_warmup=int(getattr(self._runner, "compiles_after_warmup", 0)),
            step_seconds=self._step_seconds,
        )

    def close(self) -> None:
        """Release the device. The engine cannot be used afterwards."""
        self._failure = self._failure or "the engine was closed"
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def _checked(self, message: AddRequest | AddEmbedding) -> Text:
        if isinstance(message, AddRequest):
            raise InvalidParameter("model", self.model.name, "embeddings only: this model continues no text")
        if message.request_id in self._waiting:
            raise InvalidParameter("request_id", message.request_id, "an id that is not in flight")
        if self._closes_at is not None:
            raise InvalidParameter("engine", "a new request", "none, the engine is shutting down")
        if self.config.max_waiting and len(self._waiting) >= self.config.max_waiting:
            raise InvalidParameter(
                "max_waiting",
                f"a request behind {len(self._waiting)} others",
                f"{self.config.max_waiting} in the queue",
            )
        check_embedding(message, size=self.model.embedding_size, poolings=POOLINGS)
        deadline = message.deadline_s
        if deadline is not None and not (math.isfinite(deadline) and deadline > 0):
            raise InvalidParameter("deadline_s", deadline, "a finite number of seconds above 0")
        limit, vocab_size = self._runner.max_model_len, self.model.vocab_size
        if not 1 <= len(message.prompt) <= limit:
            raise InvalidParameter("prompt", f"{len(message.prompt)} tokens", f"1 to {limit} tokens with this model")
        for place, token in enumerate(message.prompt):
            if not 0 <= token < vocab_size:
                raise InvalidParameter("prompt", f"{token} at index {place}", f"token ids 0 to {vocab_size - 1}")
        due = math.inf if deadline is None else self._clock() + deadline
        ids = np.asarray(message.prompt, np.int32)
        return Text(message, ids, message.pooling or self.model.pooling, self._runner.length_of(len(ids)), due)

    def _next_batch(self) -> list[Text]:
        if not self._waiting:
            return []
        length = next(iter(self._waiting.values())).length
        sizes = self._runner.batches(length)
        found = []
        for text in self._waiting.values():
            if text.length == length:
                found.append(text)
                if len(found) == sizes[0]:
                    break
        return found[: next(size for size in sizes if size <= len(found))]

    def _end_early(self, request_id: str, *, error: str | None = None, parameter: str | None = None) -> None:
        text = self._waiting.pop(request_id)
        self._finished[FINISH_ABORT] += 1
        self._outbox.append(
            RequestOutput(
                request_id=request_id, finish_reason=FINISH_ABORT, num_prompt_tokens=len(text.token_ids),
                error=error, parameter=parameter,
            )
        )  # fmt: skip

    def _expire(self) -> None:
        now = self._clock()
        for request_id, text in list(self._waiting.items()):
            if text.due <= now:
                limit = f"{text.message.deadline_s:g} s"
                self._end_early(request_id, error=f"deadline_s: not done after {limit}", parameter="deadline_s")
            elif self._closes_at is not None and now >= self._closes_at:
                self._end_early(request_id, error="the engine is shutting down", parameter="engine")
