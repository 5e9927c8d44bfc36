"""What a stream brings, event by event, and that it says the same as the plain answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from live import Live, ok
from toy_model import CONTEXT

PATHS = ("/v1/completions", "/v1/chat/completions")
ASKED = {
    "/v1/completions": {"prompt": "The harbour"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "The harbour"}]},
}


def plain_texts(live: Live, path: str, **fields) -> list[str]:
    choices = ok(live.post(path, {**ASKED[path], **fields}))["choices"]
    return [c["text"] if "text" in c else c["message"]["content"] for c in choices]


def long_text(live: Live, num_tokens: int = 120) -> str:
    """A greedy completion with plenty of different characters, some of several tokens."""
    text = live.complete(prompt="The harbour", max_tokens=num_tokens, temperature=0, ignore_eos=True)["choices"][0][
        "text"
    ]
    assert any(ord(char) > 0x2000 for char in text) and len(set(text)) > 12, text
    return text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"seed": 5}, {"seed": 6, "n": 3}, {"seed": 7, "stream_interval": 5}]
)
def test_joined_pieces_are_the_plain_text(live: Live, path: str, fields: dict) -> None:
    fields = {"max_tokens": 100, "ignore_eos": True, **fields}
    events = live.stream(path, **ASKED[path], **fields)
    interval = fields.pop("stream_interval", None)
    texts = plain_texts(live, path, **fields)
    assert len(texts) == fields.get("n", 1)
    for index, text in enumerate(texts):
        assert text and events.text(index) == text
        if interval:
            assert len([c for c in events.choices(index) if c["finish_reason"] is None]) <= 100 // interval + 2
    # Characters made of several tokens never arrive in halves; only the very last may be cut by the token limit.
    assert all("\ufffd" not in events.text(index)[:-1] for index in range(len(texts)))


def test_many_streams_side_by_side_do_not_mix(live: Live) -> None:
    def text(number: int) -> str:
        return live.stream_completion(prompt=f"Story {number} 🙂", max_tokens=60, seed=number, ignore_eos=True).text()

    alone = [text(number) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(text, range(16))) == alone
    assert len(set(alone)) == 16


def test_prompt_cut_inside_a_character_is_not_repeated(live: Live) -> None:
    ids = ok(live.post("/tokenize", {"prompt": "Green tea 🍵"}))["tokens"]
    for cut in (1, 2, 3):
        fields = {"prompt": ids[:-cut], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        events = live.stream_completion(**fields)
        assert "Green" not in events.text()
        assert events.text() == live.complete(**fields)["choices"][0]["text"]


def test_no_part_of_a_stop_string_is_sent(live: Live) -> None:
    text = long_text(live)
    for start in (5, 11, 20, 33):
        for length in (1, 2, 6):
            stop = text[start : start + length]
            fields = {"prompt": "The harbour", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stop": [stop]}
            events = live.stream_completion(**fields)
            assert events.text() == text[: text.find(stop)]
            assert events.finish() == ["stop"]
            assert events.choices()[-1]["stop_reason"] == stop
            # Text held back because it might have become the stop string is in no chunk either.
            assert stop not in "".join(choice["text"] for choice in events.choices())
            choice = live.complete(**fields)["choices"][0]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (events.text(), "stop", stop)


def test_stop_as_a_string_and_kept_in_the_text(live: Live) -> None:
    text = long_text(live)
    stop = text[14:18]
    fields = {"prompt": "The harbour", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stop": stop}
    choice = live.complete(**fields, include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == text[: text.find(stop) + len(stop)] and choice["stop_reason"] == stop


def test_text_held_back_comes_at_the_end(live: Live) -> None:
    text = long_text(live)
    for tail in (1, 2, 5):
        stop = [text[-tail:] + "\x01never"]
        fields = {"prompt": "The harbour", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stop": stop}
        events = live.stream_completion(**fields)
        assert events.text() == text and events.finish() == ["length"]


@pytest.mark.parametrize("path", PATHS)
def test_order_of_a_stream(live: Live, path: str) -> None:
    events = live.stream(path, **ASKED[path], n=2, seed=3, max_tokens=20)
    assert events.is_done and events.raw.count(b"[DONE]") == 1
    assert len({chunk["id"] for chunk in events.chunks}) == 1
    assert len({chunk["created"] for chunk in events.chunks}) == 1
    for index in (0, 1):
        choices = events.choices(index)
        assert events.finish(index) in (["stop"], ["length"])
        assert choices[-1]["finish_reason"] is not None, "the finish reason comes last"
        if path == "/v1/chat/completions":
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in choice["delta"] for choice in choices[1:])
            assert choices[-1]["delta"] == {}
    assert {choice["index"] for chunk in events.chunks for choice in chunk["choices"]} == {0, 1}
    kind = "text_completion" if path == "/v1/completions" else "chat.completion.chunk"
    assert {chunk["object"] for chunk in events.chunks} == {kind}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_unless_asked_for(live: Live, path: str, options: dict | None) -> None:
    events = live.stream(path, **ASKED[path], max_tokens=4, stream_options=options)
    assert events.usages() == []
    assert all(chunk["choices"] for chunk in events.chunks)


@pytest.mark.parametrize("path", PATHS)
def test_usage_is_one_chunk_of_its_own_at_the_end(live: Live, path: str) -> None:
    fields = {"max_tokens": 9, "ignore_eos": True, "n": 2, "temperature": 0}
    events = live.stream(path, **ASKED[path], **fields, stream_options={"include_usage": True})
    assert events.chunks[-1]["choices"] == [] and events.usages() == [events.chunks[-1]["usage"]]
    usage = events.usages()[0]
    assert usage["completion_tokens"] == 18
    plain = ok(live.post(path, {**ASKED[path], **fields}))["usage"]
    assert {**usage, "prompt_tokens_details": None} == {**plain, "prompt_tokens_details": None}


@pytest.mark.parametrize("path", PATHS)
def test_usage_in_every_chunk(live: Live, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = live.stream(path, **ASKED[path], max_tokens=9, ignore_eos=True, stream_options=options)
    counts = [usage["completion_tokens"] for usage in events.usages()]
    assert len(counts) == len(events.chunks) and counts == sorted(counts) and counts[-1] == 9


@pytest.mark.parametrize("path", PATHS)
def test_token_ids_of_a_stream(live: Live, path: str) -> None:
    fields = {"max_tokens": 20, "seed": 2, "return_token_ids": True, "ignore_eos": True}
    events = live.stream(path, **ASKED[path], **fields)
    ids = [token for choice in events.choices() for token in choice.get("token_ids", ())]
    plain = ok(live.post(path, {**ASKED[path], **fields}))
    assert len(ids) == 20 and ids == plain["choices"][0]["token_ids"]
    holder = events.choices()[0] if path == "/v1/completions" else events.chunks[0]
    of_plain = plain["choices"][0] if path == "/v1/completions" else plain
    assert holder["prompt_token_ids"] == of_plain["prompt_token_ids"]
    assert len(of_plain["prompt_token_ids"]) == plain["usage"]["prompt_tokens"]


def test_batch_is_indexed_prompt_by_prompt(live: Live) -> None:
    prompts = ["One boat", "Two boats 🙂", "Three"]
    fields = {"n": 2, "seed": 11, "max_tokens": 24, "ignore_eos": True}
    whole = live.complete(prompt=prompts, **fields)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    events = live.stream_completion(prompt=prompts, **fields)
    for place, prompt in enumerate(prompts):
        single = live.complete(prompt=prompt, **fields)
        for index in (0, 1):
            text = single["choices"][index]["text"]
            assert whole["choices"][2 * place + index]["text"] == text
            assert events.text(2 * place + index) == text
    singles = [live.complete(prompt=prompt, **fields)["usage"] for prompt in prompts]
    assert whole["usage"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in singles)
    assert whole["usage"]["completion_tokens"] == 6 * 24


def test_batch_of_token_ids(live: Live) -> None:
    lists = [ok(live.post("/tokenize", {"prompt": text}))["tokens"] for text in ("One boat", "Two boats 🙂")]
    both = live.complete(prompt=lists, max_tokens=10, temperature=0)
    alone = [live.complete(prompt=ids, max_tokens=10, temperature=0)["choices"][0]["text"] for ids in lists]
    assert [choice["text"] for choice in both["choices"]] == alone
    assert live.complete(prompt="One boat", max_tokens=10, temperature=0)["choices"][0]["text"] == alone[0]


def test_error_before_the_first_event_is_an_http_error(live: Live) -> None:
    response = live.post("/v1/completions", {"prompt": "a", "max_tokens": -5, "stream": True})
    assert response.status_code == 400 and response.headers["content-type"] == "application/json"
    response = live.post("/v1/completions", {"prompt": [1] * CONTEXT, "max_tokens": 1, "stream": True})
    assert response.status_code == 400
