"""POST /v1/completions: request to job, outputs to answers and chunks."""

from __future__ import annotations

from typing import Any

import msgspec
from jaxserve.server import schemas
from jaxserve.server.errors import ApiError, invalid_value
from jaxserve.server.generation import Job, Server, answer, checked_grammar, make_job, without_output
from jaxserve.server.options import DEFAULT_COMPLETION_TOKENS, completion_logprobs, sampling_options
from jaxserve.server.prompts import TextOptions
from jaxserve.server.protocol import CompletionRequest
from jaxserve.server.sse import DONE, chunk_head, event, usage_chunk
from jaxserve.server.tokens import CompletionScores, prompt_scores
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.messages import RequestOutput, TokenLogprob

_encode = msgspec.json.encode


async def complete(server: Server, http: Request, request: CompletionRequest) -> Response:
    """Answer one request. Raises ApiError."""
    loaded = server.model(request.model)
    options = sampling_options(
        request, max_n=server.settings.max_n, vocab_size=loaded.info.vocab_size, defaults=loaded.info.defaults
    )
    completion_logprobs(request, options)
    options["grammar"] = await checked_grammar(server, loaded, request)
    if request.max_tokens == 0 and not request.echo:
        raise invalid_value("max_tokens", 0, "1 or more, or 0 together with echo")
    text_options = TextOptions(
        add_special_tokens=request.add_special_tokens is not False,
        allow_special_tokens=request.allow_special_tokens is not False,
    )
    prompts = await loaded.encode_prompts(request.prompt, text_options, max_prompts=server.settings.max_sequences)
    job = make_job(
        server,
        http,
        request,
        prompts,
        options,
        max_tokens=request.max_tokens if request.max_tokens != 0 else 1,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        limit_name="max_tokens",
        prompt_name="prompt",
        id_prefix="cmpl-",
    )
    return await answer(
        server,
        http,
        request,
        job,
        make_writer=lambda job, prompt_of: CompletionChunks(request, job, prompt_of),
        make_answer=lambda job, prompt_of, outputs: _whole(request, job, prompt_of, outputs),
    )


def _echoed(request: CompletionRequest, job: Job, prompt: int) -> str:
    """The prompt as the answer repeats it: the client's own text where there is one."""
    if not request.echo:
        return ""
    text = job.prompts[prompt].text
    if text is not None:
        return text
    return job.loaded.tokens.decode(job.prompts[prompt].token_ids, skip_special_tokens=False)


def _scores(request: CompletionRequest, job: Job, echoed: str) -> CompletionScores | None:
    if request.logprobs is None:
        return None
    return CompletionScores(
        job.loaded.tokens,
        num_top=request.logprobs,
        as_ids=bool(request.return_tokens_as_token_ids),
        skip_special_tokens=request.skip_special_tokens is not False,
        echoed=echoed,
    )


def _block(
    request: CompletionRequest,
    scores: CompletionScores,
    prompt_ids: list[int],
    prompt_logprobs: list[TokenLogprob | None] | None,
    logprobs: list[TokenLogprob] | None,
) -> dict[str, Any]:
    """Scores of one chunk, or of the whole choice; those of an echoed prompt come first."""
    block: dict[str, list[Any]] = {}
    if request.echo and prompt_logprobs is not None:
        block = scores.prompt_block(prompt_ids, prompt_logprobs)
    rest = scores.block(logprobs or [])
    return {name: [*block.get(name, ()), *values] for name, values in rest.items()}


