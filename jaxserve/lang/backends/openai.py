"""Programs on any server that speaks OpenAI's protocol. What the protocol has no word for is refused by name. No jax.

A chat model gets messages, so gen() has to be the first thing of an assistant message. Other models get the whole text
and score choices by echoing it with log-probabilities.
"""

from __future__ import annotations

import json
import os
from typing import Any

from jaxserve.lang.backends.base import (
    Backend,
    Generation,
    OnGeneration,
    OnPiece,
    OnSelection,
    Selection,
    Stream,
    Turn,
    finish_meta,
)
from jaxserve.lang.backends.http import HttpClient
from jaxserve.lang.choices import ChoicesSamplingMethod, Scored, decide
from jaxserve.lang.context import Context
from jaxserve.lang.options import DEFAULT_MAX_TOKENS, GenOptions

_DEFAULT_URL = "https://api.openai.com/v1"
_COMPLETION_MODELS = frozenset({"gpt-3.5-turbo-instruct", "davinci-002", "babbage-002"})
# Options that the protocol knows, and values of others that change nothing.
_KNOWN = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "n")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0,), "top_k": (-1, 0), "min_p": (0.0,), "repetition_penalty": (1.0,), "ignore_eos": (False,),
    "stop_token_ids": ((), []), "logprob_start_len": (-1,),
}  # fmt: skip
MAX_STOPS = 4  # of OpenAI's own servers; more are left to the server to judge


