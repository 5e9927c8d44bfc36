"""Every path needs an API key, if the server has any, except those that give nothing away."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from jaxserve.server.errors import ApiError
from jaxserve.server.generation import TENANT
from starlette.types import ASGIApp, Receive, Scope, Send

# Liveness, readiness and the static page. Anything else, also a path that does not exist, asks for a key.
OPEN_PATHS = frozenset({"/health", "/ready", "/", "/web/chat.css", "/web/chat.js", "/web/icon.svg"})


class ApiKeys:
    """ASGI middleware. Sets the tenant (a digest of the key) in the scope, so that caches can be kept apart."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        digest = self._match(scope["headers"])
        if digest is not None:
            scope[TENANT] = digest.hex()[:32]
            await self._app(scope, receive, send)
            return
        await _refuse(send)

    def _match(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """The digest of the key that was sent, if it is one of ours. Takes the same time whichever matches."""
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1 or values[0][:7].lower() != b"bearer ":
            return None
        sent = hashlib.sha256(values[0][7:].strip()).digest()
        found = None
        for digest in self._digests:
            if hmac.compare_digest(digest, sent):
                found = digest
        return found


async def _refuse(send: Send) -> None:
    error = ApiError(
        401, "the API key is missing or wrong; send it as: Authorization: Bearer KEY", code="invalid_api_key"
    )
    body = error.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    # The body that may follow is not read.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
