"""From a request's bytes to what policies look at. What cannot be read is routed all the same: the worker says why."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from jaxserve.server import protocol
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import namespace_of
from jaxserve.server.parsing import BodyParser
from jaxserve.server.prompts import LoadedModel, TextOptions

from jaxserve.cache.page_hashes import hash_pages, namespace_hash
from jaxserve.messages import ModelInfo
from jaxserve.routing.policy import Query
from jaxserve.tokenizer import Tokenizer

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
_completions = BodyParser(protocol.CompletionRequest)
_chats = BodyParser(protocol.ChatCompletionRequest)
_MAX_PROMPTS = 1024


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


class PageReader:
    """From a body to the hashes of its prompt's pages, as the engine will name them.

    tokenizer    as the workers'; None: only prompts of token ids can be read
    uses_keys    whether workers keep API keys apart (they do when they ask for keys)
    Chats with tools and other bodies whose tokens depend on more than their text are not read: routing by what was
    sent where serves them.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, uses_keys: bool) -> None:
        self._loaded = None if tokenizer is None else LoadedModel(_unknown_model(tokenizer), tokenizer)
        self._uses_keys = uses_keys

    async def pages_of(self, path: str, body: bytes, authorization: bytes, page_size: int) -> list[int] | None:
        """None if the tokens cannot be told."""
        try:
            if path.endswith("/chat/completions"):
                salt, tokens = await self._chat(body)
            elif path.endswith("/completions"):
                salt, tokens = await self._completion(body)
            else:
                return None
        except (ApiError, ValueError, TypeError):
            return None  # the worker says what is wrong
        if tokens is None:
            return None
        # The last token is computed in any case: a page that it ends is never taken from the cache.
        usable = np.array(tokens[:-1], np.int32)
        return hash_pages(namespace_hash(self._namespace(authorization, salt)), usable, page_size)

    async def _completion(self, body: bytes) -> tuple[str | None, Sequence[int] | None]:
        request = _completions.parse(body)
        prompt = request.prompt
        if self._loaded is None:
            is_ids = isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
            return request.cache_salt, prompt if is_ids else None
        options = TextOptions(
            add_special_tokens=request.add_special_tokens is not False,
            allow_special_tokens=request.allow_special_tokens is not False,
        )
        prompts = await self._loaded.encode_prompts(prompt, options, max_prompts=_MAX_PROMPTS)
        return request.cache_salt, prompts[0].token_ids

    async def _chat(self, body: bytes) -> tuple[str | None, Sequence[int] | None]:
        if self._loaded is None:
            return None, None
        request = _chats.parse(body)
        if request.tools or request.reasoning_effort or getattr(request, "response_format", None) is not None:
            return None, None
        tokens = await self._loaded.encode_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.chat_template_kwargs,
        )
        return request.cache_salt, tokens

    def _namespace(self, authorization: bytes, salt: str | None) -> str:
        tenant = ""
        if self._uses_keys and authorization[:7].lower() == b"bearer ":
            tenant = hashlib.sha256(authorization[7:].strip()).hexdigest()[:32]  # as server/auth.py makes it
        return namespace_of(tenant, salt)


def _unknown_model(tokenizer: Tokenizer) -> ModelInfo:
    """What LoadedModel checks token ids against."""
    return ModelInfo(
        name="", tokenizer_path="", vocab_size=tokenizer.vocab_size, max_model_len=1 << 30, eos_token_ids=[],
        max_num_rows=0, dtype="", num_pages=0, page_size=0,
    )  # fmt: skip
