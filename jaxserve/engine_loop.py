"""The engine's loop behind a ZMQ socket: messages in, one OutputBatch per step out. No jax."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
import zmq

from jaxserve.encoder_engine import EncoderEngine
from jaxserve.engine import Engine, EngineCrash
from jaxserve.messages import (
    FINISH_ERROR,
    CacheEvents,
    EngineFailed,
    EngineReady,
    FromEngine,
    Heartbeat,
    OutputBatch,
    RequestOutput,
    decode_to_engine,
    encode,
)

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5  # half of what is promised
_MAX_MESSAGES = 512  # taken between two steps, so that a flood of requests cannot starve those that run
_STALL_REST_MS = 5


class EngineLoop:
    """run() serves until shutdown (a Shutdown message or stop()) or a crash.

    Without work it waits in poll() and uses no processor time, but for a heartbeat every half second.
    """

    def __init__(self, engine: Engine | EncoderEngine, socket: zmq.Socket) -> None:
        self._engine = engine
        self._socket = socket
        self._drain_s: float | None = None
        self._next_heartbeat = 0.0

    def stop(self, drain_s: float) -> None:
        """Ask for a shutdown; may be called by a signal handler, between any two instructions of run()."""
        self._drain_s = drain_s

    def run(self) -> bool:
        """Serve. True after a shutdown; False after a crash, which has been reported with EngineFailed."""
        engine = self._engine
        self._send(EngineReady(engine.model))
        try:
            while not engine.is_drained:
                self._receive()
                outputs = engine.step()
                if outputs:
                    self._send(OutputBatch(outputs))
                self._tell_pages()
                self._beat()
        except EngineCrash as crash:
            self._send(EngineFailed(str(crash)))
            return False
        except Exception as error:
            logger.exception("the engine's loop ended")
            self._send(EngineFailed(f"{type(error).__name__}: {error}"))
            return False
        self._send(Heartbeat(engine.stats()))
        return True

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def _tell_pages(self) -> None:
        if self._engine.page_events is not None:
            stored, evicted = self._engine.page_events.take()
            if stored or evicted:
                self._send(CacheEvents(stored, evicted))

    def _apply_stop(self) -> None:
        if self._drain_s is not None:
            self._engine.shutdown(self._drain_s)
            self._drain_s = None

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._send(Heartbeat(self._engine.stats()))
            self._next_heartbeat = now + HEARTBEAT_S

    def _receive(self) -> None:
        engine = self._engine
        if not engine.has_work:
            rest = max(0.0, self._next_heartbeat - time.monotonic())
            self._socket.poll(int(rest * 1000) + 1)
        elif engine.is_stalled:
            self._socket.poll(_STALL_REST_MS)
        self._apply_stop()
        for _ in range(_MAX_MESSAGES):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_to_engine(data)
            except (msgspec.DecodeError, ValueError, TypeError) as error:
                self._answer_malformed(data, error)
                continue
            engine.handle(message)

    def _answer_malformed(self, data: bytes, error: Exception) -> None:
        """Log and drop; if a request's id can still be read, end it, or its client waits forever."""
        logger.error("a message of %d bytes was dropped: %s", len(data), error)
        try:
            fields: Any = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, ValueError):
            return
        if isinstance(fields, dict) and fields.get("type") in ("AddRequest", "AddEmbedding"):
            request_id = fields.get("request_id")
            if isinstance(request_id, str):
                refusal = RequestOutput(request_id=request_id, finish_reason=FINISH_ERROR, error=str(error))
                self._send(OutputBatch([refusal]))
