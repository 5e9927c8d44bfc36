"""`jaxserve serve` on the real model, used by OpenAI's own client."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI

START_S = 240
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server(smollm2: str) -> Iterator[tuple[str, subprocess.Popen]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jaxserve.cli", "serve", smollm2, "--port", str(port)]
    command += ["--served-model-name", "smollm2", "--max-num-rows", "4", "--max-step-tokens", "32"]
    command += ["--max-model-len", "512"]
    process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, "the server ended while it started"
            assert time.monotonic() < deadline, f"not ready after {START_S} s"
            try:
                if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        yield url, process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def client(server: tuple[str, subprocess.Popen]) -> OpenAI:
    return OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)


CHAT = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
    "temperature": 0,
    "max_tokens": 24,
}


def test_a_chat_streams_the_text_of_the_plain_answer(client: OpenAI) -> None:
    plain = client.chat.completions.create(**CHAT)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    # The same prompt again: whole pages of it come from the cache.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == (plain.usage.prompt_tokens - 1) // 16 * 16


def test_log_probabilities_of_output_and_prompt(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=3, echo=True
    )
    scores = answer.choices[0].logprobs
    assert "".join(scores.tokens) == answer.choices[0].text
    assert scores.token_logprobs[0] is None
    assert all(value <= 0 for value in scores.token_logprobs[1:])


def test_bad_requests_name_the_field_and_the_engine_goes_on(client: OpenAI) -> None:
    for fields, name in (
        ({"temperature": -1}, "temperature"),
        ({"n": 10_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ):
        with pytest.raises(BadRequestError) as error:
            client.chat.completions.create(**{**CHAT, **fields})
        assert name in str(error.value)
    with pytest.raises(BadRequestError, match="512"):
        client.completions.create(model="smollm2", prompt=[5] * 600)
    assert client.chat.completions.create(**CHAT).choices[0].message.content


def test_answers_keep_to_their_form(server: tuple[str, subprocess.Popen], client: OpenAI) -> None:
    properties = {
        "city": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    }
    schema = {"type": "object", "properties": properties, "required": ["city", "count"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3, "n": 3}):
        answer = client.chat.completions.create(**{**CHAT, "max_tokens": 60, "response_format": form, **options})
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), schema)
    # Forced tokens are computed without steps of their own, and characters of several tokens stay whole.
    word = "🙂 žluťoučký 漢字"
    form = {"structured_outputs": {"choice": [word]}}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, extra_body=form))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == word
    metrics = httpx.get(f"{server[0]}/metrics").text
    assert "jaxserve_grammar_jumped_total" in metrics


@pytest.mark.parametrize("name", ["openai_structured", "openai_tools"])
def test_examples_run(server: tuple[str, subprocess.Popen], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(example)
    example.loader.exec_module(module)
    module.main(server[0])
    told = capsys.readouterr().out
    if name == "openai_tools":
        assert told.startswith("tool_calls: get_weather({")
        assert told.splitlines()[-1].startswith("get_weather|{")
    else:
        assert "Character(name=" in told
        assert re.search(r"^choice: (warrior|wizard|ranger)$", told, re.MULTILINE)
        assert re.search(r"^grammar: roll [1-6]( and [1-6])?$", told, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("openai_client.py", ("Paris",)), ("anthropic_client.py", ("ended by:", "get_weather {'city':", "tokens:")),
        ("responses_client.py", ("structured: {'city':", "tool:       get_weather", "background:")),
        ("embeddings_client.py", ("cut to: 64", "scores: [1.0,")),
        ("sglang_client.py", ("gen:       Paris", "select:    Paris")),
    ],
)  # fmt: skip
def test_the_clients_of_the_examples(server: tuple[str, subprocess.Popen], name: str, shown: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), server[0]], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for text in shown:
        assert text in done.stdout, done.stdout


def test_scores_of_a_native_request_are_those_of_a_completion(server: tuple[str, subprocess.Popen]) -> None:
    def post(path: str, **fields: object) -> dict:
        return httpx.post(server[0] + path, json=fields, timeout=120).raise_for_status().json()

    text, named = "The capital of France is Paris, and", [7, 42, 11]
    plain = post("/v1/completions", prompt=text, max_tokens=2, temperature=0, logprobs=0, echo=True)
    meta = post(
        "/generate", text=text, sampling_params={"max_new_tokens": 2, "temperature": 0}, return_logprob=True,
        logprob_start_len=2, token_ids_logprob=named,
    )["meta_info"]  # fmt: skip
    scores = plain["choices"][0]["logprobs"]["token_logprobs"]
    found = [value for value, _, _ in meta["input_token_logprobs"] + meta["output_token_logprobs"]]
    assert found[0] is None and found[1:] == pytest.approx(scores[3:], abs=2e-2)
    # A named token's score at the last place is what /v1/score calls its probability there.
    last = {token: value for value, token, _ in meta["output_token_ids_logprobs"][0]}
    labels = post("/v1/score", query=text, items=[""], label_token_ids=named)["scores"][0]
    assert [math.log(value) for value in labels] == pytest.approx([last[token] for token in named], abs=0.2)


def test_bad_words_do_not_come(client: OpenAI) -> None:
    fields = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    free = client.completions.create(**fields).choices[0].text
    assert "Paris" in free
    other = client.completions.create(**fields, extra_body={"bad_words": ["Paris"]}).choices[0].text
    assert "Paris" not in other


def test_nothing_was_compiled_after_warm_up_and_sigterm_ends_cleanly(
    server: tuple[str, subprocess.Popen], client: OpenAI
) -> None:
    client.completions.create(
        model="smollm2", prompt="One", max_tokens=6, n=2, temperature=0.7, top_p=0.9, seed=1, presence_penalty=0.5
    )
    url, process = server
    time.sleep(1.5)  # the engine reports once a second
    metrics = httpx.get(f"{url}/metrics").text
    found = re.search(r"^jaxserve\w*compiles_after_warmup\w*(?:\{[^}]*\})? (\S+)$", metrics, re.MULTILINE)
    assert found is not None
    assert float(found.group(1)) == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
