"""Whatever a client sends: a 4xx that names field, value and limit, and nothing else happens."""

from __future__ import annotations

import json

import pytest
from live import Live, ok, refused, strict
from toy_model import CONTEXT

USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def body_for(path: str) -> dict:
    return {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"[]", b"null", b"1", b'"x"', b"{}", b'{"prompt":"a"} more', b'{"prompt":"a",}', b"\xff\xfe",
        b'{"prompt":"\xff"}', b'\xef\xbb\xbf{"prompt":"a"}', b'{"prompt":"a\x00"}', b"{'prompt':'a'}", b"{" * 50_000,
        b'{"prompt":' + b"[" * 100_000, b'{"messages":' + b'[{"role":' * 50_000, b'{"model":1}',
        b'{"chat_template_kwargs":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    ],
)  # fmt: skip
def test_what_is_no_request(live: Live, path: str, body: bytes) -> None:
    refused(live.raw(path, body))


@pytest.mark.parametrize("escape", ["\\ud800", "a\\udfffb", "\\ud83d", "\\udc4b\\ud83d", "\\ud83d\\u0041"])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_half_a_surrogate_pair(live: Live, escape: str, stream: str) -> None:
    for path, part in (
        (COMPLETIONS, f'"prompt":"{escape}"'),
        (COMPLETIONS, f'"prompt":"a","stop":["{escape}"]'),
        (COMPLETIONS, f'"prompt":"a","user":"{escape}"'),
        (CHAT, f'"messages":[{{"role":"user","content":"{escape}"}}]'),
    ):
        error = refused(live.raw(path, f'{{{part},"stream":{stream}}}'.encode()))
        assert "surrogate" in error["message"] or "JSON" in error["message"]


def test_whole_surrogate_pairs_are_characters(live: Live) -> None:
    answer = strict(live.raw(COMPLETIONS, b'{"prompt":"\\ud83d\\ude42","max_tokens":1,"echo":true}').text)
    assert answer["choices"][0]["text"].startswith("🙂")


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400])
def test_numbers_that_are_not_finite(live: Live, name: str, literal: str) -> None:
    error = refused(live.raw(COMPLETIONS, f'{{"prompt":"a","{name}":{literal}}}'.encode()))
    assert error["param"] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"), ({"top_k": -2}, "top_k"), ({"top_k": 0.5}, "top_k"), ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 8}, "min_tokens"), ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": 1.5}, "n"), ({"n": 10_000}, "n"), ({"n": 10**9}, "n"),
        ({"n": 2**63}, "n"), ({"n": 10**4000}, "n"), ({"seed": 2**63}, "seed"), ({"seed": 10**30}, "seed"),
        ({"seed": 10**5000}, "seed"), ({"seed": 1.5}, "seed"), ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"stop": 5}, "stop"), ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"), ({"stop": [1]}, "stop[0]"), ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [99_999_999]}, "stop_token_ids"), ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"), ({"allowed_token_ids": [99_999_999]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-3": 5}}, "logit_bias"), ({"logit_bias": {"abc": 5}}, "logit_bias"),
        ({"logit_bias": {" 5": 5}}, "logit_bias"), ({"logit_bias": {"٣": 5}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 5}}, "logit_bias"), ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(k): 1 for k in range(1025)}}, "logit_bias"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 100_000}, "prompt_logprobs"), ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"), ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": "x" * 100_000}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"stream": "maybe"}, "stream"), ({"stream": 1}, "stream"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
        ({"stream_options": {}}, "stream_options"), ({"stream_interval": 0}, "stream_interval"),
        ({"request_id": "two words"}, "request_id"), ({"request_id": "x" * 200}, "request_id"),
        ({"store": True}, "store"),
        ({"metadata": {"a": 1}}, "metadata"), ({"service_tier": "flex"}, "service_tier"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_values_out_of_range_are_named(live: Live, path: str, fields: dict, param: str) -> None:
    error = refused(live.raw(path, dump({**body_for(path), **fields})))
    assert error["param"] == param and param.partition("[")[0].rpartition(".")[2] in error["message"]
    assert len(error["message"]) < 400


def dump(body: dict) -> bytes:
    """json.dumps refuses to print integers of thousands of digits."""
    import sys

    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(body).encode()
    finally:
        sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 100_000}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": 1.5}, "logprobs"),
        ({"logprobs": True}, "logprobs"), ({"best_of": 10**9}, "best_of"), ({"n": 4, "best_of": 2}, "best_of"),
        ({"best_of": 2}, "best_of"), ({"suffix": "end"}, "suffix"), ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)  # fmt: skip
