"""Errors as clients see them: OpenAI's error object, a status, and never the text of an internal exception."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from jaxserve.messages import FINISH_ABORT, FINISH_ERROR, RequestOutput
from jaxserve.sampling_params import InvalidParameter

INVALID_REQUEST = "invalid_request_error"
UNAVAILABLE = "service_unavailable"
SERVER_ERROR = "server_error"
RATE_LIMITED = "rate_limit_error"

_MAX_SHOWN = 100  # characters of a client's value that are repeated in a message
_MAX_BITS = 256  # of an integer that is repeated in full; Python refuses to print those of many thousands


class ApiError(Exception):
    """Ends a request with `status` and an error object.

    param        the request field that is wrong, if it is one
    code         a word for programs
    retry_after  seconds after which the same request may succeed
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID_REQUEST,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after = retry_after

    def encode(self) -> bytes:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


# Anthropic's words for statuses.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_type(status: int) -> str:
    """The type of an error in Anthropic's dialect."""
    return _ERROR_TYPES.get(status, "invalid_request_error")


def error_body(error: ApiError, path: str) -> bytes:
    """The JSON body in the dialect of the path that was asked."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        body = {"type": "error", "error": {"type": error_type(error.status), "message": error.message}}
        return msgspec.json.encode(body)
    return error.encode()


def shown(value: Any) -> str:
    """A client's value, short and printable, for an error message."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        return f"{'an array' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def invalid_value(param: str, seen: Any, allowed: str, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{param}: got {shown(seen)}; allowed: {allowed}", param=param, code=code)


def from_invalid_parameter(error: InvalidParameter, *, names: dict[str, str] | None = None) -> ApiError:
    """A refusal of SamplingParams. `names`: its parameter -> the field the client used."""
    message, param = str(error), error.parameter
    if names and param in names:
        message = names[param] + message.removeprefix(param)
        param = names[param]
    return ApiError(400, message, param=param, code="invalid_value")


def unavailable(message: str, *, retry_after: int = 1, code: str = "engine_unavailable") -> ApiError:
    return ApiError(503, message, kind=UNAVAILABLE, code=code, retry_after=retry_after)


def internal_error() -> ApiError:
    return ApiError(500, "the server failed to answer this request; its log says why", kind=SERVER_ERROR)


def from_output(output: RequestOutput) -> ApiError | None:
    """The error that a last output stands for; None if the continuation ended well."""
    if output.finish_reason not in (FINISH_ERROR, FINISH_ABORT):
        return None
    message = output.error or "the request was aborted"
    match output.parameter:
        case "max_waiting":
            return unavailable("the queue is full; try again later", code="queue_full")
        case "engine":
            return unavailable("the server is shutting down", retry_after=5, code="shutting_down")
        case "deadline_s":
            return ApiError(408, message, param="deadline_s", code="deadline_exceeded")
        case "prompt":
            return ApiError(400, message, param="prompt", code="context_length_exceeded")
        case None:
            if output.finish_reason == FINISH_ABORT:
                return unavailable("the request was aborted by the engine", code="aborted")
            return internal_error()
        case parameter:
            return ApiError(400, message, param=parameter, code="invalid_value")


_AT = re.compile(r" - at (?:`key` in )?`(\$.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_NOTHING = object()


def from_validation(error: msgspec.ValidationError, body: Any, hints: dict[str, str], kind: type) -> ApiError:
    """A body that is JSON but not the right JSON.

    body     the decoded body, for the value that was seen; None if it is too large to decode twice
    hints    field -> what to say about it instead (fields that other servers have and this one has not)
    kind     the type that the body should have had
    """
    text = str(error)
    at = _AT.search(text)
    path = at.group(1) if at else "$"
    reason = text[: at.start()] if at else text
    param = path.removeprefix("$").lstrip(".").removesuffix("[...]")
    unknown, missing = _UNKNOWN.match(reason), _MISSING.match(reason)
    named = unknown or missing
    if named is not None:
        param = f"{param}.{named.group(1)}" if param else named.group(1)
    top = re.split(r"[.\[]", param, maxsplit=1)[0]
    if top in hints:
        return ApiError(400, f"{top}: {hints[top]}", param=top, code="unsupported_parameter")
    if unknown:
        name = param if len(param) <= _MAX_SHOWN else param[: _MAX_SHOWN - 3] + "..."
        return ApiError(400, f"{name}: unknown field", param=name, code="unknown_parameter")
    if missing:
        return ApiError(400, f"{param}: missing; it is required", param=param, code="missing_required_parameter")
    seen = _look_up(body, path)
    got = "" if seen is _NOTHING else f"got {shown(seen)}; "
    if reason.startswith("Invalid enum value"):
        reason = f"allowed: {_allowed(kind, path)}"
    return ApiError(400, f"{param or 'body'}: {got}{_lower(reason)}", param=param or None, code="invalid_type")


def _allowed(kind: type, path: str) -> str:
    """The values of the Literal at a path of a type."""
    found = [msgspec.inspect.type_info(kind)]
    for step in _STEP.finditer(path.removeprefix("$").replace("[...]", "[0]")):
        name, _ = step.groups()
        found = [inner for info in _members(found) for inner in _inside(info, name)]
    values = [repr(v) for info in _members(found) if isinstance(info, msgspec.inspect.LiteralType) for v in info.values]
    return ", ".join(values) or "see the documentation"


def _members(infos: list[Any]) -> list[Any]:
    """Types with unions and metadata taken apart."""
    result = []
    for info in infos:
        while isinstance(info, msgspec.inspect.Metadata):
            info = info.type
        result += _members(list(info.types)) if isinstance(info, msgspec.inspect.UnionType) else [info]
    return result


def _inside(info: Any, name: str | None) -> list[Any]:
    """Types of a struct's field, or of the items of an array or object."""
    if isinstance(info, msgspec.inspect.StructType):
        return [field.type for field in info.fields if field.encode_name == name]
    inner = getattr(info, "item_type", None) if name is None else getattr(info, "value_type", None)
    return [] if inner is None else [inner]


def _look_up(body: Any, path: str) -> Any:
    value = body
    rest = path.removeprefix("$")
    if body is None or "[...]" in rest:
        return _NOTHING
    for step in _STEP.finditer(rest):
        name, index = step.groups()
        try:
            value = value[name] if name is not None else value[int(index)]
        except (KeyError, IndexError, TypeError):
            return _NOTHING
    return value


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
