"""Fields that ask for structured output: what is refused, by name, before an engine sees it."""

from __future__ import annotations

import concurrent.futures
import time

import pytest
from live import Live, refused

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Say hello"}]


def schema(value: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": "json"}, "response_format", "str"),
        ({"response_format": {}}, "response_format.type", "missing"),
        ({"response_format": {"type": "weird"}}, "response_format.type", "weird"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
         "response_format.json_schema.schema", "missing"),
        ({"response_format": schema("x")}, "response_format.json_schema.schema", "str"),
        ({"response_format": schema({"type": "nope"})}, "response_format", "nope"),
        ({"response_format": schema({"dependentSchemas": {"a": {"minProperties": 2}}})}, "response_format",
         "dependentSchemas"),
        ({"response_format": schema({"not": {"type": "string"}})}, "response_format", "not"),
        ({"response_format": schema({"$ref": "http://127.0.0.1:9/x"})}, "response_format", "127.0.0.1"),
        ({"response_format": schema({"$ref": "#/nowhere"})}, "response_format", "nowhere"),
        ({"response_format": schema({"type": "string", "pattern": "("})}, "response_format", "unclosed"),
        ({"response_format": schema({"type": "string", "format": "phone"})}, "response_format", "phone"),
        ({"response_format": schema({"x-guidance": {"lenient": True}, "not": {}})}, "response_format", "not"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<a"], "structures": [{"begin": "b"}]}},
         "response_format", "triggers"),
        ({"structured_outputs": {}, "regex": "["}, "regex", "class"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex", "backslash"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"structured_outputs": {"grammar": "root ::= (\"a\""}}, "structured_outputs.grammar", ")"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "one of them"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend", "unknown"),
        ({"guided_json": {"type": "array", "uniqueItems": 5}}, "guided_json", "uniqueItems"),
        ({"guided_regex": "(?<=a)b"}, "guided_regex", "look"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "one of them"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", ""),
        ({"ebnf": ""}, "ebnf", "empty"),
        ({"regex": "a" * 300_000}, "regex", "at most"),
        ({"regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids", "regex"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_used_is_refused_by_name(live: Live, fields: dict, param: str, word: str) -> None:
    for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "a"})):
        error = refused(live.post(path, {**body, **fields, "max_tokens": 2}))
        assert error["param"] == param, error
        assert word in error["message"], error


def test_a_grammar_that_kills_its_compiler_hurts_nobody(live: Live) -> None:
    depth = 3000
    parts = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "type": "object"} for i in range(depth)}
    deep = {"$defs": {**parts, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    error = refused(live.chat_response(response_format=schema(deep)))
    assert "deeply" in error["message"]
    assert live.chat(max_tokens=2)["choices"]
    assert "nope" in refused(live.chat_response(response_format=schema({"type": "nope"})))["message"]


def test_a_slow_grammar_is_given_up(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = live.state.grammars
    monkeypatch.setattr(checker, "_time_limit_s", 0.0)
    error = refused(live.chat_response(response_format=schema({"type": "integer", "minimum": time.time()})))
    assert "too long" in error["message"]
    monkeypatch.undo()
    assert live.chat(max_tokens=2, response_format=schema({"type": "integer"}))["choices"]


def test_slow_grammars_do_not_keep_others_waiting(live: Live) -> None:
    """Each of these takes the compiler far longer than its limit."""
    chain = "\n".join(f'R{i}: "a" R{i + 1} "b"?' for i in range(2000))
    slow = f'start: R0\n{chain}\nR2000: "x"'
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(live.chat_response, ebnf=f"{slow}\n// {n}") for n in range(2)]
        for number in range(5):
            assert live.chat(max_tokens=1, regex=f"b{{{number + 1}}}")["choices"]
        assert not any(answer.done() for answer in asked)
        assert all("too long" in refused(answer.result())["message"] for answer in asked)


def test_answers_are_remembered_up_to_a_bound(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.server.grammar_check.MAX_REMEMBERED", 4)
    for number in range(9):
        assert live.chat(max_tokens=1, regex=f"a{{{number + 1}}}")["choices"]
    assert live.state.grammars.num_remembered == 4


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**40])
def test_a_schema_with_a_number_of_more_than_64_bits(live: Live, value: int) -> None:
    """The grammar library cannot hold it: that is the request's matter, in a format as in a tool."""
    asked = {"type": "object", "properties": {"a": {"enum": [value]}}}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    assert refused(live.post("/v1/chat/completions", {**body, "response_format": schema(asked)}))["param"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": asked}}]
    assert refused(live.post("/v1/chat/completions", {**body, "tools": tools}))["param"]
