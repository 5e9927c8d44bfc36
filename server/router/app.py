"""The router as an application and as a process.

Clients see one server with the API of its workers. /workers is the admin API; /health, /ready and /metrics are the
router's own; everything else that workers have is passed on.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import uvicorn
from jaxserve.server.auth import ApiKeys, digest_of
from jaxserve.server.errors import ApiError, internal_error, unavailable
from jaxserve.server.generation import TENANT
from jaxserve.server.http_protocol import bounded, raise_file_limit
from jaxserve.server.limits import CORS_OPTIONS, HostRules, hosts_of
from jaxserve.server.listening import address_of, listen, loop_factory
from jaxserve.server.router.admin import AdminApi
from jaxserve.server.router.fleet import Fleet
from jaxserve.server.router.kv_events import KVEventReader
from jaxserve.server.router.limits import RateLimit
from jaxserve.server.router.metrics import RouterMetrics
from jaxserve.server.router.probes import Probes
from jaxserve.server.router.proxy import Proxy, Receive, Send
from jaxserve.server.router.queries import PageReader
from jaxserve.server.router.replicas import ReplicaPlan, Replicas
from jaxserve.server.router.settings import RouterSettings
from jaxserve.server.router.worker import Worker
from jaxserve.server.signals import SignalledServer
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from jaxserve import logs
from jaxserve.hub import resolve_model
from jaxserve.metrics import CONTENT_TYPE
from jaxserve.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

EXIT_REPLICA, EXIT_ADDRESS = 1, 2
_KEEP_ALIVE_S = 20
_AFTER_DRAIN_S = 5
_OTHER_FILES = 256  # open beside the connections of clients, and of those to workers
_PASSED_GETS = ("/v1/models", "/get_model_info", "/version", "/openapi.json", "/web/")
_STORED = "/v1/responses/"
_PASSED_POSTS = ("/v1/", "/tokenize", "/detokenize", "/generate")

Scope = dict[str, Any]


class RouterApp:
    """An ASGI application. plan: replicas to start and stop with it."""

    def __init__(self, settings: RouterSettings, plan: ReplicaPlan | None = None) -> None:
        self.settings = settings
        self.plan = plan
        self.replicas: Replicas | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.fleet = Fleet(settings)
        self.metrics = RouterMetrics(self.fleet)
        self.proxy = Proxy(settings, self.fleet, self.metrics)
        self.probes = Probes(settings, self.fleet, self.proxy)
        self.events = KVEventReader(settings, self.fleet, self.proxy, self.probes.headers)
        self._pages = _page_reader(settings)
        if self._pages is not None:
            self.proxy.read_pages = self._read_pages
        self.is_stopping = False
        self._limit = RateLimit(settings.requests_per_second, settings.burst)
        self._admin = AdminApi(settings, self.fleet)
        self._admin_digest = digest_of(settings.admin_key or "")
        guarded: ASGIApp = ApiKeys(self._route, settings.api_keys, None) if settings.api_keys else self._route
        if settings.cors_origins:
            guarded = CORSMiddleware(guarded, allow_origins=settings.cors_origins, **CORS_OPTIONS)
        hosts = hosts_of(settings.host, settings.allowed_hosts, has_keys=bool(settings.api_keys))
        self._entry = HostRules(guarded, hosts) if hosts else guarded
        self._admin_entry = HostRules(self._route, hosts) if hosts else self._route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            is_admin = scope["path"] == "/workers" or scope["path"].startswith("/workers/")
            await (self._admin_entry if is_admin else self._entry)(scope, receive, send)

    async def start(self) -> None:
        """Begin to ask the workers. Runs on the event loop that serves."""
        self.fleet.on_added = self._on_added
        self.fleet.on_removed = self._on_removed
        for url in self.settings.workers:
            self.fleet.add(url)
        if self.plan is not None:
            self.replicas = Replicas(self.plan, self.fleet)
            self.replicas.failure.add_done_callback(lambda failure: self.on_failure())
            self.replicas.start()

    async def stop(self) -> None:
        if self.replicas is not None:
            await self.replicas.stop(self.settings.drain_s + _AFTER_DRAIN_S)
        self.probes.close()
        self.events.close()
        self.proxy.close()

    async def _read_pages(self, path: str, body: bytes, authorization: bytes) -> Sequence[int] | None:
        size = self.events.page_size
        if self._pages is None or size is None:
            return None
        return await self._pages.pages_of(path, body, authorization, size)

    def _on_added(self, worker: Worker) -> None:
        self.probes.start(worker)
        self.events.start(worker)

    def _on_removed(self, worker: Worker) -> None:
        self.probes.stop(worker)
        self.events.stop(worker)
        self.proxy.remove_worker(worker)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def sending(message: dict[str, Any]) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._dispatch(scope, receive, sending)
        except ApiError as error:
            if has_started:
                raise
            await answer(send, error.status, error.encode(), error.headers)
        except Exception:
            logger.exception("a request failed in the router")
            if has_started:
                raise
            error = internal_error()
            await answer(send, error.status, error.encode(), error.headers)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/health":
            await answer(send, 200, b'{"status":"ok"}')
        elif path == "/ready":
            await self._ready(send)
        elif path == "/metrics":
            await answer(send, 200, self.metrics.render(), {"Content-Type": CONTENT_TYPE})
        elif path == "/workers" or path.startswith("/workers/"):
            self._check_admin(scope)
            status, document = await self._admin(method, path, scope["query_string"], receive)
            await answer(send, status, msgspec.json.encode(document))
        elif (
            (method == "POST" and path.startswith(_PASSED_POSTS))
            or (method in ("GET", "HEAD") and (path == "/" or path.startswith(_PASSED_GETS)))
            or (method in ("GET", "DELETE") and path.startswith(_STORED))
        ):
            if self.is_stopping:
                raise unavailable("the router is shutting down", retry_after=5, code="shutting_down")
            if method == "POST" or path.startswith(_STORED):
                self._check_rate(scope)
            await self.proxy(scope, receive, send)
        else:
            raise ApiError(404, f"{method} {path[:100]}: no such path", code="not_found")

    async def _ready(self, send: Send) -> None:
        is_ready = len(self.fleet.loads) > 0 and not self.is_stopping
        status = "stopping" if self.is_stopping else "ready" if is_ready else "no worker is ready"
        headers = {} if is_ready else {"Retry-After": "1"}
        await answer(send, 200 if is_ready else 503, msgspec.json.encode({"status": status}), headers)

    def _check_rate(self, scope: Scope) -> None:
        client = scope.get(TENANT) or (scope["client"][0] if scope.get("client") else "")
        wait_s = self._limit.take(client)
        if wait_s:
            self.metrics.num_limited += 1
            raise ApiError(
                429,
                f"more than {self.settings.requests_per_second:g} requests per second",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=max(1, round(wait_s + 0.5)),
            )

    def _check_admin(self, scope: Scope) -> None:
        if self.settings.admin_key is None:
            raise ApiError(404, "/workers: there is no admin API; start the router with an admin key", code="not_found")
        sent = b""
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                sent = value[7:].strip()
        if not hmac.compare_digest(hashlib.sha256(sent).digest(), self._admin_digest):
            raise ApiError(401, "the admin key is missing or wrong", code="invalid_api_key")


def _page_reader(settings: RouterSettings) -> PageReader | None:
    """Raises what the resolver raises for a model that is not there."""
    if settings.prefix_source != "events":
        return None
    tokenizer = None
    if settings.tokenizer is not None:
        resolved = resolve_model(settings.tokenizer)
        tokenizer = load_tokenizer(getattr(resolved, "path", resolved))
    return PageReader(tokenizer, uses_keys=bool(settings.api_keys))


async def answer(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """A whole answer; JSON unless the headers say otherwise."""
    fields = {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(body))}
    if status in (408, 413):
        fields["Connection"] = "close"  # the rest of the body is not read
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def uvicorn_config(app: RouterApp) -> uvicorn.Config:
    """How the router is served, in a process of its own and in tests."""
    settings = app.settings
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        log_config=None,
        http=bounded(
            write_timeout_s=settings.write_timeout_s,
            max_connections=settings.max_connections,
            header_timeout_s=settings.header_timeout_s,
        ),
        ws="none",
        lifespan="on",
        server_header=False,
        date_header=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.drain_s) + _AFTER_DRAIN_S,
    )


def run_router(settings: RouterSettings, plan: ReplicaPlan | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then let requests finish for drain_s. Returns the exit status: 0, 1 if a replica
    could not be started, 2 if the address cannot be listened on, 128 + n after a second signal n."""
    logs.configure(settings.log_format)
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        print(f"jaxserve: cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", file=sys.stderr)
        return EXIT_ADDRESS
    raise_file_limit(2 * settings.max_connections + _OTHER_FILES)
    app = RouterApp(settings, plan)
    num_workers = len(settings.workers) + (0 if plan is None else plan.count)
    scheme = "https" if settings.ssl_certfile else "http"
    print(
        f"jaxserve: router on {address_of(listener, scheme)} ({num_workers} workers, {settings.policy})",
        file=sys.stderr,
        flush=True,
    )
    with listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(RouterServer(app).serve(sockets=[listener]))
    if app.replicas is not None and app.replicas.failure.done():
        print(f"jaxserve: {app.replicas.failure.result()}", file=sys.stderr)
        return EXIT_REPLICA
    return 0


class RouterServer(SignalledServer):
    """uvicorn with our handling of signals: the first lets requests finish, the second ends the process."""

    def __init__(self, app: RouterApp) -> None:
        super().__init__(uvicorn_config(app))
        self._app = app
        app.on_failure = self._on_failure

    def _on_failure(self) -> None:
        self.should_exit = True

    def on_signal(self, number: int) -> None:
        if self.should_exit:
            os._exit(128 + number)
        logger.info("%s: finishing %d requests", signal.Signals(number).name, self._app.proxy.num_open)
        self._app.is_stopping = True
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._app.settings.drain_s, self._app.proxy.close)
