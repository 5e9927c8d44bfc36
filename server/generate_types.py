"""Types of SGLang's native /generate and of the control routes. The rules are those of protocol.py.

A field that may differ from prompt to prompt takes one value for all, or a list with one for each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from jaxserve.server.protocol import (
    Bias,
    Count,
    Interval,
    NumChoices,
    NumLogprobs,
    Penalty,
    Priority,
    Salt,
    TokenId,
)
from msgspec import UNSET, Meta, UnsetType

RequestId = Annotated[str, Meta(min_length=1, max_length=128, pattern="^[!-~]+$")]
StartLen = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="first prompt token with a score; -1: none has")]


class NativeSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """sampling_params, in SGLang's names.

    max_new_tokens   default 128; 0: the prompt is computed (and cached) and nothing follows
    no_stop_trim     keep stop strings and stop tokens in the text
    json_schema, regex, ebnf, structural_tag   what the text must follow, one of them
    """

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    n: NumChoices | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, Bias] | None = None
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream_interval: Interval | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /generate. Exactly one of text and input_ids; a list of either is a batch, answered by a list.

    return_logprob         scores of the tokens in meta_info
    logprob_start_len      the prompt's tokens from this one on are scored as well (its own entry is null)
    top_logprobs_num       best tokens beside each score
    token_ids_logprob      further tokens beside each score
    return_text_in_logprobs  the third part of a score is the token's text, otherwise null
    stream                 events with the text so far; [DONE] comes last
    rid                    name for /abort_request
    extra_key              keeps cached prefixes apart
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: StartLen | list[StartLen] | None = None
    top_logprobs_num: NumLogprobs | list[NumLogprobs] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: RequestId | list[RequestId] | None = None
    priority: Priority | None = None
    extra_key: Salt | None = None
    model: str | None = None
    log_metrics: bool | None = None
    return_hidden_states: Literal[False] | None = None


class NativeFinish(msgspec.Struct, kw_only=True):
    """matched: the stop string or token; length: of the output, if that was the reason."""

    type: Literal["stop", "length"]
    matched: int | str | UnsetType | None = UNSET
    length: int | UnsetType = UNSET


Score = tuple[float | None, int, str | None]  # log-probability, token id, text


class NativeMeta(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[Score] | UnsetType = UNSET
    output_token_logprobs: list[Score] | UnsetType = UNSET
    input_top_logprobs: list[list[Score] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Score] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[Score] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Score] | None] | UnsetType = UNSET


class Generated(msgspec.Struct, kw_only=True):
    """index: which of a batch (prompt by prompt, n each); only in streams of more than one."""

    text: str
    output_ids: list[int]
    meta_info: NativeMeta
    index: int | UnsetType = UNSET


class FlushCacheRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /flush_cache: forget the prefixes that no running request uses."""

    empty_cache: bool | None = None


class AbortRequestBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /abort_request. rid: the id of an answer, or the one that the client gave; of the caller's own requests
    only, unless the admin key is used. abort_all needs that key."""

    rid: Annotated[str, Meta(max_length=200)] | None = None
    abort_all: bool | None = None


class Done(msgspec.Struct, kw_only=True):
    success: bool
    message: str


class Aborted(msgspec.Struct, kw_only=True):
    num_aborted: int


class NativeModelInfo(msgspec.Struct, kw_only=True):
    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None
    max_context_length: int


class ServerInfo(msgspec.Struct, kw_only=True):
    """What an operator may want to know: settings without secrets, the engine's configuration, the model's facts, and
    what goes on."""

    version: str
    status: str
    served_model_name: str
    started: int
    settings: dict[str, Any]
    engine: dict[str, Any]
    model: dict[str, Any] | None
    stats: dict[str, Any] | None
    num_in_flight: int
    num_stored_responses: int
