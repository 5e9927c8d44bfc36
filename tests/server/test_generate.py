"""SGLang's native /generate, and the control routes."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jaxserve.server.settings import ServerSettings
from live import Live, engine_command, ok, refused, serving, wait_for

PATH = "/generate"
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def generated(live: Live, **fields: Any) -> Any:
    return ok(live.post(PATH, fields))


def events(live: Live, **fields: Any) -> list[dict[str, Any]]:
    with live.http.stream("POST", PATH, json={**fields, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_text_and_ids_give_what_completions_give(live: Live) -> None:
    plain = live.complete(prompt="Hello", max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True)
    choice = plain["choices"][0]
    answer = generated(live, text="Hello", sampling_params=GREEDY)
    assert (answer["text"], answer["output_ids"]) == (choice["text"], choice["token_ids"])
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (plain["usage"]["prompt_tokens"], 12)
    assert generated(live, input_ids=choice["prompt_token_ids"], sampling_params=GREEDY)["text"] == choice["text"]


def test_batches_keep_their_order_and_options(live: Live) -> None:
    texts = [f"Prompt {k}" for k in range(5)]
    params = [{**GREEDY, "max_new_tokens": 2 + k} for k in range(5)]
    answers = generated(live, text=texts, sampling_params=params)
    for k, answer in enumerate(answers):
        assert answer["text"] == generated(live, text=texts[k], sampling_params=params[k])["text"]
        assert answer["meta_info"]["completion_tokens"] == 2 + k
    many = generated(live, text=["a", "b"], sampling_params={**GREEDY, "n": 3, "temperature": 1})
    assert len(many) == 6
    assert isinstance(generated(live, text=["a"], sampling_params=GREEDY), list)


def test_a_stream_holds_the_text_so_far(live: Live) -> None:
    plain = generated(live, text="Hello", sampling_params=GREEDY)
    seen = events(live, text="Hello", sampling_params=GREEDY)
    assert seen[-1]["text"] == plain["text"] and seen[-1]["output_ids"] == plain["output_ids"]
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(seen))
    assert [event["meta_info"]["finish_reason"] for event in seen[:-1]] == [None] * (len(seen) - 1)
    batch = events(live, text=["Hello", "Other"], sampling_params=GREEDY)
    last = {event["index"]: event for event in batch}
    assert last[0]["text"] == plain["text"] and set(last) == {0, 1}


def test_scores_of_prompt_and_output(live: Live) -> None:
    reference = live.complete(prompt="Hello you", max_tokens=4, temperature=0, ignore_eos=True, logprobs=2, echo=True,
                              return_token_ids=True)["choices"][0]  # fmt: skip
    ids, scores = reference["prompt_token_ids"], reference["logprobs"]["token_logprobs"]
    fields = {"text": "Hello you", "sampling_params": {**GREEDY, "max_new_tokens": 4}, "return_logprob": True,
              "top_logprobs_num": 2}  # fmt: skip
    meta = generated(live, **fields, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    found = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    assert [value for value, _, _ in found] == scores
    assert [token for _, token, _ in found[: len(ids)]] == ids and found[0][2] == "H"
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"]) == len(ids)
    assert all(len(best) == 2 for best in [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]])
    later = generated(live, **fields, logprob_start_len=3)["meta_info"]["input_token_logprobs"]
    assert [later[0][0], later[0][1], later[0][2]] == [None, ids[3], None]
    assert [value for value, _, _ in later[1:]] == scores[4 : len(ids)]
    alone = generated(live, **fields)["meta_info"]["input_token_logprobs"]
    assert alone == [[None, ids[-1], None]]
    assert "input_token_logprobs" not in generated(live, text="Hello you", sampling_params=GREEDY)["meta_info"]


def test_named_tokens_are_scored(live: Live) -> None:
    fields = {"text": "Hello", "sampling_params": {**GREEDY, "max_new_tokens": 2}, "return_logprob": True}
    meta = generated(live, **fields, token_ids_logprob=[5, 9], logprob_start_len=0)["meta_info"]
    assert [[token for _, token, _ in named] for named in meta["output_token_ids_logprobs"]] == [[5, 9]] * 2
    assert meta["input_token_ids_logprobs"][0] is None
    assert [token for _, token, _ in meta["input_token_ids_logprobs"][1]] == [5, 9]


def test_nothing_may_be_generated(live: Live) -> None:
    answer = generated(live, text="Hello", sampling_params={"max_new_tokens": 0}, return_logprob=True)
    assert answer["text"] == "" and answer["output_ids"] == [] and answer["meta_info"]["completion_tokens"] == 0
    assert answer["meta_info"]["output_token_logprobs"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert [event["text"] for event in events(live, text="Hello", sampling_params={"max_new_tokens": 0})] == [""]


def test_what_ended_it_is_told(live: Live) -> None:
    text = generated(live, text="Hello", sampling_params={**GREEDY, "max_new_tokens": 40})["text"]
    stop = text[8:11]
    meta = generated(live, text="Hello", sampling_params={**GREEDY, "max_new_tokens": 40, "stop": stop})["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}
    kept = generated(live, text="Hello", sampling_params={**GREEDY, "stop": [stop], "no_stop_trim": True})["text"]
    assert kept == text[: text.index(stop) + len(stop)]
    long = generated(live, text="Hello", sampling_params={"temperature": 0, "max_new_tokens": 400})
    assert long["meta_info"]["finish_reason"] == {"type": "stop", "matched": long["output_ids"][-1]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"text": []}, "text"),
        ({"input_ids": [10**6]}, "input_ids[0]"), ({"text": "a", "sampling_params": {"n": 1000}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**4}}, "sampling_params.max_new_tokens"),
        ({"text": ["a"], "sampling_params": [{"temperature": -1}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [10**6]}}, "sampling_params.stop_token_ids"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 900}}, "sampling_params.min_new_tokens"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": "a", "image_data": "x"}, "image_data"), ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [10**6]}, "token_ids_logprob"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"), ({"text": "a", "rid": "a b"}, "rid"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(live: Live, fields: dict, param: str) -> None:
    error = refused(live.post(PATH, fields))
    assert error["param"].split("[")[0] == param.split("[")[0], error


def test_requests_are_aborted_by_their_ids(live: Live) -> None:
    body = {"text": "Go on", "sampling_params": {**GREEDY, "max_new_tokens": 450}}
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(httpx.post(live.url + PATH, json={**body, "rid": "mine"}))),
        threading.Thread(
            target=lambda: answers.append(
                httpx.post(
                    live.url + "/v1/completions",
                    headers={"X-Request-Id": "mine"},
                    json={"prompt": "Go on", "max_tokens": 450, "ignore_eos": True},
                )
            )
        ),
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: live.state.client.num_in_flight == 2)
    assert ok(live.post("/abort_request", {"rid": "other"}))["num_aborted"] == 0
    assert ok(live.post("/abort_request", {"rid": "mine"}))["num_aborted"] == 2
    for thread in threads:
        thread.join(10)
    assert [refused(answer, 409)["code"] for answer in answers] == ["aborted"] * 2
    refused(live.post("/abort_request", {}))


def test_model_and_server_are_described_without_secrets(live: Live) -> None:
    info = ok(live.http.get("/get_model_info"))
    assert info["model_path"] == "toy-model" and info["is_generation"] is True
    server = ok(live.http.get("/server_info"))
    assert server["status"] == "ready" and server["stats"] is not None and server["settings"]["max_n"]
    text = json.dumps(server)
    assert "fake_engine" not in text and "tokenizer_path" not in text
    assert ok(live.http.get("/get_server_info"))["version"] == server["version"]


KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def guarded(toy_tokenizer: Path) -> Iterator[Live]:
    settings = ServerSettings(engine_command=engine_command(toy_tokenizer), api_keys=KEYS, admin_api_key="admin-key")
    with serving(settings) as live:
        yield live.wait_ready()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/flush_cache"), ("GET", "/server_info"), ("GET", "/get_server_info")]
)
def test_control_routes_want_the_admin_key(guarded: Live, method: str, path: str) -> None:
    assert refused(guarded.http.request(method, path), 401)
    assert refused(guarded.http.request(method, path, headers=bearer(KEYS[0])), 403)["code"] == "admin_key_required"
    assert guarded.http.request(method, path, headers=bearer("admin-key")).status_code == 200


def test_the_admin_key_opens_the_rest_and_x_api_key_counts(guarded: Live) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert ok(guarded.post("/v1/completions", body, headers=bearer("admin-key")))
    assert ok(guarded.post("/v1/completions", body, headers={"x-api-key": KEYS[1]}))
    refused(guarded.post("/v1/completions", body, headers={"x-api-key": "wrong"}), 401)
    both = {"x-api-key": KEYS[1], "Authorization": "Bearer wrong"}
    refused(guarded.post("/v1/completions", body, headers=both), 401)


def test_tenants_cannot_see_or_stop_each_other(guarded: Live) -> None:
    one, two = bearer(KEYS[0]), bearer(KEYS[1])
    made = ok(guarded.post("/v1/responses", {"input": "secret", "max_output_tokens": 2}, headers=one))["id"]
    assert guarded.http.get(f"/v1/responses/{made}", headers=one).status_code == 200
    refused(guarded.http.get(f"/v1/responses/{made}", headers=two), 404)
    refused(guarded.http.delete(f"/v1/responses/{made}", headers=two), 404)
    refused(guarded.post("/v1/responses", {"input": "a", "previous_response_id": made}, headers=two), 404)
    body = {"text": "Go on", "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}, "rid": "r"}
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(guarded.url + PATH, json=body, headers=one, timeout=30))
    )
    thread.start()
    wait_for(lambda: guarded.state.client.num_in_flight == 1)
    assert ok(guarded.post("/abort_request", {"rid": "r"}, headers=two))["num_aborted"] == 0
    refused(guarded.post("/abort_request", {"abort_all": True}, headers=two), 403)
    assert ok(guarded.post("/abort_request", {"abort_all": True}, headers=bearer("admin-key")))["num_aborted"] == 1
    thread.join(10)
    assert answers[0].status_code == 409


def test_control_routes_are_closed_without_an_admin_key(toy_tokenizer: Path) -> None:
    settings = ServerSettings(engine_command=engine_command(toy_tokenizer), api_keys=KEYS)
    with serving(settings) as live:
        live.wait_ready()
        assert refused(live.post("/flush_cache", headers=bearer(KEYS[0])), 403)["code"] == "admin_key_required"


def test_the_oldest_responses_make_room(toy_tokenizer: Path) -> None:
    settings = ServerSettings(engine_command=engine_command(toy_tokenizer), max_stored_responses=3)
    with serving(settings) as live:
        live.wait_ready()
        made = [ok(live.post("/v1/responses", {"input": "a", "max_output_tokens": 1}))["id"] for _ in range(5)]
        assert [live.http.get(f"/v1/responses/{name}").status_code for name in made] == [404, 404, 200, 200, 200]


def test_a_deadline_ends_a_request(live: Live) -> None:
    body = {"prompt": "Go on", "max_tokens": 480, "ignore_eos": True}
    started = time.monotonic()
    answer = live.post("/v1/completions", body, headers={"X-Request-Timeout": "0.05"})
    assert refused(answer, 408)["code"] == "deadline_exceeded"
    assert time.monotonic() - started < 10
    for bad in ("0", "-1", "soon", "inf"):
        assert refused(live.post("/v1/completions", body, headers={"X-Request-Timeout": bad}))["param"]
