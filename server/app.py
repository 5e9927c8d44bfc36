"""The application and the process around it: build_app() makes the routes, run_server() serves them.

The port is open from the start; until the engine is ready, routes that need it answer 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from jaxserve.server.auth import ApiKeys
from jaxserve.server.engine_client import EngineClient, EngineState
from jaxserve.server.errors import unavailable
from jaxserve.server.generation import Server
from jaxserve.server.http_protocol import bounded, raise_file_limit
from jaxserve.server.limits import CORS_OPTIONS, HostRules, RateLimits, hosts_of
from jaxserve.server.listening import address_of, listen, loop_factory
from jaxserve.server.observe import Observe
from jaxserve.server.openapi import install
from jaxserve.server.prompts import LoadedModel
from jaxserve.server.reasoning.styles import resolve_style
from jaxserve.server.response_store import ResponseStore
from jaxserve.server.routes import add_routes
from jaxserve.server.settings import ServerSettings
from jaxserve.server.signals import SignalledServer
from jaxserve.server.supervisor import Supervisor
from jaxserve.server.tools.formats import resolve_format
from jaxserve.server.tracing import OpenTelemetry
from starlette.middleware.cors import CORSMiddleware

import jaxserve
from jaxserve import logs
from jaxserve.config import EngineConfig
from jaxserve.messages import ModelInfo
from jaxserve.metrics import EngineMetrics
from jaxserve.tokenizer import load_tokenizer

__all__ = ["EXIT_ADDRESS", "EXIT_ENGINE", "ServerSettings", "build_app", "run_server"]

logger = logging.getLogger(__name__)

EXIT_ENGINE, EXIT_ADDRESS = 1, 2
_KEEP_ALIVE_S = 20  # longer than usual clients keep idle connections (httpx 5, aiohttp 15), so that they close first
_OTHER_FILES = 512  # sockets of the engine, libraries, logs
_AFTER_DRAIN_S = 5  # for answers that say that the server is shutting down


def build_app(config: EngineConfig, settings: ServerSettings) -> FastAPI:
    """The application. Its engine is started and ended with its lifespan; app.state.server is the Server."""
    name = settings.served_model_name or _model_name(config.model)
    client = EngineClient(EngineMetrics(name), max_in_flight=settings.max_in_flight)

    def load(model: ModelInfo) -> LoadedModel:
        tokenizer = load_tokenizer(model.tokenizer_path)
        template = tokenizer.template_text(with_tools=True)
        return LoadedModel(
            model,
            tokenizer,
            tool_format=resolve_format(settings.tool_call_parser, template),
            reasoning_style=resolve_style(settings.reasoning_parser, template),
        )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        supervision = asyncio.create_task(app.state.server.supervisor.run())
        supervision.add_done_callback(lambda task: app.state.on_engine_end())
        try:
            yield
        finally:
            client.state = EngineState.STOPPING
            server.responses.close()
            app.state.server.supervisor.stop()
            await supervision
            await asyncio.to_thread(app.state.close_tracer)
            await app.state.server.grammars.close()

    app = FastAPI(
        title="jaxserve",
        version=jaxserve.__version__,
        description="An LLM inference engine compiled by JAX/XLA. The API follows OpenAI's and vLLM's.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    # Supervisor makes events of asyncio: those need no running loop.
    supervisor = Supervisor(config, settings, client, load)
    server = Server(
        settings=settings,
        client=client,
        supervisor=supervisor,
        model_name=name,
        started=int(time.time()),
        config=config,
        responses=ResponseStore(
            max_responses=settings.max_stored_responses, max_bytes=settings.max_stored_response_bytes
        ),
    )
    app.state.server = server
    app.state.on_engine_end = lambda: None
    app.state.close_tracer = lambda: None
    add_routes(app, server)
    install(app, has_keys=bool(settings.api_keys))
    _add_middleware(app, server)
    return app


def _add_middleware(app: FastAPI, server: Server) -> None:
    """What a request passes before it reaches its route, the innermost first."""
    settings = server.settings
    if settings.max_requests_per_minute or settings.max_requests_at_once:
        app.add_middleware(
            RateLimits, per_minute=settings.max_requests_per_minute, at_once=settings.max_requests_at_once
        )
    app.add_middleware(ApiKeys, keys=settings.api_keys, admin_key=settings.admin_api_key)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origins, **CORS_OPTIONS)
    hosts = hosts_of(settings.host, settings.allowed_hosts, has_keys=bool(settings.api_keys))
    if hosts:
        app.add_middleware(HostRules, hosts=hosts)
    tracer = None
    if settings.otlp_endpoint is not None:
        tracer = OpenTelemetry(settings.otlp_endpoint, server.model_name)
        app.state.close_tracer = tracer.close
    app.add_middleware(Observe, metrics=server.client.metrics, with_log=settings.access_log, tracer=tracer)


def run_server(config: EngineConfig, settings: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    0   stopped by a signal, requests in flight answered (or told, after drain_s)
    1   the engine could not be started, or was lost too often
    2   the address cannot be listened on
    128 + number of the signal: a second one came while requests were being finished
    """
    logs.configure(settings.log_format)
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        print(f"jaxserve: cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", file=sys.stderr)
        return EXIT_ADDRESS
    raise_file_limit(2 * settings.max_connections + _OTHER_FILES)
    app = build_app(config, settings)
    uvicorn_config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # middleware writes it
        log_config=None,
        http=bounded(
            write_timeout_s=settings.write_timeout_s,
            max_connections=settings.max_connections,
            header_timeout_s=settings.header_timeout_s,
        ),
        ws="none",
        lifespan="on",
        server_header=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.drain_s) + _AFTER_DRAIN_S,
    )
    address = address_of(listener, "https" if settings.ssl_certfile else "http")
    _announce(f"{app.state.server.model_name} on {address} (loading; /ready tells when)")
    with listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_HttpServer(uvicorn_config, app).serve(sockets=[listener]))
    failure = app.state.server.supervisor.failure
    if failure is not None:
        _announce(failure)
        return EXIT_ENGINE
    return 0


class _HttpServer(SignalledServer):
    """uvicorn with our handling of signals: the first lets requests finish, the second ends the process."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._server: Server = app.state.server
        self._settings = self._server.settings
        app.state.on_engine_end = self._on_engine_end

    def on_signal(self, number: int) -> None:
        if self.should_exit:
            # The engine ends by itself when its parent is gone.
            self._server.supervisor.remove_sockets()
            os._exit(128 + number)
        logger.info("%s: finishing %d prompts", signal.Signals(number).name, self._server.client.num_in_flight)
        self._server.client.state = EngineState.STOPPING
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._settings.drain_s, self._end_drain)

    def _end_drain(self) -> None:
        self._server.client.fail_all(unavailable("the server is shutting down", code="shutting_down", retry_after=5))

    def _on_engine_end(self) -> None:
        # After a failure there is nothing left to serve; after a stop this changes nothing.
        self.should_exit = True


def _announce(text: str) -> None:
    """Tell the operator: a line for people, or a record like all others."""
    if logs.is_json():
        logger.info("%s", text)
    else:
        print(f"jaxserve: {text}", file=sys.stderr)


def _model_name(model: str) -> str:
    """The name for clients: a local path shows nothing but its last part."""
    path = Path(model)
    if not path.is_absolute() and not path.exists():
        return model
    return path.stem if path.suffix == ".gguf" else path.name
