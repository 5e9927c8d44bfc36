"""Fake workers and a router over them, all on one loop in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import uvicorn
from fake_worker import FakeWorker
from jaxserve.server.router.app import RouterApp, uvicorn_config
from jaxserve.server.router.settings import RouterSettings

ADMIN = {"Authorization": "Bearer admin-secret"}


class Cluster:
    """Workers, and a router in front of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.workers: list[FakeWorker] = []
        self.app: RouterApp | None = None
        self.http = httpx.Client()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def start_workers(self, count: int) -> list[FakeWorker]:
        for number in range(count):
            worker = FakeWorker(f"w{number}")
            self.run(worker.start())
            self.workers.append(worker)
        return self.workers

    @contextlib.contextmanager
    def router(self, *, wait: bool = True, **options: Any) -> Iterator[Cluster]:
        options = {"probe_interval_s": 0.05, "admin_key": "admin-secret", "queue_timeout_s": 5.0, **options}
        options.setdefault("workers", tuple(worker.url for worker in self.workers))
        self.app = RouterApp(RouterSettings(**options))
        server = uvicorn.Server(uvicorn_config(self.app))
        server.config.host, server.config.port = "127.0.0.1", 0
        serving = asyncio.run_coroutine_threadsafe(server._serve(), self.loop)
        wait_for(lambda: server.started)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        self.http = httpx.Client(base_url=url, timeout=20)
        try:
            if wait:
                ready = len(options["workers"])
                wait_for(lambda: len(self.app.fleet.loads) == ready)
            yield self
        finally:
            self.http.close()
            server.should_exit = True
            serving.result(20)

    def post(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", None)
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields}, headers=headers)

    def stream(self, prompt: Any = "hello", **fields: Any) -> list[Any]:
        """The events of a stream; "[DONE]" as it is."""
        with self.http.stream("POST", "/v1/completions", json={"prompt": prompt, "stream": True, **fields}) as answer:
            assert answer.status_code == 200, answer.read()
            text = b"".join(answer.iter_bytes()).decode()
        events = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        lines = self.http.get("/metrics").text.splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert found, name
        return sum(float(line.rpartition(" ")[2]) for line in found if all(label in line for label in wanted))

    def state(self, worker: FakeWorker) -> str:
        listed = self.http.get("/workers", headers=ADMIN).json()["workers"]
        return {entry["url"]: entry["state"] for entry in listed}[worker.url]


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
