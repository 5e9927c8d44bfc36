"""The OpenAPI document, made from the same types that parse requests and write answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from jaxserve.server import anthropic_types, embedding_types, generate_types, protocol, response_types, schemas
from jaxserve.server.cached_pages import KVEvent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """What the document says of one route. answer: a type, or several of which it is one; chunk: one event of a stream;
    errors: their statuses, 401 aside."""

    summary: str
    request: type | None = None
    answer: Any = None
    chunk: type | None = None
    errors: tuple[int, ...] = ()
    query: tuple[tuple[str, dict[str, Any], str], ...] = ()  # name, schema, description
    needs_body: bool = True

    @property
    def types(self) -> list[Any]:
        answers = self.answer if isinstance(self.answer, tuple) else (self.answer,)
        return [kind for kind in (self.request, *answers, self.chunk) if kind is not None]


_POSTED = (400, 404, 408, 413, 415, 429, 500, 503)
_STORED = (400, 404)

ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "/v1/completions"): Route(
        summary="Continue texts or token ids", request=protocol.CompletionRequest, answer=schemas.Completion,
        chunk=schemas.Completion, errors=_POSTED,
    ),
    ("POST", "/v1/chat/completions"): Route(
        summary="Answer a conversation", request=protocol.ChatCompletionRequest, answer=schemas.ChatCompletion,
        chunk=schemas.ChatCompletionChunk, errors=_POSTED,
    ),
    ("POST", "/v1/responses"): Route(
        summary="Answer a conversation, and keep it", request=response_types.ResponsesRequest,
        answer=response_types.ResponseObject, chunk=response_types.ResponseEvent, errors=_POSTED,
    ),
    ("POST", "/v1/responses/input_tokens"): Route(
        summary="Tokens of the prompt that a request would have", request=response_types.ResponsesRequest,
        answer=response_types.InputTokens, errors=_POSTED,
    ),
    ("GET", "/v1/responses/{response_id}"): Route(
        summary="A stored response", answer=response_types.ResponseObject, errors=_STORED,
    ),
    ("DELETE", "/v1/responses/{response_id}"): Route(
        summary="Forget a stored response", answer=response_types.DeletedResponse, errors=_STORED,
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Route(
        summary="Stop a response that is generated in the background", answer=response_types.ResponseObject,
        errors=_STORED,
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Route(
        summary="What a stored response was asked", answer=response_types.InputItems, errors=_STORED,
        query=(
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "items at most"),
            ("order", {"enum": ["asc", "desc"], "default": "desc"}, "newest first, or oldest"),
            ("after", {"type": "string"}, "id of the item after which to go on"),
        ),
    ),
    ("POST", "/v1/messages"): Route(
        summary="Answer a conversation in Anthropic's dialect", request=anthropic_types.MessagesRequest,
        answer=anthropic_types.MessageAnswer, chunk=anthropic_types.MessageEvent, errors=_POSTED,
    ),
    ("POST", "/v1/messages/count_tokens"): Route(
        summary="Tokens of the prompt that a request would have", request=anthropic_types.CountTokensRequest,
        answer=anthropic_types.CountedTokens, errors=_POSTED,
    ),
    ("POST", "/generate"): Route(
        summary="Continue texts or token ids in SGLang's dialect", request=generate_types.GenerateRequest,
        answer=generate_types.Generated | list[generate_types.Generated], chunk=generate_types.Generated,
        errors=(*_POSTED, 409),
    ),
    ("POST", "/v1/embeddings"): Route(
        summary="Vectors of texts", request=embedding_types.EmbeddingRequest, answer=embedding_types.EmbeddingList,
        errors=_POSTED,
    ),
    **{
        ("POST", path): Route(
            summary="How alike texts are, or how likely labels", request=embedding_types.ScoreRequest,
            answer=(embedding_types.ScoreList, embedding_types.LabelScores), errors=_POSTED,
        )
        for path in ("/v1/score", "/score")
    },
    **{
        ("POST", path): Route(
            summary="Documents by how well they fit a query", request=embedding_types.RerankRequest,
            answer=embedding_types.RerankAnswer, errors=_POSTED,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    ("POST", "/tokenize"): Route(
        summary="Token ids of a text or a conversation", request=protocol.TokenizeRequest, answer=schemas.Tokens,
        errors=_POSTED,
    ),
    ("POST", "/detokenize"): Route(
        summary="Text of token ids", request=protocol.DetokenizeRequest, answer=schemas.Text, errors=_POSTED,
    ),
    ("POST", "/flush_cache"): Route(
        summary="Forget cached prefixes", request=generate_types.FlushCacheRequest, answer=generate_types.Done,
        errors=(*_POSTED, 403), needs_body=False,
    ),
    ("POST", "/abort_request"): Route(
        summary="Stop requests in flight", request=generate_types.AbortRequestBody, answer=generate_types.Aborted,
        errors=(*_POSTED, 403),
    ),
    ("GET", "/v1/models"): Route(summary="The model that is served", answer=schemas.ModelList),
    ("GET", "/v1/models/{model_id:path}"): Route(summary="One model", answer=schemas.ModelCard, errors=(404,)),
    ("GET", "/get_model_info"): Route(
        summary="The model, as SGLang's clients ask for it", answer=generate_types.NativeModelInfo, errors=(503,),
    ),
    ("GET", "/server_info"): Route(
        summary="Settings, engine and what goes on", answer=generate_types.ServerInfo, errors=(403,),
    ),
    ("GET", "/get_server_info"): Route(
        summary="The same under SGLang's older name", answer=generate_types.ServerInfo, errors=(403,),
    ),
    ("GET", "/health"): Route(summary="Whether the server lives", answer=schemas.Status),
    ("GET", "/ready"): Route(summary="Whether requests are taken", answer=schemas.Status),
    ("GET", "/metrics"): Route(summary="Metrics in Prometheus' text format"),
    ("GET", "/kv_events"): Route(
        summary="What the engine has cached, and every change (a stream)", chunk=KVEvent, errors=(404, 503)
    ),
    ("GET", "/version"): Route(summary="Version of jaxserve", answer=schemas.Version),
}  # fmt: skip

_ERRORS = {
    400: "The request is wrong; the error names field, value and limit",
    401: "The API key is missing or wrong",
    403: "The admin key is needed",
    404: "There is no such model or response",
    408: "The body, or the answer, did not come in time",
    409: "The request was aborted",
    413: "The body is too long",
    415: "The body is not declared as JSON",
    429: "Too many requests of this client; see Retry-After",
    500: "A defect of the server",
    503: "Not ready, too busy, or shutting down; see Retry-After",
}


def describe(method: str, path: str) -> dict[str, Any]:
    """Arguments of add_api_route that document a route."""
    route = ROUTES[method, path]
    content: dict[str, Any] = {}
    if route.answer is None:
        content["text/plain"] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": _reference(route.answer)}
    if route.chunk is not None:
        content["text/event-stream"] = {"schema": _reference(route.chunk)}
    responses: dict[str, Any] = {"200": {"description": route.summary, "content": content}}
    for status in route.errors:
        responses[str(status)] = _error(status, path)
    if path not in ("/health", "/ready"):
        responses["401"] = _error(401, path)
    else:
        down = {"application/json": {"schema": _reference(schemas.Status)}}
        responses["503"] = {"description": "No", "content": down}
    extra: dict[str, Any] = {"responses": responses}
    if route.request is not None:
        body = {"application/json": {"schema": _reference(route.request)}}
        extra["requestBody"] = {"required": route.needs_body, "content": body}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("model_id", "response_id")
        if "{" + name in path
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, schema, text in route.query
    ]
    if parameters:
        extra["parameters"] = parameters
    return {"summary": route.summary, "openapi_extra": extra}


def install(app: FastAPI, *, has_keys: bool) -> None:
    """Let app.openapi() give the document with all schemas."""
    kinds = [kind for route in ROUTES.values() for kind in route.types]
    kinds += [schemas.ErrorAnswer, anthropic_types.MessageErrorAnswer]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            # FastAPI writes the converter of a path parameter into the path.
            document["paths"] = {path.replace(":path}", "}"): item for path, item in document["paths"].items()}
            parts = document.setdefault("components", {})
            parts.setdefault("schemas", {}).update(components)
            if has_keys:
                parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _reference(kind: Any) -> dict[str, Any]:
    """Schema of a type; those with a name stand among the components."""
    if isinstance(kind, tuple):
        return {"anyOf": [_reference(one) for one in kind]}
    (schema,), _ = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return schema


def _error(status: int, path: str) -> dict[str, Any]:
    kind = anthropic_types.MessageErrorAnswer if path.startswith("/v1/messages") else schemas.ErrorAnswer
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": _reference(kind)}}}
