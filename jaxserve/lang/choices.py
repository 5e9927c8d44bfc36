"""How select() decides between scored choices: three rules, over plain numbers.

Every rule gets for each choice its tokens as (log-probability, token id, text), in the order of the text. Ties go to
the choice that stands first. The signature is that of SGLang's choices methods, so that methods written for it work.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

Scored = tuple[float | None, int, str | None]  # log-probability (None: unknown), token id, text


@dataclasses.dataclass
class ChoicesDecision:
    decision: str
    meta_info: dict[str, Any] | None = None


class ChoicesSamplingMethod(abc.ABC):
    """A rule. requires_unconditional_logprobs: it also wants the choices scored without the text before them."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return False

    @abc.abstractmethod
    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Scored]],
        output_token_logprobs: list[list[Scored]],
        unconditional_token_logprobs: list[list[Scored]] | None = None,
    ) -> ChoicesDecision: ...


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The highest mean log-probability per token."""

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Scored]],
        output_token_logprobs: list[list[Scored]],
        unconditional_token_logprobs: list[list[Scored]] | None = None,
    ) -> ChoicesDecision:
        best = _first_of_best(normalized_prompt_logprobs)
        return ChoicesDecision(choices[best], _meta(normalized_prompt_logprobs, input_token_logprobs))


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Token by token, only the choices whose token is likeliest stay; the last one left wins.

    A choice that has ended while longer ones go on is continued with its own mean log-probability.
    """

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Scored]],
        output_token_logprobs: list[list[Scored]],
        unconditional_token_logprobs: list[list[Scored]] | None = None,
    ) -> ChoicesDecision:
        rows = [[_number(token[0]) for token in tokens] for tokens in input_token_logprobs]
        length = max(map(len, rows))
        matrix = [row + [mean(row)] * (length - len(row)) for row in rows]
        left = list(range(len(choices)))
        for column in range(length):
            best = max(matrix[choice][column] for choice in left)
            left = [choice for choice in left if matrix[choice][column] == best]
            if len(left) == 1:
                break
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs)
        return ChoicesDecision(choices[left[0]], meta | {"greedy_logprob_matrix": matrix})


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The highest mean of log-probability minus the log-probability without the text before the choice.

    A first token that has no unconditional score (the model has no begin token) keeps its own.
    """

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Scored]],
        output_token_logprobs: list[list[Scored]],
        unconditional_token_logprobs: list[list[Scored]] | None = None,
    ) -> ChoicesDecision:
        if unconditional_token_logprobs is None:
            raise ValueError("unconditional_token_logprobs: got None; allowed: one list for each choice")
        values = []
        for tokens, alone in zip(input_token_logprobs, unconditional_token_logprobs, strict=True):
            pairs = zip(tokens, alone, strict=True)
            values.append(mean([_number(token[0]) - _number(other[0]) for token, other in pairs]))
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs) | {
            "unconditional_token_logprobs": unconditional_token_logprobs,
            "normalized_unconditional_prompt_logprobs": values,
        }
        return ChoicesDecision(choices[_first_of_best(values)], meta)


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


def decide(
    method: ChoicesSamplingMethod,
    choices: Sequence[str],
    scores: list[list[Scored]],
    unconditional: list[list[Scored]] | None,
) -> ChoicesDecision:
    """Apply a rule to scored choices."""
    return method(
        choices=list(choices),
        normalized_prompt_logprobs=[mean([_number(token[0]) for token in tokens]) for tokens in scores],
        input_token_logprobs=scores,
        output_token_logprobs=[[] for _ in scores],
        unconditional_token_logprobs=unconditional,
    )


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _number(logprob: float | None) -> float:
    return 0.0 if logprob is None else logprob


def _first_of_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _meta(normalized: list[float], scores: list[list[Scored]]) -> dict[str, Any]:
    return {
        "normalized_prompt_logprobs": normalized,
        "input_token_logprobs": scores,
        "output_token_logprobs": [[] for _ in scores],
    }
