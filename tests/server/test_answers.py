"""Finish reasons, usage, log-probabilities, echo: what plain answers say."""

from __future__ import annotations

import math

import pytest
from live import Live, ok, refused
from toy_model import CONTEXT, PAGE


@pytest.mark.parametrize("count", [1, 3, 17])
def test_limit_is_reported_as_length(live: Live, count: int) -> None:
    answer = live.complete(prompt="Hello", max_tokens=count, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == count
    assert answer["choices"][0]["finish_reason"] == "length" and answer["choices"][0]["stop_reason"] is None


def test_natural_end_is_reported_as_stop(live: Live) -> None:
    answer = live.chat(temperature=0, max_tokens=400)
    assert answer["usage"]["completion_tokens"] < 400
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer["choices"][0]["message"]["content"]


def test_stop_token_is_named(live: Live) -> None:
    ids = live.complete(prompt="Hello", max_tokens=12, temperature=0, return_token_ids=True)["choices"][0]["token_ids"]
    choice = live.complete(prompt="Hello", max_tokens=12, temperature=0, stop_token_ids=[ids[4]])["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ids[4]


def test_completions_end_after_sixteen_tokens_chats_at_the_context(live: Live) -> None:
    assert live.complete(prompt="Hi", ignore_eos=True)["usage"]["completion_tokens"] == 16
    usage = live.chat(ignore_eos=True)["usage"]
    assert usage["total_tokens"] == CONTEXT
    near_the_end = live.complete(prompt=[40] * (CONTEXT - 5), ignore_eos=True)
    assert near_the_end["usage"]["completion_tokens"] == 5


def test_both_names_of_the_limit(live: Live) -> None:
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        assert live.chat(ignore_eos=True, **fields)["usage"]["completion_tokens"] == 5
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "max_tokens": 5, "max_completion_tokens": 6}
    assert refused(live.post("/v1/chat/completions", body))["param"] == "max_completion_tokens"


def test_cached_tokens_are_exact(live: Live) -> None:
    ids = [30 + (k * 7) % 60 for k in range(5 * PAGE + 3)]
    first = live.complete(prompt=ids, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    second = live.complete(prompt=ids, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    part = live.complete(prompt=ids[: 2 * PAGE + 1] + [31, 32], max_tokens=1, n=3)["usage"]
    assert (first, second) == (0, 5 * PAGE)
    assert part["prompt_tokens_details"]["cached_tokens"] == 2 * PAGE, "n continuations share one prompt"
    assert part["prompt_tokens"] == 2 * PAGE + 3 and part["completion_tokens"] == 3


def test_salts_keep_prefixes_apart(live: Live) -> None:
    ids = [33 + (k * 5) % 60 for k in range(3 * PAGE)]

    def cached(**fields) -> int:
        return live.complete(prompt=ids, max_tokens=1, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(cache_salt="a"), cached(cache_salt="a") > 0, cached(cache_salt="b"), cached()] == [0, True, 0, 0]
    assert refused(live.post("/v1/completions", {"prompt": "a", "cache_salt": ""}))["param"] == "cache_salt"


def test_completion_scores(live: Live) -> None:
    answer = live.complete(
        prompt="Hi", max_tokens=30, temperature=0, logprobs=5, return_token_ids=True, ignore_eos=True
    )
    choice = answer["choices"][0]
    scores = choice["logprobs"]
    assert {len(values) for values in scores.values()} == {30}
    assert all(value <= 0 and math.isfinite(value) for value in scores["token_logprobs"])
    for token, value, best in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"]):
        assert best[token] == value
        assert len(best) in (5, 6), "five best, and the token itself if it is none of them"
    # Each token's offset is where its text stands; halves of a character share its offset.
    for token, offset in zip(scores["tokens"], scores["text_offset"]):
        if token.startswith("bytes:"):
            assert ord(choice["text"][offset]) > 127
        else:
            assert choice["text"].startswith(token, offset)


def test_streamed_scores_are_the_plain_ones(live: Live) -> None:
    fields = {"prompt": "Hi", "max_tokens": 30, "temperature": 0, "logprobs": 3, "echo": True, "ignore_eos": True}
    plain = live.complete(**fields)["choices"][0]["logprobs"]
    pieces = [choice["logprobs"] for choice in live.stream_completion(**fields).choices()]
    assert plain == {name: [value for piece in pieces for value in piece[name]] for name in plain}
    fields = {"max_tokens": 30, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    chat = live.chat(**fields)["choices"][0]["logprobs"]["content"]
    deltas = [choice["logprobs"] for choice in live.stream_chat(**fields).choices()]
    assert chat == [entry for delta in deltas if delta is not None for entry in delta["content"]]


def test_no_scores_unless_asked_for(live: Live) -> None:
    assert live.chat(max_tokens=2)["choices"][0]["logprobs"] is None
    assert live.complete(prompt="a", max_tokens=2)["choices"][0]["logprobs"] is None
    zero = live.complete(prompt="a", max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert [len(best) for best in zero["top_logprobs"]] == [1, 1], "the token itself"


def test_chat_scores_without_alternatives(live: Live) -> None:
    answer = live.chat(max_tokens=3, temperature=0, logprobs=True, ignore_eos=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == 3
    assert all(entry["top_logprobs"] == [] and entry["logprob"] <= 0 for entry in content)
    messages = [{"role": "user", "content": "a"}]
    error = refused(live.post("/v1/chat/completions", {"messages": messages, "top_logprobs": 3}))
    assert error["param"] == "top_logprobs"


def test_every_alternative_is_listed_with_its_bytes(live: Live) -> None:
    answer = live.chat(max_tokens=40, temperature=0, logprobs=True, top_logprobs=20, ignore_eos=True)
    content = answer["choices"][0]["logprobs"]["content"]
    halves = 0
    for entry in content:
        assert len(entry["top_logprobs"]) == 20
        assert len({tuple(other["bytes"]) for other in entry["top_logprobs"]}) == 20
        for shown in (entry, *entry["top_logprobs"]):
            data = bytes(shown["bytes"])
            if shown["token"].startswith("bytes:"):
                halves += 1
                assert shown["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
                with pytest.raises(UnicodeDecodeError):
                    data.decode()
            else:
                assert shown["token"] == data.decode() and "\ufffd" not in shown["token"]
    assert halves > 10
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace")
    assert text == answer["choices"][0]["message"]["content"]


def test_tokens_named_by_id(live: Live) -> None:
    fields = {"max_tokens": 3, "temperature": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = live.complete(prompt="a", logprobs=2, **fields)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    choice = live.chat(logprobs=True, top_logprobs=1, **fields)["choices"][0]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]


@pytest.mark.parametrize(
    "prompt", [" leading space , ( odd ) spacing !", "🙂 two  spaces\n\n", "<|im_start|>user\nHi<|im_end|>"]
)
def test_echo_repeats_the_prompt_unchanged(live: Live, prompt: str) -> None:
    text = live.complete(prompt=prompt, max_tokens=5, temperature=0)["choices"][0]["text"]
    echoed = live.complete(prompt=prompt, max_tokens=5, temperature=0, echo=True)["choices"][0]
    assert echoed["text"] == prompt + text
    assert live.stream_completion(prompt=prompt, max_tokens=5, temperature=0, echo=True).text() == prompt + text
    ids = ok(live.post("/tokenize", {"prompt": prompt}))["tokens"]
    assert live.complete(prompt=ids, max_tokens=5, temperature=0, echo=True)["choices"][0]["text"] == prompt + text


def test_echo_with_scores(live: Live) -> None:
    prompt = "Seven café 🙂 boats"
    answer = live.complete(prompt=prompt, max_tokens=4, temperature=0, echo=True, logprobs=1, ignore_eos=True)
    scores, text, count = (
        answer["choices"][0]["logprobs"],
        answer["choices"][0]["text"],
        answer["usage"]["prompt_tokens"],
    )
    assert {len(values) for values in scores.values()} == {count + 4}
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert all(value is not None for value in scores["token_logprobs"][1:])
    assert scores["text_offset"][0] == 0 and scores["text_offset"][count] == len(prompt)
    for token, offset in zip(scores["tokens"], scores["text_offset"]):
        assert token.startswith("bytes:") or text.startswith(token, offset)


def test_prompt_scores(live: Live) -> None:
    choice = live.complete(prompt="abc", max_tokens=1, prompt_logprobs=2, return_token_ids=True)["choices"][0]
    scores = choice["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(choice["prompt_token_ids"])
    for token, entry in zip(choice["prompt_token_ids"][1:], scores[1:]):
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"} and 2 <= len(entry) <= 3
    assert len(live.chat(max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]) > 3
    body = {"prompt": "a", "prompt_logprobs": 1, "stream": True}
    assert refused(live.post("/v1/completions", body))["param"] == "prompt_logprobs"


def test_choices_of_n(live: Live) -> None:
    choices = live.chat(n=4, seed=5, max_tokens=12, temperature=1)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["message"]["content"] for choice in choices}) > 1
    assert live.complete(prompt="a", n=2, best_of=2, max_tokens=1)["choices"][1]["index"] == 1


def test_prompts_are_cut_from_the_left(live: Live) -> None:
    ids = list(range(40, 90))
    choice = live.complete(prompt=ids, truncate_prompt_tokens=7, max_tokens=1, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == ids[-7:]
    long = live.complete(prompt=[50] * (2 * CONTEXT), truncate_prompt_tokens=-1, max_tokens=9, ignore_eos=True)
    assert long["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": CONTEXT - 9, "completion_tokens": 9, "total_tokens": CONTEXT, "prompt_tokens_details": 0,
    }  # fmt: skip


def test_bias_reaches_the_engine(live: Live) -> None:
    choice = live.complete(prompt="Hi", max_tokens=4, temperature=0, logit_bias={"42": 100}, return_token_ids=True)
    assert choice["choices"][0]["token_ids"] == [42] * 4


def test_ids_of_clients_come_back(live: Live) -> None:
    response = live.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "mine-7"})
    assert ok(response)["id"] == "cmpl-mine-7" and response.headers["x-request-id"] == "mine-7"
    assert live.complete(prompt="a", max_tokens=1, request_id="body-8")["id"] == "cmpl-body-8"
    ids = {live.complete(prompt="a", max_tokens=1)["id"] for _ in range(5)}
    assert len(ids) == 5


def test_tokenize_and_back(live: Live) -> None:
    text = "Sieben Boote 🙂 <|im_end|>"
    plain = ok(live.post("/tokenize", {"prompt": text, "allow_special_tokens": False, "return_token_strs": True}))
    special = ok(live.post("/tokenize", {"prompt": text}))
    assert plain["max_model_len"] == CONTEXT and plain["count"] == len(plain["tokens"]) == len(plain["token_strs"])
    assert special["count"] < plain["count"] and special["token_strs"] is None
    for answer in (plain, special):
        assert ok(live.post("/detokenize", {"tokens": answer["tokens"]}))["prompt"] == text
    skipped = ok(live.post("/detokenize", {"tokens": special["tokens"], "skip_special_tokens": True}))["prompt"]
    assert skipped == text.removesuffix("<|im_end|>")
    messages = [{"role": "user", "content": "hi"}]
    chat = ok(live.post("/tokenize", {"messages": messages, "return_token_strs": True}))
    assert "".join(chat["token_strs"]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert live.chat(messages=messages, max_tokens=1)["usage"]["prompt_tokens"] == chat["count"]
    assert refused(live.post("/tokenize", {"prompt": "a", "messages": messages}))["param"] == "prompt"
    assert refused(live.post("/detokenize", {"tokens": [10**6]}))["param"] == "tokens[0]"


def test_model_list(live: Live) -> None:
    cards = ok(live.http.get("/v1/models"))["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("toy-model", CONTEXT)]
    assert ok(live.http.get("/v1/models/toy-model")) == cards[0]
    assert refused(live.http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert live.complete(model="toy-model", prompt="a", max_tokens=1)["model"] == "toy-model"
    assert live.http.get("/version").json()["version"]


def test_metrics_count_tokens(live: Live) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    live.complete(prompt="counted before, not after", max_tokens=3)
    before = [live.metric(name) for name in names]
    usages = [live.complete(prompt="count " * k, max_tokens=k + 1, ignore_eos=True)["usage"] for k in range(1, 5)]
    prompt, output = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    assert [live.metric(name) for name in names] == [before[0] + prompt, before[1] + output]
    assert live.metric("vllm:time_to_first_token_seconds_count") >= 4


def test_what_matched_is_told_as_sglang_does(live: Live) -> None:
    fields = {"prompt": "Hello", "max_tokens": 400, "temperature": 0, "return_token_ids": True}
    whole = live.complete(**fields)["choices"][0]
    assert (whole["stop_reason"], whole["matched_stop"]) == (None, whole["token_ids"][-1])  # an end-of-sequence token
    stop = whole["text"][10:13]
    for choice in (
        live.complete(**fields, stop=stop)["choices"][0],
        live.stream_completion(**fields, stop=stop).choices()[-1],
    ):
        assert (choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]) == ("stop", stop, stop)
    cut = live.chat(max_tokens=2, ignore_eos=True)["choices"][0]
    assert (cut["finish_reason"], cut["matched_stop"]) == ("length", None)
    ended = live.stream_chat(temperature=0, max_tokens=400).choices()[-1]
    assert ended["finish_reason"] == "stop" and isinstance(ended["matched_stop"], int)


def test_the_prompt_alone_is_scored_with_max_tokens_zero(live: Live) -> None:
    fields = {"prompt": "Hello you", "echo": True, "logprobs": 1, "temperature": 0}
    more = live.complete(**fields, max_tokens=3, ignore_eos=True)["choices"][0]["logprobs"]
    answer = live.complete(**fields, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("Hello you", "length", 0)
    count = len(choice["logprobs"]["tokens"])
    assert count == answer["usage"]["prompt_tokens"]
    assert choice["logprobs"]["token_logprobs"] == more["token_logprobs"][:count]
    events = live.stream_completion(**fields, max_tokens=0)
    assert (events.text(), events.finish(), events.is_done) == ("Hello you", ["length"], True)
    assert refused(live.post("/v1/completions", {"prompt": "a", "max_tokens": 0}))["param"] == "max_tokens"


def test_named_tokens_stand_beside_the_best(live: Live) -> None:
    fields = {"max_tokens": 3, "ignore_eos": True, "logprob_token_ids": [5, 9]}
    for score in live.chat(**fields, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]:
        assert [best["logprob"] for best in score["top_logprobs"][-2:]] == [-8.0, -12.0]
    tops = live.complete(prompt="a", **fields, logprobs=0, return_tokens_as_token_ids=True)
    for best in tops["choices"][0]["logprobs"]["top_logprobs"]:
        assert best["token_id:5"] == -8.0 and best["token_id:9"] == -12.0
    for body in ({"prompt": "a"}, {"prompt": "a", "logprobs": 1, "logprob_token_ids": [10**6]}):
        assert refused(live.post("/v1/completions", {**fields, **body}))["param"] == "logprob_token_ids"


def test_prompts_are_cut_at_either_end(live: Live) -> None:
    ids = list(range(40, 60))
    for side, kept in ((None, ids[-4:]), ("left", ids[-4:]), ("right", ids[:4])):
        fields = {"truncate_prompt_tokens": 4, "return_token_ids": True, "max_tokens": 1}
        if side:
            fields["truncation_side"] = side
        assert live.complete(prompt=ids, **fields)["choices"][0]["prompt_token_ids"] == kept


def test_spaces_between_special_tokens_are_not_made(live: Live) -> None:
    body = {"prompt": "a", "max_tokens": 1, "spaces_between_special_tokens": True}
    assert ok(live.post("/v1/completions", body))
    error = refused(live.post("/v1/completions", {**body, "skip_special_tokens": False}))
    assert error["param"] == "spaces_between_special_tokens"
