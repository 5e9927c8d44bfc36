"""POST /v1/chat/completions: request to job, outputs to answers and chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec
from jaxserve.server import schemas
from jaxserve.server.answer_parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    PartParser,
    Reasoning,
    WholeAnswer,
    read_answer,
)
from jaxserve.server.answer_plan import plan_answer, plan_tools, template_arguments
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Job, Server, answer, make_job
from jaxserve.server.options import chat_logprobs, chat_max_tokens, sampling_options
from jaxserve.server.prompts import Prompt
from jaxserve.server.protocol import ChatCompletionRequest
from jaxserve.server.sse import DONE, chunk_head, event, usage_chunk
from jaxserve.server.tokens import chat_scores, prompt_scores
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.messages import FINISH_STOP, RequestOutput, TokenLogprob

_encode = msgspec.json.encode


async def chat(server: Server, http: Request, request: ChatCompletionRequest) -> Response:
    """Answer one request. Raises ApiError."""
    job = await chat_job(server, http, request)
    return await answer(
        server,
        http,
        request,
        job,
        make_writer=lambda job, prompt_of: ChatChunks(request, job),
        make_answer=lambda job, prompt_of, outputs: chat_completion(request, job, outputs),
    )


async def chat_job(
    server: Server, http: Request, request: ChatCompletionRequest, *, id_prefix: str = "chatcmpl-"
) -> Job:
    """Check a request and make it ready for the engine. Other dialects translate their requests into this one; their
    answers are made from chat_completion() and ChatChunks. Raises ApiError."""
    loaded = server.model(request.model)
    options = sampling_options(
        request, max_n=server.settings.max_n, vocab_size=loaded.info.vocab_size, defaults=loaded.info.defaults
    )
    chat_logprobs(request, options)
    use = await plan_tools(server, request)
    max_tokens, limit_name = chat_max_tokens(request)
    token_ids = await loaded.encode_chat(
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=template_arguments(request, loaded),
        tools=None if use is None else [msgspec.to_builtins(tool) for tool in request.tools or ()],
    )
    plan = await plan_answer(server, loaded, request, use, token_ids)
    options["grammar"] = plan.grammar
    if plan.keeps_control:
        options["skip_special_tokens"] = False
    job = make_job(
        server,
        http,
        request,
        [Prompt(token_ids)],
        options,
        max_tokens=max_tokens,
        default_max_tokens=None,
        limit_name=limit_name,
        prompt_name="messages",
        id_prefix=id_prefix,
        names={"logprobs": "top_logprobs", "max_tokens": limit_name},
    )
    return dataclasses.replace(job, make_parser=plan.make_parser, shows_reasoning=plan.shows_reasoning)


def chat_completion(request: ChatCompletionRequest, job: Job, outputs: list[RequestOutput]) -> schemas.ChatCompletion:
    """The whole answer."""
    usage = schemas.UsageCount(job.num_prompt_tokens)
    by_index: dict[int, list[RequestOutput]] = {}
    of_prompt: list[TokenLogprob | None] | None = None
    for output in outputs:
        usage.take(output)
        by_index.setdefault(output.index, []).append(output)
        of_prompt = output.prompt_logprobs or of_prompt
    whole = schemas.ChatCompletion(
        id=job.response_id,
        created=job.created,
        model=job.model_name,
        choices=[_choice(request, job, index, by_index[index]) for index in sorted(by_index)],
        usage=usage.usage(),
    )
    if request.return_token_ids:
        whole.prompt_token_ids = job.prompts[0].token_ids
    if request.prompt_logprobs is not None and of_prompt is not None:
        whole.prompt_logprobs = prompt_scores(job.loaded.tokens, of_prompt, num_top=request.prompt_logprobs)
    return whole


def _choice(request: ChatCompletionRequest, job: Job, index: int, outputs: list[RequestOutput]) -> schemas.ChatChoice:
    last = outputs[-1]
    text = "".join([output.text for output in outputs])
    message, reason = schemas.AssistantMessage(content=text), last.finish_reason
    if job.make_parser is not None:
        message, has_calls = _message(read_answer(job.make_parser(), text), job)
        reason = _reason(reason, has_calls)
    choice = schemas.ChatChoice(
        index=index,
        message=message,
        logprobs=None,
        finish_reason=reason,  # type: ignore[arg-type]  # errors were raised before
        stop_reason=last.stop_reason,
        matched_stop=schemas.matched_stop(last),
    )
    if request.logprobs:
        scores = [score for output in outputs for score in output.logprobs or ()]
        choice.logprobs = _scores(request, job, scores)
    if request.return_token_ids:
        choice.token_ids = [token for output in outputs for token in output.token_ids]
    return choice


def _message(whole: WholeAnswer, job: Job) -> tuple[schemas.AssistantMessage, bool]:
    """The message, and whether it calls tools."""
    message = schemas.AssistantMessage(content=whole.content)
    if whole.reasoning is not None and job.shows_reasoning:
        message.reasoning = message.reasoning_content = whole.reasoning
    if whole.calls:
        message.tool_calls = [
            schemas.ToolCall(id=call.call_id, function=schemas.FunctionCall(name=call.name, arguments=call.arguments))
            for call in whole.calls
        ]
    elif whole.content is None:
        message.content = ""
    return message, bool(whole.calls)


def _reason(reason: str | None, has_calls: bool) -> str | None:
    """One rule for every tool_choice, plain or streamed: an answer that ended by itself and calls tools says so."""
    return "tool_calls" if has_calls and reason == FINISH_STOP else reason


def _scores(request: ChatCompletionRequest, job: Job, scores: list[TokenLogprob]) -> schemas.ChatLogprobs:
    return chat_scores(
        job.loaded.tokens,
        scores,
        num_top=request.top_logprobs or 0,
        as_ids=bool(request.return_tokens_as_token_ids),
    )


class ChatChunks:
    """Chunks of one stream. Each choice gets the role, then text, then one chunk with the finish reason alone."""

    def __init__(self, request: ChatCompletionRequest, job: Job) -> None:
        self._request = request
        self._job = job
        self._head = chunk_head(job.response_id, "chat.completion.chunk", job.created, job.model_name)
        self._usage = schemas.UsageCount(job.num_prompt_tokens)
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._usage_everywhere = bool(options and options.continuous_usage_stats)
        self._is_plain = not request.logprobs and not request.return_token_ids
        self._started: set[int] = set()
        self._parsers: dict[int, PartParser] = {}
        self._calling: set[int] = set()  # choices with a call

    def write(self, outputs: list[RequestOutput]) -> bytes:
        return b"".join([self._events(output) for output in outputs])

    def end(self) -> bytes:
        if not self._with_usage:
            return DONE
        return usage_chunk(self._head, self._usage.usage()) + DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.encode())

    def _events(self, output: RequestOutput) -> bytes:
        self._usage.take(output)
        index = output.index
        tail = b"}"
        if self._usage_everywhere:
            tail = b',"usage":' + _encode(self._usage.usage()) + tail
        parts = []
        if index not in self._started:
            parts.append(self._first(index, tail))
            self._started.add(index)
        if self._job.make_parser is not None:
            parts += [self._chunk(index, delta, tail) for delta in self._part_deltas(output)]
        elif self._is_plain:
            if output.text:
                delta = b'{"content":' + _encode(output.text) + b'},"logprobs":null,"finish_reason":null'
                parts.append(self._chunk(index, delta, tail))
        elif output.text or output.token_ids:
            parts.append(self._chunk(index, self._details(output), tail))
        if output.finish_reason is not None:
            reason = _reason(output.finish_reason, index in self._calling) or ""
            delta = b'{},"logprobs":null,"finish_reason":"%b","stop_reason":%b,"matched_stop":%b' % (
                reason.encode(),
                _encode(output.stop_reason),
                _encode(schemas.matched_stop(output)),
            )
            parts.append(self._chunk(index, delta, tail))
        return b"".join(parts)

    def _chunk(self, index: int, delta: bytes, tail: bytes) -> bytes:
        return b'%b%d,"delta":%b}]%b\n\n' % (self._head, index, delta, tail)

    def _first(self, index: int, tail: bytes) -> bytes:
        if self._request.return_token_ids and not self._started:
            tail = b',"prompt_token_ids":' + _encode(self._job.prompts[0].token_ids) + tail
        delta = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._chunk(index, delta, tail)

    def _part_deltas(self, output: RequestOutput) -> Iterator[bytes]:
        """Deltas of one output's parts; token ids and scores come with the first of them."""
        index = output.index
        parser = self._parsers.get(index)
        if parser is None:
            assert self._job.make_parser is not None
            parser = self._parsers[index] = self._job.make_parser()
        parts = parser.feed(output.text)
        if output.finish_reason is not None:
            parts += parser.finish()
        deltas = [delta for part in parts if (delta := self._part_delta(index, part)) is not None]
        if not self._is_plain and output.token_ids and not deltas:
            deltas = [b"{}"]
        for place, delta in enumerate(deltas):
            if place or self._is_plain:
                yield delta + b',"logprobs":null,"finish_reason":null'
            else:
                yield delta + self._extras(output)

    def _part_delta(self, index: int, part: Part) -> bytes | None:
        match part:
            case Content(text):
                return b'{"content":%b}' % _encode(text)
            case Reasoning(text):
                if not self._job.shows_reasoning:
                    return None
                encoded = _encode(text)
                return b'{"reasoning":%b,"reasoning_content":%b}' % (encoded, encoded)
            case CallStart(number, call_id, name):
                self._calling.add(index)
                function = schemas.FunctionDelta(name=name, arguments="")
                call = schemas.ToolCallDelta(index=number, id=call_id, type="function", function=function)
                return _encode(schemas.Delta(tool_calls=[call]))
            case CallArguments(number, text):
                return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (number, _encode(text))

    def _details(self, output: RequestOutput) -> bytes:
        return b'{"content":%b}%b' % (_encode(output.text), self._extras(output))

    def _extras(self, output: RequestOutput) -> bytes:
        """What stands behind a delta: scores, finish_reason, token ids."""
        scores = b"null"
        if self._request.logprobs:
            scores = _encode(_scores(self._request, self._job, output.logprobs or []))
        extra = b""
        if self._request.return_token_ids:
            extra = b',"token_ids":' + _encode(output.token_ids)
        return b',"logprobs":%b,"finish_reason":null%b' % (scores, extra)
