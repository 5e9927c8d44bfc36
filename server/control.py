"""Routes for operators and native clients: flush the cache, abort requests, tell what is served and how."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from jaxserve.server.errors import ApiError, unavailable
from jaxserve.server.generate_types import (
    Aborted,
    AbortRequestBody,
    Done,
    FlushCacheRequest,
    NativeModelInfo,
    ServerInfo,
)
from jaxserve.server.generation import Server, is_admin, tenant_of
from starlette.requests import Request
from starlette.responses import Response

import jaxserve
from jaxserve.messages import FlushCache, encode

_SECRET = frozenset({"api_keys", "admin_api_key", "engine_command", "ssl_keyfile", "ssl_keyfile_password"})


async def flush_cache(server: Server, http: Request, request: FlushCacheRequest) -> Response:
    """POST /flush_cache."""
    server.client.check_ready()
    if not server.client.send(encode(FlushCache())):
        raise unavailable("the engine does not answer; try again", retry_after=5)
    return _json(Done(success=True, message="cached prefixes that no running request uses are forgotten"))


async def abort_request(server: Server, http: Request, request: AbortRequestBody) -> Response:
    """POST /abort_request. A name that is not in flight (any more) is no mistake."""
    everything = bool(request.abort_all)
    if everything and not is_admin(http):
        raise ApiError(403, "abort_all: needs the admin key", param="abort_all", code="admin_key_required")
    if everything == bool(request.rid):
        raise ApiError(400, "rid: exactly one of rid and abort_all must be given", param="rid")
    tenant = None if is_admin(http) else tenant_of(http)
    found = server.client.find(tenant, None if everything else request.rid)
    for submission in found:
        submission.cancel(ApiError(409, "the request was aborted by its client or an operator", code="aborted"))
    return _json(Aborted(num_aborted=len(found)))


async def model_info(server: Server, http: Request) -> Response:
    """GET /get_model_info."""
    loaded = server.model(None, task="any")
    info = loaded.info
    return _json(
        NativeModelInfo(
            model_path=server.model_name,
            served_model_name=server.model_name,
            tokenizer_path=server.model_name,
            is_generation=info.task == "generate",
            preferred_sampling_params=None,
            max_context_length=info.max_model_len,
        )
    )


async def server_info(server: Server, http: Request) -> Response:
    """GET /server_info: no paths, keys or commands."""
    client = server.client
    settings: dict[str, Any] = {
        field.name: getattr(server.settings, field.name)
        for field in dataclasses.fields(server.settings)
        if field.name not in _SECRET
    }
    engine = dataclasses.asdict(server.config)
    for name in ("model", "compile_cache_dir"):
        engine.pop(name, None)
    model = None
    if client.model is not None:
        model = {name: value for name, value in msgspec.to_builtins(client.model).items() if name != "tokenizer_path"}
        model["name"] = server.model_name
    return _json(
        ServerInfo(
            version=jaxserve.__version__,
            status=client.state.value,
            served_model_name=server.model_name,
            started=server.started,
            settings=settings,
            engine=engine,
            model=model,
            stats=None if client.stats is None else msgspec.to_builtins(client.stats),
            num_in_flight=client.num_in_flight,
            num_stored_responses=len(server.responses),
        )
    )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
