"""What both kinds of completion share between the parsed request and the engine's outputs."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from jaxserve.server.answer_parts import PartParser
from jaxserve.server.engine_client import ClientLeft, EngineClient, Submission
from jaxserve.server.errors import ApiError, shown
from jaxserve.server.grammar_check import GrammarChecker
from jaxserve.server.options import make_params
from jaxserve.server.prompts import LoadedModel, Prompt
from jaxserve.server.protocol import MAX_CLIENT_ID, GenerationRequest
from jaxserve.server.response_store import ResponseStore
from jaxserve.server.settings import ServerSettings
from jaxserve.server.sse import ChunkWriter, EventStream, Watch, first_error, gather
from jaxserve.server.structured_fields import StructuredFields, asked_grammar, refused
from jaxserve.server.supervisor import Supervisor
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.config import EngineConfig
from jaxserve.messages import FINISH_LENGTH, AddEmbedding, AddRequest, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import Grammar

TENANT = "jaxserve.tenant"  # in the ASGI scope: which API key was sent
SUBMISSION = "jaxserve.submission"  # in the ASGI scope: what the request has in the engine
ADMIN = "jaxserve.admin"  # in the ASGI scope: whether it was the admin key, or none is needed
NO_CLIENT = 499  # nobody reads this status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """What the routes work with."""

    settings: ServerSettings
    client: EngineClient
    supervisor: Supervisor[LoadedModel]
    model_name: str
    started: int
    config: EngineConfig
    responses: ResponseStore
    grammars: GrammarChecker = dataclasses.field(default_factory=GrammarChecker)

    def model(self, name: str | None, *, task: str = "generate") -> LoadedModel:
        """The ready model. Raises ApiError 404 for another model's name, 503 until it is ready, 400 for one that only
        makes embeddings where text is wanted."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"model: got {shown(name)}; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )
        self.client.check_ready()
        loaded = self.supervisor.loaded
        assert loaded is not None  # it is loaded before the state becomes READY
        if task == "generate" and loaded.info.task != "generate":
            raise ApiError(
                400, f"model: {self.model_name!r} makes embeddings only; use /v1/embeddings", param="model",
                code="model_not_supported",
            )  # fmt: skip
        return loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One HTTP request, ready for the engine. Choice `index` of the answer is continuation index % n of prompt
    index // n."""

    response_id: str
    created: int
    model_name: str
    loaded: LoadedModel
    prompts: list[Prompt]
    params: list[SamplingParams]  # of each prompt
    namespace: str
    headers: dict[str, str]
    deadline_s: float | None = None
    names: frozenset[tuple[str, str]] = frozenset()  # (tenant, id): by which its client may abort it
    make_parser: Callable[[], PartParser] | None = None  # of a choice's text; None: it is content as it stands
    shows_reasoning: bool = True

    @property
    def n(self) -> int:
        return self.params[0].n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


async def checked_grammar(server: Server, loaded: LoadedModel, fields: StructuredFields) -> Grammar | None:
    """The grammar that a request asks for, known to compile. Raises ApiError 400."""
    grammar = asked_grammar(fields, special_tokens=loaded.control_terms)
    if grammar is not None:
        await check_grammar(server, grammar)
    return grammar


async def check_grammar(server: Server, grammar: Grammar) -> None:
    """Raise ApiError 400, naming the field it came from, unless it compiles."""
    error = await server.grammars.error(grammar)
    if error:
        raise refused(grammar.parameter, error)


def make_job(
    server: Server,
    http: Request,
    request: GenerationRequest,
    prompts: list[Prompt],
    options: dict[str, Any],
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    limit_name: str,
    prompt_name: str,
    id_prefix: str,
    names: dict[str, str] | None = None,
) -> Job:
    """Check prompts and options against each other and the context. Raises ApiError 400.

    limit_name, prompt_name   fields that max_tokens and the prompts came from
    default_max_tokens        if the client gave none; None: up to the context limit
    """
    loaded = server.model(request.model)
    if request.bad_words:
        options["bad_word_ids"] = loaded.bad_word_ids(request.bad_words)
        names = {"bad_word_ids": "bad_words", **(names or {})}
    num_sequences = len(prompts) * options["n"]
    if num_sequences > server.settings.max_sequences:
        raise ApiError(
            400,
            f"n: got {options['n']} for {len(prompts)} prompts; allowed: at most {server.settings.max_sequences} "
            "continuations in all",
            param="n",
            code="invalid_value",
        )
    fitted, params = [], []
    made: dict[int | None, SamplingParams] = {}
    for place, prompt in enumerate(prompts):
        ids = loaded.fit(
            prompt.token_ids, request.truncate_prompt_tokens, max_tokens, side=request.truncation_side or "left"
        )
        name = prompt_name if len(prompts) == 1 else f"{prompt_name}[{place}]"
        room = loaded.room(ids, max_tokens, prompt=name, limit=limit_name)
        limit = max_tokens
        if limit is None and default_max_tokens is not None:
            limit = min(default_max_tokens, room)
        if limit not in made:
            made[limit] = make_params({**options, "max_tokens": limit}, vocab_size=loaded.info.vocab_size, names=names)
        was_cut = len(ids) != len(prompt.token_ids)
        fitted.append(Prompt(ids) if was_cut else prompt)
        params.append(made[limit])
    return new_job(server, http, request, loaded, fitted, params, id_prefix=id_prefix)