def test_values_of_completions(live: Live, fields: dict, param: str) -> None:
    assert refused(live.post(COMPLETIONS, {"prompt": "a", **fields}))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 3}, "logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"), ({"top_logprobs": 0}, "top_logprobs"),
        ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "martian", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"audio": {"voice": "x"}}, "audio"), ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"reasoning_effort": "most"}, "reasoning_effort"), ({"functions": [{}]}, "functions"),
        ({"max_completion_tokens": CONTEXT}, "max_completion_tokens"),
    ],
)  # fmt: skip
def test_values_of_chats(live: Live, fields: dict, param: str) -> None:
    error = refused(live.post(CHAT, {"messages": USER, **fields}))
    assert error["param"] == param, error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "name",
    [
        "use_beam_search",
        "logits_processors",
        "max_token",
        "x" * 5000,
    ],
)
def test_fields_that_are_not_served(live: Live, path: str, name: str) -> None:
    error = refused(live.post(path, {**body_for(path), name: "a"}))
    assert error["param"].removesuffix("...") in name and (
        "not supported" in error["message"] or "unknown" in error["message"]
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"user": "u"}, {"store": False},
        {"metadata": {"a": "b"}}, {"service_tier": "auto"}, {"stop": None}, {"stop": ""}, {"stop": []}, {"n": None},
        {"temperature": None}, {"seed": -(2**63)}, {"top_k": 2**31 - 1}, {"logit_bias": {}}, {"modalities": ["text"]},
    ],
)  # fmt: skip
def test_fields_that_ask_for_nothing(live: Live, fields: dict) -> None:
    assert live.chat(max_tokens=2, **fields)["choices"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([-1], "prompt[0]"), ([2**31 - 1], "prompt[0]"), ([2**63], "prompt[0]"), ([10, -5, 10], "prompt[1]"),
        ([1.5], "prompt[0]"), (["a", 1], "prompt[1]"), ([[1], "a"], "prompt[1]"), ([[1], [-1]], "prompt[1][0]"),
        ([True], "prompt[0]"), ([None], "prompt[0]"), ({"a": 1}, "prompt"), (None, "prompt"), ([], "prompt"),
        ([[]], "prompt"), ("", "prompt"), ([[1], []], "prompt[1]"), (["a"] * 200_000, "prompt"),
        ([10**5000], "prompt[0]"),
        ([40] * CONTEXT, "prompt"), ([40] * (CONTEXT + 1), "prompt"), ("word " * 5 * CONTEXT, "prompt"),
    ],
)  # fmt: skip
def test_prompts(live: Live, prompt: object, param: str) -> None:
    error = refused(live.raw(COMPLETIONS, dump({"prompt": prompt, "max_tokens": 1})))
    assert error["param"] == param


def test_too_long_prompts_are_told_the_numbers(live: Live) -> None:
    error = refused(live.post(COMPLETIONS, {"prompt": [40] * 600, "max_tokens": 1}))
    assert error["code"] == "context_length_exceeded"
    assert "600" in error["message"] and str(CONTEXT - 1) in error["message"]
    error = refused(live.post(CHAT, {"messages": [{"role": "user", "content": "word " * 5 * CONTEXT}]}))
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"


