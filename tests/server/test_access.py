"""API keys, the static page, and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import pytest
from jaxserve.server.settings import ServerSettings
from live import Live, engine_command, ok, refused, serving

KEYS = ("first-key", "second-key")
OPEN = {"/health", "/ready", "/", "/web/chat.css", "/web/chat.js", "/web/icon.svg"}


@pytest.fixture(scope="module")
def locked(toy_tokenizer: Path) -> Iterator[Live]:
    with serving(ServerSettings(engine_command=engine_command(toy_tokenizer), api_keys=KEYS)) as live:
        yield live.wait_ready()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_wants_a_key(locked: Live) -> None:
    document = ok(locked.http.get("/openapi.json", headers=bearer(KEYS[0])))
    routes = {(method, path) for path, item in document["paths"].items() for method in item}
    assert ("post", "/v1/completions") in routes and ("get", "/metrics") in routes
    routes |= {
        ("get", "/openapi.json"),
        ("post", "//v1/completions"),
        ("post", "/v1/completions/"),
        ("post", "/flush_cache"),
    }
    routes |= {("post", "/health"), ("get", "/web/chat.js/x"), ("get", "/nowhere"), ("get", "/HEALTH")}
    wrong = ({}, bearer("wrong"), bearer("-"), {"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"})
    for method, path in sorted(routes):
        if path in OPEN:
            continue
        for headers in wrong:
            response = locked.http.request(method, locked.url + path.replace("{model_id}", "x"), headers=headers)
            if path.startswith("/v1/messages"):
                assert ok(response, 401)["error"]["type"] == "authentication_error"
            else:
                assert refused(response, 401)["code"] == "invalid_api_key", (method, path)
            assert response.headers["www-authenticate"] == "Bearer"


def test_open_paths_need_none(locked: Live) -> None:
    for path in OPEN:
        assert locked.http.get(path).status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(locked: Live, key: str) -> None:
    response = locked.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=bearer(key))
    assert ok(response)["choices"]
    assert locked.http.get("/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200


def test_two_authorizations_are_none(locked: Live) -> None:
    headers = [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {KEYS[0]}")]
    assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == 401


def test_keys_do_not_share_cached_prefixes(locked: Live) -> None:
    ids = list(range(40, 120))

    def cached(key: str, **fields) -> int:
        body = {"prompt": ids, "max_tokens": 1, **fields}
        usage = ok(locked.post("/v1/completions", body, headers=bearer(key)))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEYS[0], cache_salt="s") == 0
    assert cached(KEYS[0], cache_salt="s") > 0
    assert cached(KEYS[1], cache_salt="s") == 0, "the salt of another key is of no use"
    assert cached(KEYS[0]) == 0 and cached(KEYS[0]) > 0 and cached(KEYS[1]) == 0


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "tab\t"])
def test_keys_that_no_client_could_send(key: str) -> None:
    with pytest.raises(ValueError, match="api_keys"):
        ServerSettings(api_keys=("fine", key))


@pytest.mark.parametrize(
    "fields",
    [{"port": 70_000}, {"port": "80"}, {"max_n": 0}, {"max_n": 10**6}, {"drain_s": -1}, {"drain_s": float("nan")},
     {"host": ""}, {"served_model_name": " "}, {"max_body_bytes": 10}, {"heartbeat_timeout_s": 0}],
)  # fmt: skip
def test_settings_out_of_range(fields: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ServerSettings(**fields)


def test_page_may_load_nothing_from_elsewhere(live: Live) -> None:
    page = live.http.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for path in OPEN - {"/health", "/ready"}:
        text = live.http.get(path).text
        assert "https://" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text


def test_page_can_be_turned_off(toy_tokenizer: Path) -> None:
    settings = ServerSettings(engine_command=engine_command(toy_tokenizer), chat_page=False, served_model_name="named")
    with serving(settings) as live:
        refused(live.http.get("/"), 404)
        assert ok(live.http.get("/v1/models"))["data"][0]["id"] == "named"


def check(document: dict, schema: dict, value: object) -> None:
    whole = {**schema, "components": document["components"]}  # where its references point
    jsonschema.Draft202012Validator(whole).validate(value)


def validate(document: dict, path: str, status: int, kind: str, value: object, method: str = "post") -> None:
    check(document, document["paths"][path][method]["responses"][str(status)]["content"][kind]["schema"], value)


def test_answers_are_what_the_document_says(live: Live) -> None:
    document = ok(live.http.get("/openapi.json"))
    messages = [{"role": "user", "content": "hi"}]
    full = {"max_tokens": 3, "n": 2, "return_token_ids": True}
    for path, fields in (
        ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": messages, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        body = {**full, **fields}
        request = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        check(document, request, body)
        validate(document, path, 200, "application/json", ok(live.post(path, body)))
        body.pop("prompt_logprobs", None)
        options = {"include_usage": True, "continuous_usage_stats": True}
        for chunk in live.stream(path, **body, stream_options=options).chunks:
            validate(document, path, 200, "text/event-stream", chunk)
    validate(document, "/tokenize", 200, "application/json", ok(live.post("/tokenize", {"prompt": "a"})))
    validate(document, "/v1/completions", 400, "application/json", live.post("/v1/completions", {}).json())
    for path in ("/v1/models", "/health", "/ready", "/version"):
        validate(document, path, 200, "application/json", ok(live.http.get(path)), "get")


def test_document_names_every_field(live: Live) -> None:
    document = ok(live.http.get("/openapi.json"))
    schema = document["components"]["schemas"]["ChatCompletionRequest"]
    assert schema["additionalProperties"] is False and "messages" in schema["required"]
    assert schema["properties"]["n"]["anyOf"][0]["maximum"] == 128
    assert {"cache_salt", "top_k", "stop_token_ids", "return_token_ids"} <= schema["properties"].keys()
    assert "{model_id}" in "".join(document["paths"])


def test_openai_client(live: Live) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    plain = client.chat.completions.create(model="toy-model", messages=messages, temperature=0, max_tokens=30)
    assert plain.usage.prompt_tokens_details.cached_tokens >= 0 and plain.choices[0].finish_reason
    pieces = client.chat.completions.create(
        model="toy-model",
        messages=messages,
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in pieces:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == plain.choices[0].message.content and usage.completion_tokens == plain.usage.completion_tokens
    done = client.completions.create(model="toy-model", prompt="a", max_tokens=3, logprobs=2, extra_body={"top_k": 5})
    assert len(done.choices[0].logprobs.tokens) == done.usage.completion_tokens
    assert [model.id for model in client.models.list()] == ["toy-model"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy-model", prompt="a", max_tokens=10_000)
    assert caught.value.param == "max_tokens" and caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
