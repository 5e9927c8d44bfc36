"""From a request's bytes to what policies look at. What cannot be read is routed all the same: the worker says why."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from jaxserve.routing.policy import Query

_NOTHING = Query()


class _Body(msgspec.Struct):
    """The fields of interest of a completion, a chat, a response or an embedding."""

    prompt: Any = None
    messages: Any = None
    input: Any = None
    instructions: Any = None
    tools: Any = None
    user: Any = None
    prompt_cache_key: Any = None
    cache_salt: Any = None


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.encode


def query_of(body: bytes, *, authorization: bytes = b"", session: str = "") -> Query:
    """The query of a request body. `session`: from a header; else the body's prompt_cache_key or user."""
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _NOTHING if not session else Query(session=session)
    prefix = _prefix(fields)
    salt = fields.cache_salt if isinstance(fields.cache_salt, str) else ""
    if prefix and (authorization or salt):
        # Workers share nothing between keys and between salts.
        prefix = blake2b(authorization + b"\0" + salt.encode(), digest_size=8).digest() + prefix
    for name in (fields.prompt_cache_key, fields.user):
        if not session and isinstance(name, str):
            session = name
    return Query(prefix, session)


def _prefix(fields: _Body) -> bytes:
    if fields.prompt is not None:
        return _text(fields.prompt)
    head = b""
    if fields.tools:
        head = _encode(fields.tools)  # templates write tools before the first message
    if isinstance(fields.instructions, str):
        head += fields.instructions.encode(errors="replace")
    if isinstance(fields.messages, list):
        return head + b"".join(map(_message, fields.messages))
    if isinstance(fields.input, list) and fields.input and isinstance(fields.input[0], dict):
        return head + b"".join(map(_message, fields.input))
    return head + _text(fields.input)


def _text(prompt: Any) -> bytes:
    """Text, token ids, or the first of several of these."""
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            try:
                return np.array(prompt, np.int32).tobytes()
            except (OverflowError, ValueError, TypeError):
                return b""
        return _text(prompt[0])
    return b""


def _message(message: Any) -> bytes:
    if not isinstance(message, dict):
        return b""
    role, content = message.get("role"), message.get("content")
    start = b"\x01" + (role.encode(errors="replace") if isinstance(role, str) else b"") + b"\x02"
    if isinstance(content, str):
        return start + content.encode(errors="replace")
    return start + (_encode(content) if content is not None else _encode(message.get("tool_calls")))
