"""/v1/messages with Anthropic's own client."""

from __future__ import annotations

import anthropic
import pytest
from anthropic import Anthropic
from live import MODEL, Live, ok

PATH = "/v1/messages"
COLD = {"temperature": 0}  # the package no longer has a parameter for it
USER = [{"role": "user", "content": "Say hello"}]


@pytest.fixture(scope="module")
def client(_shared: Live) -> Anthropic:
    return Anthropic(base_url=_shared.url, api_key="none", max_retries=0)


def test_a_message_is_the_chat_answer(live: Live, client: Anthropic) -> None:
    chat = live.chat(temperature=0, max_tokens=30)
    message = client.messages.create(model=MODEL, max_tokens=30, messages=USER, extra_body=COLD)
    assert message.content[0].text == chat["choices"][0]["message"]["content"]
    assert message.stop_reason == ("max_tokens" if chat["choices"][0]["finish_reason"] == "length" else "end_turn")
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == chat["usage"]["completion_tokens"]
    assert message.role == "assistant" and message.type == "message" and message.id.startswith("msg_")


def test_a_stream_is_replayed_by_the_package(live: Live, client: Anthropic) -> None:
    fields = {"model": MODEL, "max_tokens": 30, "messages": USER, "extra_body": COLD}
    plain = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == plain.content[0].text == final.content[0].text
    assert final.stop_reason == plain.stop_reason and final.usage.output_tokens == plain.usage.output_tokens
    kinds = [event.type for event in client.messages.create(**fields, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_stop_sequences_are_named(client: Anthropic) -> None:
    fields = {"model": MODEL, "max_tokens": 200, "messages": USER, "extra_body": COLD}
    text = client.messages.create(**fields).content[0].text
    stop = text[20:24]
    message = client.messages.create(**fields, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_system_blocks_and_an_opened_answer(live: Live, client: Anthropic) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One"}]},
        {"role": "assistant", "content": "Well"},
    ]
    message = client.messages.create(
        model=MODEL, max_tokens=9, messages=messages, extra_body=COLD,
        system=[{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
    )  # fmt: skip
    turns = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "One"}, messages[1]]
    chat = live.chat(temperature=0, max_tokens=9, messages=turns, continue_final_message=True)
    assert message.content[0].text == chat["choices"][0]["message"]["content"]


def test_earlier_calls_and_results_reach_the_template(live: Live) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look"},
                                          {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 3}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                                     {"type": "text", "text": "So?"}]},
    ]  # fmt: skip
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look",
         "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"a": 3}'}}]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"}, {"role": "user", "content": "So?"},
    ]  # fmt: skip
    chat = live.chat(temperature=0, max_tokens=5, messages=turns)
    answer = ok(live.post(PATH, {"messages": messages, "max_tokens": 5, "temperature": 0}))
    assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_tokens_are_counted(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=USER, system="Be brief")
    message = client.messages.create(model=MODEL, max_tokens=1, messages=USER, system="Be brief")
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_errors_have_anthropics_shape(live: Live, client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=USER)
    assert missing.value.body["error"]["type"] == "not_found_error"
    for fields, name in (
        ({"max_tokens": 1}, "messages"), ({"messages": USER}, "max_tokens"),
        ({"messages": USER, "max_tokens": 10_000}, "max_tokens"),
        ({"messages": USER, "max_tokens": 1, "top_k": -3}, "top_k"),
        ({"messages": [{"role": "system", "content": "a"}], "max_tokens": 1}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, "type"),
        ({"messages": USER, "max_tokens": 1, "container": "c"}, "container"),
        ({"messages": USER, "max_tokens": 1, "stop_sequences": [""]}, "stop_sequences"),
    ):  # fmt: skip
        answer = ok(live.post(PATH, fields), 400)
        assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
        assert name in answer["error"]["message"], answer
