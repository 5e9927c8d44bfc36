"""POST /generate: SGLang's native dialect. Each prompt's options are translated into those of a completion."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from jaxserve.server.errors import ApiError, from_validation, invalid_value
from jaxserve.server.generate_types import Generated, GenerateRequest, NativeFinish, NativeMeta, NativeSampling, Score
from jaxserve.server.generation import Server, answer, checked_grammar, new_job, tenant_of, without_output
from jaxserve.server.options import make_params, sampling_options
from jaxserve.server.prompts import LoadedModel, Prompt, TextOptions
from jaxserve.server.protocol import HINTS, CompletionRequest
from jaxserve.server.sse import DONE, event
from jaxserve.server.tokens import TokenTable
from jaxserve.server.turns import renamed
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.messages import FINISH_LENGTH, RequestOutput, TokenLogprob
from jaxserve.sampling_params import SamplingParams

DEFAULT_NEW_TOKENS = 128

# Our parameter -> field of sampling_params. The others have the same name.
_FIELDS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
}
_SAME = (
    "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "n", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
)  # fmt: skip
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scores:
    """Which scores one prompt's answer holds. start: the first prompt token with an entry."""

    is_on: bool
    start: int
    num_top: int
    token_ids: tuple[int, ...]


async def generate(server: Server, http: Request, request: GenerateRequest) -> Response:
    """Answer one request. Raises ApiError."""
    loaded = server.model(request.model)
    given, field = _prompts(request)
    text_options = TextOptions(add_special_tokens=True, allow_special_tokens=True)
    prompts = await loaded.encode_prompts(given, text_options, max_prompts=server.settings.max_sequences, name=field)
    is_batch = isinstance(given, list) and not isinstance(given[0], int)
    names = _rids(request, len(prompts))
    options = await _options(request, len(prompts), server)
    scores = _scores(request, prompts)
    params = [
        _params(loaded, prompts[k], options[k], scores[k], field if not is_batch else f"{field}[{k}]")
        for k in range(len(prompts))
    ]
    if len({one.n for one in params}) > 1 or len(prompts) * params[0].n > server.settings.max_sequences:
        raise ApiError(
            400,
            f"sampling_params.n: got {sorted({one.n for one in params})} for {len(prompts)} prompts; allowed: one "
            f"value for all, and at most {server.settings.max_sequences} continuations together",
            param="sampling_params.n",
            code="invalid_value",
        )
    shared = msgspec.structs.replace(
        options[0].request, stream=request.stream, priority=request.priority, cache_salt=request.extra_key
    )
    job = new_job(server, http, shared, loaded, prompts, params, id_prefix="")
    tenant = tenant_of(http)
    job = dataclasses.replace(job, names=job.names | {(tenant, name) for name in names})
    ids = names or [job.response_id if not is_batch else f"{job.response_id}-{k}" for k in range(len(prompts))]
    makers = [
        _Maker(loaded.tokens, prompts[k], options[k], scores[k], bool(request.return_text_in_logprobs), ids[k])
        for k in range(len(prompts))
    ]
    has_index = is_batch or job.n > 1
    return await answer(
        server,
        http,
        shared,
        job,
        make_writer=lambda job, prompt_of: _Chunks(makers, prompt_of, job.n, has_index=has_index),
        make_answer=lambda job, prompt_of, outputs: _whole(makers, prompt_of, job.n, outputs, is_list=has_index),
    )


def _prompts(request: GenerateRequest) -> tuple[str | list[Any], str]:
    """(the prompts, the field they came from)."""
    if (request.text is None) == (request.input_ids is None):
        raise ApiError(400, "text: exactly one of text and input_ids must be given", param="text")
    given, field = (request.text, "text") if request.text is not None else (request.input_ids, "input_ids")
    assert given is not None
    if given == []:
        raise invalid_value(field, [], "at least one prompt")
    return given, field


def _each(value: Any, count: int, field: str) -> list[Any]:
    """One value for each prompt, from one for all or a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ApiError(400, f"{field}: got {len(value)} values for {count} prompts; allowed: one for each", param=field)
    return value


def _rids(request: GenerateRequest, count: int) -> list[str]:
    if request.rid is None:
        return []
    if isinstance(request.rid, str):
        return [request.rid] if count == 1 else [f"{request.rid}-{k}" for k in range(count)]
    return _each(request.rid, count, "rid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """One prompt's options: as a completion request, as arguments of SamplingParams, and where they stood."""

    request: CompletionRequest
    fields: dict[str, Any]
    place: str

    @property
    def is_silent(self) -> bool:
        """Nothing shall be generated: the engine makes one token all the same."""
        return self.request.max_tokens == 0

    def name_of(self, param: str) -> str:
        return f"{self.place}.{_FIELDS.get(param, param)}"


