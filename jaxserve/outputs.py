"""What LLM returns: whole generations, and the pieces of a stream. No jax."""

from __future__ import annotations

import dataclasses
import html

from jaxserve.messages import FINISH_ERROR, RequestOutput, TokenLogprob


class RequestRefused(ValueError):
    """The engine cannot serve a request as it is. `parameter` names what is wrong with it."""

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class RequestFailed(RuntimeError):
    """The engine could not finish a request, through no fault of the caller."""


def raise_for_error(output: RequestOutput) -> None:
    """Raise RequestRefused or RequestFailed for an output with FINISH_ERROR."""
    if output.finish_reason == FINISH_ERROR:
        message = output.error or "the request failed"
        if output.parameter is not None:
            raise RequestRefused(message, output.parameter)
        raise RequestFailed(message)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What a stream yields; str() is its text.

    text may be empty, and one piece may carry several tokens. finish_reason is set in the last piece of each
    continuation (`index` of n). The counts are totals so far.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, output: RequestOutput) -> Piece:
        """Raises RequestRefused or RequestFailed for an error."""
        raise_for_error(output)
        return cls(
            output.text,
            output.token_ids,
            index=output.index,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            logprobs=output.logprobs,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_output_tokens=output.num_output_tokens,
        )


@dataclasses.dataclass(slots=True)
class Completion:
    """One continuation. logprobs: one per token of token_ids, None unless asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclasses.dataclass(slots=True, repr=False)
class GenerationOutput:
    """The continuations of one prompt. text, token_ids, finish_reason, stop_reason and logprobs are those of the
    first; `outputs` holds all n.

    prompt             the text, None for a prompt of token ids
    prompt_logprobs    one per prompt token, None for the first token; None unless asked for
    num_cached_tokens  prompt tokens whose keys and values were found in the prefix cache
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    def __repr__(self) -> str:
        texts = ", ".join(repr(_shorten(output.text)) for output in self.outputs[:4])
        more = f", … {len(self.outputs)} in all" if len(self.outputs) > 4 else ""
        return (
            f"GenerationOutput({texts}{more}; finish_reason={self.finish_reason!r}, "
            f"{self.num_prompt_tokens} prompt tokens ({self.num_cached_tokens} cached), "
            f"{self.num_output_tokens} output tokens)"
        )

    def _repr_html_(self) -> str:
        prompt = f"{self.num_prompt_tokens} token ids"
        if self.prompt is not None:
            prompt = html.escape(_shorten(self.prompt, 300))
        rows = "".join(
            f"<tr><td>{output.index}</td>"
            f"<td style='text-align:left;white-space:pre-wrap'>{html.escape(output.text)}</td>"
            f"<td>{len(output.token_ids)}</td><td>{output.finish_reason}</td></tr>"
            for output in self.outputs
        )
        head = "<tr><th>#</th><th style='text-align:left'>text</th><th>tokens</th><th>finish</th></tr>"
        return (
            f"<div><div style='color:gray;white-space:pre-wrap'>{prompt}</div>"
            f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
            f"<small>{self.num_prompt_tokens} prompt tokens, {self.num_cached_tokens} cached</small></div>"
        )


def _shorten(text: str, width: int = 120) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


class Gatherer:
    """Joins the outputs of one request into a GenerationOutput."""

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], n: int) -> None:
        self._result = GenerationOutput(prompt, prompt_token_ids, [Completion(index) for index in range(n)])
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._num_unfinished = n

    def take(self, output: RequestOutput) -> bool:
        """Add what is new; True once every continuation has ended. Raises RequestRefused or RequestFailed."""
        raise_for_error(output)
        completion = self._result.outputs[output.index]
        self._texts[output.index].append(output.text)
        completion.token_ids += output.token_ids
        if output.logprobs is not None:
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self._result.prompt_logprobs = output.prompt_logprobs
        if output.index == 0:
            self._result.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            completion.finish_reason = output.finish_reason
            completion.stop_reason = output.stop_reason
            completion.text = "".join(self._texts[output.index])
            self._num_unfinished -= 1
        return not self._num_unfinished

    @property
    def result(self) -> GenerationOutput:
        return self._result
