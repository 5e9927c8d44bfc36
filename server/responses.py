"""/v1/responses: create (plain, streamed, in the background), get, cancel, delete, input items, count of tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from typing import Any

import msgspec
from jaxserve.server.chat import ChatChunks, chat_completion, chat_job
from jaxserve.server.errors import ApiError, internal_error, shown
from jaxserve.server.generation import Job, Server, answer, submit_job, tenant_of
from jaxserve.server.protocol import ChatCompletionRequest
from jaxserve.server.response_events import ResponseBuilder, ResponseEvents
from jaxserve.server.response_input import (
    input_items,
    input_messages,
    name_of,
    output_messages,
    translate,
)
from jaxserve.server.response_store import StoredResponse
from jaxserve.server.response_types import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseObject,
    ResponsesRequest,
)
from jaxserve.server.sse import gather
from jaxserve.server.turns import renamed, view_of
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.messages import RequestOutput

logger = logging.getLogger(__name__)

_MAX_LISTED = 100
Message = dict[str, Any]


async def create_response(server: Server, http: Request, request: ResponsesRequest) -> Response:
    """POST /v1/responses. Raises ApiError."""
    _check(request)
    turn = await _prepare(server, http, request)
    if request.background:
        return _json(turn.start_in_background(server))
    return await answer(
        server,
        http,
        turn.chat,
        turn.job,
        make_writer=lambda job, prompt_of: ResponseEvents(turn.builder, ChatChunks(turn.chat, job), turn.store),
        make_answer=lambda job, prompt_of, outputs: turn.whole(outputs),
    )


async def count_input_tokens(server: Server, http: Request, request: ResponsesRequest) -> Response:
    """POST /v1/responses/input_tokens: what the same request would have as its prompt."""
    turn = await _prepare(server, http, request)
    return _json(InputTokens(input_tokens=turn.job.num_prompt_tokens))


async def get_response(server: Server, http: Request) -> Response:
    """GET /v1/responses/{response_id}."""
    for name in ("stream", "starting_after"):
        if http.query_params.get(name, "false") not in ("false", "False"):
            raise ApiError(400, f"{name}: stored responses are not streamed by this server", param=name)
    return _json(_stored(server, http).response)


async def delete_response(server: Server, http: Request) -> Response:
    """DELETE /v1/responses/{response_id}: also stops one that still generates."""
    response_id = http.path_params["response_id"]
    server.responses.delete(tenant_of(http), response_id)
    return _json(DeletedResponse(id=response_id))


async def cancel_response(server: Server, http: Request) -> Response:
    """POST /v1/responses/{response_id}/cancel: of one in the background; one that has ended stays as it is."""
    stored = _stored(server, http)
    if not stored.response.background:
        raise ApiError(400, "response_id: only a response in the background can be cancelled", param="response_id")
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait([stored.task])
    return _json(stored.response)


async def list_input_items(server: Server, http: Request) -> Response:
    """GET /v1/responses/{response_id}/input_items, with limit, order and after."""
    items = _stored(server, http).items
    query = http.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order: got {shown(order)}; allowed: 'asc', 'desc'", param="order")
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MAX_LISTED):
        raise ApiError(400, f"limit: got {shown(limit)}; allowed: 1 to {_MAX_LISTED}", param="limit")
    ordered = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        place = next((place for place, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise ApiError(400, f"after: got {shown(after)}; allowed: the id of an input item", param="after")
        ordered = ordered[place + 1 :]
    found = ordered[: int(limit)]
    ends = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return _json(InputItems(data=found, first_id=ends[0], last_id=ends[1], has_more=len(ordered) > len(found)))


@dataclasses.dataclass(kw_only=True)
class _Turn:
    """One request on its way."""

    request: ResponsesRequest
    chat: ChatCompletionRequest
    job: Job
    builder: ResponseBuilder
    messages: list[Message]  # the conversation with this request's input, without instructions
    items: list[dict[str, Any]]
    tenant: str
    server: Server

    def whole(self, outputs: list[RequestOutput]) -> ResponseObject:
        self._complete(outputs)
        self.store(self.builder.response)
        return self.builder.response

    def _complete(self, outputs: list[RequestOutput]) -> None:
        chunk = view_of(chat_completion(self.chat, self.job, outputs))
        for _ in self.builder.take(chunk):
            pass
        for _ in self.builder.finish():
            pass

    def store(self, response: ResponseObject, task: asyncio.Task[None] | None = None) -> None:
        if self.request.store is not False:
            messages = [*self.messages, *output_messages(response.output)]
            stored = StoredResponse(response=response, items=self.items, messages=messages, task=task)
            self.server.responses.put(self.tenant, stored)

    def start_in_background(self, server: Server) -> ResponseObject:
        """Raises ApiError 503 if the engine takes nothing."""
        submission = submit_job(server, self.chat, self.job)
        response = self.builder.response

        async def run() -> None:
            self._complete(await gather(submission))

        def end(task: asyncio.Task[None]) -> None:
            submission.abort()
            error = None if task.cancelled() else task.exception()
            if task.cancelled():
                response.status = "cancelled"
            elif isinstance(error, ApiError):
                self.builder.fail(error)
            elif error is not None:
                logger.error("a response in the background failed", exc_info=error)
                self.builder.fail(internal_error())
            if server.responses.holds(self.tenant, response.id):
                self.store(response)

        task = asyncio.create_task(run())
        self.store(response, task=task)
        task.add_done_callback(end)
        return response


async def _prepare(server: Server, http: Request, request: ResponsesRequest) -> _Turn:
    tenant = tenant_of(http)
    messages = input_messages(request)
    if request.previous_response_id is not None:
        earlier = server.responses.get(tenant, request.previous_response_id, param="previous_response_id")
        if earlier.task is not None:
            raise ApiError(
                400, "previous_response_id: this response is still being generated", param="previous_response_id"
            )
        messages = [*earlier.messages, *messages]
    chat, job = await _fit(server, http, request, messages)
    # An id of its own: two requests may bring the same one, and this one is looked up later.
    response_id = _new_id("resp")
    job = dataclasses.replace(job, response_id=response_id, names=job.names | {(tenant, response_id)})
    base = _base(server, request, job)
    return _Turn(
        request=request,
        chat=chat,
        job=job,
        builder=ResponseBuilder(base, _new_id),
        messages=messages,
        items=input_items(request, _new_id),
        tenant=tenant,
        server=server,
    )


async def _fit(
    server: Server, http: Request, request: ResponsesRequest, messages: list[Message]
) -> tuple[ChatCompletionRequest, Job]:
    """The chat request and its job; with truncation "auto" without the oldest messages that do not fit."""
    while True:
        chat = translate(request, messages)
        try:
            return chat, await chat_job(server, http, chat, id_prefix="resp_")
        except ApiError as error:
            if request.truncation != "auto" or error.code != "context_length_exceeded" or len(messages) < 2:
                raise renamed(error, name_of) from None
        messages = messages[max(1, len(messages) // 8) :]


def _base(server: Server, request: ResponsesRequest, job: Job) -> ResponseObject:
    wanted = request.text.format if request.text is not None else None
    fields = {} if wanted is None else {n: getattr(wanted, n) for n in ("name", "schema", "strict", "description")}
    text_format = {"type": "text" if wanted is None else wanted.type}
    text_format |= {name: value for name, value in fields.items() if value is not None}
    reasoning = request.reasoning
    return ResponseObject(
        id=job.response_id,
        created_at=job.created,
        status="in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=job.model_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        safety_identifier=request.safety_identifier,
        service_tier="default",
        store=request.store is not False,
        temperature=1.0 if request.temperature is None else request.temperature,
        text={"format": text_format, "verbosity": "medium"},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=[msgspec.to_builtins(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
    )


def _check(request: ResponsesRequest) -> None:
    if request.stream_options is not None:
        if not request.stream:
            raise ApiError(400, "stream_options: allowed only with stream true", param="stream_options")
        if request.stream_options.include_obfuscation:
            param = "stream_options.include_obfuscation"
            raise ApiError(400, f"{param}: true is not supported", param=param)
    if request.background and request.stream:
        raise ApiError(400, "background: not supported together with stream", param="background")
    if request.background and request.store is False:
        raise ApiError(400, "background: allowed only with store true, or nobody could read the answer",
                       param="background")  # fmt: skip


def _stored(server: Server, http: Request) -> StoredResponse:
    return server.responses.get(tenant_of(http), http.path_params["response_id"])


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