async def _options(request: GenerateRequest, count: int, server: Server) -> list[_Options]:
    many = isinstance(request.sampling_params, list)
    made: dict[int, _Options] = {}
    result = []
    for k, native in enumerate(_each(request.sampling_params, count, "sampling_params")):
        if id(native) not in made:
            place = f"sampling_params[{k}]" if many else "sampling_params"
            made[id(native)] = await _translate(native or NativeSampling(), place, server)
        result.append(made[id(native)])
    return result


async def _translate(native: NativeSampling, place: str, server: Server) -> _Options:
    """Raises ApiError 400."""
    fields: dict[str, Any] = {name: getattr(native, name) for name in _SAME}
    fields |= {ours: getattr(native, theirs) for ours, theirs in _FIELDS.items()}
    fields["stream_interval"] = native.stream_interval
    if fields["max_tokens"] is None:
        fields["max_tokens"] = DEFAULT_NEW_TOKENS
    grammars = {name: value for name in _GRAMMARS if (value := getattr(native, name)) is not None}
    if len(grammars) > 1:
        raise ApiError(400, f"{place}.{list(grammars)[1]}: got it together with {next(iter(grammars))}; allowed: one",
                       param=f"{place}.{list(grammars)[1]}")  # fmt: skip
    fields |= {name: value for name, value in grammars.items() if name != "structural_tag"}
    if native.structural_tag is not None:
        tag = native.structural_tag
        text = tag if isinstance(tag, str) else json.dumps(tag)
        fields["structured_outputs"] = {"structural_tag": text}
    given = {name: value for name, value in fields.items() if value is not None}

    def name_of(param: str) -> str:
        if param.startswith("structured_outputs"):
            return f"{place}.structural_tag"
        return f"{place}.{_FIELDS.get(param, param)}"

    try:
        made = msgspec.convert({"prompt": "", **given}, CompletionRequest, strict=True)
        loaded = server.model(None)
        options = sampling_options(
            made, max_n=server.settings.max_n, vocab_size=loaded.info.vocab_size, defaults=loaded.info.defaults
        )
        options["grammar"] = await checked_grammar(server, loaded, made)
    except msgspec.ValidationError as error:
        raise renamed(from_validation(error, given, HINTS, CompletionRequest), name_of) from None
    except ApiError as error:
        raise renamed(error, name_of) from None
    return _Options(request=made, fields=options, place=place)


def _scores(request: GenerateRequest, prompts: Sequence[Prompt]) -> list[_Scores]:
    count = len(prompts)
    on = _each(request.return_logprob, count, "return_logprob")
    starts = _each(request.logprob_start_len, count, "logprob_start_len")
    tops = _each(request.top_logprobs_num, count, "top_logprobs_num")
    ids = request.token_ids_logprob
    of_each = [ids] * count if ids is None or all(isinstance(one, int) for one in ids) else ids
    if len(of_each) != count:
        raise invalid_value("token_ids_logprob", ids, f"token ids, or one list for each of {count} prompts")
    result = []
    for k, prompt in enumerate(prompts):
        named = of_each[k] or []
        if not isinstance(named, list) or any(isinstance(token, bool) or token < 0 for token in named):
            raise invalid_value("token_ids_logprob", named, "token ids, or lists of them")
        start = starts[k] if starts[k] is not None and starts[k] >= 0 else len(prompt.token_ids) - 1
        result.append(_Scores(is_on=bool(on[k]), start=start, num_top=tops[k] or 0, token_ids=tuple(named)))
    return result


def _params(loaded: LoadedModel, prompt: Prompt, options: _Options, scores: _Scores, field: str) -> SamplingParams:
    limit = options.name_of("max_tokens")
    max_tokens = max(1, options.request.max_tokens or 0)
    loaded.room(prompt.token_ids, max_tokens, prompt=field, limit=limit)
    fields = {**options.fields, "max_tokens": max_tokens}
    if scores.is_on:
        fields |= {"logprobs": scores.num_top, "logprob_token_ids": scores.token_ids}
        if scores.start + 1 < len(prompt.token_ids):
            fields |= {"prompt_logprobs": scores.num_top, "prompt_logprobs_start": scores.start + 1}
    names = {name: options.name_of(name) for name in fields}
    names |= {"logprob_token_ids": "token_ids_logprob", "logprobs": "top_logprobs_num"}
    return make_params(fields, vocab_size=loaded.info.vocab_size, names=names)


