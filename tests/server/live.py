"""Servers for tests: in a thread (one per set of settings), or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import uvloop
from jaxserve.server.app import build_app
from jaxserve.server.http_protocol import bounded
from jaxserve.server.settings import ServerSettings

from jaxserve.config import EngineConfig

HERE = Path(__file__).parent
MODEL = "toy-model"


def engine_command(tokenizer: Path, **options: Any) -> tuple[str, ...]:
    """Command of the fake engine; options are its flags."""
    flags = [f"--{name}={value}" for name, value in options.items()]
    return (sys.executable, str(HERE / "fake_engine.py"), f"--tokenizer={tokenizer}", *flags)


class Live:
    """A running server and a client for it."""

    def __init__(self, url: str, state: Any = None) -> None:
        self.url = url
        self.state = state  # the Server object, if it runs in this process
        self.http = httpx.Client(base_url=url, timeout=30)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def raw(self, path: str, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.http.post(path, content=content, headers={"Content-Type": "application/json", **(headers or {})})

    def complete(self, **fields: Any) -> dict[str, Any]:
        return ok(self.post("/v1/completions", fields))

    def chat(self, **fields: Any) -> dict[str, Any]:
        fields.setdefault("messages", [{"role": "user", "content": "Say hello"}])
        return ok(self.post("/v1/chat/completions", fields))

    def chat_response(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say hello"}], **fields})

    def stream(self, path: str, **fields: Any) -> Events:
        with self.http.stream("POST", path, json={**fields, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
                raise AssertionError(f"{response.status_code}: {response.text}")
            assert response.headers["content-type"].startswith("text/event-stream")
            return Events(b"".join(response.iter_bytes()))

    def stream_completion(self, **fields: Any) -> Events:
        return self.stream("/v1/completions", **fields)

    def stream_chat(self, **fields: Any) -> Events:
        fields.setdefault("messages", [{"role": "user", "content": "Say hello"}])
        return self.stream("/v1/chat/completions", **fields)

    def wait_ready(self, timeout_s: float = 20.0) -> Live:
        wait_for(lambda: self.http.get("/ready").status_code == 200, timeout_s)
        return self

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.http.get("/metrics").text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " "))]
        assert values, name
        return sum(values)


def ok(response: httpx.Response, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, f"{response.status_code}: {response.text}"
    return strict(response.text)


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal."""
    assert response.status_code == status, f"{response.status_code}: {response.text}"
    error = strict(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "Traceback" not in error["message"]
    return error


def strict(text: str) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


@dataclasses.dataclass
class Events:
    """The events of one stream."""

    raw: bytes

    def __post_init__(self) -> None:
        blocks = self.raw.decode("utf-8").split("\n\n")
        assert blocks.pop() == "", "the stream ends in the middle of an event"
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        payloads = [block.removeprefix("data: ") for block in blocks]
        self.is_done = bool(payloads) and payloads[-1] == "[DONE]"
        self.chunks = [strict(payload) for payload in (payloads[:-1] if self.is_done else payloads)]

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [c for chunk in self.chunks for c in chunk.get("choices", ()) if c["index"] == index]

    def text(self, index: int = 0) -> str:
        choices = self.choices(index)
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    def finish(self, index: int = 0) -> list[str]:
        return [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]

    def usages(self) -> list[dict[str, Any]]:
        return [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]


def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    """Poll until it holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(settings: ServerSettings, **config: Any) -> Iterator[Live]:
    """The application in a thread of this process, on a free port. Not yet ready when it is yielded."""
    app = build_app(EngineConfig(model=MODEL, **config), settings)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            log_config=None,
            ws="none",
            lifespan="on",
            http=bounded(
                write_timeout_s=settings.write_timeout_s,
                max_connections=settings.max_connections,
                header_timeout_s=settings.header_timeout_s,
            ),
        )
    )

    def run() -> None:
        with contextlib.closing(uvloop.new_event_loop()) as loop:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(server._serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        live = Live(f"http://127.0.0.1:{port}", app.state.server)
        with live.http:
            yield live
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def server_process(settings: dict[str, Any], **config: Any) -> Iterator[tuple[subprocess.Popen[str], Live]]:
    """run_server() in a process; yields it and a client (the process may have ended already)."""
    arguments = json.dumps({"settings": {"port": 0, **settings}, "config": {"model": MODEL, **config}})
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "serve.py"), arguments],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if " on http" in line:
                url = line.split(" on ")[1].split()[0]
                break
        with Live(url or "http://127.0.0.1:9").http as http:
            live = Live.__new__(Live)
            live.url, live.state, live.http = url, None, http
            yield process, live
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
