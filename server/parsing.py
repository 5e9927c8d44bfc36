"""Bytes of a request body to a typed request, or an ApiError that says what is wrong with them."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Generic, TypeVar

import msgspec
from jaxserve.server.errors import ApiError, from_validation
from starlette.requests import ClientDisconnect, Request

_MAX_EXPLAINED = 1 << 16  # bytes: longer bodies are not decoded a second time to explain what is wrong

Body = TypeVar("Body", bound=msgspec.Struct)


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be too long, 408 if it takes too long, 415 for
    a declared type other than JSON (which also keeps forms of foreign web pages out)."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"Content-Type: got {kind[:80]!r}; allowed: application/json", code="unsupported_media_type"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_long(declared, max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_long(f"more than {max_bytes}", max_bytes)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(499, "the client left", code="client_disconnected") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_long(seen: str, max_bytes: int) -> ApiError:
    return ApiError(413, f"body: got {seen} bytes; allowed: at most {max_bytes} bytes", code="request_too_large")


class BodyParser(Generic[Body]):
    """Decodes bodies of one kind. hints: what to say of fields instead of "unknown field"."""

    def __init__(self, kind: type[Body], hints: dict[str, str] | None = None) -> None:
        self._kind = kind
        self._hints = hints or {}
        self._decode = msgspec.json.Decoder(kind).decode
        self._names = [field.encode_name.encode() for field in msgspec.structs.fields(kind)]

    def parse(self, data: bytes) -> Body:
        """Raises ApiError 400 unless `data` is one JSON object with the right fields, each once."""
        try:
            body = self._decode(data)
        except msgspec.ValidationError as error:
            seen = _decode_loosely(data) if len(data) <= _MAX_EXPLAINED else None
            raise from_validation(error, seen, self._hints, self._kind) from None
        except msgspec.DecodeError as error:
            raise _not_json(data, error) from None
        except UnicodeDecodeError as error:
            raise ApiError(400, f"body: not valid UTF-8 at byte {error.start}", code="invalid_json") from None
        except RecursionError:
            raise ApiError(400, "body: JSON is nested too deeply", code="invalid_json") from None
        self._refuse_duplicates(data)
        return body

    def _refuse_duplicates(self, data: bytes) -> None:
        """JSON leaves open which of two equal names counts; another program may have checked the other one."""
        for name in self._names:
            if data.count(b'"%b"' % name) > 1 and len(re.findall(rb'"%b"\s*:' % name, data)) > 1:
                # Perhaps inside a nested object or a string: only the slow way can tell.
                json.loads(data, object_pairs_hook=_refuse_duplicate_names)
                return


def _refuse_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ApiError(400, f"{name[:80]}: given more than once", param=name[:80], code="duplicate_parameter")
    return result


def _decode_loosely(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None


def _not_json(data: bytes, error: msgspec.DecodeError) -> ApiError:
    """Say what is wrong with text that is no JSON, as far as that is cheap to find out."""
    reason = str(error)
    if not data.strip():
        reason = "it is empty"
    elif len(data) <= _MAX_EXPLAINED:
        try:
            value = json.loads(data.decode())
        except UnicodeDecodeError as fault:
            reason = f"not valid UTF-8 at byte {fault.start}"
        except (ValueError, RecursionError):
            pass
        else:
            constant = _CONSTANT.search(data)
            if constant is not None:
                return _no_number(constant)
            if _has_lone_surrogate(value):
                reason = "a string holds half of a surrogate pair, which is no character"
    return ApiError(400, f"body: invalid JSON: {reason}", code="invalid_json")


# Python's reader takes these words for numbers, JSON does not.
_CONSTANT = re.compile(rb'"(\w{1,80})"\s*:\s*(NaN|-?Infinity)\b')


def _no_number(found: re.Match[bytes]) -> ApiError:
    name, value = (group.decode() for group in found.groups())
    return ApiError(400, f"{name}: got {value}; allowed: a finite number", param=name, code="invalid_json")


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except RecursionError:
        pass
    return False
