"""/v1/responses with OpenAI's own client: plain, streamed, stored, continued, in the background."""

from __future__ import annotations

import time

import openai
import pytest
from live import MODEL, Live, ok, refused
from openai import OpenAI

PATH = "/v1/responses"
FREE = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client(_shared: Live) -> OpenAI:
    return OpenAI(base_url=f"{_shared.url}/v1", api_key="none", max_retries=0)


def test_a_plain_response_is_the_chat_answer(live: Live, client: OpenAI) -> None:
    chat = live.chat(temperature=0, max_tokens=30)
    response = client.responses.create(**FREE, input="Say hello", max_output_tokens=30)
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.status == ("incomplete" if chat["choices"][0]["finish_reason"] == "length" else "completed")
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert response.object == "response" and response.id.startswith("resp_")
    (item,) = response.output
    assert item.type == "message" and item.role == "assistant" and item.content[0].annotations == []


def test_a_stream_has_its_events_in_order_and_the_same_text(client: OpenAI) -> None:
    plain = client.responses.create(**FREE, input="Say hello", max_output_tokens=30)
    events = list(client.responses.create(**FREE, input="Say hello", max_output_tokens=30, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    head = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    tail = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[:4] == head
    assert kinds[-4:] == [*tail, f"response.{plain.status}"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == plain.output_text == events[-4].text
    last = events[-1].response
    assert (last.status, last.output_text, last.usage.output_tokens) == (
        plain.status, plain.output_text, plain.usage.output_tokens,
    )  # fmt: skip
    assert {event.item_id for event in events[4:-4]} == {last.output[0].id}


def test_the_packages_stream_helper_replays_it(client: OpenAI) -> None:
    with client.responses.stream(**FREE, input="Say hello", max_output_tokens=400) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed" and "".join(texts) == final.output_text


def test_scores_come_with_include(client: OpenAI) -> None:
    fields = {**FREE, "input": "Hi", "max_output_tokens": 8, "top_logprobs": 2}
    fields["include"] = ["message.output_text.logprobs"]
    scores = client.responses.create(**fields).output[0].content[0].logprobs
    assert len(scores) == 8 and all(len(score.top_logprobs) == 2 for score in scores)
    streamed = [event for event in client.responses.create(**fields, stream=True)]
    of_deltas = [score for event in streamed if event.type.endswith("text.delta") for score in event.logprobs]
    done = next(event for event in streamed if event.type == "response.output_text.done")
    assert [score.logprob for score in done.logprobs] == [score.logprob for score in scores]
    assert [score.logprob for score in of_deltas] == [score.logprob for score in scores]


def test_a_conversation_goes_on_from_what_is_stored(live: Live, client: OpenAI) -> None:
    first = client.responses.create(**FREE, input="One", instructions="Be brief", max_output_tokens=9)
    second = client.responses.create(**FREE, input="Two", previous_response_id=first.id, max_output_tokens=9)
    turns = [
        {"role": "user", "content": "One"}, {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Two"},
    ]  # fmt: skip
    chat = live.chat(temperature=0, max_tokens=9, messages=turns)  # instructions do not go on
    assert second.output_text == chat["choices"][0]["message"]["content"]
    assert second.previous_response_id == first.id
    one, two = ({"role": "user", "content": text} for text in ("One", "Two"))
    items = client.responses.create(**FREE, input=[one, *first.output, two], max_output_tokens=9)
    assert items.output_text == second.output_text
    counted = ok(live.post(f"{PATH}/input_tokens", {"input": "Two", "previous_response_id": first.id}))
    assert counted["input_tokens"] == second.usage.input_tokens


def test_stored_responses_are_read_listed_and_deleted(live: Live, client: OpenAI) -> None:
    made = client.responses.create(**FREE, input=[{"role": "user", "content": str(k)} for k in range(5)],
                                   max_output_tokens=3, metadata={"a": "b"})  # fmt: skip
    read = client.responses.retrieve(made.id)
    assert read == made and read.metadata == {"a": "b"}
    page = client.responses.input_items.list(made.id, limit=2, order="asc")
    assert [item.content for item in page] == ["0", "1", "2", "3", "4"]  # the package asks for all pages
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    kept = client.responses.create(**FREE, input="x", max_output_tokens=3, store=False)
    assert refused(live.http.get(f"{PATH}/{kept.id}"), 404)["code"] == "response_not_found"


def test_background_responses_are_polled_and_cancelled(live: Live, client: OpenAI) -> None:
    made = client.responses.create(**FREE, input="Say hello", max_output_tokens=20, background=True)
    assert made.status == "in_progress" and not made.output
    end = time.monotonic() + 10
    while (read := client.responses.retrieve(made.id)).status == "in_progress":
        assert time.monotonic() < end
        time.sleep(0.02)
    plain = client.responses.create(**FREE, input="Say hello", max_output_tokens=20)
    assert read.output_text == plain.output_text
    long = {**FREE, "input": "Go on", "background": True, "extra_body": {"ignore_eos": True}}
    running = client.responses.create(**long)
    assert client.responses.cancel(running.id).status == "cancelled"
    assert client.responses.retrieve(running.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == read.status  # it had ended
    gone = client.responses.create(**long)
    client.responses.delete(gone.id)
    refused(live.http.get(f"{PATH}/{gone.id}"), 404)
    refused(live.post(f"{PATH}/{plain.id}/cancel"))


def test_truncation_drops_the_oldest_turns(live: Live) -> None:
    items = [{"role": "user", "content": "word " * 30} for _ in range(8)]
    body = {"input": items, "max_output_tokens": 4}
    error = refused(live.post(PATH, body))
    assert error["param"] == "input" and error["code"] == "context_length_exceeded"
    assert ok(live.post(PATH, {**body, "truncation": "auto"}))["output"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"), ({"input": [{"role": "user"}]}, "input[0]"), ({}, "input"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 100000}, "max_output_tokens"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"input": "a", "top_logprobs": 3}, "top_logprobs"), ({"input": "a", "include": ["x"]}, "include[0]"),
        ({"input": "a", "stream": True, "background": True}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"), ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "a", "text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"input": "a", "temperature": -1}, "temperature"), ({"input": "a", "seed": 1.5}, "seed"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0]"),
        ({"input": "a", "logit_bias": {}}, "logit_bias"), ({"input": "a", "bad_words": [""]}, "bad_words[0]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(live: Live, fields: dict, param: str) -> None:
    assert refused(live.post(PATH, fields))["param"] == param


def test_unknown_responses_and_queries(live: Live) -> None:
    assert refused(live.post(PATH, {"input": "a", "previous_response_id": "resp_x"}), 404)["code"]
    refused(live.http.get(f"{PATH}/resp_x"), 404)
    refused(live.http.delete(f"{PATH}/resp_x"), 404)
    refused(live.post(f"{PATH}/resp_x/cancel"), 404)
    made = ok(live.post(PATH, {"input": "a", "max_output_tokens": 1}))["id"]
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nothing"):
        refused(live.http.get(f"{PATH}/{made}/input_items?{query}"))
    assert refused(live.http.get(f"{PATH}/{made}?stream=true"))["param"] == "stream"