def test_edges_of_the_context(live: Live) -> None:
    assert live.complete(prompt=[40] * (CONTEXT - 1), max_tokens=1)["usage"]["completion_tokens"] == 1
    full = live.complete(prompt=[40] * (CONTEXT - 8), max_tokens=8, ignore_eos=True)
    assert full["usage"]["total_tokens"] == CONTEXT
    error = refused(live.post(COMPLETIONS, {"prompt": [40] * (CONTEXT - 8), "max_tokens": 9}))
    assert error["param"] == "max_tokens" and "8" in error["message"]


def test_vocabulary_ends_where_it_ends(live: Live) -> None:
    size = live.state.client.model.vocab_size
    assert live.complete(prompt=[size - 1], max_tokens=1)
    assert str(size) in refused(live.post(COMPLETIONS, {"prompt": [size]}))["message"]


@pytest.mark.parametrize("name", ["other", "", " ", "../../../etc/passwd", "a\x00b", "%2e%2e/etc", "a" * 100_000])
def test_other_models(live: Live, name: str) -> None:
    for path in (COMPLETIONS, CHAT):
        error = refused(live.post(path, {"model": name, **body_for(path)}), 404)
        assert error["code"] == "model_not_found" and len(error["message"]) < 300


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","prompt":"b"}',
        b'{"n":1,"prompt":"a" , "n" : 2}',
        b'{"prompt":"a","stream_options":{"include_usage":true,"include_usage":false},"stream":true,"stream":true}',
    ],
)
def test_names_given_twice(live: Live, body: bytes) -> None:
    assert refused(live.raw(COMPLETIONS, body))["code"] == "duplicate_parameter"


def test_names_of_fields_inside_texts_are_texts(live: Live) -> None:
    assert live.complete(prompt='"n": 1, "n": 2, "prompt": "user"', n=1, max_tokens=1)
    turns = [{"role": role, "content": 'say "user": "user"'} for role in ("user", "assistant", "user")]
    assert live.chat(messages=turns, user="user", max_tokens=1)


def test_bodies_over_the_limit_are_not_read(live: Live) -> None:
    limit = live.state.settings.max_body_bytes
    error = refused(live.raw(COMPLETIONS, b'{"prompt":"' + b"a" * 50_000_000 + b'"}'), 413)
    assert str(limit) in error["message"] and error["code"] == "request_too_large"

    def pieces():
        for _ in range(30):
            yield b"a" * 1_000_000

    headers = {"Content-Type": "application/json"}  # without a length: sent in chunks
    refused(live.http.post(COMPLETIONS, content=pieces(), headers=headers), 413)


def test_declared_types(live: Live) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    for kind in ("application/json", "application/json; charset=utf-8", "application/vnd.api+json", "APPLICATION/JSON"):
        ok(live.raw(COMPLETIONS, body, {"Content-Type": kind}))
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert "application/json" in refused(live.raw(COMPLETIONS, body, {"Content-Type": kind}), 415)["message"]


def test_other_paths_and_methods(live: Live) -> None:
    for path in ("/v1/nowhere", "/v1/completions/", "//v1/completions", "/V1/completions", "/docs", "/web/../app.py"):
        refused(live.http.get(path), 404)
    for path in ("/v1/completions", "/tokenize"):
        response = live.http.get(path)
        assert refused(response, 405) and "POST" in response.headers["allow"]
    refused(live.post("/health", {}), 405)


def test_odd_ids_in_the_header(live: Live) -> None:
    for value in ("x" * 200, "two words", "tab\there"):
        response = live.post(COMPLETIONS, {"prompt": "a"}, headers={"X-Request-Id": value})
        assert refused(response)["param"] == "X-Request-Id"


def test_defects_of_the_engine_tell_nothing(live: Live) -> None:
    error = refused(live.post(COMPLETIONS, {"prompt": "BREAK-THIS"}), 500)
    assert "TypeError" not in json.dumps(error) and "internal matter" not in json.dumps(error)