class OpenAI(Backend):
    """A model behind an OpenAI-compatible server.

    model_name     as the server calls it
    base_url       with /v1; None: OPENAI_BASE_URL, or OpenAI's own
    api_key        None: OPENAI_API_KEY
    is_chat_model  whether to use /chat/completions; None: all but the known completion models
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self.model_name = model_name
        self.is_chat_model = model_name not in _COMPLETION_MODELS if is_chat_model is None else is_chat_model
        url = base_url or os.environ.get("OPENAI_BASE_URL") or _DEFAULT_URL
        self._http = HttpClient(url, api_key or os.environ.get("OPENAI_API_KEY"))

    def open_role(self, roles: tuple[str, ...]) -> str:
        if not self.is_chat_model:
            raise ValueError(
                f"role: got {roles[-1]!r}; allowed on a completion model: text without roles (a chat template belongs "
                f"to the server's chat route: is_chat_model=True)"
            )
        return f"{roles[-1].upper()}: "  # for text(); the server gets messages

    def close_role(self, roles: tuple[str, ...]) -> str:
        return "\n"

    def generate(
        self,
        stream: Stream,
        context: Context,
        turn: Turn,
        options: GenOptions,
        on_piece: OnPiece | None,
        done: OnGeneration,
    ) -> None:
        body = self._body(options)
        if self.is_chat_model:
            if turn.role != "assistant" or turn.text:
                raise ValueError(
                    "gen: OpenAI's chat models write whole messages; allowed: gen() as the first thing of an assistant "
                    "message, s += assistant(gen(...))"
                )
            body["messages"] = list(turn.messages)
            path = "/chat/completions"
        else:
            body["prompt"] = context.text
            path = "/completions"
        work = self._streamed(path, body, context, on_piece) if on_piece else self._whole(path, body, context, options)
        self._http.start(work, done)

    async def _whole(self, path: str, body: dict[str, Any], context: Context, options: GenOptions) -> Generation:
        answer = await self._http.post(path, body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        texts = [_text(choice) for choice in choices]
        usage = answer.get("usage") or {}
        metas = []
        for choice in choices:
            meta = {
                "prompt_tokens": usage.get("prompt_tokens"),
                "completion_tokens": usage.get("completion_tokens"),
                "finish_reason": finish_meta(
                    choice.get("finish_reason"), choice.get("stop_reason"), usage.get("completion_tokens") or 0
                ),
            }
            if options.wants_logprobs and choice.get("logprobs"):
                meta |= _logprobs(choice["logprobs"])
            metas.append(meta)
        return Generation(texts, context.add_text(texts[0]), metas)

    async def _streamed(self, path: str, body: dict[str, Any], context: Context, on_piece: OnPiece) -> Generation:
        if body.get("n", 1) != 1:
            raise ValueError(f"n: got {body['n']}; allowed with stream: 1")
        text, reason = "", None
        async for event in self._http.stream(path, {**body, "stream": True}):
            for choice in event.get("choices") or ():
                piece = _text(choice)
                if piece:
                    text += piece
                    on_piece(piece)
                reason = choice.get("finish_reason") or reason
        return Generation([text], context.add_text(text), [{"finish_reason": finish_meta(reason, None, 0)}])

    def _body(self, options: GenOptions) -> dict[str, Any]:
        """Raises ValueError for an option that the protocol has no word for."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(options, name)
            if value is not None and value not in neutral:
                raise ValueError(
                    f"{name}: got {value!r}; OpenAI's protocol has no such option; allowed: max_tokens, stop, "
                    f"{', '.join(_KNOWN)}, logit_bias, return_logprob, json_schema"
                )
        body: dict[str, Any] = {"model": self.model_name}
        limit = "max_completion_tokens" if self.is_chat_model and self._is_openai else "max_tokens"
        body[limit] = DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens
        for name in _KNOWN:
            value = getattr(options, name)
            if value is not None:
                body[name] = value
        if options.stops:
            body["stop"] = list(options.stops)
        if options.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in options.logit_bias.items()}
        if options.wants_logprobs:
            if self.is_chat_model:
                body |= {"logprobs": True, "top_logprobs": options.top_logprobs_num or 0}
            else:
                body["logprobs"] = options.top_logprobs_num or 0
        if options.constraint is not None:
            body["response_format"] = self._response_format(options)
        return body

    @property
    def _is_openai(self) -> bool:
        return self._http.base_url == _DEFAULT_URL

    def _response_format(self, options: GenOptions) -> dict[str, Any]:
        assert options.constraint is not None
        kind, schema = options.constraint
        if kind == "regex":
            name = "regex" if options.dtype is None else "dtype"
            raise ValueError(f"{name}: OpenAI's protocol has no regular expressions; allowed: json_schema, choices")
        schema = json.loads(schema) if isinstance(schema, str) else schema
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}

    # Choices

    def select(
        self,
        stream: Stream,
        context: Context,
        choices: tuple[str, ...],
        method: ChoicesSamplingMethod,
        done: OnSelection,
    ) -> None:
        if self.is_chat_model:
            raise ValueError(
                "select: OpenAI's chat route scores no given text; allowed: a completion model, or gen() with a "
                "json_schema whose enum holds the choices"
            )
        self._http.start(self._select(context, choices, method), done)

    async def _select(self, context: Context, choices: tuple[str, ...], method: ChoicesSamplingMethod) -> Selection:
        prompt = context.text
        if not prompt:
            raise ValueError("select: got nothing before the choices; allowed: some text that they follow")
        echoed = await self._echo([prompt + choice for choice in choices])
        # Where a choice changes how the text before it is cut into tokens, all are scored from there.
        start = min([_boundary(tokens, len(prompt)) for tokens in echoed])
        scores = [_behind(tokens, start, len(prompt + choice)) for tokens, choice in zip(echoed, choices, strict=True)]
        alone = None
        if method.requires_unconditional_logprobs:
            texts = [(prompt + choice)[start:] for choice in choices]
            echoed = await self._echo(texts)
            alone = [_behind(tokens, 0, len(text)) for tokens, text in zip(echoed, texts, strict=True)]
        decision = decide(method, choices, scores, alone)
        return Selection(decision, context.add_text(decision.decision))

    async def _echo(self, texts: list[str]) -> list[list[tuple[int, str, float | None]]]:
        """(offset, token, log-probability) of each token of each text."""
        body = {"model": self.model_name, "prompt": texts, "max_tokens": 1, "temperature": 0, "seed": 0, "echo": True}
        answer = await self._http.post("/completions", {**body, "logprobs": 1})
        result = []
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            found = choice.get("logprobs")
            if not found or not found.get("token_logprobs"):
                raise ValueError("select: the server does not score an echoed prompt; allowed: one that does")
            result.append(list(zip(found["text_offset"], found["tokens"], found["token_logprobs"], strict=True)))
        return result


def _text(choice: dict[str, Any]) -> str:
    """Of a completion, a chat message or a piece of one."""
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("message") or choice.get("delta") or {}).get("content") or ""


def _logprobs(found: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of a choice as meta info; the protocol gives no token ids."""
    if "content" in found:
        tokens = [(item["logprob"], None, item["token"]) for item in found["content"]]
        top = [
            [(other["logprob"], None, other["token"]) for other in item.get("top_logprobs", ())]
            for item in found["content"]
        ]
    else:
        tokens = [(logprob, None, token) for logprob, token in zip(found["token_logprobs"], found["tokens"])]
        top = [
            [(logprob, None, token) for token, logprob in (best or {}).items()] for best in found["top_logprobs"] or ()
        ]
    return {"output_token_logprobs": tokens, "output_top_logprobs": top}


def _boundary(tokens: list[tuple[int, str, float | None]], length: int) -> int:
    """Offset of the first token that reaches beyond the first `length` characters."""
    starts = [offset for offset, _, _ in tokens if offset <= length]
    return starts[-1]


def _behind(tokens: list[tuple[int, str, float | None]], start: int, end: int) -> list[Scored]:
    return [(logprob, -1, token) for offset, token, logprob in tokens if start <= offset < end]
