"""Any OpenAI-compatible server as a target of load. No jax.

One asyncio stream per request and typed JSON decoding: on a machine that also runs the server the client must cost
little, and a general HTTP client costs more per streamed token than the differences that are to be seen.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from jaxserve.bench.load import RequestRecord

MAX_LINE_BYTES = 1 << 24


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


_encode = msgspec.json.Encoder().encode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_models = msgspec.json.Decoder(_ModelList).decode


class HttpError(ConnectionError):
    """The server answered with an error, or not at all."""


class HttpTarget:
    """`url` is a server's root or its /v1. Raises ValueError for anything but http and https.

    use_extensions   send ignore_eos (every answer has exactly the length asked for) and return_token_ids (the
                     next turn of a chat contains the true answer). Servers that know OpenAI's fields only refuse
                     them: turn it off there
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        temperature: float = 0.0,
        use_extensions: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: got {url!r}; allowed: http://HOST[:PORT][/v1] or https://...")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._netloc = parts.hostname, parts.netloc.rpartition("@")[2]
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._api_key = api_key
        self._fields: dict[str, Any] = {"model": model, "temperature": temperature, "stream": True}
        self._fields["stream_options"] = {"include_usage": True}
        if use_extensions:
            self._fields.update(ignore_eos=True, return_token_ids=True)
        self._timeout_s = timeout_s

    @property
    def model(self) -> str | None:
        return self._fields["model"]

    async def connect(self) -> None:
        """Ask which model is served, unless one was named. Raises HttpError if nobody answers."""
        cards = _decode_models(await self.get("/models")).data
        if not cards:
            raise HttpError(f"{self.url}{self._base}/models lists no model")
        if self._fields["model"] is None:
            self._fields["model"] = cards[0].id

    async def get(self, path: str, *, is_absolute: bool = False) -> bytes:
        """The body of a GET below /v1 (is_absolute: below the root). Raises HttpError unless the status is 200."""
        reader, writer = await self._open()
        try:
            writer.write(self._head("GET", path if is_absolute else self._base + path, 0))
            await writer.drain()
            status, headers = await _read_head(reader)
            body = b"\n".join([line async for line in _lines(reader, headers)])
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise HttpError(f"{self.url}{path}: {error}") from error
        finally:
            writer.close()
        if status != 200:
            raise HttpError(f"{self.url}{path}: status {status}: {body[:300].decode(errors='replace')}")
        return body

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> RequestRecord:
        body = _encode(self._fields | {"prompt": list(prompt), "max_tokens": max_tokens})
        record = RequestRecord(num_prompt_tokens=len(prompt), start=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, record)
        except TimeoutError:
            record.error = f"no complete answer within {self._timeout_s:g} s"
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.end = time.perf_counter()
        if record.error is None and not record.times:
            record.error = "the answer held no token"
        return record

    async def _stream(self, body: bytes, record: RequestRecord) -> None:
        reader, writer = await self._open()
        try:
            writer.write(self._head("POST", self._base + "/completions", len(body)) + body)
            await writer.drain()
            status, headers = await _read_head(reader)
            if status != 200:
                text = b"\n".join([line async for line in _lines(reader, headers)])
                record.error = f"status {status}: {text[:300].decode(errors='replace')}"
                return
            is_done = False
            async for line in _lines(reader, headers):
                if line.startswith(b"data:"):
                    payload = line[5:].strip()
                    if payload == b"[DONE]":
                        is_done = True
                        break
                    _take_chunk(_decode_chunk(payload), time.perf_counter(), record)
            if not is_done and record.error is None:
                record.error = "the stream ended without [DONE]"
        finally:
            writer.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=MAX_LINE_BYTES)
        except OSError as error:
            raise HttpError(f"nobody answers at {self.url}: {error}") from error

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._netloc}", "Connection: close", "Accept: */*"]
        if length:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        if self._api_key:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _take_chunk(chunk: _Chunk, now: float, record: RequestRecord) -> None:
    if chunk.error is not None:
        record.error = str(chunk.error)
    for choice in chunk.choices:
        # A last chunk that carries the finish reason alone brings no token.
        count = len(choice.token_ids) if choice.token_ids is not None else int(bool(choice.text))
        if choice.token_ids is None and not choice.text and choice.finish_reason is None:
            count = 1  # a token whose characters are still being held back
        if count:
            record.times.append(now)
            record.counts.append(count)
            record.num_output_tokens += count
            record.token_ids.extend(choice.token_ids or ())
    if chunk.usage is not None:
        record.num_output_tokens = chunk.usage.completion_tokens or record.num_output_tokens
        record.num_prompt_tokens = chunk.usage.prompt_tokens or record.num_prompt_tokens
        details = chunk.usage.prompt_tokens_details
        record.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in head[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(head[0].split(" ", 2)[1]), headers


async def _lines(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Lines of a body without their line ends, whichever way its length is told."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        rest = b""
        while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
            rest += await reader.readexactly(size)
            await reader.readexactly(2)
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if rest:
            yield rest
        return
    length = headers.get("content-length")
    body = await reader.readexactly(int(length)) if length is not None else None
    if body is not None:
        for line in body.split(b"\n"):
            yield line.rstrip(b"\r")
        return
    while line := await reader.readline():
        yield line.rstrip(b"\r\n")
