"""Around every HTTP request: its id, its line in the log, its count in the metrics, its span in a trace."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from typing import Any, Protocol

from jaxserve.server.auth import send_error
from jaxserve.server.engine_client import Submission
from jaxserve.server.errors import internal_error
from jaxserve.server.generation import SUBMISSION, TENANT
from jaxserve.server.protocol import MAX_CLIENT_ID
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve import logs
from jaxserve.metrics import EngineMetrics

logger = logging.getLogger(__name__)
access = logging.getLogger("jaxserve.access")

_QUIET = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds


class Tracer(Protocol):
    """Makes a span for each HTTP request; see tracing.py."""

    def start(self, scope: Scope) -> Any: ...

    def end(self, span: Any, facts: dict[str, Any]) -> None: ...


class Observe:
    """ASGI middleware, the outermost. Every answer carries an X-Request-Id: the client's, or one made here. A defect
    is logged with it and answered with 500."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: EngineMetrics,
        *,
        with_log: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._with_log = with_log
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        name = _given_id(scope["headers"]) or secrets.token_hex(12)
        token = logs.request_id.set(name)
        span = self._tracer.start(scope) if self._tracer is not None else None
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.setdefault("headers", [])
                if not any(key == b"x-request-id" for key, _ in headers):
                    message["headers"] = [*headers, (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"][:200])
            if status:
                raise  # the answer has begun: only closing the connection tells that it is broken
            await send_error(internal_error(), scope["path"], send_on)
        finally:
            facts = _facts(scope, status, time.monotonic() - started)
            self._metrics.count_http(facts["method"], facts["route"], status)
            if self._with_log and scope["path"] not in _QUIET:
                self._log(name, facts)
            if self._tracer is not None:
                self._tracer.end(span, facts)
            logs.request_id.reset(token)

    def _log(self, name: str, facts: dict[str, Any]) -> None:
        text = "%s %s %d in %.3f s"
        values = (facts["method"], facts["path"], facts["status"], facts["seconds"])
        if not logs.is_json():
            text, values = text + " [%s]", (*values, name)
        access.info(text, *values, extra={key: value for key, value in facts.items() if value is not None})


def _given_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    for key, value in headers:
        if key == b"x-request-id" and 0 < len(value) <= MAX_CLIENT_ID and all(33 <= byte <= 126 for byte in value):
            return value.decode()
    return None


def _facts(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    """What is known of a request that has ended. status 0: the client left before an answer began."""
    client = scope.get("client")
    facts: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"][:200],
        "route": getattr(scope.get("route"), "path", "other"),
        "status": status,
        "seconds": round(seconds, 6),
        "client": client[0] if client else None,
        # The first digits of the key's digest tell keys apart and give nothing away.
        "key": scope.get(TENANT, "")[:8] or None,
    }
    submission: Submission | None = scope.get(SUBMISSION)
    if submission is not None:
        facts["prompts"] = len(submission.prompt_of)
        facts["prompt_tokens"] = submission.num_prompt_tokens
        facts["output_tokens"] = submission.num_output_tokens
        if submission.first_output is not None:
            facts["first_token_seconds"] = round(submission.first_output - submission.arrival, 6)
    return facts
