"""The OpenAPI document, made from the same types that parse requests and write answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from jaxserve.server import protocol, schemas

_PARSED = (
    protocol.CompletionRequest,
    protocol.ChatCompletionRequest,
    protocol.TokenizeRequest,
    protocol.DetokenizeRequest,
)
_ANSWERED = (
    schemas.Completion,
    schemas.ChatCompletion,
    schemas.ChatCompletionChunk,
    schemas.ModelList,
    schemas.ModelCard,
    schemas.Tokens,
    schemas.Text,
    schemas.Status,
    schemas.Version,
    schemas.ErrorAnswer,
)

# path -> (summary, request, answer, chunk of a stream, statuses of errors)
_ROUTES: dict[str, tuple[str, type | None, type | None, type | None, tuple[int, ...]]] = {
    "/v1/completions": (
        "Continue texts or token ids", protocol.CompletionRequest, schemas.Completion, schemas.Completion,
        (400, 404, 408, 413, 415, 500, 503),
    ),
    "/v1/chat/completions": (
        "Answer a conversation", protocol.ChatCompletionRequest, schemas.ChatCompletion,
        schemas.ChatCompletionChunk, (400, 404, 408, 413, 415, 500, 503),
    ),
    "/tokenize": (
        "Token ids of a text or a conversation", protocol.TokenizeRequest, schemas.Tokens, None,
        (400, 404, 408, 413, 415, 500, 503),
    ),
    "/detokenize": (
        "Text of token ids", protocol.DetokenizeRequest, schemas.Text, None, (400, 404, 408, 413, 415, 500, 503),
    ),
    "/v1/models": ("The model that is served", None, schemas.ModelList, None, ()),
    "/v1/models/{model_id:path}": ("One model", None, schemas.ModelCard, None, (404,)),
    "/health": ("Whether the server lives", None, schemas.Status, None, ()),
    "/ready": ("Whether requests are taken", None, schemas.Status, None, ()),
    "/metrics": ("Metrics in Prometheus' text format", None, None, None, ()),
    "/version": ("Version of jaxserve", None, schemas.Version, None, ()),
}  # fmt: skip

_ERRORS = {
    400: "The request is wrong; the error names field, value and limit",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    408: "The body did not arrive in time",
    413: "The body is too long",
    415: "The body is not declared as JSON",
    500: "A defect of the server",
    503: "Not ready, too busy, or shutting down; see Retry-After",
}


def describe(path: str) -> dict[str, Any]:
    """Arguments of add_api_route that document a route."""
    summary, request, answer, chunk, statuses = _ROUTES[path]
    content: dict[str, Any] = {}
    if answer is None:
        content["text/plain"] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": _reference(answer)}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _reference(chunk)}
    responses: dict[str, Any] = {"200": {"description": summary, "content": content}}
    for status in statuses:
        responses[str(status)] = _error(status)
    if path not in ("/health", "/ready"):
        responses["401"] = _error(401)
    else:
        down = {"application/json": {"schema": _reference(schemas.Status)}}
        responses["503"] = {"description": "No", "content": down}
    extra: dict[str, Any] = {"responses": responses}
    if request is not None:
        body = {"application/json": {"schema": _reference(request)}}
        extra["requestBody"] = {"required": True, "content": body}
    if "{model_id" in path:
        extra["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {"summary": summary, "openapi_extra": extra}


def install(app: FastAPI, *, has_keys: bool) -> None:
    """Let app.openapi() give the document with all schemas."""
    names = [kind.__name__ for kind in (*_PARSED, *_ANSWERED)]
    _, components = msgspec.json.schema_components((*_PARSED, *_ANSWERED), ref_template="#/components/schemas/{name}")
    assert set(names) <= components.keys()

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


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _error(status: int) -> dict[str, Any]:
    return {
        "description": _ERRORS[status],
        "content": {"application/json": {"schema": _reference(schemas.ErrorAnswer)}},
    }
