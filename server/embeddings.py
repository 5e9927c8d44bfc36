"""/v1/embeddings, /v1/score and /rerank: vectors of texts, and what is made from them."""

from __future__ import annotations

import array
import base64
import math
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxserve.server.embedding_types import (
    Embedding,
    EmbeddingFields,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    LabelScores,
    PairScore,
    RerankAnswer,
    RerankRequest,
    RerankResult,
    ScoreList,
    ScoreRequest,
)
from jaxserve.server.errors import ApiError, invalid_value
from jaxserve.server.generation import Server, Sharing, run_to_end, sharing_of
from jaxserve.server.prompts import LoadedModel, Prompt, TextOptions
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.messages import AddEmbedding, AddRequest, RequestOutput
from jaxserve.sampling_params import SamplingParams


async def embed(server: Server, http: Request, request: EmbeddingRequest) -> Response:
    """POST /v1/embeddings. Raises ApiError."""
    loaded = server.model(request.model, task="embed")
    size = loaded.info.embedding_size
    if request.dimensions is not None and request.dimensions > size:
        raise invalid_value("dimensions", request.dimensions, f"1 to {size}")
    options = TextOptions(add_special_tokens=request.add_special_tokens is not False, allow_special_tokens=False)
    prompts = await _prompts(server, loaded, request, request.input, options, "input")
    shared = sharing_of(server, http, request)
    messages = [
        AddEmbedding(
            request_id=server.client.new_id(),
            prompt=prompt.token_ids,
            pooling=request.pooling or "",
            normalize=request.normalize is not False,
            dimensions=request.dimensions or 0,
            namespace=shared.namespace,
            priority=request.priority or 0,
            deadline_s=shared.deadline_s,
        )
        for prompt in prompts
    ]

    def answer(outputs: list[RequestOutput], prompt_of: dict[str, int]) -> EmbeddingList:
        vectors = _vectors(outputs, prompt_of)
        encoded: list[Any] = [_base64(v) for v in vectors] if request.encoding_format == "base64" else vectors
        data = [Embedding(index=index, embedding=value) for index, value in enumerate(encoded)]
        return EmbeddingList(data=data, model=server.model_name, usage=_usage(prompts))

    return await run_to_end(server, http, messages, shared, answer)


async def score(server: Server, http: Request, request: ScoreRequest) -> Response:
    """POST /v1/score. Raises ApiError."""
    by_labels = request.query is not None or request.items is not None or request.label_token_ids is not None
    if by_labels == (request.text_1 is not None or request.text_2 is not None):
        raise ApiError(
            400, "text_1: text_1 and text_2 must be given, or query, items and label_token_ids", param="text_1"
        )
    return await (_score_labels if by_labels else _score_pairs)(server, http, request)


async def rerank(server: Server, http: Request, request: RerankRequest) -> Response:
    """POST /rerank. Raises ApiError."""
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    prompts, messages, shared = await _to_compare(server, http, request, [request.query], texts, ("query", "documents"))

    def answer(outputs: list[RequestOutput], prompt_of: dict[str, int]) -> RerankAnswer:
        query, *vectors = _vectors(outputs, prompt_of)
        scores = [_dot(query, vector) for vector in vectors]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            RerankResult(
                index=index,
                relevance_score=scores[index],
                document={"text": texts[index]} if request.return_documents is not False else None,
            )
            for index in best[: request.top_n or len(best)]
        ]
        name = f"rerank-{secrets.token_hex(12)}"
        return RerankAnswer(id=name, model=server.model_name, usage=_usage(prompts), results=results)

    return await run_to_end(server, http, messages, shared, answer)


async def _score_pairs(server: Server, http: Request, request: ScoreRequest) -> Response:
    if request.text_1 is None or request.text_2 is None:
        name = "text_1" if request.text_1 is None else "text_2"
        raise ApiError(400, f"{name}: missing; it is required", param=name, code="missing_required_parameter")
    left = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    right = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(left) not in (1, len(right)):
        raise invalid_value("text_1", left, f"one text, or as many as text_2 has ({len(right)})")
    prompts, messages, shared = await _to_compare(server, http, request, left, right, ("text_1", "text_2"))

    def answer(outputs: list[RequestOutput], prompt_of: dict[str, int]) -> ScoreList:
        vectors = _vectors(outputs, prompt_of)
        ours, theirs = vectors[: len(left)], vectors[len(left) :]
        scores = [_dot(ours[index if len(ours) > 1 else 0], vector) for index, vector in enumerate(theirs)]
        return ScoreList(
            id=f"score-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=server.model_name,
            data=[PairScore(index=index, score=value) for index, value in enumerate(scores)],
            usage=_usage(prompts),
        )

    return await run_to_end(server, http, messages, shared, answer)