def new_job(
    server: Server,
    http: Request,
    request: GenerationRequest,
    loaded: LoadedModel,
    prompts: list[Prompt],
    params: list[SamplingParams],
    *,
    id_prefix: str,
) -> Job:
    """A job of checked prompts and params, with what the HTTP request itself says. Raises ApiError 400."""
    client_id = request.request_id or header_id(http)
    response_id = f"{id_prefix}{client_id or secrets.token_hex(12)}"
    tenant = tenant_of(http)
    return Job(
        response_id=response_id,
        created=int(time.time()),
        model_name=server.model_name,
        loaded=loaded,
        prompts=prompts,
        params=params,
        namespace=namespace_of(tenant, request.cache_salt),
        headers={} if client_id is None else {"X-Request-Id": client_id},
        deadline_s=_deadline(http, server.settings.request_timeout_s),
        names=frozenset((tenant, name) for name in (response_id, client_id) if name),
    )


def submit_job(server: Server, request: GenerationRequest, job: Job) -> Submission:
    """Send a job's prompts to the engine. Raises ApiError 503 if it takes none."""
    messages = [
        AddRequest(
            request_id=server.client.new_id(),
            prompt=prompt.token_ids,
            params=params,
            namespace=job.namespace,
            priority=request.priority or 0,
            stream_interval=(request.stream_interval or 1) if request.stream else 0,
            deadline_s=job.deadline_s,
        )
        for prompt, params in zip(job.prompts, job.params, strict=True)
    ]
    return server.client.submit(messages, names=job.names)


async def answer(
    server: Server,
    http: Request,
    request: GenerationRequest,
    job: Job,
    *,
    make_writer: Any,
    make_answer: Any,
) -> Response:
    """Run a job; stop it when the client leaves.

    make_writer(job, prompt_of) -> ChunkWriter for a stream; make_answer(job, prompt_of, outputs) -> Struct
    """
    submission = submit_job(server, request, job)
    http.scope[SUBMISSION] = submission
    try:
        async with Watch(http.receive, submission.leave) as watch:
            if not request.stream:
                outputs = await gather(submission)
                body = msgspec.json.encode(make_answer(job, submission.prompt_of, outputs))
                return Response(body, media_type="application/json", headers=job.headers)
            first = await submission.next()
            error = first_error(first)
            if error is not None:
                raise error
            writer: ChunkWriter = make_writer(job, submission.prompt_of)
            return EventStream(
                submission,
                first,
                writer,
                watch.hand_over(),
                write_timeout_s=server.settings.write_timeout_s,
                headers=job.headers,
            )
    except ClientLeft:
        return Response(status_code=NO_CLIENT)
    except BaseException:
        submission.abort()
        raise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """What an HTTP request itself says about its prompts."""

    namespace: str
    deadline_s: float | None
    names: frozenset[tuple[str, str]]
    headers: dict[str, str]


def sharing_of(server: Server, http: Request, request: Any) -> Sharing:
    """request: has request_id and cache_salt. Raises ApiError 400."""
    client_id = request.request_id or header_id(http)
    tenant = tenant_of(http)
    return Sharing(
        namespace=namespace_of(tenant, request.cache_salt),
        deadline_s=_deadline(http, server.settings.request_timeout_s),
        names=frozenset() if client_id is None else frozenset({(tenant, client_id)}),
        headers={} if client_id is None else {"X-Request-Id": client_id},
    )


async def run_to_end(
    server: Server,
    http: Request,
    messages: Sequence[AddRequest | AddEmbedding],
    shared: Sharing,
    make_answer: Callable[[list[RequestOutput], dict[str, int]], Any],
) -> Response:
    """Answer a request that is not streamed from all its outputs; stop it when the client leaves."""
    submission = server.client.submit(messages, names=shared.names)
    http.scope[SUBMISSION] = submission
    try:
        async with Watch(http.receive, submission.leave):
            outputs = await gather(submission)
        body = msgspec.json.encode(make_answer(outputs, submission.prompt_of))
        return Response(body, media_type="application/json", headers=shared.headers)
    except ClientLeft:
        return Response(status_code=NO_CLIENT)
    except BaseException:
        submission.abort()
        raise


def without_output(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """The outputs of a request that asked for no token: the engine makes one all the same, which is dropped."""
    return [
        msgspec.structs.replace(
            output,
            text="",
            token_ids=[],
            logprobs=None if output.logprobs is None else [],
            finish_reason=output.finish_reason and FINISH_LENGTH,
            stop_reason=None,
            num_output_tokens=0,
        )
        for output in outputs
    ]


def header_id(http: Request) -> str | None:
    """The client's X-Request-Id. Raises ApiError 400 for one that could not be echoed."""
    value = http.headers.get("x-request-id")
    if not value:
        return None
    if len(value) > MAX_CLIENT_ID or not all("!" <= char <= "~" for char in value):
        raise ApiError(
            400,
            f"X-Request-Id: got {shown(value)}; allowed: at most {MAX_CLIENT_ID} visible ASCII characters",
            param="X-Request-Id",
        )
    return value


def is_admin(http: Request) -> bool:
    """Whether the admin key was sent (or the server has no keys at all)."""
    return bool(http.scope.get(ADMIN, False))


def tenant_of(http: Request) -> str:
    """Which API key was sent, as a digest; empty if the server has none."""
    return http.scope.get(TENANT, "")


def _deadline(http: Request, limit_s: float | None) -> float | None:
    """Seconds after which the engine gives up: what the client says in X-Request-Timeout, at most the operator's
    limit. Raises ApiError 400."""
    text = http.headers.get("x-request-timeout")
    if not text:
        return limit_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(
            400,
            f"X-Request-Timeout: got {shown(text)}; allowed: seconds, above 0",
            param="X-Request-Timeout",
            code="invalid_value",
        )
    return seconds if limit_s is None else min(seconds, limit_s)


def namespace_of(tenant: str, salt: str | None) -> str:
    """Which requests share cached prefixes: those of one API key and, if it asks for it, of one salt. A salt alone
    could be guessed by another client."""
    return f"{tenant}/{salt or ''}" if tenant or salt else ""
