"""`jaxserve run-batch`: a file of requests through the routes of a server that has no port.

The format is that of OpenAI's batch API: lines {"custom_id", "method": "POST", "url", "body"} in, lines {"id",
"custom_id", "response": {"status_code", "request_id", "body"}, "error"} out, in the order of the file. A line that
cannot be read, or whose request is refused, gets its answer like all others; `error` is then not null.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import secrets
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx
from jaxserve.server.app import EXIT_ENGINE, build_app
from jaxserve.server.engine_client import EngineState
from jaxserve.server.generation import Server
from jaxserve.server.settings import ServerSettings

from jaxserve import logs
from jaxserve.config import EngineConfig

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/generate",
    "/v1/score", "/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
_AT_ONCE = 256  # lines in flight: enough for full batches, and a bound on memory
_POLL_S = 0.05
_BASE = "http://127.0.0.1"

Answer = dict[str, Any]


def run_file(config: EngineConfig, settings: ServerSettings, file: Path, output: Path | None) -> int:
    """Answer every line of `file`; returns the exit status: 0, or 1 if the engine could not be started or was lost.

    Raises OSError for files that cannot be opened.
    """
    logs.configure(settings.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would write a line for each request
    with file.open(encoding="utf-8", errors="surrogateescape") as lines, _open(output) as out:
        return asyncio.run(_run(config, settings, lines, out))


@contextlib.contextmanager
def _open(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    with output.open("w", encoding="utf-8") as out:
        yield out


async def _run(config: EngineConfig, settings: ServerSettings, lines: Iterable[str], out: TextIO) -> int:
    app = build_app(config, settings)
    server: Server = app.state.server
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    stop = asyncio.Event()
    with contextlib.suppress(NotImplementedError):  # event loops of Windows take no signal handlers
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url=_BASE, timeout=None) as client,
    ):
        await _wait_ready(server, stop)
        counts = await _answer_all(client, server, lines, out, stop)
    if server.supervisor.failure is not None:
        print(f"jaxserve: {server.supervisor.failure}", file=sys.stderr)
        return EXIT_ENGINE
    print(f"jaxserve: {counts['all']} requests, {counts['failed']} of them failed", file=sys.stderr)
    return 0


async def _wait_ready(server: Server, stop: asyncio.Event) -> None:
    waiting = (EngineState.STARTING, EngineState.RESTARTING)
    while server.client.state in waiting and not stop.is_set():
        await asyncio.sleep(_POLL_S)


async def _answer_all(
    client: httpx.AsyncClient, server: Server, lines: Iterable[str], out: TextIO, stop: asyncio.Event
) -> collections.Counter[str]:
    """Keeps _AT_ONCE lines in flight and writes answers in order."""
    counts: collections.Counter[str] = collections.Counter()
    flying: collections.deque[asyncio.Task[Answer]] = collections.deque()

    async def write_first() -> None:
        answer = await flying.popleft()
        counts["all"] += 1
        counts["failed"] += answer["error"] is not None
        out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        out.flush()

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if stop.is_set() or server.client.state is EngineState.FAILED:
            break
        flying.append(asyncio.create_task(_answer(client, server, stop, number, line)))
        if len(flying) >= _AT_ONCE:
            await write_first()
    while flying:
        await write_first()
    return counts


async def _answer(client: httpx.AsyncClient, server: Server, stop: asyncio.Event, number: int, line: str) -> Answer:
    """The answer to one line. One whose engine was lost meanwhile is asked again when a new one is there."""
    request, fault = _read(line)
    answer: Answer = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": None, "response": None, "error": None}
    answer["custom_id"] = request.get("custom_id")
    if fault is not None:
        answer["error"] = {"code": "invalid_request", "message": f"line {number}: {fault}"}
        return answer
    while True:
        response = await client.post(request["url"], json=request["body"])
        if response.status_code != 503 or stop.is_set() or server.client.state is EngineState.FAILED:
            break
        await asyncio.sleep(_POLL_S)
        await _wait_ready(server, stop)
    body = response.json()
    answer["response"] = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id"),
        "body": body,
    }
    if response.status_code != 200:
        error = body.get("error", {})
        code = error.get("code") or error.get("type") or "error"
        answer["error"] = {"code": code, "message": error.get("message", "")}
    return answer


def _read(line: str) -> tuple[dict[str, Any], str | None]:
    """(the request, what is wrong with it or None)."""
    try:
        line.encode()
        request = json.loads(line)
    except (ValueError, RecursionError):
        return {}, "this is no JSON"
    if not isinstance(request, dict):
        return {}, "this is no JSON object"
    if not isinstance(request.get("custom_id"), str):
        return {}, "custom_id: missing; it is required"
    try:
        request["custom_id"].encode()
    except UnicodeEncodeError:
        return {}, "custom_id: holds half of a surrogate pair, which is no character"
    known = {"custom_id": request["custom_id"]}
    if request.get("method", "POST") != "POST":
        return known, f"method: got {request['method']!r}; allowed: 'POST'"
    if request.get("url") not in URLS:
        return known, f"url: got {str(request.get('url'))[:100]!r}; allowed: {', '.join(URLS)}"
    body = request.get("body")
    if not isinstance(body, dict):
        return known, "body: missing; an object is required"
    for name in ("stream", "background"):
        if body.get(name):
            return known, f"body.{name}: not available in a batch"
    unknown = request.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        return known, f"{sorted(unknown)[0]}: unknown field"
    return request, None
