"""Embeddings, scores and reranking over a toy engine whose vector of a text is a bag of its tokens."""

from __future__ import annotations

import base64
import math
import struct

import pytest
from live import MODEL, Live, ok, refused
from openai import OpenAI

TEXTS = ["the old harbour", "seven boats", "rain 🙂"]
SIZE = 16


@pytest.fixture(scope="module")
def client(_shared: Live) -> OpenAI:
    return OpenAI(base_url=f"{_shared.url}/v1", api_key="none", max_retries=0)


def bag(ids: list[int], size: int = SIZE) -> list[float]:
    vector = [0.0] * SIZE
    for token in ids:
        vector[token % SIZE] += 1.0
    vector = vector[:size]
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length for value in vector]


def ids_of(live: Live, text: str) -> list[int]:
    return ok(live.post("/tokenize", {"prompt": text}))["tokens"]


def test_texts_and_ids_in_their_order(live: Live, client: OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    ids = [ids_of(live, text) for text in TEXTS]
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, one in zip(answer.data, ids, strict=True):
        assert item.embedding == pytest.approx(bag(one), abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert client.embeddings.create(model=MODEL, input=ids, encoding_format="float").data == answer.data
    assert client.embeddings.create(model=MODEL, input=ids[0], encoding_format="float").data == answer.data[:1]


def test_base64_holds_little_endian_floats(live: Live, client: OpenAI) -> None:
    plain = ok(live.post("/v1/embeddings", {"input": "a b c"}))["data"][0]["embedding"]
    coded = ok(live.post("/v1/embeddings", {"input": "a b c", "encoding_format": "base64"}))["data"][0]["embedding"]
    assert struct.unpack(f"<{SIZE}f", base64.b64decode(coded)) == pytest.approx(plain, abs=1e-6)
    assert client.embeddings.create(model=MODEL, input="a b c").data[0].embedding == pytest.approx(plain, abs=1e-6)


def test_dimensions_and_truncation(live: Live) -> None:
    ids = ids_of(live, TEXTS[0])

    def one(**fields: object) -> list[float]:
        return ok(live.post("/v1/embeddings", {"input": TEXTS[0], **fields}))["data"][0]["embedding"]

    assert one(dimensions=4) == pytest.approx(bag(ids, 4), abs=1e-6)
    assert sum(one(normalize=False)) == len(ids)
    assert one(truncate_prompt_tokens=5) == pytest.approx(bag(ids[-5:]), abs=1e-6)
    assert one(truncate_prompt_tokens=5, truncation_side="right") == pytest.approx(bag(ids[:5]), abs=1e-6)
    long = {"input": "word " * 600}
    assert refused(live.post("/v1/embeddings", long))["code"] == "context_length_exceeded"
    assert ok(live.post("/v1/embeddings", {**long, "truncate_prompt_tokens": -1}))["usage"]["prompt_tokens"] == 511


def test_pairs_are_scored_by_their_cosine(live: Live) -> None:
    vectors = [bag(ids_of(live, text)) for text in TEXTS]
    answer = ok(live.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}))
    cosines = [sum(a * b for a, b in zip(vectors[0], other)) for other in vectors]
    assert [item["score"] for item in answer["data"]] == pytest.approx(cosines, abs=1e-6)
    pairs = ok(live.post("/score", {"text_1": TEXTS, "text_2": TEXTS}))
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1.0] * 3, abs=1e-6)
    assert refused(live.post("/v1/score", {"text_1": TEXTS[:2], "text_2": TEXTS}))["param"] == "text_1"


def test_labels_are_scored_as_the_next_token(live: Live) -> None:
    body = {"query": "Is it? ", "items": ["yes", "no"], "label_token_ids": [3, 5]}
    raw = ok(live.post("/v1/score", body))["scores"]
    assert raw[0] == raw[1] == pytest.approx([math.exp(-6), math.exp(-8)])  # the toy gives token t the score -3 - t
    soft = ok(live.post("/v1/score", {**body, "apply_softmax": True}))["scores"]
    assert [sum(row) for row in soft] == pytest.approx([1.0, 1.0])
    ids = {"query": [40, 41], "items": [[42], [43, 44]], "label_token_ids": [3], "item_first": True}
    assert ok(live.post("/v1/score", ids))["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first(live: Live, path: str) -> None:
    body = {"query": TEXTS[1], "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    results = ok(live.post(path, body))["results"]
    assert (results[0]["index"], results[0]["document"]) == (1, {"text": TEXTS[1]})
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and scores[0] == pytest.approx(1.0)
    short = ok(live.post(path, {**body, "top_n": 2, "return_documents": False}))["results"]
    assert [result["index"] for result in short] == [result["index"] for result in results[:2]]
    assert short[0]["document"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {}, "input"), ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"), ("/v1/embeddings", {"input": [10**6]}, "input[0]"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input[1]"),
        ("/v1/embeddings", {"input": "a", "dimensions": 17}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream"),
        ("/v1/score", {"text_1": "a"}, "text_2"), ("/v1/score", {}, "text_1"),
        ("/v1/score", {"text_1": "a", "query": "b"}, "text_1"), ("/v1/score", {"query": "a"}, "items"),
        ("/v1/score", {"query": "a", "items": [[1]], "label_token_ids": [1]}, "items[0]"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [10**6]}, "label_token_ids"),
        ("/rerank", {"query": "a", "documents": []}, "documents"), ("/rerank", {"documents": ["a"]}, "query"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(live: Live, path: str, fields: dict, param: str) -> None:
    assert refused(live.post(path, fields))["param"] == param
