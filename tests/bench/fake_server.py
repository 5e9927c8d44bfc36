"""A small OpenAI-like completions server in asyncio, for tests of clients: says what the test tells it to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

Answer = Callable[[dict[str, Any]], Iterator[bytes | float]]  # chunks of the body; a float is a pause in seconds


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class FakeServer:
    """answers POSTs with `answer(body)`; `requests` keeps (path, headers, body) of all of them."""

    def __init__(self, answer: Answer, status: int = 200) -> None:
        self.answer, self.status = answer, status
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.running = self.most_running = 0
        self.url = ""

    @asynccontextmanager
    async def serve(self):
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        if method == "GET":
            body = json.dumps({"object": "list", "data": [{"id": "fake", "object": "model"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            self.requests.append((path, headers, body))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            await self._stream(writer, body)
            self.running -= 1
        await writer.drain()
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" % self.status)
        for piece in self.answer(body):
            if isinstance(piece, float):
                await writer.drain()
                await asyncio.sleep(piece)
            else:
                writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
        writer.write(b"0\r\n\r\n")


def tokens(body: dict[str, Any], *, cached: int = 0, pause: float = 0.0) -> Iterator[bytes | float]:
    """max_tokens tokens, one event each, their ids counting up from the length of the prompt; then usage."""
    first = len(body["prompt"])
    for i in range(body["max_tokens"]):
        yield event(choices=[{"index": 0, "text": "x", "token_ids": [first + i], "finish_reason": None}])
        if pause:
            yield pause
    yield event(choices=[{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}])
    usage = {"prompt_tokens": first, "completion_tokens": body["max_tokens"]}
    yield event(choices=[], usage=usage | {"prompt_tokens_details": {"cached_tokens": cached}})
    yield b"data: [DONE]\n\n"
