"""Options of one generation: what gen() says over what run() says over the defaults. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import Grammar

DEFAULT_MAX_TOKENS = 128

# Spaces and newlines end a number; they are cut off as stop strings.
REGEX_OF_TYPE = {
    int: r"[-+]?[0-9]+[ \n]?",
    float: r"[-+]?[0-9]*\.?[0-9]+[ \n]?",
    bool: r"(True|False)",
    str: r'"[^"\\\n\r\t]*"',
}
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "string": str}
_NUMBER_STOPS = (" ", "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenOptions:
    """None: not said here. Meanings and ranges are those of SamplingParams, and in SGLang's spelling

    return_logprob, top_logprobs_num    log-probabilities of the output, and of so many best alternatives
    logprob_start_len                   with return_logprob: also those of prompt tokens from this index on; -1: none
    return_text_in_logprobs             with the text of each token
    dtype                               int, float, bool or str: the output is one literal of that type
    regex, json_schema                  the output matches
    stop_regex                          refused: stop strings and regex end an output
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    dtype: type | str | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.stop_regex:
            raise ValueError(
                "stop_regex: not supported; allowed: stop (strings that end the output), or regex (the whole output)"
            )
        kinds = [name for name in ("dtype", "regex", "json_schema") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise ValueError(f"{kinds[1]}: got it together with {kinds[0]}; allowed: one of dtype, regex, json_schema")
        self._type()

    def over(self, defaults: GenOptions) -> GenOptions:
        """These options, and those of `defaults` where nothing is said here."""
        said = {name: getattr(self, name) for name in _NAMES if getattr(self, name) is not None}
        if said.keys() & {"dtype", "regex", "json_schema"}:
            said = {"dtype": None, "regex": None, "json_schema": None} | said
        return dataclasses.replace(defaults, **said)

    def _type(self) -> type | None:
        kind = _TYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if self.dtype is not None and kind not in REGEX_OF_TYPE:
            raise ValueError(f"dtype: got {self.dtype!r}; allowed: int, float, bool, str")
        return kind

    @property
    def constraint(self) -> tuple[str, str | dict[str, Any]] | None:
        """("regex", pattern) or ("json_schema", schema): what the output must match."""
        kind = self._type()
        if kind is not None:
            return "regex", REGEX_OF_TYPE[kind]
        if self.regex is not None:
            return "regex", self.regex
        if self.json_schema is not None:
            return "json_schema", self.json_schema
        return None

    def _grammar(self) -> Grammar | None:
        if self.constraint is None:
            return None
        kind, text = self.constraint
        if kind == "json_schema":
            return Grammar.json_schema(text)
        return Grammar.regex(str(text), parameter="regex" if self.dtype is None else "dtype")

    @property
    def stops(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return stop + (_NUMBER_STOPS if self._type() in (int, float) else ())

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.return_logprob or self.top_logprobs_num)

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidParameter or GrammarError (ValueErrors) for what cannot be."""
        given: dict[str, Any] = {}
        for name in _COMMON:
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): float(bias) for token, bias in self.logit_bias.items()}
        if self.wants_logprobs:
            given["logprobs"] = self.top_logprobs_num or 0
            if self.logprob_start_len is not None and self.logprob_start_len >= 0:
                given["prompt_logprobs"] = self.top_logprobs_num or 0
                given["prompt_logprobs_start"] = self.logprob_start_len
        return SamplingParams(
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            grammar=self._grammar(),
            **given,
        )


_NAMES = tuple(field.name for field in dataclasses.fields(GenOptions))
_COMMON = (
    "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "seed", "ignore_eos",
)  # fmt: skip
# What run() and run_batch() take as options, whatever the program's arguments are called; SGLang's names.
RUN_OPTIONS = frozenset({
    "max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "ignore_eos", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "return_text_in_logprobs",
})  # fmt: skip
# Options too, unless the program has an argument of that name.
_MORE_RUN_OPTIONS = frozenset({"min_new_tokens", "repetition_penalty", "logit_bias", "seed"})


def split_arguments(keywords: dict[str, Any], parameters: Collection[str]) -> tuple[GenOptions, dict[str, Any]]:
    """Options for every generation of a run, and what is left: arguments of the program with these parameters."""
    names = RUN_OPTIONS | (_MORE_RUN_OPTIONS - set(parameters))
    said = {name: value for name, value in keywords.items() if name in names}
    rest = {name: value for name, value in keywords.items() if name not in names}
    for name in ("max_tokens", "min_tokens"):
        spelled = name.replace("_", "_new_")
        if spelled in said:
            said[name] = said.pop(spelled)
    return GenOptions(**said), rest
