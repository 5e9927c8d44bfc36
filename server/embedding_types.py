"""Types of /v1/embeddings, /v1/score and /rerank. The rules are those of protocol.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from jaxserve.server.protocol import ClientId, Priority, Salt, TokenId, Truncation
from msgspec import Meta

MAX_LABELS = 128
Documents = Annotated[list["str | Document"], Meta(min_length=1)]


class EmbeddingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all of them have in common. user changes no answer."""

    model: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: ClientId | None = None
    user: str | None = None


class EmbeddingRequest(EmbeddingFields, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings.

    input               a text, token ids, or a list of either. Names of control tokens in a text stay text
    encoding_format     float, or base64 of little-endian float32
    dimensions          keep the first so many values, scaled to length one
    normalize           scale vectors to length one (default true)
    pooling             last token, mean of all, or cls; default: what the model was made for
    add_special_tokens  whether the tokenizer's own tokens are put around a text (default true)
    """

    input: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    normalize: bool | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    add_special_tokens: bool | None = None


class Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    text: str


class ScoreRequest(EmbeddingFields, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/score. Either text_1 and text_2, or query, items and label_token_ids.

    text_1, text_2      pairs (one text_1 for all of text_2, or as many): cosine of the embeddings of both
    query, items        the labels' probabilities as the next token after query + item (item + query with item_first)
    apply_softmax       of the labels' log-probabilities among each other, instead of their probabilities
    """

    text_1: str | Annotated[list[str], Meta(min_length=1)] | None = None
    text_2: str | Annotated[list[str], Meta(min_length=1)] | None = None
    query: str | list[TokenId] | None = None
    items: str | Annotated[list[str | list[TokenId]], Meta(min_length=1)] | None = None
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LABELS)] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class RerankRequest(EmbeddingFields, forbid_unknown_fields=True, kw_only=True):
    """POST /rerank, /v1/rerank, /v2/rerank: documents by the cosine of their embedding and the query's, best first."""

    query: str
    documents: Documents
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class PairScore(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


class LabelScores(msgspec.Struct, kw_only=True):
    """scores: for each item one value per label."""

    object: Literal["scoring"] = "scoring"
    scores: list[list[float]]
    model: str
    usage: EmbeddingUsage


class RerankResult(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankAnswer(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]
