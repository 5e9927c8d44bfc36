"""Damaged and strange bodies: a 2xx or a 4xx, quickly, and never a 5xx."""

from __future__ import annotations

import json
import random

import pytest
from live import Live, strict

BODIES: dict[str, dict] = {
    "/v1/completions": {
        "prompt": ["One", "Two 🙂"], "max_tokens": 2, "n": 2, "temperature": 0.5, "stop": ["x", "y"], "seed": 7,
        "logprobs": 2, "echo": True, "logit_bias": {"5": 1.5}, "stream_options": None, "cache_salt": "s",
    },
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}],
        "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 3,
        "chat_template_kwargs": {"a": [1, {"b": None}]}, "metadata": {"k": "v"},
    },
    "/tokenize": {"prompt": "One", "return_token_strs": True, "add_special_tokens": False},
    "/detokenize": {"tokens": [40, 41, 42]},
}  # fmt: skip
STRANGE = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308, 5e-324, "", " ",
    "a" * 3000, "\x00", "\ufffe\uffff",
    "🙂", [], [[]], [[[]]], [None], [1, "a"], {}, {"": 0}, {"type": "text"}, {"a": {"a": {"a": 1}}},
]  # fmt: skip
PIECES = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\\ud800",
    b"\\u0000",
    b"\xff",
    b"\xf0\x9f",
    b"NaN",
    b"1e999",
    b"null",
]


def send(live: Live, path: str, data: bytes) -> None:
    response = live.raw(path, data)
    assert response.status_code < 500, (path, data, response.text)
    if response.status_code >= 400:
        error = strict(response.text)["error"]
        assert error["message"] and len(error["message"]) < 1000, data


@pytest.mark.parametrize("path", BODIES)
def test_every_field_with_strange_values(live: Live, path: str) -> None:
    fields = set(BODIES[path]) | {"model", "n", "stream", "user", "request_id", "priority", "tools", "top_k"}
    for name in sorted(fields):
        for value in STRANGE:
            send(live, path, json.dumps({**BODIES[path], name: value}).encode())


@pytest.mark.parametrize("path", BODIES)
def test_damaged_bytes(live: Live, path: str) -> None:
    source = random.Random(path)
    for _ in range(250):
        data = bytearray(json.dumps(BODIES[path], ensure_ascii=False).encode())
        for _ in range(source.randint(1, 4)):
            start = source.randrange(len(data))
            end = start + source.choice((0, 1, 1, 2, 9))
            data[start:end] = source.choice((b"", source.choice(PIECES), bytes([source.randrange(256)])))
        send(live, path, bytes(data))
