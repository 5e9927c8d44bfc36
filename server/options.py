"""Fields of a request to the engine's SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.server.errors import ApiError, from_invalid_parameter, invalid_value
from jaxserve.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

from jaxserve.sampling_params import InvalidParameter, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

_PLAIN_FIELDS = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "prompt_logprobs",
)  # fmt: skip


def sampling_options(
    request: GenerationRequest, *, max_n: int, vocab_size: int, defaults: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Arguments of SamplingParams that both kinds of request share, max_tokens and logprobs aside. defaults: those of
    the model (ModelInfo.defaults), for fields that the request leaves out.

    Raises ApiError 400 for what no range in the request's type could express.
    """
    _check_flags(request)
    n = request.n if request.n is not None else 1
    if n > max_n:
        raise invalid_value("n", n, f"1 to {max_n}")
    options: dict[str, Any] = {"n": n, **(defaults or {})}
    for name in _PLAIN_FIELDS:
        value = getattr(request, name)
        if value is not None:
            options[name] = value
    # A top_k above the vocabulary keeps every token: the same as none.
    if options.get("top_k", 0) >= vocab_size:
        options["top_k"] = 0
    if request.stop is not None:
        stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        if request.stop != "":  # some clients send an empty text for "none"
            options["stop"] = stops
    if request.stop_token_ids:
        options["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.allowed_token_ids is not None:
        options["allowed_token_ids"] = tuple(request.allowed_token_ids)
    if request.logprob_token_ids:
        if not request.logprobs and request.prompt_logprobs is None and request.logprobs != 0:
            raise ApiError(
                400,
                "logprob_token_ids: allowed only with logprobs or prompt_logprobs",
                param="logprob_token_ids",
                code="invalid_value",
            )
        options["logprob_token_ids"] = tuple(request.logprob_token_ids)
    if request.logit_bias:
        options["logit_bias"] = _logit_bias(request.logit_bias)
    return options


def make_params(options: dict[str, Any], *, vocab_size: int, names: dict[str, str] | None = None) -> SamplingParams:
    """Raises ApiError 400. `names`: parameter -> the field in which the client gave it."""
    try:
        params = SamplingParams(**options)
        params.check_vocabulary(vocab_size)
    except InvalidParameter as error:
        raise from_invalid_parameter(error, names=names) from None
    return params


def completion_logprobs(request: CompletionRequest, options: dict[str, Any]) -> None:
    """logprobs, and the prompt's scores that echo with logprobs asks for."""
    if request.best_of is not None and request.best_of != options["n"]:
        raise invalid_value("best_of", request.best_of, f"n ({options['n']}); choosing among more is not supported")
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(400, "prompt_logprobs: not available with stream", param="prompt_logprobs")
    if request.logprobs is None:
        return
    options["logprobs"] = request.logprobs
    if request.echo:
        options["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)


def chat_logprobs(request: ChatCompletionRequest, options: dict[str, Any]) -> None:
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(400, "prompt_logprobs: not available with stream", param="prompt_logprobs")
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs is not None:
        raise ApiError(
            400,
            f"top_logprobs: got {request.top_logprobs} without logprobs; allowed: only with logprobs true",
            param="top_logprobs",
            code="invalid_value",
        )


def chat_max_tokens(request: ChatCompletionRequest) -> tuple[int | None, str]:
    """The limit and the name of the field that set it."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid_value("max_completion_tokens", new, f"the value of max_tokens ({old}), or only one of the two")
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _check_flags(request: GenerationRequest) -> None:
    if request.store:
        raise ApiError(400, "store: answers are not stored by this server; true is not supported", param="store")
    if request.spaces_between_special_tokens and request.skip_special_tokens is False:
        raise invalid_value(
            "spaces_between_special_tokens", True, "false together with skip_special_tokens false; no spaces are added"
        )
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise ApiError(400, "stream_options: allowed only with stream true", param="stream_options")
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise ApiError(400, f"{param}: true is not supported", param=param)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, value in bias.items():
        # int() would take " 5", "+5" and "1_0", and digits of other scripts.
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 10):
            raise invalid_value("logit_bias", key, "token ids as keys")
        result[int(key)] = value
    return result
