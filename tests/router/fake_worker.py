"""A worker that does as it is told, byte by byte: raw asyncio, so that it can also break HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import uvloop


class FakeWorker:
    """behaviour: what happens to POSTs: "ok", "503", "refuse" (closes at once), "cut" (closes in the middle of a
    stream), "cut_whole" (closes in the middle of a plain answer), "hang", "queue_full".

    requests: (headers, body) of every POST. responses: ids of those that it has stored.
    num_chunks, gap_s: shape of a stream.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviour = "ok"
        self.is_ready = True
        self.num_chunks, self.gap_s, self.delay_s = 3, 0.0, 0.0
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.responses: set[str] = set()
        self.asked: list[str] = []  # method and path of what was about one of its responses, or should have been
        self.num_left = 0  # clients that went before the end
        self.metrics = ""
        self.events: list[dict[str, Any]] = []  # of /kv_events
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As if the process had died: no more connections, all open ones cut."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = head[0].split(" ")
                await self._answer(method, path, headers, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            self.num_left += 1
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if path.startswith("/v1/responses/") and path != "/v1/responses/input_tokens":
            self.asked.append(f"{method} {path}")
            has_it = path.split("/")[3] in self.responses
            self._whole(writer, 200 if has_it else 404, {"worker": self.name, "path": path})
            return
        if method == "GET":
            if path == "/ready":
                self._whole(writer, 200 if self.is_ready else 503, {"status": "ready"})
            elif path == "/kv_events":
                await self._tell(writer)
            elif path == "/metrics":
                self._write(writer, 200, self.metrics.encode(), "text/plain")
            else:
                self._whole(writer, 200, {"path": path, "worker": self.name})
            return
        request = json.loads(body)
        self.requests.append((headers, request))
        await asyncio.sleep(self.delay_s)
        match self.behaviour:
            case "503" | "queue_full":
                code = "queue_full" if self.behaviour == "queue_full" else "restarting"
                self._whole(writer, 503, {"error": {"message": "not now", "code": code}})
            case "500":
                self._whole(writer, 500, {"error": {"message": "a defect", "code": None}})
            case "refuse":
                raise ConnectionResetError
            case "hang":
                await asyncio.sleep(3600)
            case "cut_whole":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
                await writer.drain()
                await asyncio.sleep(0.05)
                raise ConnectionResetError
            case _ if path == "/v1/responses":
                await self._respond(request, writer)
            case _ if request.get("stream"):
                await self._stream(writer)
            case _:
                self._whole(writer, 200, {"worker": self.name, "number": len(self.requests)})

    async def _respond(self, request: Any, writer: asyncio.StreamWriter) -> None:
        earlier = request.get("previous_response_id")
        if earlier is not None and earlier not in self.responses:
            self._whole(writer, 404, {"error": {"message": "there is no such response", "code": "response_not_found"}})
            return
        name = f"resp_{self.name}x{len(self.requests)}"
        self.responses.add(name)
        if not request.get("stream"):
            self._whole(writer, 200, {"id": name, "object": "response", "worker": self.name})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        event = json.dumps({"type": "response.created", "response": {"id": name, "object": "response"}}).encode()
        for piece in (b"event: response.created\ndata: " + event[:50], event[50:] + b"\n\n", b"data: [DONE]\n\n", b""):
            self._chunk(writer, piece)
            await writer.drain()
            await asyncio.sleep(self.gap_s)

    async def _tell(self, writer: asyncio.StreamWriter) -> None:
        """KV events: what stands in `events`, then what is added to it."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        place = 0
        while True:
            for event in self.events[place:]:
                self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            place = len(self.events)
            await writer.drain()
            await asyncio.sleep(0.02)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for number in range(self.num_chunks):
            self._chunk(writer, b'data: {"worker":"%s","n":%d}\n\n' % (self.name.encode(), number))
            await writer.drain()
            if self.behaviour == "cut" and number == 1:
                await asyncio.sleep(0.05)
                raise ConnectionResetError
            await asyncio.sleep(self.gap_s)
        self._chunk(writer, b"data: [DONE]\n\n")
        self._chunk(writer, b"")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, writer: asyncio.StreamWriter, status: int, document: Any) -> None:
        self._write(writer, status, json.dumps(document).encode(), "application/json")

    def _write(self, writer: asyncio.StreamWriter, status: int, body: bytes, kind: str) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)


@contextlib.contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread, for whatever a test starts beside itself."""
    loop = uvloop.new_event_loop()  # the router's own, in a process of its own
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
