"""The OpenAI surface in front of Ray Serve's deployments: finds the model, then its replica, and hands answers on."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from jaxserve.server.errors import SERVER_ERROR, ApiError, unavailable
from jaxserve.server.router.response_homes import CREATE_PATH, id_reader, named_response
from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jaxserve.routing.homes import Homes

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_PASSED = ("/v1/", "/tokenize", "/detokenize", "/generate")
_DROPPED_HEADERS = frozenset((b"content-length", b"transfer-encoding", b"connection", b"host"))


class Call(msgspec.Struct):
    """A request on its way from ingress to replica.

    headers   name, value
    home      the replica that has the stored response which it is about; empty: not known, or it is about none
    without   replicas that have said that they do not have it
    """

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body: bytes
    home: str = ""
    without: tuple[str, ...] = ()


class Head(msgspec.Struct):
    """The first item of an answer; pieces of its body follow."""

    status: int
    headers: list[tuple[str, str]]
    replica: str


class Gateway:
    """The OpenAI surface of all models: finds the deployment that a body names, and hands its answer on."""

    def __init__(self, handles: dict[str, Any]) -> None:
        self._handles = {name: handle.options(stream=True, method_name="__call__") for name, handle in handles.items()}
        self._homes = Homes()  # of stored responses

    def models(self) -> Response:
        cards = [{"id": name, "object": "model", "owned_by": "jaxserve"} for name in self._handles]
        return Response(msgspec.json.encode({"object": "list", "data": cards}), media_type="application/json")

    async def pass_on(self, request: Request) -> Response:
        body, path = await request.body(), request.url.path
        stored = named_response(path, body)
        try:
            headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in request.scope["headers"]
                       if n not in _DROPPED_HEADERS]  # fmt: skip
            headers += [("content-length", str(len(body))), ("host", "localhost")]
            call = Call(request.method, path, request.url.query, headers, body)
            if stored:
                head, pieces = await self._find(stored, call)
            else:
                head, pieces = await self._begin(self._handle(body), call)
        except ApiError as error:
            return _refused(error)
        kept = {n: v for n, v in head.headers if n.lower().encode() not in _DROPPED_HEADERS}
        kept["x-jaxserve-worker"] = head.replica
        if path == CREATE_PATH and head.status == 200:
            pieces = self._with_home(pieces, head.replica)
        return StreamingResponse(pieces, head.status, kept)

    async def _find(self, stored: str, call: Call) -> tuple[Head, AsyncIterator[bytes]]:
        """The answer of the replica that has a stored response; if none has, of the last one that said so."""
        # A request without a body names no model.
        handles = [self._handle(call.body)] if call.body else list(self._handles.values())
        call.home = self._homes.find(stored)
        for handle in handles:
            while True:
                head, pieces = await self._begin(handle, call)
                if head.status != 404:
                    self._homes.note(stored, head.replica)
                    return head, pieces
                if head.replica in call.without:
                    break  # all of them have been asked
                call = msgspec.structs.replace(call, home="", without=(*call.without, head.replica))
                async for _ in pieces:
                    pass
        return head, pieces

    async def _with_home(self, pieces: AsyncIterator[bytes], replica: str) -> AsyncIterator[bytes]:
        read = id_reader(lambda name: self._homes.note(name, replica))
        async for piece in pieces:
            read(piece)
            yield piece

    def _handle(self, body: bytes) -> Any:
        try:
            name = msgspec.json.decode(body, type=_Named).model
        except msgspec.DecodeError as error:
            raise ApiError(400, f"body: {error}") from None
        if name is None and len(self._handles) == 1:
            return next(iter(self._handles.values()))
        if name not in self._handles:
            raise ApiError(
                404, f"model: got {name!r}; allowed: {', '.join(self._handles)}", param="model", code="model_not_found"
            )
        return self._handles[name]

    async def _begin(self, handle: Any, call: Call) -> tuple[Head, AsyncIterator[bytes]]:
        """The head of an answer. A replica that dies before it is tried again on another."""
        for attempt in range(_ATTEMPTS):
            items = aiter(handle.remote(call))
            try:
                return await anext(items), _pieces(items)
            except (RayActorError, StopAsyncIteration) as error:
                logger.warning("a replica was lost before it answered (attempt %d): %s", attempt + 1, error)
        raise unavailable("no replica could answer", retry_after=5, code="no_worker")


class _Named(msgspec.Struct):
    model: str | None = None


async def _pieces(items: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """The rest of an answer; if its replica dies, an error event ends a stream."""
    try:
        async for piece in items:
            yield piece
    except RayActorError:
        fault = ApiError(502, "the replica was lost while it answered", kind=SERVER_ERROR, code="worker_lost")
        yield b"data: " + fault.encode() + b"\n\n"


class Ingress:
    """What Ray's proxy calls: a few paths of its own, the rest goes to the model's replicas."""

    def __init__(self, names: list[str], api_keys: list[str], *handles: Any) -> None:
        self._gateway = Gateway(dict(zip(names, handles)))
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, request: Request) -> Response:
        path, method = request.url.path, request.method
        if method == "GET" and path in ("/health", "/ready"):
            return Response(b'{"status":"ready"}', media_type="application/json")
        if self._digests and not self._is_known(request.headers.get("authorization", "")):
            return _refused(ApiError(401, "the API key is missing or wrong", code="invalid_api_key"))
        if method == "GET" and path == "/v1/models":
            return self._gateway.models()
        is_stored = method in ("GET", "DELETE") and path.startswith(CREATE_PATH + "/")
        if is_stored or (method == "POST" and path.startswith(_PASSED)):
            return await self._gateway.pass_on(request)
        return _refused(ApiError(404, f"{method} {path[:100]}: no such path", code="not_found"))

    def _is_known(self, authorization: str) -> bool:
        sent = hashlib.sha256(authorization[7:].strip().encode()).digest()
        return authorization[:7].lower() == "bearer " and any(hmac.compare_digest(d, sent) for d in self._digests)


def _refused(error: ApiError) -> Response:
    return Response(error.encode(), error.status, error.headers, "application/json")
