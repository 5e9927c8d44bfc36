"""Tool calls and reasoning through the whole server; the engine writes what the test tells it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxserve.server.settings import ServerSettings
from jaxserve.server.tools.prompting import describe_tools, write_calls_out
from live import Events, Live, engine_command, refused, serving

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "żó]}{"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}


def tool(name: str = "add", parameters: Any = SCHEMA, **fields: Any) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": f"WRITE[{text}]WRITE"}]


def joined(events: Events, index: int = 0) -> dict[str, Any]:
    """The message that a stream's deltas make."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    for choice in events.choices(index):
        delta = choice["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert call["type"] == "function" and call["id"].startswith("call_")
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
def test_calls_are_the_same_plain_and_streamed(live: Live, choice: Any) -> None:
    fields = {"messages": say(f"On it.\n{CALL}\n{CALL}"), "tools": [tool()], "tool_choice": choice}
    plain = live.chat(**fields)["choices"][0]
    calls = plain["message"]["tool_calls"]
    assert plain["message"]["content"] == "On it."
    assert plain["finish_reason"] == "tool_calls"
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1, "b": "żó]}{"}] * 2
    assert len({call["id"] for call in calls}) == 2
    events = live.stream_chat(**fields)
    message = joined(events)
    assert events.finish() == ["tool_calls"]
    assert message["content"] == "On it."
    assert [call["arguments"] for call in message["tool_calls"]] == [call["function"]["arguments"] for call in calls]
    assert sum("tool_calls" in choice["delta"] for choice in events.choices()) > 6


def test_a_call_cut_off_by_max_tokens_says_length(live: Live) -> None:
    fields = {"messages": say(CALL), "tools": [tool()], "max_tokens": 50}
    plain = live.chat(**fields)["choices"][0]
    assert plain["finish_reason"] == "length"
    assert plain["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert live.stream_chat(**fields).finish() == ["length"]


def test_tokens_and_scores_come_once_each_beside_calls(live: Live) -> None:
    fields = {"messages": say(f"Hm {CALL}"), "tools": [tool()], "logprobs": True, "return_token_ids": True}
    plain = live.chat(**fields)["choices"][0]
    events = live.stream_chat(**fields)
    tokens = [token for choice in events.choices() for token in choice.get("token_ids", ())]
    scores = [s["token"] for choice in events.choices() for s in (choice["logprobs"] or {}).get("content", ())]
    assert tokens == plain["token_ids"]
    assert scores == [score["token"] for score in plain["logprobs"]["content"]]


def test_none_leaves_the_text_alone(live: Live) -> None:
    plain = live.chat(messages=say(CALL), tools=[tool()], tool_choice="none")["choices"][0]
    assert plain["message"]["content"] == CALL
    assert "tool_calls" not in plain["message"]
    assert plain["finish_reason"] == "stop"


def test_the_template_gets_the_tools_unless_none_may_be_called(live: Live) -> None:
    short = live.chat(messages=say("x"), max_tokens=1)["usage"]["prompt_tokens"]
    long = live.chat(messages=say("x"), max_tokens=1, tools=[tool()])
    assert long["usage"]["prompt_tokens"] > short + 5
    off = live.chat(messages=say("x"), max_tokens=1, tools=[tool()], tool_choice="none")
    assert off["usage"]["prompt_tokens"] == short


def test_a_template_without_tools_gets_them_as_text() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    told = describe_tools(write_calls_out(turns), [tool()])
    assert told[0]["content"].startswith("Be brief.\n\n# Tools")
    assert json.dumps(tool()) in told[0]["content"]
    assert told[2] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    }
    answers = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert told[3:] == [{"role": "user", "content": answers}]
    assert describe_tools(turns[1:2], [tool()])[0]["role"] == "system"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
         "tool_choice.function.name"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": 5})]}, "tools[0].function.parameters"),
        ({"tools": [tool(), tool("b", {"type": "nope"})]}, "tools[1].function.parameters"),
        ({"tools": [tool(parameters={"$ref": "#/nowhere"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"properties": {"a": {"pattern": "("}}, "type": "object"})], "tool_choice": "auto"},
         "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"not": {"type": "object"}})], "tool_choice": "required"},
         "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"not": {"type": "object"}}, strict=True)]}, "tools[0].function.parameters"),
        ({"tools": [tool()], "regex": "a"}, "regex"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_kept_to_are_refused_by_name(live: Live, fields: dict, param: str) -> None:
    error = refused(live.chat_response(max_tokens=2, **fields))
    assert error["param"] == param, error


def test_a_schema_beyond_the_compiler_is_let_through_unless_it_must_hold(live: Live) -> None:
    wide = tool(parameters={"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    assert live.chat(messages=say("x"), tools=[wide])["choices"]
    assert live.chat(messages=say("x"), tools=[tool(parameters=None), tool("noargs", {})])["choices"]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, toy_tokenizer: Path) -> Iterator[Live]:
    """A server whose model is said to reason."""
    settings = ServerSettings(engine_command=engine_command(toy_tokenizer), reasoning_parser="qwen3")
    with serving(settings) as live:
        yield live.wait_ready()


def test_reasoning_has_both_names_plain_and_streamed(thinker: Live) -> None:
    fields = {"messages": say(f"<think>\nLet me see.\n</think>\n\nSure.\n{CALL}"), "tools": [tool()]}
    message = thinker.chat(**fields)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Let me see."
    assert message["content"] == "Sure."
    assert message["tool_calls"][0]["function"]["name"] == "add"
    streamed = joined(thinker.stream_chat(**fields))
    assert streamed["reasoning"] == streamed["reasoning_content"] == "Let me see."
    assert streamed["content"] == "Sure."
    hidden = thinker.chat(**fields, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning" not in hidden and "reasoning_content" not in hidden
    assert hidden["content"] == "Sure."
    assert joined(thinker.stream_chat(**fields, include_reasoning=False))["reasoning"] == ""


def test_a_text_without_reasoning_stays_as_it_is(thinker: Live) -> None:
    message = thinker.chat(messages=say("No </think> here."))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "No </think> here.", "refusal": None}


def test_budgets_and_efforts_are_taken(thinker: Live) -> None:
    for fields in ({"thinking_token_budget": 5}, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}):
        assert thinker.chat(messages=say("x"), **fields)["choices"]


def test_an_earlier_answer_may_come_back_with_everything_it_held(thinker: Live) -> None:
    earlier = thinker.chat(messages=say(f"<think>a</think>{CALL}"), tools=[tool()])["choices"][0]["message"]
    turns = [*say("x"), earlier, {"role": "tool", "tool_call_id": earlier["tool_calls"][0]["id"], "content": "3"}]
    assert thinker.chat(messages=[*turns, *say("done")])["choices"][0]["message"]["content"] == "done"
