"""An engine in this process as a target of load, stepped by the event loop itself: no thread, no socket.

What is measured is the engine with its detokenizer, as a server would run it, and nothing of a transport.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jaxserve.bench.load import RequestRecord
from jaxserve.config import EngineConfig
from jaxserve.messages import AddRequest, RequestOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine import Engine


class InProcessTarget:
    """A context manager; `engine` may be built already (it is closed at exit all the same).

    Greedy, end-of-sequence tokens ignored: every answer has exactly the length asked for. A crash of the engine is
    raised by every complete() under way.
    """

    def __init__(self, engine: EngineConfig | Engine) -> None:
        if isinstance(engine, EngineConfig):
            # Imports jax, which a ready-made engine (over the simulator, say) does not need.
            from jaxserve.engine_process import build_engine

            engine = build_engine(engine)
        self.engine = engine
        self._numbers = itertools.count()
        self._live: dict[str, tuple[RequestRecord, asyncio.Future[None]]] = {}
        self._pump: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> RequestRecord:
        record = RequestRecord(num_prompt_tokens=len(prompt), start=time.perf_counter())
        request_id = str(next(self._numbers))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._live[request_id] = record, done
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.handle(AddRequest(request_id=request_id, prompt=list(prompt), params=params))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._step_until_idle())
        await done
        return record

    def flush_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.flush_cache()

    async def _step_until_idle(self) -> None:
        try:
            while self.engine.has_work:
                for output in self.engine.step():
                    self._take(output, time.perf_counter())
                # Clients whose request has just ended ask again before the next step is scheduled.
                await asyncio.sleep(0.001 if self.engine.is_stalled else 0)
        except Exception as error:
            for _, done in self._live.values():
                if not done.done():
                    done.set_exception(error)
            self._live.clear()

    def _take(self, output: RequestOutput, now: float) -> None:
        record, done = self._live[output.request_id]
        if output.token_ids:
            record.times.append(now)
            record.counts.append(len(output.token_ids))
            record.token_ids += output.token_ids
            record.num_output_tokens += len(output.token_ids)
        record.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            if output.error is not None:
                record.error = output.error
            record.end = now
            del self._live[output.request_id]
            done.set_result(None)
