"""The routes: bodies to typed requests, errors to answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from jaxserve.server import anthropic, control, embeddings, protocol, responses, schemas
from jaxserve.server.anthropic_types import CountTokensRequest, MessagesRequest
from jaxserve.server.chat import chat
from jaxserve.server.completions import complete
from jaxserve.server.embedding_types import EmbeddingRequest, RerankRequest, ScoreRequest
from jaxserve.server.engine_client import EngineState
from jaxserve.server.errors import ApiError, error_body
from jaxserve.server.generate import generate
from jaxserve.server.generate_types import AbortRequestBody, FlushCacheRequest, GenerateRequest
from jaxserve.server.generation import Server
from jaxserve.server.openapi import describe
from jaxserve.server.parsing import BodyParser, read_body
from jaxserve.server.prompts import TextOptions
from jaxserve.server.response_types import ResponsesRequest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

import jaxserve
from jaxserve.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

# Control routes that take no options may be called without a body.
_NO_BODY = frozenset({"/flush_cache"})

_WEB = Path(__file__).parent / "web"
_WEB_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/web/chat.css": ("chat.css", "text/css; charset=utf-8"),
    "/web/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/web/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The page loads nothing from elsewhere, and text of a model can never become a script in it.
_WEB_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

Answer = Callable[[Server, Request], Awaitable[Response]]
Handler = Callable[[Server, Request, Any], Awaitable[Response]]


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_response(error: ApiError, path: str) -> Response:
    headers = error.headers
    if error.status in (408, 413, 415):
        headers = {**headers, "Connection": "close"}  # the rest of the body is not read
    return Response(error_body(error, path), error.status, headers, "application/json")


def add_routes(app: FastAPI, server: Server) -> None:
    """All routes of the API, the page, and how errors are answered."""
    for path, kind, handler in (
        ("/v1/completions", protocol.CompletionRequest, complete),
        ("/v1/chat/completions", protocol.ChatCompletionRequest, chat),
        ("/tokenize", protocol.TokenizeRequest, tokenize),
        ("/detokenize", protocol.DetokenizeRequest, detokenize),
        ("/v1/responses", ResponsesRequest, responses.create_response),
        ("/v1/responses/input_tokens", ResponsesRequest, responses.count_input_tokens),
        ("/v1/messages", MessagesRequest, anthropic.create_message),
        ("/v1/messages/count_tokens", CountTokensRequest, anthropic.count_tokens),
        ("/generate", GenerateRequest, generate),
        ("/v1/embeddings", EmbeddingRequest, embeddings.embed),
        ("/v1/score", ScoreRequest, embeddings.score),
        ("/score", ScoreRequest, embeddings.score),
        ("/rerank", RerankRequest, embeddings.rerank),
        ("/v1/rerank", RerankRequest, embeddings.rerank),
        ("/v2/rerank", RerankRequest, embeddings.rerank),
        ("/flush_cache", FlushCacheRequest, control.flush_cache),
        ("/abort_request", AbortRequestBody, control.abort_request),
    ):
        _add_post(app, server, path, kind, handler)
    for method, path, answer in (
        ("GET", "/v1/responses/{response_id}", responses.get_response),
        ("DELETE", "/v1/responses/{response_id}", responses.delete_response),
        ("POST", "/v1/responses/{response_id}/cancel", responses.cancel_response),
        ("GET", "/v1/responses/{response_id}/input_items", responses.list_input_items),
    ):
        _add(app, server, method, path, answer)
    for path, answer in (
        ("/v1/models", _models),
        ("/v1/models/{model_id:path}", _model),
        ("/health", _health),
        ("/ready", _ready),
        ("/metrics", _metrics),
        ("/kv_events", _kv_events),
        ("/version", _version),
        ("/server_info", control.server_info),
        ("/get_server_info", control.server_info),
        ("/get_model_info", control.model_info),
    ):
        _add(app, server, "GET", path, answer)
    if server.settings.chat_page:
        for path, (name, media_type) in _WEB_FILES.items():
            _add_file(app, path, _WEB / name, media_type)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)


def _add_post(app: FastAPI, server: Server, path: str, kind: type[msgspec.Struct], handler: Handler) -> None:
    parser = BodyParser(kind, protocol.HINTS if kind.__module__ == protocol.__name__ else None)
    settings = server.settings
    may_be_empty = not any(field.required for field in msgspec.structs.fields(kind)) and path in _NO_BODY

    async def endpoint(http: Request) -> Response:
        # Before the model is ready every body is answered alike, without reading it in full first.
        server.client.check_ready()
        data = await read_body(http, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
        return await handler(server, http, parser.parse(b"{}" if may_be_empty and not data.strip() else data))

    app.add_api_route(path, endpoint, methods=["POST"], response_class=Response, **describe("POST", path))


def _add(app: FastAPI, server: Server, method: str, path: str, answer: Answer) -> None:
    async def endpoint(http: Request) -> Response:
        return await answer(server, http)

    app.add_api_route(path, endpoint, methods=[method], response_class=Response, **describe(method, path))


def _add_file(app: FastAPI, path: str, file: Path, media_type: str) -> None:
    async def endpoint() -> Response:
        return FileResponse(file, media_type=media_type, headers=_WEB_HEADERS)

    app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False, response_class=Response)


async def tokenize(server: Server, http: Request, request: protocol.TokenizeRequest) -> Response:
    loaded = server.model(request.model, task="any")
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "prompt: exactly one of prompt and messages must be given", param="prompt")
    if request.messages is not None:
        ids = await loaded.encode_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.chat_template_kwargs,
        )
    else:
        options = TextOptions(
            add_special_tokens=request.add_special_tokens is not False,
            allow_special_tokens=request.allow_special_tokens is not False,
        )
        ids = await loaded.encode_text(request.prompt or "", options)
    names = [loaded.tokens.text_of(token) for token in ids] if request.return_token_strs else None
    return json_response(
        schemas.Tokens(count=len(ids), max_model_len=loaded.info.max_model_len, tokens=ids, token_strs=names)
    )


async def detokenize(server: Server, http: Request, request: protocol.DetokenizeRequest) -> Response:
    loaded = server.model(request.model, task="any")
    text = await loaded.decode(request.tokens, skip_special_tokens=bool(request.skip_special_tokens))
    return json_response(schemas.Text(prompt=text))


def _card(server: Server) -> schemas.ModelCard:
    model = server.client.model
    return schemas.ModelCard(
        id=server.model_name,
        created=server.started,
        owned_by="jaxserve",
        max_model_len=None if model is None else model.max_model_len,
    )


async def _models(server: Server, http: Request) -> Response:
    return json_response(schemas.ModelList(data=[_card(server)]))


async def _model(server: Server, http: Request) -> Response:
    name = http.path_params["model_id"]
    if name != server.model_name:
        raise ApiError(
            404, f"model: got {name[:100]!r}; this server has {server.model_name!r}", param="model",
            code="model_not_found",
        )  # fmt: skip
    return json_response(_card(server))


async def _health(server: Server, http: Request) -> Response:
    """Liveness: whether a restart of the whole server would help. One of the engine alone is under way or coming."""
    client = server.client
    if client.state is EngineState.FAILED:
        return json_response(schemas.Status(status="failed"), 503)
    silent = time.monotonic() - client.last_heartbeat
    if client.state is EngineState.READY and silent > server.settings.heartbeat_timeout_s:
        return json_response(schemas.Status(status="stuck"), 503)
    return json_response(schemas.Status(status=client.state.value))


async def _ready(server: Server, http: Request) -> Response:
    state = server.client.state
    if state is EngineState.READY:
        return json_response(schemas.Status(status=state.value))
    return json_response(schemas.Status(status=state.value), 503, {"Retry-After": "5"})


async def _metrics(server: Server, http: Request) -> Response:
    return Response(await server.client.current_metrics(), headers={"Content-Type": CONTENT_TYPE})


async def _kv_events(server: Server, http: Request) -> Response:
    """What is cached, for routers. The stream ends with the connection."""
    if not server.config.kv_events:
        raise ApiError(404, "/kv_events: off; start the server with --kv-events", code="not_found")
    events = server.client.cached_pages.events(server.client.check_ready().page_size)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _version(server: Server, http: Request) -> Response:
    return json_response(schemas.Version(version=jaxserve.__version__))


async def _on_api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, http.url.path)


async def _on_http_error(http: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = http.url.path[:100]
    text = f"{path}: no such path" if error.status_code == 404 else f"{http.method} {path}: {error.detail}"
    fault = ApiError(error.status_code, text, code="not_found" if error.status_code == 404 else None)
    response = error_response(fault, http.url.path)
    response.headers.update(error.headers or {})
    return response
