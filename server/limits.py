"""Who may ask how often, and under which host names: middlewares that answer before anything else is done."""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Iterable
from typing import Any

from jaxserve.server.auth import OPEN_PATHS, send_error
from jaxserve.server.errors import RATE_LIMITED, ApiError
from jaxserve.server.generation import TENANT
from starlette.types import ASGIApp, Receive, Scope, Send

# What web pages of allowed origins may do and read; for CORSMiddleware.
CORS_OPTIONS: dict[str, Any] = {
    "allow_methods": ("GET", "POST", "DELETE"),
    "allow_headers": ("*",),
    "expose_headers": ("X-Request-Id", "Retry-After"),
}

_MAX_CALLERS = 10_000  # buckets kept; those that are full again are forgotten first


class RateLimits:
    """ASGI middleware behind the keys: each key, or each address where there are none, has its own allowance.

    per_minute   requests: a bucket that holds as many and is filled evenly; 0: no limit
    at_once      requests that are being answered; 0: no limit
    More are answered with 429 and Retry-After. Open paths are not counted.
    """

    def __init__(self, app: ASGIApp, *, per_minute: int, at_once: int) -> None:
        self._app = app
        self._per_minute = per_minute
        self._at_once = at_once
        self._buckets: dict[str, tuple[float, float]] = {}  # requests left, when that was so
        self._running: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        caller = _caller(scope)
        error = self._take(caller)
        if error is not None:
            await send_error(error, scope["path"], send)
            return
        self._running[caller] = self._running.get(caller, 0) + 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]

    def _take(self, caller: str) -> ApiError | None:
        if self._at_once and self._running.get(caller, 0) >= self._at_once:
            return _too_many(f"{self._at_once} requests at once are allowed", 1)
        if not self._per_minute:
            return None
        now, rate = time.monotonic(), self._per_minute / 60
        left, since = self._buckets.get(caller, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - since) * rate)
        if left < 1:
            self._buckets[caller] = (left, now)
            return _too_many(f"{self._per_minute} requests a minute are allowed", math.ceil((1 - left) / rate))
        if caller not in self._buckets and len(self._buckets) >= _MAX_CALLERS:
            self._forget(now, rate)
        self._buckets[caller] = (left - 1, now)
        return None

    def _forget(self, now: float, rate: float) -> None:
        full = [c for c, (left, since) in self._buckets.items() if left + (now - since) * rate >= self._per_minute]
        for caller in full or list(self._buckets)[: _MAX_CALLERS // 2]:
            del self._buckets[caller]


class HostRules:
    """ASGI middleware: only requests for these host names are answered.

    A web page that makes a browser ask a local server under the page's own name (DNS rebinding) is refused with it.
    hosts   names or addresses, without port; *.example.org stands for all names below it
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._exact = {host.lower() for host in hosts if not host.startswith("*.")}
        self._below = tuple(host[1:].lower() for host in hosts if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._knows(_host(scope)):
            text = "Host: this server does not answer under that name; an operator can allow it"
            await send_error(ApiError(421, text, param="Host", code="unknown_host"), scope["path"], send)
            return
        await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        return host in self._exact or host.endswith(self._below)


def hosts_of(address: str, allowed: tuple[str, ...], *, has_keys: bool) -> tuple[str, ...]:
    """The host names of a server that listens on `address`. Empty: every name.

    Without keys a server on a loopback address answers under loopback names only, unless others are allowed.
    """
    if allowed:
        return () if "*" in allowed else (*allowed, "localhost", "127.0.0.1", "::1")
    return () if has_keys or not _is_loopback(address) else ("localhost", "127.0.0.1", "::1", address.lower())


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def _host(scope: Scope) -> str:
    values = [value for name, value in scope["headers"] if name == b"host"]
    host = values[0].decode("latin-1").lower() if len(values) == 1 else ""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and ":" in host else host


def _caller(scope: Scope) -> str:
    tenant = scope.get(TENANT)
    if tenant:
        return tenant
    client = scope.get("client")
    return client[0] if client else ""


def _too_many(what: str, retry_after: int) -> ApiError:
    return ApiError(
        429, f"too many requests: {what}", kind=RATE_LIMITED, code="rate_limit_exceeded", retry_after=retry_after
    )
