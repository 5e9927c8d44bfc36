"""Options of one generation, validated once. No jax."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from jaxserve.structured.grammar import Grammar

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries per request, staged in a fixed-shape array
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 64
MAX_N = 128
MAX_LOGPROB_TOKEN_IDS = 128  # ids whose log-probabilities a request may ask for beside the best ones
MAX_BAD_WORDS = 64  # token sequences of two tokens and more; single tokens share the limit of MAX_LOGIT_BIAS
MAX_BAD_WORD_TOKENS = 16


class InvalidParameter(ValueError):
    """A request option is out of range. `parameter` names it; the text says what was seen and what is allowed."""

    def __init__(self, parameter: str, seen: Any, allowed: str) -> None:
        self.parameter = parameter
        super().__init__(f"{parameter}: got {_show(seen)}; allowed: {allowed}")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to continue one prompt. Raises InvalidParameter (a ValueError) for a value out of range.

    n                    independent continuations of the prompt
    max_tokens           tokens to generate at most; None: up to the context limit
    min_tokens           no end-of-sequence or stop token before this many tokens
    temperature          0 is greedy; values below 1e-5 are treated as 0
    top_k                0 or -1: off
    top_p, min_p         nucleus mass; smallest probability relative to the best token
    presence_penalty, frequency_penalty   subtracted once / per occurrence in the output
    repetition_penalty   divides (multiplies negative) logits of tokens seen in prompt or output; 1 is off
    logit_bias           token id -> added to its logit
    allowed_token_ids    only these may be sampled
    seed                 None: the engine draws one. Draws depend on (seed, index of the continuation, position)
    stop, stop_token_ids strings / tokens that end the text; include_stop_str_in_output keeps them in it
    ignore_eos           go on after end-of-sequence tokens
    bad_word_ids         token sequences that the output must not contain: the last token of one is not sampled where
                         the output so far ends with the others
    logprobs             None: none; k: the chosen token's log-probability and those of the k best
    prompt_logprobs      the same for each prompt token after the first
    prompt_logprobs_start  index of the first prompt token that is scored; the cached prefix before it is used
    logprob_token_ids    tokens that are reported beside the best ones wherever log-probabilities are
    skip_special_tokens  leave control tokens out of the text
    grammar              what the text must look like: Grammar.json_schema(...), .regex(...), .choice(...), ...
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"0 to max_tokens ({self.max_tokens})")
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _integer(name, value, 0, MAX_TOP_LOGPROBS)
        _integer("prompt_logprobs_start", self.prompt_logprobs_start, 0, 2**31 - 1)
        self._check_lists()
        self._check_bad_words()
        self._check_grammar()

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidParameter("stop", text, "non-empty strings")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidParameter(
                "logprob_token_ids", f"{len(self.logprob_token_ids)} ids", f"at most {MAX_LOGPROB_TOKEN_IDS}"
            )
        for token in self.logprob_token_ids:
            _integer("logprob_token_ids", token, 0, 2**31 - 1)
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise InvalidParameter("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
            for token, bias in self.logit_bias.items():
                _integer("logit_bias", token, 0, 2**31 - 1)
                _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidParameter("allowed_token_ids", self.allowed_token_ids, "at least one id")
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0, 2**31 - 1)

    def _check_grammar(self) -> None:
        """Two of these together could leave no token at all."""
        if self.grammar is not None:
            for name, value in (("allowed_token_ids", self.allowed_token_ids), ("bad_word_ids", self.bad_word_ids)):
                if value:
                    raise InvalidParameter(
                        name, f"{len(value)} entries", f"none together with {self.grammar.parameter}"
                    )

    def _check_bad_words(self) -> None:
        for words in self.bad_word_ids:
            if not 1 <= len(words) <= MAX_BAD_WORD_TOKENS:
                raise InvalidParameter(
                    "bad_word_ids", f"{len(words)} tokens", f"1 to {MAX_BAD_WORD_TOKENS} tokens each"
                )
            for token in words:
                _integer("bad_word_ids", token, 0, 2**31 - 1)
        singles = {words[0] for words in self.bad_word_ids if len(words) == 1}
        num_longer = sum(len(words) > 1 for words in self.bad_word_ids)
        if num_longer > MAX_BAD_WORDS or len(singles) > MAX_LOGIT_BIAS:
            raise InvalidParameter(
                "bad_word_ids",
                f"{len(self.bad_word_ids)} sequences",
                f"at most {MAX_BAD_WORDS} of several tokens and {MAX_LOGIT_BIAS} of one",
            )
        if self.allowed_token_ids is not None and singles.issuperset(self.allowed_token_ids):
            raise InvalidParameter("bad_word_ids", "every allowed token", "sequences that leave a token to sample")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidParameter when a token id lies outside [0, vocab_size)."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids),
            ("bad_word_ids", [token for words in self.bad_word_ids for token in words]),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidParameter(name, token, f"token ids 0 to {vocab_size - 1}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature, top-k, top-p and min-p shapes the distribution."""
        return (
            self.has_penalties
            or bool(self.logit_bias)
            or bool(self.bad_word_ids)
            or self.allowed_token_ids is not None
            or self.min_tokens > 0
            or self.grammar is not None
        )


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(name, value, f"an integer from {low} to {high}")


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low <= value <= high or (open_low and value == low):
        raise InvalidParameter(name, value, f"a finite number {'above' if open_low else 'from'} {low} to {high}")
