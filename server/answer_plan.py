"""What an answer may consist of: which tools, which form, how much reasoning; and how it is read.

Every chat dialect goes through plan_answer(): it gives the grammar for the engine and a parser for each choice.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from jaxserve.server.answer_parts import Chain, DropTokens, PartParser, PlainText
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Server, check_grammar
from jaxserve.server.prompts import LoadedModel
from jaxserve.server.protocol import ChatCompletionRequest
from jaxserve.server.reasoning.harmony import harmony_grammar
from jaxserve.server.reasoning.styles import EFFORT_BUDGETS, make_parser
from jaxserve.server.structured_fields import asked_grammar, refused
from jaxserve.server.tool_types import NamedToolChoice, ToolDefinition
from jaxserve.server.tools.formats import Tool

from jaxserve.structured.grammar import Grammar, GrammarError

# Of a compiler's words: a schema that is right, but asks for more than can be kept to.
_TOO_MUCH = ("nimplemented", "Unknown format", "oneOf constraints", "not disjoint", "too large", "too many digits",
             "not supported")  # fmt: skip
_PROMPT_END = 12  # tokens of the prompt that may open or close the reasoning


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools that an answer may, or must, call. All that the client gave are in the prompt."""

    tools: tuple[Tool, ...]
    must_call: bool
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerPlan:
    """grammar        what the text must look like; None: anything
    make_parser       makes the parser of one choice; None: the text is content as it stands
    keeps_control     control tokens must stay in the text, as the parser reads them
    shows_reasoning   whether the client gets it
    """

    grammar: Grammar | None
    make_parser: Callable[[], PartParser] | None
    keeps_control: bool = False
    shows_reasoning: bool = True


async def plan_tools(server: Server, request: ChatCompletionRequest) -> ToolUse | None:
    """The tools of a request, known to compile. Raises ApiError 400."""
    choice = request.tool_choice
    given = request.tools or []
    if not given:
        if choice is not None and choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice: a call is asked for without tools", param="tool_choice")
        return None
    names = [item.function.name for item in given]
    double = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if double is not None:
        raise ApiError(400, f"tools: got two functions with the name {double!r}; allowed: one of each", param="tools")
    if choice == "none":
        return None
    must_call = choice == "required" or isinstance(choice, NamedToolChoice)
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            raise ApiError(
                400,
                f"tool_choice.function.name: got {choice.function.name[:80]!r}; allowed: {', '.join(names)[:400]}",
                param="tool_choice.function.name",
            )
        given = [item for item in given if item.function.name == choice.function.name]
    tools = []
    for item in given:
        place = f"tools[{names.index(item.function.name)}].function.parameters"
        tools.append(await _checked_tool(server, item, place, must_keep=must_call or bool(item.function.strict)))
    parallel = request.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    return ToolUse(tools=tuple(tools), must_call=must_call, parallel=parallel)


async def _checked_tool(server: Server, item: ToolDefinition, place: str, *, must_keep: bool) -> Tool:
    """A tool whose schema compiles. must_keep: if it asks for more than can be kept to, that is an error; otherwise
    any object is let through."""
    schema = item.function.parameters
    if not schema:
        return Tool(item.function.name, {"type": "object", "properties": {}, "additionalProperties": False})
    try:
        error = await server.grammars.error(Grammar.json_schema(schema))
    except GrammarError as fault:
        error = str(fault)
    if not error:
        return Tool(item.function.name, schema)
    if not must_keep and any(word in error for word in _TOO_MUCH):
        return Tool(item.function.name, {"type": "object"})
    raise refused(place, error)


async def plan_answer(
    server: Server,
    loaded: LoadedModel,
    request: ChatCompletionRequest,
    use: ToolUse | None,
    prompt_ids: list[int],
) -> AnswerPlan:
    """Raises ApiError 400 for what cannot be kept to."""
    style = loaded.reasoning_style
    state = None
    if style is not None:
        state = style.state(loaded.tokens.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False))
        if state is None and _is_switched_off(request):
            state = False
    budget = _budget(request, loaded)
    grammar = await _answer_grammar(server, loaded, request, use)
    # A model that has yet to open its reasoning must get through it before a form is asked of it.
    is_formed = grammar is not None and (use is None or use.must_call)
    reasons = style is not None and not style.is_harmony and (state is True or (state is None and is_formed))
    if style is not None and state is not False and (budget is not None or reasons):
        inner = grammar if reasons or grammar is None else None
        if inner is None and grammar is not None:
            raise ApiError(
                400,
                "thinking_token_budget: not available together with tools unless the prompt opens the reasoning",
                param="thinking_token_budget",
            )
        grammar = Grammar(
            "" if grammar is None else grammar.text,
            parameter="thinking_token_budget" if grammar is None else grammar.parameter,
            begins_after=style.answer_mark,
            max_free_tokens=budget,
            forced_end=style.forced_end,
            only_behind="" if reasons else style.start,
        )
    # A text that is held in its reasoning is reasoning from its first word on.
    parser, control = _parser(loaded, use, True if reasons else state)
    return AnswerPlan(
        grammar=grammar,
        make_parser=parser,
        keeps_control=bool(set(control) & loaded.control_terms.keys()),
        shows_reasoning=request.include_reasoning is not False,
    )