def _whole(
    request: CompletionRequest, job: Job, prompt_of: dict[str, int], outputs: list[RequestOutput]
) -> schemas.Completion:
    if request.max_tokens == 0:
        outputs = without_output(outputs)
    usage = schemas.UsageCount(job.num_prompt_tokens)
    by_choice: dict[int, list[RequestOutput]] = {}
    prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}
    for output in outputs:
        usage.take(output)
        prompt = prompt_of[output.request_id]
        by_choice.setdefault(prompt * job.n + output.index, []).append(output)
        if output.prompt_logprobs is not None:
            prompt_logprobs[prompt] = output.prompt_logprobs
    choices = [
        _choice(request, job, index, by_choice[index], prompt_logprobs.get(index // job.n))
        for index in sorted(by_choice)
    ]
    return schemas.Completion(
        id=job.response_id, created=job.created, model=job.model_name, choices=choices, usage=usage.usage()
    )


def _choice(
    request: CompletionRequest,
    job: Job,
    index: int,
    outputs: list[RequestOutput],
    prompt_logprobs: list[TokenLogprob | None] | None,
) -> schemas.CompletionChoice:
    prompt = job.prompts[index // job.n]
    echoed = _echoed(request, job, index // job.n)
    scores = _scores(request, job, echoed)
    logprobs = None
    if scores is not None:
        values = [score for output in outputs for score in output.logprobs or ()]
        logprobs = schemas.CompletionLogprobs(**_block(request, scores, prompt.token_ids, prompt_logprobs, values))
    choice = schemas.CompletionChoice(
        index=index,
        text=echoed + "".join([output.text for output in outputs]),
        logprobs=logprobs,
        finish_reason=outputs[-1].finish_reason,  # type: ignore[arg-type]  # errors were raised before
        stop_reason=outputs[-1].stop_reason,
        matched_stop=schemas.matched_stop(outputs[-1]),
    )
    if request.return_token_ids:
        choice.token_ids = [token for output in outputs for token in output.token_ids]
        choice.prompt_token_ids = prompt.token_ids
    if request.prompt_logprobs is not None and prompt_logprobs is not None:
        choice.prompt_logprobs = prompt_scores(job.loaded.tokens, prompt_logprobs, num_top=request.prompt_logprobs)
    return choice


class CompletionChunks:
    """Chunks of one stream. A choice's first chunk brings the echoed prompt, its last one the finish reason."""

    def __init__(self, request: CompletionRequest, job: Job, prompt_of: dict[str, int]) -> None:
        self._request = request
        self._job = job
        self._prompt_of = prompt_of
        self._n = job.n
        self._head = chunk_head(job.response_id, "text_completion", job.created, job.model_name)
        self._usage = schemas.UsageCount(job.num_prompt_tokens)
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._usage_everywhere = bool(options and options.continuous_usage_stats)
        self._is_plain = request.logprobs is None and not request.return_token_ids
        self._started: set[int] = set()
        self._scores: dict[int, CompletionScores] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}

    def write(self, outputs: list[RequestOutput]) -> bytes:
        if self._request.max_tokens == 0:
            outputs = without_output(outputs)
        return b"".join([self._chunk(output) for output in outputs])

    def end(self) -> bytes:
        if not self._with_usage:
            return DONE
        return usage_chunk(self._head, self._usage.usage()) + DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.encode())

    def _chunk(self, output: RequestOutput) -> bytes:
        prompt = self._prompt_of[output.request_id]
        index = prompt * self._n + output.index
        is_first = index not in self._started
        text = output.text
        self._usage.take(output)
        if is_first:
            self._started.add(index)
            if self._request.echo:
                text = _echoed(self._request, self._job, prompt) + text
        if self._is_plain:
            if not text and output.finish_reason is None:
                return b""
            extra, logprobs = b"", b"null"
        else:
            extra, logprobs = self._details(output, prompt, index, is_first)
        if output.finish_reason is None:
            finish = b',"finish_reason":null,"stop_reason":null'
        else:
            finish = b',"finish_reason":"%b","stop_reason":%b,"matched_stop":%b' % (
                output.finish_reason.encode(),
                _encode(output.stop_reason),
                _encode(schemas.matched_stop(output)),
            )
        usage = b',"usage":' + _encode(self._usage.usage()) if self._usage_everywhere else b""
        return b"".join(
            (self._head, b'%d,"text":' % index, _encode(text), b',"logprobs":', logprobs, finish, extra, b"}]",
             usage, b"}\n\n")
        )  # fmt: skip

    def _details(self, output: RequestOutput, prompt: int, index: int, is_first: bool) -> tuple[bytes, bytes]:
        """(token ids as further fields, the scores) of one chunk."""
        request, prompt_ids = self._request, self._job.prompts[prompt].token_ids
        extra = b""
        if request.return_token_ids:
            extra = b',"token_ids":' + _encode(output.token_ids)
            if is_first:
                extra += b',"prompt_token_ids":' + _encode(prompt_ids)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = output.prompt_logprobs
        if request.logprobs is None:
            return extra, b"null"
        scores = self._scores.get(index)
        if scores is None:
            scores = _scores(request, self._job, _echoed(request, self._job, prompt))
            assert scores is not None
            self._scores[index] = scores
        of_prompt = self._prompt_logprobs.get(prompt) if is_first else None
        return extra, _encode(_block(request, scores, prompt_ids, of_prompt, output.logprobs))
