"""Server-sent events: chunks made by hand from prepared pieces, one write per stream and step.

A stream costs a wake-up, a few encoded strings and one send for each step; sixteen or sixty-four of them share two
cores with the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from jaxserve.server.engine_client import ClientLeft, Submission
from jaxserve.server.errors import ApiError, from_output, internal_error
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.messages import FINISH_ABORT, FINISH_ERROR, RequestOutput

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class ChunkWriter(Protocol):
    """Makes the events of one stream."""

    def write(self, outputs: list[RequestOutput]) -> bytes:
        """Events of these outputs; may be empty."""
        ...

    def end(self) -> bytes:
        """What follows the last output, [DONE] included."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """The last event of a stream that broke."""
        ...


class Watch:
    """Notices that the client has gone, while its request is being answered.

    Reading from the connection is the only way to learn of it, streamed or not. `async with Watch(...)` watches
    until the block is left; hand_over() lets somebody else end it.
    """

    def __init__(self, receive: Receive, on_leave: Callable[[], None]) -> None:
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._wait(receive, on_leave))

    @staticmethod
    async def _wait(receive: Receive, on_leave: Callable[[], None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_leave()

    def hand_over(self) -> Watch:
        other = Watch.__new__(Watch)
        other._task, self._task = self._task, None
        return other

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.stop()


class EventStream(Response):
    """The answer to a streamed request whose first outputs have come (so that errors before them are HTTP errors).

    An error later on is an event of its own, after which the stream ends without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        submission: Submission,
        first: list[RequestOutput],
        writer: ChunkWriter,
        watch: Watch,
        *,
        write_timeout_s: float,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._submission = submission
        self._first = first
        self._writer = writer
        self._watch = watch
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stalls = _StallWatch(self._write_timeout_s)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_events(send, stalls)
        except ClientLeft:
            pass
        except asyncio.CancelledError:
            if not stalls.has_fired:
                raise
            # Returning without the end of the body makes the server drop the connection.
            logger.warning("a client left its stream unread for %g s and is dropped", self._write_timeout_s)
        finally:
            stalls.stop()
            self._watch.stop()
            self._submission.abort()

    async def _send_events(self, send: Send, stalls: _StallWatch) -> None:
        submission, writer = self._submission, self._writer
        outputs = self._first
        while True:
            data = b""
            error = first_error(outputs)
            if error is not None:
                outputs = [output for output in outputs if output.finish_reason not in (FINISH_ABORT, FINISH_ERROR)]
            try:
                data = writer.write(outputs)
            except Exception:
                logger.exception("a stream's events could not be made")
                error = internal_error()
            is_last = error is not None or submission.is_done
            if error is not None:
                data += writer.fail(error)
            elif is_last:
                data += writer.end()
            if data:
                await stalls.write(send, data, more=not is_last)
            if is_last:
                return
            try:
                outputs = await submission.next()
            except ApiError as fault:
                await stalls.write(send, writer.fail(fault), more=False)
                return


class _StallWatch:
    """Cancels the task that made it when one of its writes waits too long for the client to read.

    Looks now and then instead of setting a timer for every write: that would cost a fifth of a chunk.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._task = asyncio.current_task()
        self._writing_since: float | None = None
        self.has_fired = False
        self._timer = asyncio.get_running_loop().call_later(timeout_s / 2, self._look)

    async def write(self, send: Send, data: bytes, *, more: bool) -> None:
        self._writing_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing_since = None

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        since = self._writing_since
        if since is not None and time.monotonic() - since >= self._timeout_s:
            self.has_fired = True
            if self._task is not None:
                self._task.cancel()
            return
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s / 2, self._look)


def first_error(outputs: list[RequestOutput]) -> ApiError | None:
    """The error of the first output that ended badly."""
    for output in outputs:
        if output.finish_reason is not None:
            error = from_output(output)
            if error is not None:
                if error.status == 500:
                    logger.error("request %s failed in the engine: %s", output.request_id, output.error)
                return error
    return None


async def gather(submission: Submission) -> list[RequestOutput]:
    """All outputs of a request that is not streamed. Raises ApiError or ClientLeft; then nothing keeps running."""
    outputs: list[RequestOutput] = []
    try:
        while not submission.is_done:
            outputs += await submission.next()
            error = first_error(outputs)
            if error is not None:
                raise error
    except BaseException:
        submission.abort()
        raise
    return outputs


def chunk_head(response_id: str, kind: str, created: int, model: str) -> bytes:
    """The start of every chunk of one stream, up to the first choice's index."""
    fields: dict[str, Any] = {"id": response_id, "object": kind, "created": created, "model": model}
    return b"data: " + _encode(fields)[:-1] + b',"choices":[{"index":'


def usage_chunk(head: bytes, usage: dict[str, Any]) -> bytes:
    """A chunk with the usage and no choices."""
    return head.removesuffix(b'{"index":') + b'],"usage":' + _encode(usage) + b"}\n\n"
