"""A request of /v1/responses as a chat request, and conversations as messages."""

from __future__ import annotations

from typing import Any

from jaxserve.server.errors import ApiError, invalid_value, shown
from jaxserve.server.protocol import ChatCompletionRequest
from jaxserve.server.response_types import InputItem, InputPart, OutputItem, ReasoningItem, ResponsesRequest
from jaxserve.server.turns import chat_request

Message = dict[str, Any]

_SAME = (
    "model", "temperature", "top_p", "stream", "stop", "stop_token_ids", "seed", "top_k", "min_p", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "ignore_eos", "priority", "cache_salt",
    "request_id", "chat_template_kwargs", "parallel_tool_calls", "user", "metadata",
)  # fmt: skip
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def name_of(param: str) -> str:
    """The field of this dialect from which a field of a chat was made."""
    top = param.partition("[")[0].partition(".")[0]
    return _NAMES.get(top, param if top in ("tools", "tool_choice") else top)


def translate(request: ResponsesRequest, messages: list[Message]) -> ChatCompletionRequest:
    """The chat request for a conversation that ends with the request's own input. Raises ApiError 400."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    fields["messages"] = messages
    fields["max_completion_tokens"] = request.max_output_tokens
    if request.instructions:
        fields["messages"] = [{"role": "system", "content": request.instructions}, *messages]
    if request.stream:
        fields["stream_options"] = {"include_usage": True}
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    if wants_logprobs(request):
        fields["logprobs"] = True
        fields["top_logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise invalid_value("top_logprobs", request.top_logprobs, "0 without include ['message.output_text.logprobs']")
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _response_format(request)
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    return chat_request(fields, name_of)


def wants_logprobs(request: ResponsesRequest) -> bool:
    return bool(request.include)


def input_messages(request: ResponsesRequest) -> list[Message]:
    """The request's own input as messages. Raises ApiError 400 naming the item."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    if not request.input and request.previous_response_id is None:
        raise invalid_value("input", [], "a text, or at least one item")
    messages: list[Message] = []
    thought = ""
    for place, item in enumerate(request.input):
        name = f"input[{place}]"
        match item.type:
            case "reasoning":
                thought += _joined(item.content or item.summary or [], f"{name}.content")
                continue
            case "function_call":
                _add_call(messages, _call(item, name), thought)
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise ApiError(400, f"{name}: call_id and output are required", param=name)
                text = _joined(item.output, f"{name}.output")
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            case _:
                messages.append(_message(item, name, thought))
        thought = ""
    return messages


def output_messages(output: list[OutputItem]) -> list[Message]:
    """The output of a response as the messages that later requests continue from."""
    messages: list[Message] = []
    thought = ""
    for item in output:
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content)
            continue
        match item.__struct_config__.tag:
            case "message":
                message = {"role": "assistant", "content": "".join(part.text for part in item.content)}
                messages.append({**message, "reasoning_content": thought} if thought else message)
            case "function_call":
                call = {"id": item.call_id, "type": "function"}
                call["function"] = {"name": item.name, "arguments": item.arguments}
                _add_call(messages, call, thought)
        thought = ""
    return messages


def input_items(request: ResponsesRequest, new_id: Any) -> list[dict[str, Any]]:
    """The request's own input as GET .../input_items shows it."""
    if isinstance(request.input, str):
        part = {"type": "input_text", "text": request.input}
        return [{"id": new_id("msg"), "type": "message", "role": "user", "status": "completed", "content": [part]}]
    items = []
    for item in request.input:
        kind = item.type or "message"
        fields = {name: getattr(item, name) for name in item.__struct_fields__}
        shown_item = {name: value for name, value in fields.items() if value is not None}
        for name in ("content", "output", "summary"):
            value = shown_item.get(name)
            if isinstance(value, list):
                shown_item[name] = [_shown_part(part) for part in value]
        items.append({**shown_item, "id": item.id or new_id("item"), "type": kind})
    return items


def _shown_part(part: InputPart) -> dict[str, Any]:
    return {name: value for name in part.__struct_fields__ if (value := getattr(part, name)) is not None}


def _message(item: InputItem, name: str, thought: str) -> Message:
    if item.role is None or item.content is None:
        raise ApiError(400, f"{name}: role and content are required for a message", param=name)
    message: Message = {"role": item.role, "content": _joined(item.content, f"{name}.content")}
    if thought and item.role == "assistant":
        message["reasoning_content"] = thought
    return message


def _call(item: InputItem, name: str) -> dict[str, Any]:
    if item.call_id is None or item.name is None or item.arguments is None:
        raise ApiError(400, f"{name}: call_id, name and arguments are required for a function_call", param=name)
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _add_call(messages: list[Message], call: dict[str, Any], thought: str) -> None:
    """Calls of one turn stand together in one message."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant" and not thought:
        last.setdefault("tool_calls", []).append(call)
        return
    message: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages.append({**message, "reasoning_content": thought} if thought else message)


def _joined(content: str | list[InputPart], name: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            field = f"{name}[{place}].{'refusal' if part.type == 'refusal' else 'text'}"
            raise ApiError(400, f"{field}: missing; it is required", param=field, code="missing_required_parameter")
        texts.append(text)
    return "\n".join(texts)


def _tool(tool: Any) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str) or len(choice) != 2:
        raise ApiError(
            400,
            f"tool_choice: got {shown(choice)}; allowed: 'none', 'auto', 'required', "
            "{'type': 'function', 'name': NAME}",
            param="tool_choice",
            code="invalid_value",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(request: ResponsesRequest) -> dict[str, Any]:
    assert request.text is not None and request.text.format is not None
    wanted = request.text.format
    schema = {
        name: value
        for name in ("name", "schema", "strict", "description")
        if (value := getattr(wanted, name)) is not None
    }
    if wanted.type != "json_schema":
        if schema:
            field = f"text.format.{next(iter(schema))}"
            raise ApiError(400, f"{field}: allowed only with type 'json_schema'", param=field, code="invalid_value")
        return {"type": wanted.type}
    return {"type": "json_schema", "json_schema": schema}