async def _score_labels(server: Server, http: Request, request: ScoreRequest) -> Response:
    for name in ("query", "items", "label_token_ids"):
        if getattr(request, name) is None:
            raise ApiError(400, f"{name}: missing; it is required", param=name, code="missing_required_parameter")
    assert request.query is not None and request.items is not None and request.label_token_ids is not None
    loaded = server.model(request.model)
    labels = tuple(request.label_token_ids)
    if max(labels) >= loaded.info.vocab_size:
        raise invalid_value("label_token_ids", max(labels), f"token ids 0 to {loaded.info.vocab_size - 1}")
    items = [request.items] if isinstance(request.items, str) else request.items
    prompts = await _prompts(server, loaded, request, _joined(request, items), _PLAIN, "items", room=1)
    shared = sharing_of(server, http, request)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=labels)
    messages = [
        AddRequest(
            request_id=server.client.new_id(),
            prompt=prompt.token_ids,
            params=params,
            namespace=shared.namespace,
            priority=request.priority or 0,
            stream_interval=0,
            deadline_s=shared.deadline_s,
        )
        for prompt in prompts
    ]

    def answer(outputs: list[RequestOutput], prompt_of: dict[str, int]) -> LabelScores:
        scores: list[list[float]] = [[]] * len(prompts)
        for output in outputs:
            assert output.logprobs is not None
            values = [math.exp(logprob) for _, logprob in output.logprobs[0].named]
            if request.apply_softmax:
                values = _softmax([logprob for _, logprob in output.logprobs[0].named])
            scores[prompt_of[output.request_id]] = values
        return LabelScores(scores=scores, model=server.model_name, usage=_usage(prompts))

    return await run_to_end(server, http, messages, shared, answer)


_PLAIN = TextOptions(add_special_tokens=True, allow_special_tokens=False)


def _joined(request: ScoreRequest, items: Sequence[str | list[int]]) -> list[Any]:
    """query + item of each. Raises ApiError 400 for texts beside token ids."""
    query = request.query
    joined: list[Any] = []
    for place, item in enumerate(items):
        if type(item) is not type(query):
            raise invalid_value(f"items[{place}]", item, "texts if query is one, else token ids")
        joined.append(item + query if request.item_first else query + item)  # type: ignore[operator]
    return joined


async def _to_compare(
    server: Server, http: Request, request: EmbeddingFields, left: list[str], right: list[str], names: tuple[str, str]
) -> tuple[list[Prompt], list[AddEmbedding], Sharing]:
    """Prompts of both sides, and the messages that turn them into vectors of length one."""
    loaded = server.model(request.model, task="embed")
    prompts = [
        prompt
        for texts, name in zip((left, right), names, strict=True)
        for prompt in await _prompts(server, loaded, request, texts, _PLAIN, name)
    ]
    shared = sharing_of(server, http, request)
    messages = [
        AddEmbedding(
            request_id=server.client.new_id(),
            prompt=prompt.token_ids,
            namespace=shared.namespace,
            priority=request.priority or 0,
            deadline_s=shared.deadline_s,
        )
        for prompt in prompts
    ]
    return prompts, messages, shared


async def _prompts(
    server: Server,
    loaded: LoadedModel,
    request: EmbeddingFields,
    given: Any,
    options: TextOptions,
    name: str,
    *,
    room: int | None = None,
) -> list[Prompt]:
    """Token ids of each input, cut as truncate_prompt_tokens says. room: tokens that must follow; default: one with a
    decoder. Raises ApiError 400."""
    prompts = await loaded.encode_prompts(given, options, max_prompts=server.settings.max_sequences, name=name)
    if room is None:
        room = 0 if loaded.info.task == "embed" else 1
    limit = loaded.info.max_model_len - room
    result = []
    for place, prompt in enumerate(prompts):
        ids = prompt.token_ids
        if request.truncate_prompt_tokens is not None:
            ids = loaded.cut(prompt, request.truncate_prompt_tokens, limit, side=request.truncation_side or "left")
        if not 1 <= len(ids) <= limit:
            field = name if len(prompts) == 1 else f"{name}[{place}]"
            raise ApiError(
                400,
                f"{field}: got {len(ids)} tokens; allowed: 1 to {limit}",
                param=field,
                code="context_length_exceeded" if ids else "invalid_value",
            )
        result.append(Prompt(ids))
    return result


def _vectors(outputs: list[RequestOutput], prompt_of: dict[str, int]) -> list[list[float]]:
    """Embeddings in the order of their prompts."""
    vectors: list[list[float]] = [[]] * len(prompt_of)
    for output in outputs:
        assert output.embedding is not None
        vectors[prompt_of[output.request_id]] = output.embedding
    return vectors


def _base64(vector: list[float]) -> str:
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def _dot(left: list[float], right: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def _softmax(logprobs: list[float]) -> list[float]:
    top = max(logprobs)
    weights = [math.exp(value - top) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


def _usage(prompts: list[Prompt]) -> EmbeddingUsage:
    count = sum(len(prompt.token_ids) for prompt in prompts)
    return EmbeddingUsage(prompt_tokens=count, total_tokens=count)