def _is_switched_off(request: ChatCompletionRequest) -> bool:
    """Whether the client wants no reasoning of a model that may choose."""
    return request.reasoning_effort == "none" or (request.chat_template_kwargs or {}).get("enable_thinking") is False


def _budget(request: ChatCompletionRequest, loaded: LoadedModel) -> int | None:
    budget = request.thinking_token_budget
    style = loaded.reasoning_style
    if budget is not None and style is None:
        raise ApiError(
            400,
            "thinking_token_budget: this model has no reasoning that is known to the server (--reasoning-parser)",
            param="thinking_token_budget",
        )
    if budget is None and style is not None and not style.is_harmony:
        budget = EFFORT_BUDGETS.get(request.reasoning_effort or "")
    return budget


async def _answer_grammar(
    server: Server, loaded: LoadedModel, request: ChatCompletionRequest, use: ToolUse | None
) -> Grammar | None:
    terms = loaded.control_terms
    asked = asked_grammar(request, special_tokens=terms)
    style = loaded.reasoning_style
    is_harmony = style is not None and style.is_harmony
    if use is None and not (is_harmony and asked is not None):
        grammar = asked
    else:
        answer = None if asked is None else _as_rule(asked, use)
        tools = () if use is None else use.tools
        must_call = use is not None and use.must_call
        try:
            if is_harmony:
                text = harmony_grammar(tools, terms, must_call=must_call, answer=answer)
            else:
                assert use is not None
                text = loaded.tool_format.grammar(
                    tools, terms, must_call=must_call, parallel=use.parallel, answer=answer
                )
            grammar = Grammar.lark(text, parameter="tools" if asked is None else asked.parameter)
        except GrammarError as error:
            raise refused("tools", str(error)) from None
    if grammar is not None:
        await check_grammar(server, grammar)
    return grammar


def _as_rule(asked: Grammar, use: ToolUse | None) -> str:
    """A JSON schema as the body of a rule in a larger grammar."""
    try:
        described = json.loads(asked.text)["grammars"][0]["json_schema"]
    except (ValueError, LookupError, TypeError):
        described = None
    if described is None:
        with_what = "tools" if use is not None else "a model that answers in messages"
        raise ApiError(
            400, f"{asked.parameter}: not available together with {with_what}; allowed: a JSON schema",
            param=asked.parameter,
        )  # fmt: skip
    return "%json " + json.dumps(described)


def _parser(
    loaded: LoadedModel, use: ToolUse | None, state: bool | None
) -> tuple[Callable[[], PartParser] | None, tuple[str, ...]]:
    """(maker of parsers, control tokens that they read)."""
    style, form = loaded.reasoning_style, loaded.tool_format
    names = None if use is None else use.names
    makers: list[Callable[[], PartParser]] = []
    control: tuple[str, ...] = ()
    if style is not None and state is not False:
        makers.append(make_parser(style, is_open=state is True, names=names))
        control += style.control or (style.start, style.end)
    if use is not None and not (style is not None and style.is_harmony):
        makers.append(lambda: form.parser(names))
        control += form.control
    if not makers:
        return None, ()
    dropped = [name for name in loaded.control_terms if name not in control]
    reads_control = bool(set(control) & loaded.control_terms.keys())

    def make() -> PartParser:
        first = makers[0]()
        parser: PartParser = Chain(first, makers[1]() if len(makers) > 1 else PlainText())
        return DropTokens(dropped, parser) if reads_control and dropped else parser

    return make, control


def template_arguments(request: ChatCompletionRequest, loaded: LoadedModel) -> dict[str, Any] | None:
    """Variables of the chat template, among them what reasoning_effort means to it. The client's own win."""
    given = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is not None:
        given.setdefault("reasoning_effort", effort)
        given.setdefault("enable_thinking", effort != "none")
    return given or None