class _Maker:
    """Makes the answers of one prompt's continuations."""

    def __init__(
        self, table: TokenTable, prompt: Prompt, options: _Options, scores: _Scores, with_text: bool, name: str
    ) -> None:
        self._table = table
        self._prompt = prompt
        self.is_silent = options.is_silent
        self._scores = scores
        self._with_text = with_text
        self._id = name
        self._started = time.monotonic()
        self._of_prompt: list[TokenLogprob | None] | None = None

    def answer(self, outputs: Sequence[RequestOutput]) -> Generated:
        """What a continuation has become with these outputs, all that it has had."""
        last = outputs[-1]
        ids = [token for output in outputs for token in output.token_ids]
        meta = NativeMeta(
            id=self._id,
            finish_reason=None if last.finish_reason is None else _finish(last, ids),
            prompt_tokens=len(self._prompt.token_ids),
            completion_tokens=last.num_output_tokens,
            cached_tokens=last.num_cached_tokens,
        )
        if last.finish_reason is not None:
            meta.e2e_latency = time.monotonic() - self._started
        if self._scores.is_on:
            self._add_scores(meta, outputs)
        return Generated(text="".join([output.text for output in outputs]), output_ids=ids, meta_info=meta)

    def see(self, output: RequestOutput) -> None:
        """The prompt's scores come once, with one of the continuations."""
        if output.prompt_logprobs is not None:
            self._of_prompt = output.prompt_logprobs

    def _add_scores(self, meta: NativeMeta, outputs: Sequence[RequestOutput]) -> None:
        wanted = self._scores
        made = [score for output in outputs for score in output.logprobs or ()]
        ids = self._prompt.token_ids[wanted.start :]
        # The first entry has no score: SGLang's clients expect it so, whatever stands before it.
        scored = (self._of_prompt or [])[wanted.start + 1 :]
        first = [self._entry(token, None) for token in ids[:1]]
        meta.input_token_logprobs = [*first, *(self._own(score) for score in scored if score is not None)]
        meta.output_token_logprobs = [self._own(score) for score in made]
        if wanted.num_top:
            meta.input_top_logprobs = [*[None][: len(ids)], *(self._top(s) for s in scored if s is not None)]
            meta.output_top_logprobs = [self._top(score) for score in made]
        if wanted.token_ids:
            meta.input_token_ids_logprobs = [*[None][: len(ids)], *(self._named(s) for s in scored if s is not None)]
            meta.output_token_ids_logprobs = [self._named(score) for score in made]

    def _entry(self, token: int, logprob: float | None) -> Score:
        return (logprob, token, self._table.text_of(token) if self._with_text else None)

    def _own(self, score: TokenLogprob) -> Score:
        return self._entry(score.token_id, score.logprob)

    def _top(self, score: TokenLogprob) -> list[Score]:
        return [self._entry(token, logprob) for token, logprob in score.top[: self._scores.num_top]]

    def _named(self, score: TokenLogprob) -> list[Score]:
        return [self._entry(token, logprob) for token, logprob in score.named]


def _finish(last: RequestOutput, ids: list[int]) -> NativeFinish:
    if last.finish_reason == FINISH_LENGTH:
        return NativeFinish(type="length", length=last.num_output_tokens)
    matched = last.stop_reason if last.stop_reason is not None else ids[-1] if ids else None
    return NativeFinish(type="stop", matched=matched)


class _Gathered:
    """The outputs of all continuations by their index in the whole request."""

    def __init__(self, makers: list[_Maker], prompt_of: dict[str, int], n: int) -> None:
        self._makers = makers
        self._prompt_of = prompt_of
        self._n = n
        self._outputs: dict[int, list[RequestOutput]] = {}

    def take(self, output: RequestOutput) -> int:
        prompt = self._prompt_of[output.request_id]
        maker = self._makers[prompt]
        maker.see(output)
        index = prompt * self._n + output.index
        self._outputs.setdefault(index, []).append(without_output([output])[0] if maker.is_silent else output)
        return index

    def answer(self, index: int) -> Generated:
        return self._makers[index // self._n].answer(self._outputs[index])

    @property
    def indices(self) -> list[int]:
        return sorted(self._outputs)


def _whole(
    makers: list[_Maker], prompt_of: dict[str, int], n: int, outputs: list[RequestOutput], *, is_list: bool
) -> Generated | list[Generated]:
    gathered = _Gathered(makers, prompt_of, n)
    for output in outputs:
        gathered.take(output)
    answers = [gathered.answer(index) for index in gathered.indices]
    return answers if is_list else answers[0]


class _Chunks:
    """Writes a stream: each event holds the whole text so far, as SGLang's clients expect."""

    def __init__(self, makers: list[_Maker], prompt_of: dict[str, int], n: int, *, has_index: bool) -> None:
        self._gathered = _Gathered(makers, prompt_of, n)
        self._has_index = has_index

    def write(self, outputs: list[RequestOutput]) -> bytes:
        changed = dict.fromkeys(self._gathered.take(output) for output in outputs)
        parts = []
        for index in changed:
            answer = self._gathered.answer(index)
            if self._has_index:
                answer.index = index
            parts.append(event(msgspec.json.encode(answer)))
        return b"".join(parts)

    def end(self) -> bytes:
        return DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.encode())
