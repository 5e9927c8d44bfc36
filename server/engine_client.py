"""asyncio to engine process: requests out, outputs back to whoever waits for them.

One callback reads all that has arrived (one OutputBatch per step, however many streams there are) and hands each
output to its Submission. Everything here runs on the event loop's thread; nothing blocks.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
from jaxserve.server.cached_pages import CachedPages
from jaxserve.server.errors import ApiError, unavailable

from jaxserve.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    AbortRequest,
    AddEmbedding,
    AddRequest,
    CacheEvents,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    Heartbeat,
    ModelInfo,
    OutputBatch,
    RequestOutput,
    decode_from_engine,
    encode,
    num_outputs,
)
from jaxserve.metrics import EngineMetrics

logger = logging.getLogger(__name__)

_MAX_METRICS_WAIT_S = 1.0  # heartbeats come at least once a second
_METRICS_POLL_S = 0.02


class EngineState(enum.Enum):
    STARTING = "starting"  # the first engine loads, compiles, or its tokenizer is being loaded
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"  # the server shuts down: what is in flight is finished
    FAILED = "failed"  # given up


class ClientLeft(Exception):
    """The HTTP client has gone; nobody waits for the answer."""


class EngineLink:
    """The socket to one engine, read without a task: callbacks of the event loop take what is there.

    ZMQ's file descriptor tells changes, not states, and sending may swallow a change: after every read and every
    send the socket itself is asked whether something is left.
    """

    def __init__(self, socket: zmq.Socket, on_message: Callable[[FromEngine], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._loop.add_reader(socket.getsockopt(zmq.FD), self._read)
        self._loop.call_soon(self._read)

    def send(self, data: bytes) -> None:
        """Raises zmq.Again if no engine has connected yet (or its process is gone)."""
        self._socket.send(data, zmq.NOBLOCK)
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def drain(self) -> None:
        """Take what the engine had sent before it ended."""
        self._read()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
            self._socket.close(linger=0)

    def _read(self) -> None:
        while not self._is_closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_from_engine(data)
            except ValueError:
                logger.exception("a message of %d bytes from the engine cannot be read", len(data))
                continue
            self._on_message(message)


class Submission:
    """The prompts of one HTTP request in the engine. One task waits on it.

    prompt_of[request_id] is the prompt's place in the request; is_done: every continuation has had its last output;
    names: (tenant, id) by which its client may abort it.
    """

    __slots__ = (
        "_client", "_clocks", "_error", "_left", "_num_open", "_outputs", "_waiter", "arrival", "first_output", "names",
        "num_output_tokens", "num_prompt_tokens", "prompt_of",
    )  # fmt: skip

    def __init__(self, client: EngineClient, prompt_of: dict[str, int], num_continuations: int) -> None:
        self._client = client
        self.names: frozenset[tuple[str, str]] = frozenset()
        self.prompt_of = prompt_of
        self.arrival = time.monotonic()
        self.first_output: float | None = None
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._clocks: dict[tuple[str, int], _Clock] = {}  # of each continuation
        self._num_open = num_continuations
        self._outputs: list[RequestOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: ApiError | None = None
        self._left = False

    @property
    def is_done(self) -> bool:
        return not self._num_open and not self._outputs

    async def next(self) -> list[RequestOutput]:
        """All outputs that have come since the last call, at least one. Raises ApiError if the engine is lost,
        ClientLeft after leave()."""
        while not self._outputs:
            if self._left:
                raise ClientLeft
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        return outputs

    def deliver(self, output: RequestOutput) -> None:
        now = time.monotonic()
        if self.first_output is None:
            self.first_output = now
            if output.embedding is None:
                self._client.metrics.observe_first_token(now - self.arrival)
        self.num_output_tokens += len(output.token_ids)
        if output.embedding is None:
            self._observe(output, now)
        if output.finish_reason is not None:
            self._num_open -= 1
        self._outputs.append(output)
        self._wake()

    def _observe(self, output: RequestOutput, now: float) -> None:
        key = (output.request_id, output.index)
        clock = self._clocks.get(key)
        if clock is None:
            clock = self._clocks[key] = _Clock(now, output.queue_seconds)
        elif output.token_ids:
            self._client.metrics.observe_gap((now - clock.last) / len(output.token_ids))
        clock.last = now
        if output.finish_reason is None:
            return
        del self._clocks[key]
        if output.finish_reason not in (FINISH_ABORT, FINISH_ERROR):
            self._client.metrics.observe_finished(
                now - self.arrival,
                first_token_seconds=clock.first - self.arrival,
                queue_seconds=clock.queue_seconds,
                num_prompt_tokens=output.num_prompt_tokens,
                num_output_tokens=output.num_output_tokens,
            )

    def fail(self, error: ApiError) -> None:
        """The rest will not come. What has come can still be read."""
        if self._num_open:
            self._error = error
            self._wake()

    def leave(self) -> None:
        """The client has gone: stop the engine's work and wake the waiting task with ClientLeft."""
        self._left = True
        self.abort()
        self._outputs.clear()
        self._wake()

    def cancel(self, error: ApiError) -> None:
        """Stop the engine's work; whoever waits gets `error`."""
        self.fail(error)
        self.abort()

    def abort(self) -> None:
        """Stop what still runs. May be called at any time and more than once."""
        self._client.abort(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """The server's view of the engine, over restarts: its state, what is in flight, and the last heartbeat.

    An entry of `_in_flight` lives until the engine has sent the last output of the request, also after an abort:
    only then may the id be forgotten.
    """

    def __init__(self, metrics: EngineMetrics, *, max_in_flight: int) -> None:
        self.metrics = metrics
        self.cached_pages = CachedPages()
        self.state = EngineState.STARTING
        self.model: ModelInfo | None = None
        self.last_heartbeat = time.monotonic()
        self._max_in_flight = max_in_flight
        self._link: EngineLink | None = None
        self._stats: EngineStats | None = None  # of the last heartbeat
        self._last_output = 0.0
        self._in_flight: dict[str, _Entry] = {}
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self.on_ready: Callable[[ModelInfo], None] = lambda model: None
        self.on_failed: Callable[[str], None] = lambda reason: None

    @property
    def stats(self) -> EngineStats | None:
        """Of the last heartbeat; None while no engine is there."""
        return self._stats

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def latest_stats(self) -> EngineStats:
        """Of the last heartbeat; zeros before the first."""
        return self._stats or EngineStats()

    def attach(self, socket: zmq.Socket) -> EngineLink:
        """Listen to a new engine."""
        self._link = EngineLink(socket, self._take)
        self.last_heartbeat = time.monotonic()
        return self._link

    async def current_metrics(self) -> bytes:
        """Text for Prometheus. The engine's figures are half a second old at worst. What has ended since then is
        known here; and once nothing is left in flight, the heartbeat that counts all of it is waited for."""
        end = time.monotonic() + _MAX_METRICS_WAIT_S
        while self._is_uncounted and time.monotonic() < end:
            await asyncio.sleep(_METRICS_POLL_S)
        stats = self._stats
        if stats is not None:
            num_open = sum(entry.num_open for entry in self._in_flight.values())
            num_running = min(stats.num_running, num_open)
            num_waiting = min(stats.num_waiting, num_open - num_running)
            self.metrics.update(msgspec.structs.replace(stats, num_running=num_running, num_waiting=num_waiting))
        return self.metrics.render()

    @property
    def _is_uncounted(self) -> bool:
        return self.is_attached and not self._in_flight and self._last_output > self.last_heartbeat

    @property
    def is_attached(self) -> bool:
        return self._link is not None

    def detach(self, error: ApiError) -> None:
        """The engine is gone: hand out what it had sent, then end all that was in flight with `error`."""
        if self._link is not None:
            self._link.drain()
            self._link.close()
            self._link = None
        self.fail_all(error)
        self.cached_pages.clear()
        self._stats = None
        if self.state is not EngineState.STOPPING:
            self.metrics.engine_lost()

    def fail_all(self, error: ApiError) -> None:
        """End everything in flight, and tell a living engine."""
        entries = list(self._in_flight.items())
        for request_id, entry in entries:
            self._send_abort(request_id)
            if entry.submission is not None:
                entry.submission.fail(error)
        self._in_flight.clear()

    def check_ready(self) -> ModelInfo:
        """The model. Raises ApiError 503 unless requests can be taken now."""
        match self.state:
            case EngineState.READY if self.model is not None:
                return self.model
            case EngineState.STARTING | EngineState.READY:
                raise unavailable("the model is still being loaded; try again", retry_after=5, code="starting")
            case EngineState.RESTARTING:
                raise unavailable("the engine is being restarted; try again", retry_after=5, code="restarting")
            case EngineState.STOPPING:
                raise unavailable("the server is shutting down", retry_after=10, code="shutting_down")
            case _:
                raise unavailable("the engine has failed and was not restarted", retry_after=60)

    def new_id(self) -> str:
        """An id that no other request of this or an earlier server has: clients' own ids need not be unique."""
        return f"{self._prefix}-{next(self._numbers):x}"

    def submit(
        self, messages: Sequence[AddRequest | AddEmbedding], *, names: frozenset[tuple[str, str]] = frozenset()
    ) -> Submission:
        """Send the prompts of one HTTP request. Raises ApiError 503 if there are too many in flight already, or the
        engine is not there."""
        self.check_ready()
        if len(self._in_flight) + len(messages) > self._max_in_flight:
            raise unavailable(
                f"{len(self._in_flight)} prompts are in flight, at most {self._max_in_flight} are taken",
                code="queue_full",
            )
        prompt_of = {message.request_id: place for place, message in enumerate(messages)}
        submission = Submission(self, prompt_of, sum(map(num_outputs, messages)))
        submission.names = names
        submission.num_prompt_tokens = sum(len(message.prompt) for message in messages)
        try:
            for message in messages:
                self._send(encode(message))
                self._in_flight[message.request_id] = _Entry(submission, num_outputs(message))
        except zmq.ZMQError:
            self.abort(submission)
            raise unavailable("the engine does not answer; try again", retry_after=5) from None
        return submission

    def abort(self, submission: Submission) -> None:
        for request_id in submission.prompt_of:
            entry = self._in_flight.get(request_id)
            if entry is not None and entry.submission is not None:
                entry.submission = None
                self._send_abort(request_id)

    def find(self, tenant: str | None, name: str | None) -> list[Submission]:
        """What is in flight under a name that a client chose or was given; None: of every tenant, under any name."""
        found: dict[int, Submission] = {}
        for entry in self._in_flight.values():
            submission = entry.submission
            if submission is None or not (
                (tenant is None and name is None)
                or any(name in (None, n) and tenant in (None, t) for t, n in submission.names)
            ):
                continue
            found[id(submission)] = submission
        return list(found.values())

    def send(self, data: bytes) -> bool:
        """Send an encoded message. False if no engine listens."""
        try:
            self._send(data)
        except zmq.ZMQError:
            return False
        return True

    def _send(self, data: bytes) -> None:
        if self._link is None:
            raise zmq.Again()
        self._link.send(data)

    def _send_abort(self, request_id: str) -> None:
        # With no engine left there is nothing to abort either.
        self.send(encode(AbortRequest(request_id)))

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, OutputBatch):
            self._last_output = time.monotonic()
            for output in message.outputs:
                self._hand_out(output)
        elif isinstance(message, Heartbeat):
            self.last_heartbeat = time.monotonic()
            self._stats = message.stats
            self.metrics.update(message.stats)
        elif isinstance(message, CacheEvents):
            self.cached_pages.change(message.stored, message.evicted)
        elif isinstance(message, EngineReady):
            self.last_heartbeat = time.monotonic()
            self.on_ready(message.model)
        elif isinstance(message, EngineFailed):
            self.on_failed(message.reason)

    def _hand_out(self, output: RequestOutput) -> None:
        entry = self._in_flight.get(output.request_id)
        if entry is None:
            return
        if output.finish_reason is not None:
            entry.num_open -= 1
            if not entry.num_open:
                del self._in_flight[output.request_id]
        if entry.submission is not None:
            entry.submission.deliver(output)


class _Clock:
    """When a continuation's first and newest output came."""

    __slots__ = ("first", "last", "queue_seconds")

    def __init__(self, now: float, queue_seconds: float | None) -> None:
        self.first = self.last = now
        self.queue_seconds = queue_seconds


class _Entry:
    """Who gets a request's outputs (None: nobody any more), and how many continuations are still to end."""

    __slots__ = ("num_open", "submission")

    def __init__(self, submission: Submission, num_open: int) -> None:
        self.submission: Submission | None = submission
        self.num_open = num_open
