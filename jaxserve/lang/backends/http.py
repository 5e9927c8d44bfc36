"""HTTP requests that answer by a callback: one thread with an event loop for all backends. No jax."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_LIMITS = httpx.Limits(max_connections=256)


class ServerError(RuntimeError):
    """A server refused a request or failed. status: of HTTP; message: the server's own words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.status = status


class HttpClient:
    """base_url with or without a trailing slash. Sends api_key as a bearer token."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client: httpx.AsyncClient | None = None
        self._blocking = httpx.Client(timeout=_TIMEOUT, headers=self._headers)

    def start(self, work: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
        """Run a coroutine in the loop's thread; done(its result or its exception)."""

        async def run() -> None:
            try:
                result = await work
            except Exception as error:
                result = error
            done(result)

        asyncio.run_coroutine_threadsafe(run(), _loop())

    def get_now(self, path: str) -> Any:
        """GET, waiting for it."""
        return _checked(self._blocking.get(self.base_url + path))

    def post_now(self, path: str, body: dict[str, Any]) -> Any:
        """POST, waiting for it."""
        return _checked(self._blocking.post(self.base_url + path, json=body))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """In the loop's thread. Raises ServerError, or what httpx raises if nobody answers."""
        return _checked(await self._async_client().post(self.base_url + path, json=body))

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The events of a stream, up to [DONE]."""
        async with self._async_client().stream("POST", self.base_url + path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                _checked(response)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict) and "error" in event:
                    raise ServerError(200, _message(event))
                yield event

    def _async_client(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=_LIMITS, headers=self._headers)
        return self._client


def _checked(response: httpx.Response) -> Any:
    try:
        body = response.json()
    except json.JSONDecodeError:
        body = response.text
    if response.status_code != 200:
        raise ServerError(response.status_code, _message(body))
    return body


def _message(body: Any) -> str:
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            return str(error.get("message", error))
        return str(error)
    return str(body)[:300]


_lock = threading.Lock()
_running: asyncio.AbstractEventLoop | None = None


def _loop() -> asyncio.AbstractEventLoop:
    global _running
    with _lock:
        if _running is None:
            _running = asyncio.new_event_loop()
            threading.Thread(target=_running.run_forever, name="jaxserve-lang-http", daemon=True).start()
        return _running
