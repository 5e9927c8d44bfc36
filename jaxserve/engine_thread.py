"""An Engine in a thread of its own, for notebooks and scripts. No jax.

Any thread may submit, abort and close. Answers are delivered in the engine's thread, by a callback that must not
block; several callers at once share the engine's batch.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from jaxserve.encoder_engine import EncoderEngine
from jaxserve.engine import Engine, EngineCrash
from jaxserve.messages import FINISH_ERROR, AddEmbedding, AddRequest, RequestOutput, num_outputs

logger = logging.getLogger(__name__)

Deliver = Callable[[RequestOutput | EngineCrash], None]
T = TypeVar("T")

_STALL_REST_S = 0.005


class EngineThread:
    """Owns the engine from here on; close() ends thread and engine.

    Every continuation of a submitted request gets exactly one output with a finish_reason, or, if the engine
    crashes, the request gets one EngineCrash.
    """

    def __init__(self, engine: Engine | EncoderEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._subscribers: dict[str, tuple[Deliver, set[int]]] = {}
        self._lock = threading.Lock()  # guards _crash against submissions that would come too late for it
        self._crash: EngineCrash | None = None
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    def submit(self, message: AddRequest | AddEmbedding, deliver: Deliver) -> None:
        """Queue a request. Raises EngineCrash if the engine is gone."""
        self._post(lambda: self._add(message, deliver))

    def abort(self, request_id: str) -> None:
        """End a request with FINISH_ABORT. Ids not in flight, and engines that are gone, are no mistake."""
        try:
            self._post(lambda: self._engine.abort(request_id))
        except EngineCrash:
            pass

    def release_kept(self, request_id: str) -> None:
        """Pages kept under this id are not needed any more. Ids unknown, and engines that are gone, are no mistake."""
        try:
            self._post(lambda: self._engine.release_kept((request_id,)))
        except EngineCrash:
            pass

    def call(self, function: Callable[[Engine | EncoderEngine], T]) -> T:
        """The value of function(engine), run in the engine's thread between two steps."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if self._crash is not None:
                future.set_exception(self._crash)
                return
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._post(run)
        return future.result()

    def close(self, drain_s: float = 0.0) -> None:
        """Finish what runs within `drain_s` seconds, abort the rest, release the device. Twice does no harm."""
        try:
            self._post(lambda: self._engine.shutdown(drain_s))
        except EngineCrash:
            pass
        # The garbage collector may call this from the engine's own thread, which then ends by itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_running(self) -> bool:
        return self._crash is None

    def _post(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._crash is not None:
                raise EngineCrash(str(self._crash))
            self._inbox.put(action)

    def _add(self, message: AddRequest | AddEmbedding, deliver: Deliver) -> None:
        if self._crash is not None:
            deliver(self._crash)
            return
        if message.request_id in self._subscribers:
            error = f"request_id: got {message.request_id!r}; allowed: an id that is not in flight"
            for index in range(num_outputs(message)):
                deliver(
                    RequestOutput(
                        request_id=message.request_id,
                        index=index,
                        finish_reason=FINISH_ERROR,
                        error=error,
                        parameter="request_id",
                    )
                )
            return
        self._subscribers[message.request_id] = (deliver, set(range(num_outputs(message))))
        self._engine.add(message)

    def _run(self) -> None:
        engine = self._engine
        reason = "the engine was closed"
        try:
            while not engine.is_drained:
                self._receive(wait=not engine.has_work)
                if engine.has_work:
                    for output in engine.step():
                        self._deliver(output)
                    if engine.is_stalled:
                        time.sleep(_STALL_REST_S)
        except BaseException as error:
            reason = str(error) if isinstance(error, EngineCrash) else f"{type(error).__name__}: {error}"
            if not isinstance(error, EngineCrash):
                logger.exception("the engine's thread ended")
        self._end(EngineCrash(reason))

    def _receive(self, *, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get(block=False)()
        except queue.Empty:
            pass

    def _deliver(self, output: RequestOutput) -> None:
        subscriber = self._subscribers.get(output.request_id)
        if subscriber is None:
            return
        deliver, unfinished = subscriber
        if output.finish_reason is not None:
            unfinished.discard(output.index)
            if not unfinished:
                del self._subscribers[output.request_id]
        try:
            deliver(output)
        except Exception:
            # The caller is gone, for instance with its event loop: nobody reads what is still to come.
            logger.exception("the output of request %s could not be delivered", output.request_id)
            self._subscribers.pop(output.request_id, None)
            self._engine.abort(output.request_id)

    def _end(self, crash: EngineCrash) -> None:
        with self._lock:
            self._crash = crash
        for deliver, _ in self._subscribers.values():
            try:
                deliver(crash)
            except Exception:
                logger.exception("the end of the engine could not be delivered")
        self._subscribers.clear()
        self._receive(wait=False)  # what was posted before _crash was set is answered with it
        self._engine.close()
