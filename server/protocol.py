"""Requests, field by field, in the spellings of OpenAI and vLLM.

A field stands here exactly if it is honoured, or if leaving it out of account is what its definition allows (it says
so). Everything else is refused by name. null means "not given", as with OpenAI.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from jaxserve.server.structured_fields import StructuredFields
from jaxserve.server.tool_types import ReasoningEffort, ToolChoice, Tools
from msgspec import Meta

from jaxserve.sampling_params import MAX_N, MAX_TOP_LOGPROBS

MAX_CLIENT_ID = 128  # characters of a client's request id
MAX_CACHE_SALT = 256

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_N)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Interval = Annotated[int, Meta(ge=1, le=1024, description="tokens between two chunks")]
Truncation = Annotated[
    int, Meta(ge=-1, le=2**31 - 1, description="keep the last tokens of the prompt; -1: as many as fit")
]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="lower runs first")]
Salt = Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT)]
ClientId = Annotated[str, Meta(min_length=1, max_length=MAX_CLIENT_ID, pattern="^[!-~]+$")]
BadWords = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=256)]
Nothing = Annotated[list[Any], Meta(max_length=0)]  # an empty list asks for nothing


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """include_usage: one more chunk before [DONE] with the usage and no choices. continuous_usage_stats: usage so far
    in every chunk as well. include_obfuscation must not be true: chunks are not padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(StructuredFields, kw_only=True):
    """What both kinds of completion have in common. Ranges are those of SamplingParams.

    bad_words                  words that the output must not contain, as their tokens with and without a space before
    logprob_token_ids          tokens whose log-probabilities stand beside the best ones
    truncation_side            which end of the prompt truncate_prompt_tokens cuts off (default left)
    spaces_between_special_tokens   true only where control tokens are left out: text is made of the tokens' own bytes

    user, safety_identifier, metadata, prompt_cache_key, prompt_cache_retention, service_tier and parallel_tool_calls
    describe the caller or hint at something; they change no answer. store must not be true: nothing is stored.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Interval | None = None
    n: NumChoices | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Bias] | None = None
    allowed_token_ids: list[TokenId] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: BadWords | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: list[TokenId] | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: ClientId | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions.

    prompt          a text, token ids, or a list of either
    max_tokens      default 16; 0 with echo: the prompt is scored and nothing follows
    best_of         only if equal to n
    logprobs        log-probabilities of each token and of so many best ones
    echo            the prompt before the text; with logprobs its log-probabilities too
    allow_special_tokens   whether names of control tokens in a text prompt become those tokens (default true)
    """

    prompt: str | list[int | str | list[int]]
    max_tokens: Count | None = None
    best_of: NumChoices | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    allow_special_tokens: bool | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class ToolCallFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call that an earlier assistant message made."""

    function: ToolCallFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. Fields that answers carry may come back with it, as long as they hold nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Nothing | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions.

    max_completion_tokens    the newer name of max_tokens; default: up to the context limit
    add_generation_prompt    open the assistant's turn (default: true unless continue_final_message)
    continue_final_message   the answer goes on where the last message ends
    echo, add_special_tokens only false: a template writes its special tokens itself, an answer is the answer
    chat_template_kwargs     variables of the model's chat template
    tools, tool_choice, parallel_tool_calls   functions the model may call; "required" and a named function hold
    reasoning_effort         a variable of the template; "none" also means enable_thinking false, and where the
                             template knows no efforts, minimal, low and medium are budgets of 256, 1024, 4096 tokens
    thinking_token_budget    tokens of reasoning at most
    include_reasoning        whether the answer shows it (default true)
    """

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Count | None = None
    include_reasoning: bool | None = None
    verbosity: Literal["medium"] | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a text, or a conversation through the chat template. Exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    allow_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize. skip_special_tokens: leave control tokens out (default false)."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


_NO_FUNCTIONS = "the older form of tools is not supported by this server; use tools"
_NO_MEDIA = "only text is supported by this server"
_NO_BEAMS = "beam search is not supported by this server"
_NO_PROCESSORS = "logit processors are not supported by this server"

# Fields of other servers, with a better answer than "unknown field".
HINTS = {
    "functions": _NO_FUNCTIONS,
    "function_call": _NO_FUNCTIONS,
    "suffix": "filling in between a prompt and a suffix is not supported by this server",
    "audio": _NO_MEDIA,
    "modalities": f"{_NO_MEDIA}; allowed: ['text']",
    "mm_processor_kwargs": _NO_MEDIA,
    "prompt_embeds": "prompts given as embeddings are not supported by this server",
    "prediction": "predicted outputs are not supported by this server",
    "web_search_options": "web search is not supported by this server",
    "chat_template": "templates from clients are not supported; the model's own is used",
    "documents": "documents are not supported by this server; put them into a message",
    "logits_processors": _NO_PROCESSORS,
    "logit_processors": _NO_PROCESSORS,
    "use_beam_search": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "verbosity": "not supported by this server; allowed: 'medium'",
    "service_tier": "not supported by this server; allowed: 'auto', 'default'",
}
