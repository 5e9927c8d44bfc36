"""Mutated bodies against a running server: never a 5xx but a deliberate 503, never a hang.

    python benchmarks/fuzz.py [--url http://127.0.0.1:8000] [--count 10000] [--seed 0] [--clients 8] [--json FILE]

Every body starts from a valid one of some route and is damaged in its values, its fields or its bytes. An answer is
right if it is a 2xx, or a 4xx with an error object, and came within --limit seconds. The first bodies that got
anything else are printed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import copy
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

FUNCTION = {
    "name": "f",
    "description": "call",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": ["One", "Two 🙂"], "max_tokens": 2, "n": 2, "temperature": 0.5, "stop": ["x", "y"], "seed": 7,
         "logprobs": 2, "echo": True, "logit_bias": {"5": 1.5}, "cache_salt": "s", "bad_words": ["so", "a b"]},
        {"prompt": [40, 41, 42], "max_tokens": 3, "stream": True, "min_p": 0.1, "top_k": 5, "top_p": 0.9,
         "min_tokens": 1, "stop_token_ids": [3], "allowed_token_ids": [5, 6, 7], "stream_interval": 2,
         "return_token_ids": True,
         "logprobs": 1, "logprob_token_ids": [1, 2], "stream_options": {"include_usage": True}},
        {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{2}"}, "repetition_penalty": 1.1},
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "system", "content": "a"},
                      {"role": "user", "content": [{"type": "text", "text": "b"}]}],
         "max_tokens": 2, "stream": True, "logprobs": True, "stream_options": {"include_usage": True},
         "top_logprobs": 3, "chat_template_kwargs": {"a": [1, {"b": None}]}, "metadata": {"k": "v"}},
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 12, "tools": [TOOL],
         "tool_choice": "auto", "parallel_tool_calls": False},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8,
         "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        {"messages": [{"role": "user", "content": "x"},
                      {"role": "assistant", "content": None,
                       "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                      {"role": "tool", "tool_call_id": "c", "content": "1"}], "max_tokens": 2},
    ],
    "/v1/responses": [
        {"input": "a", "max_output_tokens": 2, "instructions": "b", "metadata": {"k": "v"}, "top_p": 0.5},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                   {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": "1"}],
         "max_output_tokens": 2, "stream": True, "store": False, "tools": [{"type": "function", **FUNCTION}]},
    ],
    "/v1/responses/input_tokens": [{"input": "a"}],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "system": "b", "stop_sequences": ["x"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                      {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}],
         "max_tokens": 2, "stream": True, "tools": [{"name": "f", "input_schema": SCHEMA}],
         "thinking": {"type": "disabled"}},
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "a"}]}],
    "/generate": [
        {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 1}], "return_logprob": True,
         "logprob_start_len": 0, "top_logprobs_num": 1, "token_ids_logprob": [1], "rid": ["p", "q"]},
        {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 2, "regex": "a|b", "stop": ["x"]}, "stream": True},
    ],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}, {"input": [[1, 2], [3]]}],
    "/v1/score": [{"text_1": "a", "text_2": ["b", "c"]}, {"query": "a", "items": ["b"], "label_token_ids": [1, 2]}],
    "/rerank": [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}],
    "/tokenize": [{"prompt": "One", "return_token_strs": True, "add_special_tokens": False}],
    "/detokenize": [{"tokens": [40, 41, 42]}],
    "/abort_request": [{"rid": "nobody"}],
    "/flush_cache": [{}],
}  # fmt: skip

STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308, 5e-324, "", " ", "a" * 3000,
    "\x00", "\ufffe\uffff", "🙂", "<|im_end|>", [], [[]], [[[]]], [None], [1, "a"], {}, {"": 0}, {"type": "text"},
    {"a": {"a": {"a": 1}}}, [0] * 300, {str(k): k for k in range(50)}, "(a+)+$", {"$ref": "#"}, "../../etc/passwd",
]  # fmt: skip
PIECES = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\ud800", b"\\u0000", b"\xff", b"\xf0\x9f", b"NaN",
          b"1e999", b"null", b"-", b"0" * 50, b"[" * 2000]  # fmt: skip
FIELDS = ["model", "n", "stream", "user", "request_id", "priority", "tools", "tool_choice", "top_k", "response_format",
          "echo", "max_tokens", "truncate_prompt_tokens", "text", "background", "previous_response_id"]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a body."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutated(source: random.Random, body: dict[str, Any]) -> bytes:
    """One damaged body."""
    body = copy.deepcopy(body)
    for _ in range(source.choice((0, 1, 1, 1, 2, 3))):
        spots = places(body)
        if not spots or source.random() < 0.2:
            body[source.choice(FIELDS)] = copy.deepcopy(source.choice(STRANGE))
            continue
        *path, last = source.choice(spots)
        inside: Any = body
        for key in path:
            inside = inside[key]
        if source.random() < 0.15 and isinstance(inside, dict):
            del inside[last]
        else:
            inside[last] = copy.deepcopy(source.choice(STRANGE))
    data = bytearray(json.dumps(body, ensure_ascii=source.random() < 0.5).encode(errors="replace"))
    if source.random() < 0.35:
        for _ in range(source.randint(1, 4)):
            start = source.randrange(len(data) + 1)
            end = start + source.choice((0, 1, 1, 2, 9))
            data[start:end] = source.choice((b"", source.choice(PIECES), bytes([source.randrange(256)])))
    return bytes(data)


def is_right(response: httpx.Response) -> bool:
    """A 2xx, a deliberate 503, or a 4xx with an error object that shows no internals."""
    if response.status_code < 300:
        return True
    if response.status_code >= 500 and not (response.status_code == 503 and "retry-after" in response.headers):
        return False
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(error.get("message")) and "Traceback" not in response.text


def run(url: str, count: int, seed: int, clients: int, limit: float, headers: dict[str, str]) -> dict[str, Any]:
    """Send `count` bodies; what came back, counted."""
    statuses: collections.Counter[str] = collections.Counter()
    faults: list[dict[str, Any]] = []
    slowest = 0.0

    def work(worker: int) -> None:
        nonlocal slowest
        source = random.Random(f"{seed}/{worker}")
        with httpx.Client(base_url=url, timeout=limit, headers={"Content-Type": "application/json", **headers}) as http:
            for _ in range(count // clients + (worker < count % clients)):
                path = source.choice(list(BODIES))
                data = mutated(source, source.choice(BODIES[path]))
                started = time.monotonic()
                try:
                    response = http.post(path, content=data)
                    status, is_fault = str(response.status_code), not is_right(response)
                    shown = response.text[:300]
                except httpx.HTTPError as error:
                    status, is_fault, shown = type(error).__name__, True, str(error)
                slowest = max(slowest, time.monotonic() - started)
                statuses[status] += 1
                if is_fault:
                    faults.append(
                        {"path": path, "status": status, "answer": shown, "body": data[:2000].decode("latin-1")}
                    )

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        list(pool.map(work, range(clients)))
    health = httpx.get(f"{url}/ready", timeout=limit).status_code
    return {
        "count": sum(statuses.values()), "statuses": dict(sorted(statuses.items())), "num_faults": len(faults),
        "slowest_s": round(slowest, 3), "ready_afterwards": health == 200, "faults": faults[:20],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which an answer counts as a hang")
    parser.add_argument("--api-key")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    started = time.monotonic()
    result = run(options.url, options.count, options.seed, options.clients, options.limit, headers)
    result["seconds"] = round(time.monotonic() - started, 1)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    for fault in result.pop("faults"):
        print(json.dumps(fault))
    print(json.dumps(result))
    return 0 if not result["num_faults"] and result["ready_afterwards"] else 1


if __name__ == "__main__":
    sys.exit(main())
