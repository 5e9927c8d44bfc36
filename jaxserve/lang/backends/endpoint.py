"""Programs on a jaxserve server (or another that speaks SGLang's /generate), by tokens. No jax.

The server cuts text into tokens; what the model wrote goes back as the tokens it was. So values are those of the same
program on an LLM in this process, and the server's prefix cache finds everything that was said before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
)
from jaxserve.lang.backends.http import HttpClient
from jaxserve.lang.chat import ChatFormat
from jaxserve.lang.choices import ChoicesSamplingMethod, Scored, decide
from jaxserve.lang.context import Context, Part, TextRun, common_prefix
from jaxserve.lang.options import DEFAULT_MAX_TOKENS, GenOptions

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "ignore_eos", "n",
)  # fmt: skip


class RuntimeEndpoint(Backend):
    """base_url: of the server, without /v1. Raises what httpx raises if nobody answers there.

    Text that spells a control token becomes that token on the server wherever text from the chat template stands in
    the same run of text.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._http = HttpClient(base_url, api_key)
        self.model_info = self._http.get_now("/get_model_info")
        self._chat = ChatFormat(self._render)
        self._begin: list[int] | None = None

    def get_model_name(self) -> str:
        return self.model_info["model_path"]

    # Text and tokens

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """A conversation's text, by way of its tokens."""
        body: dict[str, Any] = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        tokens = self._http.post_now("/tokenize", body)["tokens"]
        text = self._http.post_now("/detokenize", {"tokens": tokens, "skip_special_tokens": False})
        return text["prompt"] if "prompt" in text else text["text"]

    def open_role(self, roles: tuple[str, ...]) -> str:
        return self._chat.open(roles)

    def close_role(self, roles: tuple[str, ...]) -> str:
        return self._chat.close(roles)

    async def _tokens(self, context: Context) -> list[int]:
        ids: list[int] = []
        for index, run in enumerate(context.runs):
            if isinstance(run, TextRun) and not run.is_encoded:
                run.remember(await self._encode(run.parts, index == 0))
            ids += run.token_ids(_encoded_before, index == 0)
        return ids

    async def _encode(self, parts: Sequence[Part], is_first: bool) -> list[int]:
        body = {
            "prompt": "".join([text for text, _ in parts]),
            "allow_special_tokens": any([is_template for _, is_template in parts]),
            # A begin token that the chat template printed is not doubled.
            "add_special_tokens": is_first,
        }
        return (await self._http.post("/tokenize", body))["tokens"]

    # What programs ask for

    def generate(
        self,
        stream: Stream,
        context: Context,
        turn: Turn,
        options: GenOptions,
        on_piece: OnPiece | None,
        done: OnGeneration,
    ) -> None:
        self._http.start(self._generate(context, options, on_piece), done)

    async def _generate(self, context: Context, options: GenOptions, on_piece: OnPiece | None) -> Generation:
        body: dict[str, Any] = {"input_ids": await self._tokens(context), "sampling_params": _sampling(options)}
        if options.wants_logprobs:
            body |= {
                "return_logprob": True,
                "top_logprobs_num": options.top_logprobs_num or 0,
                "return_text_in_logprobs": bool(options.return_text_in_logprobs),
            }
            if options.logprob_start_len is not None:
                body["logprob_start_len"] = options.logprob_start_len
        if on_piece is None:
            answer = await self._http.post("/generate", body)
        elif (options.n or 1) != 1:
            raise ValueError(f"n: got {options.n}; allowed with stream: 1")
        else:
            answer, position = {}, 0
            async for answer in self._http.stream("/generate", {**body, "stream": True}):
                piece = answer["text"][position:]
                position += len(piece)
                if piece:
                    on_piece(piece)
        answers = answer if isinstance(answer, list) else [answer]
        first = answers[0]
        ids = first["output_ids"]
        finish = first["meta_info"]["finish_reason"]
        if finish["type"] == "length":
            after = context.add_tokens(first["text"], ids)
        elif isinstance(finish.get("matched"), int):
            after = context.add_tokens(first["text"], ids[:-1])  # without the token that ended it
        else:
            after = context.add_text(first["text"])
        return Generation([each["text"] for each in answers], after, [each["meta_info"] for each in answers])

    def select(
        self,
        stream: Stream,
        context: Context,
        choices: tuple[str, ...],
        method: ChoicesSamplingMethod,
        done: OnSelection,
    ) -> None:
        self._http.start(self._select(context, choices, method), done)

    async def _select(self, context: Context, choices: tuple[str, ...], method: ChoicesSamplingMethod) -> Selection:
        prompt = await self._tokens(context)
        extended = [context.add_text(choice) for choice in choices]
        tokens = [await self._tokens(each) for each in extended]
        start = min([common_prefix(prompt, each) for each in tokens])
        if start < 1:
            raise ValueError("select: got nothing before the choices; allowed: some text that they follow")
        scores = await self._scores(tokens, start)
        alone = None
        if method.requires_unconditional_logprobs:
            if self._begin is None:
                self._begin = (await self._http.post("/tokenize", {"prompt": "", "add_special_tokens": True}))["tokens"]
            texts = [each[start:] for each in tokens]
            alone = await self._scores([self._begin + each for each in texts], len(self._begin))
        decision = decide(method, choices, scores, alone)
        return Selection(decision, extended[choices.index(decision.decision)])

    async def _scores(self, prompts: list[list[int]], start: int) -> list[list[Scored]]:
        """Scores of the tokens from `start` on. Nothing is generated, and what they share is computed once."""
        body = {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0, "sampling_seed": 0},
            "return_logprob": True,
            "logprob_start_len": max(start - 1, 0),  # whose own entry has no score
            "return_text_in_logprobs": True,
        }
        answers = await self._http.post("/generate", body)
        found = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
        return [[tuple(entry) for entry in entries[1 if start else 0 :]] for entries in found]

    def flush_cache(self) -> bool:
        self._http.post_now("/flush_cache", {})
        return True


def _sampling(options: GenOptions) -> dict[str, Any]:
    """Options in SGLang's spelling."""
    options.sampling_params()  # ranges are checked here, before anything is sent
    params: dict[str, Any] = {
        "max_new_tokens": DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens,
    }
    for name in _SAMPLING:
        value = getattr(options, name)
        if value is not None:
            params[name] = value
    if options.min_tokens is not None:
        params["min_new_tokens"] = options.min_tokens
    if options.seed is not None:
        params["sampling_seed"] = options.seed
    if options.stops:
        params["stop"] = list(options.stops)
    if options.stop_token_ids:
        params["stop_token_ids"] = list(options.stop_token_ids)
    if options.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in options.logit_bias.items()}
    if options.constraint is not None:
        kind, text = options.constraint
        params[kind] = text if isinstance(text, str) else json.dumps(text)
    return params


def _encoded_before(parts: Sequence[Part], is_first: bool) -> list[int]:
    raise AssertionError("runs of text are encoded before they are read")
