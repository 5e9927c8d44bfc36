"""The words of the language: function, gen, select, roles. No jax."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, overload

from jaxserve.lang.choices import ChoicesSamplingMethod, token_length_normalized
from jaxserve.lang.expressions import Expr, ExprList, Gen, Media, RoleBegin, RoleEnd, Select, as_expr, leaves
from jaxserve.lang.function import Function
from jaxserve.lang.options import GenOptions
from jaxserve.lang.reasoning import check_model_type


@overload
def function(func: Callable[..., Any]) -> Function: ...
@overload
def function(*, num_api_spec_tokens: int | None = None) -> Callable[[Callable[..., Any]], Function]: ...
def function(func: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first argument is the state.

    num_api_spec_tokens is accepted for programs written for SGLang: it lets several generations of one assistant turn
    be guessed with one call of a chat API. Nothing is guessed here, and values are the same without.
    """
    if func is not None:
        return Function(func)
    return Function


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, Any] | None = None,
    *,
    repetition_penalty: float | None = None,
    logit_bias: dict[int, float] | None = None,
    seed: int | None = None,
) -> Expr:
    """Let the model write. The text becomes the variable `name`; with n > 1 a list, and the first goes on.

    choices makes it a select(). Other options are those of SamplingParams and of GenOptions. Raises ValueError
    naming an option that cannot be.
    """
    if choices is not None:
        return select(name, choices, temperature or 0.0, choices_method or token_length_normalized)
    if regex is not None:
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"regex: got {regex!r}; allowed: a regular expression ({error})") from None
    options = GenOptions(
        max_tokens=max_tokens, min_tokens=min_tokens, n=n, stop=stop, stop_token_ids=stop_token_ids,
        stop_regex=stop_regex, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty, ignore_eos=ignore_eos,
        return_logprob=return_logprob, logprob_start_len=logprob_start_len, top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs, dtype=dtype, regex=regex, json_schema=json_schema,
        repetition_penalty=repetition_penalty, logit_bias=logit_bias, seed=seed,
    )  # fmt: skip
    return Gen(name, options)


def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Expr:
    """gen() of a whole number. The variable is its text."""
    return gen(name, max_tokens, dtype=int, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Expr:
    """gen() of a string in double quotes, which are part of the text."""
    return gen(name, max_tokens, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
) -> Expr:
    """Append the one of `choices` that the model finds likeliest, by a rule of jaxserve.lang.choices.

    Raises ValueError unless there are choices, none of them empty, and temperature is 0.
    """
    if not choices or any(not isinstance(choice, str) or not choice for choice in choices):
        raise ValueError(f"choices: got {choices!r}; allowed: at least one text, none of them empty")
    if temperature > 1e-5:
        raise ValueError(f"temperature: got {temperature}; allowed with choices: 0, the likeliest is taken")
    if not isinstance(choices_method, ChoicesSamplingMethod):
        raise ValueError(
            f"choices_method: got {choices_method!r}; allowed: token_length_normalized, greedy_token_selection, "
            f"unconditional_likelihood_normalized, or another ChoicesSamplingMethod"
        )
    return Select(name, tuple(choices), choices_method)


def system(expr: Expr | str | None = None) -> Expr:
    """A system message; without an argument an empty one. state.system() can also be a with block."""
    return role("system", expr)


def user(expr: Expr | str | None = None) -> Expr:
    return role("user", expr)


def assistant(expr: Expr | str | None = None) -> Expr:
    return role("assistant", expr)


def role(name: str, expr: Expr | str | None = None) -> Expr:
    """One message of a conversation."""
    inner = [] if expr is None else [as_expr(expr)]
    return ExprList([RoleBegin(name), *inner, RoleEnd(name)])


def system_begin() -> Expr:
    return RoleBegin("system")


def system_end() -> Expr:
    return RoleEnd("system")


def user_begin() -> Expr:
    return RoleBegin("user")


def user_end() -> Expr:
    return RoleEnd("user")


def assistant_begin() -> Expr:
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    return RoleEnd("assistant")


def image(path: object) -> Expr:
    """Appending it is an error: no model here takes images."""
    return Media("image")


def video(path: object, num_frames: int) -> Expr:
    """Appending it is an error: no model here takes videos."""
    return Media("video")


def separate_reasoning(expr: Expr, model_type: str | None = None) -> Expr:
    """Cut the thoughts of a reasoning model out of every gen() in expr.

    The variable `name` and the text hold what comes after them; the thoughts are in `name_reasoning_content`.
    model_type: see jaxserve.lang.reasoning.
    """
    kind = check_model_type(model_type)
    parts = [dataclasses.replace(leaf, reasoning=kind) if isinstance(leaf, Gen) else leaf for leaf in leaves(expr)]
    return ExprList(parts)
