"""Logs as text lines or as JSON lines, the same in every process of a server. No jax."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import os
from typing import Any

FORMATS = ("text", "json")
FORMAT_VARIABLE = "JAXSERVE_LOG_FORMAT"  # how a server tells its engine's process

# Id of the HTTP request on whose behalf this task runs.
request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}


def configure(format_name: str | None = None) -> None:
    """Send records of this process to standard error. format_name: one of FORMATS; None: what the parent says."""
    name = format_name or os.environ.get(FORMAT_VARIABLE, "text")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if name == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def is_json() -> bool:
    """Whether this process writes JSON lines."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, request_id, whatever `extra` held, exception."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        found = request_id.get()
        if found is not None:
            line["request_id"] = found
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
