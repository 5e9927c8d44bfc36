"""Who may do what: API keys on every path but those that give nothing away, the admin key on control routes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from jaxserve.server.errors import ApiError, error_body
from jaxserve.server.generation import ADMIN, TENANT
from starlette.types import ASGIApp, Receive, Scope, Send

DIGEST_PREFIX = "sha256:"

# Liveness, readiness and the static page. Anything else, also a path that does not exist, asks for a key.
OPEN_PATHS = frozenset({"/health", "/ready", "/", "/web/chat.css", "/web/chat.js", "/web/icon.svg"})
# What concerns all clients, or tells of their prompts.
ADMIN_PATHS = frozenset({"/flush_cache", "/server_info", "/get_server_info", "/kv_events"})


class ApiKeys:
    """ASGI middleware. Sets the tenant (a digest of the key) in the scope, so that caches can be kept apart.

    keys        of clients; none: every client may use the API
    admin_key   opens control routes, and everything that the others open. Without it they are closed if there are
                keys, and open if there are none
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], admin_key: str | None) -> None:
        self._app = app
        self._digests = [digest_of(key) for key in keys]
        self._admin = None if admin_key is None else digest_of(admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        sent = _sent_key(scope["headers"])
        is_admin = self._admin is not None and sent is not None and hmac.compare_digest(self._admin, sent)
        match = self._match(sent)
        refusal = None
        if scope["path"] in ADMIN_PATHS:
            refusal = self._refuse_admin(is_known=match is not None, is_admin=is_admin)
        elif self._digests and not is_admin and match is None:
            refusal = _wrong_key()
        if refusal is not None:
            await send_error(refusal, scope["path"], send)
            return
        if match is not None or is_admin:
            scope[TENANT] = (match or self._admin or b"").hex()[:32]
        scope[ADMIN] = is_admin or (not self._digests and self._admin is None)
        await self._app(scope, receive, send)

    def _refuse_admin(self, *, is_known: bool, is_admin: bool) -> ApiError | None:
        if is_admin or (self._admin is None and not self._digests):
            return None
        if self._digests and not is_known:
            return _wrong_key()
        if self._admin is None:
            return ApiError(403, "control routes are closed: the server has no admin key", code="admin_key_required")
        if is_known:
            return ApiError(403, "this path needs the admin key", code="admin_key_required")
        return _wrong_key()

    def _match(self, sent: bytes | None) -> bytes | None:
        """The digest of the key that was sent, if it is one of ours. Takes the same time whichever matches."""
        found = None
        for digest in self._digests:
            if sent is not None and hmac.compare_digest(digest, sent):
                found = digest
        return found


def digest_of(key: str) -> bytes:
    """SHA-256 of a key. A key may be given as the digest itself, so that no configuration holds it in clear."""
    if key.startswith(DIGEST_PREFIX):
        return bytes.fromhex(key.removeprefix(DIGEST_PREFIX))
    return hashlib.sha256(key.encode()).digest()


def _sent_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The digest of the key in Authorization: Bearer, or in x-api-key as Anthropic's clients send it."""
    bearers, others = [], []
    for name, value in headers:
        if name == b"authorization":
            bearers.append(value)
        elif name == b"x-api-key":
            others.append(value)
    if len(bearers) == 1 and bearers[0][:7].lower() == b"bearer ":
        return hashlib.sha256(bearers[0][7:].strip()).digest()
    if not bearers and len(others) == 1:
        return hashlib.sha256(others[0].strip()).digest()
    return None


def _wrong_key() -> ApiError:
    return ApiError(
        401, "the API key is missing or wrong; send it as: Authorization: Bearer KEY", code="invalid_api_key"
    )


async def send_error(error: ApiError, path: str, send: Send) -> None:
    """Answer a request whose body is not read."""
    body = error_body(error, path)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    # The body that may follow is not read.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
