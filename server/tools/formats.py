"""How each family of models writes tool calls.

A format says which texts are calls (a grammar) and reads them (a parser). Which one a model uses is found in its
chat template, or set with --tool-call-parser.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxserve.server.answer_parts import PartParser
from jaxserve.server.tools.marked_calls import BareJsonCalls, MarkedCalls
from jaxserve.server.tools.python_calls import WholeCalls, read_gemma_call, read_python_calls

from jaxserve.structured.grammar import quoted
from jaxserve.structured.structural_tag import compact, literals

Terms = Mapping[str, str]  # control tokens by their spelling, as a grammar names them


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. schema: of its arguments, an object."""

    name: str
    schema: dict[str, Any]


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: Mistral's templates accept nothing else."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def json_rule(tool: Tool, before: str, after: str, terms: Terms) -> str:
    """The body of a rule: `before`, the arguments as JSON, `after`."""
    parts = [*literals(before, terms), _json(tool.schema), *literals(after, terms)]
    return " ".join(parts)


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(compact(schema))


def python_rule(tool: Tool, terms: Terms) -> str:
    """name(a=VALUE, b=VALUE), values in JSON, which the parser reads like Python's."""
    return " ".join([quoted(f"{tool.name}("), *_members(tool.schema, "{}=", ", ", _json), '")"'])


def gemma_rule(tool: Tool, quote: str, terms: Terms) -> str:
    """call:name{a:VALUE,b:VALUE}, strings between quotes that are control tokens, everything else in JSON."""

    def value(schema: dict[str, Any]) -> str:
        if schema.get("type") == "string" and not {"pattern", "format"} & schema.keys():
            texts = [schema["const"]] if "const" in schema else schema.get("enum")
            body = "(" + " | ".join(quoted(text) for text in texts) + ")" if texts else r"/[^\n<]*/"
            return " ".join([*literals(quote, terms), body, *literals(quote, terms)])
        return _json(schema)

    return " ".join([quoted(f"call:{tool.name}{{"), *_members(tool.schema, "{}:", ",", value), '"}"'])


def _members(schema: dict[str, Any], key: str, comma: str, value: Callable[[dict[str, Any]], str]) -> list[str]:
    """Terms for the properties of an object in their order, commas between those that are there."""
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    names = [name for name in properties if re.fullmatch(r"[^\W\d]\w*", name)]
    needed = [name for name in names if name in required]
    terms = []
    for place, name in enumerate(needed):
        text = ("" if place == 0 else comma) + key.format(name)
        terms.append(f"{quoted(text)} {value(_with(properties[name], shared))}")
    optional = [name for name in names if name not in required]
    if needed:
        terms += [
            f"({quoted(comma + key.format(name))} {value(_with(properties[name], shared))})?" for name in optional
        ]
    elif optional:
        # Nothing stands before the first of them, whichever it is.
        ways = []
        for place, name in enumerate(optional):
            rest = [
                f"({quoted(comma + key.format(other))} {value(_with(properties[other], shared))})?"
                for other in optional[place + 1 :]
            ]
            ways.append(" ".join([quoted(key.format(name)), value(_with(properties[name], shared)), *rest]))
        terms.append("(" + " | ".join(ways) + ")?")
    return terms


def _with(schema: Any, shared: dict[str, Any]) -> dict[str, Any]:
    return {**schema, **shared} if isinstance(schema, dict) else dict(shared)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way of writing calls.

    rule        tool -> body of a grammar rule for one call, behind `opening`
    opening     text behind which a call (or the first of a list) must follow: what gives it away
    between, closing   text between two calls of one opening, and behind the last
    repeats     several calls are written as several openings
    parser      (names of the functions there are) -> a new parser
    control     control tokens that the format is made of; they have to stay in the text
    bare        calls stand at the very beginning of an answer, and nothing gives them away later
    hint        found in chat templates of models that use it
    """

    name: str
    rule: Callable[[Tool, Terms], str]
    opening: str
    parser: Callable[[Collection[str] | None], PartParser]
    between: str = ""
    closing: str = ""
    repeats: bool = False
    bare: bool = False
    control: tuple[str, ...] = ()
    hint: str = ""
    new_id: Callable[[], str] = call_id

    def grammar(
        self,
        tools: Sequence[Tool],
        terms: Terms,
        *,
        must_call: bool,
        parallel: bool,
        answer: str | None = None,
    ) -> str:
        """A Lark grammar of answers.

        must_call   calls alone; otherwise text, calls, or both
        parallel    whether there may be more than one
        answer      instead of free text: a rule's body (for answers that must have a form of their own)
        """
        rules = ["%llguidance {}"]
        rules += [f"call_{number}: {self.rule(tool, terms)}" for number, tool in enumerate(tools)]
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        between, closing = " ".join(literals(self.between, terms)), " ".join(literals(self.closing, terms))
        more = f" ({between} call)*" if parallel and not self.repeats else ""
        rules.append(f"calls: call{more} {closing}")
        opening = " ".join(literals(self.opening, terms))
        many = parallel and self.repeats
        rules.append(f"block: {opening} calls")
        rules.append(r"blocks: block" + (f" ({between} block)*" if many else ""))
        if must_call:
            rules.append("start: blocks")
        elif answer is not None:
            rules += ["start: blocks | answer", f"answer: {answer}"]
        elif self.bare:
            rules += ["start: blocks | TEXT", f"TEXT: /{self._bare_text()}/"]
        else:
            rules += self._among_text(terms, many)
        return "\n".join(rules)

    def _bare_text(self) -> str:
        first = re.escape(self.opening[:1] or "{")
        return rf"([^{first}](.|\n)*)?"

    def _among_text(self, terms: Terms, many: bool) -> list[str]:
        parts = literals(self.opening, terms)
        if self.opening.startswith(tuple(terms)):
            head, rest = f"TEXT? {parts[0]}", " ".join(parts[1:])
            rules = [f"more: {head} {rest} calls"]
        else:
            rules = [f"head[lazy]: TEXT {quoted(self.opening)}", "more: head calls"]
        return [*rules, f"start: more{'*' if many else '?'} tail", "tail: TEXT", r"TEXT: /(.|\n)*/"]


def _hermes_rule(tool: Tool, terms: Terms) -> str:
    return json_rule(tool, f'\n{{"name": {quoted(tool.name)}, "arguments": ', "}\n</tool_call>", terms)


def _llama_rule(tool: Tool, terms: Terms) -> str:
    return json_rule(tool, f'"name": {quoted(tool.name)}, "parameters": ', "}", terms)


def _mistral_rule(tool: Tool, terms: Terms) -> str:
    return json_rule(tool, f'{{"name": {quoted(tool.name)}, "arguments": ', "}", terms)


def _mistral_new_rule(tool: Tool, terms: Terms) -> str:
    return json_rule(tool, f"{tool.name}[ARGS]", "", terms)


def _deepseek_v3_rule(tool: Tool, terms: Terms) -> str:
    before = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{tool.name}\n```json\n"
    return json_rule(tool, before, "\n```<｜tool▁call▁end｜>", terms)


def _deepseek_v31_rule(tool: Tool, terms: Terms) -> str:
    return json_rule(tool, f"<｜tool▁call▁begin｜>{tool.name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", terms)


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_DEEPSEEK_PARSER = {
    "start": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "ends": ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
}


HERMES = ToolFormat(
    name="hermes",
    rule=_hermes_rule,
    opening="<tool_call>",
    between="\n",
    repeats=True,
    control=("<tool_call>", "</tool_call>"),
    hint="<tool_call>",
    parser=lambda names: MarkedCalls(call_id, start=("<tool_call>",), ends=("</tool_call>",), names=names),
)
LLAMA3 = ToolFormat(
    name="llama3_json",
    rule=_llama_rule,
    opening="{",
    between="; {",
    bare=True,
    control=("<|python_tag|>",),
    hint="<|python_tag|>",
    parser=lambda names: BareJsonCalls(call_id, "<|python_tag|>", names),
)
MISTRAL = ToolFormat(
    name="mistral",
    rule=_mistral_rule,
    opening="[TOOL_CALLS][",
    between=", ",
    closing="]",
    control=("[TOOL_CALLS]",),
    hint="[TOOL_CALLS]",
    new_id=short_call_id,
    parser=lambda names: MarkedCalls(short_call_id, start=("[TOOL_CALLS]",), in_list=True, names=names),
)
MISTRAL_NEW = ToolFormat(
    name="mistral_args",
    rule=_mistral_new_rule,
    opening="[TOOL_CALLS]",
    repeats=True,
    control=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    hint="[ARGS]",
    new_id=short_call_id,
    parser=lambda names: MarkedCalls(
        short_call_id, start=("[TOOL_CALLS]",), header=r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\s*\[ARGS\]", names=names
    ),
)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    rule=_deepseek_v3_rule,
    opening="<｜tool▁calls▁begin｜>",
    between="\n",
    closing="<｜tool▁calls▁end｜>",
    control=_DEEPSEEK,
    hint="<｜tool▁calls▁begin｜>",
    parser=lambda names: MarkedCalls(
        call_id,
        header=r"\s*(?:<｜tool▁call▁begin｜>)?\s*function<｜tool▁sep｜>([^\n]+)\n```json",
        continues="<｜tool▁call▁begin｜>",
        names=names,
        **_DEEPSEEK_PARSER,
    ),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    rule=_deepseek_v31_rule,
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    control=_DEEPSEEK,
    parser=lambda names: MarkedCalls(
        call_id,
        header=r"\s*(?:<｜tool▁call▁begin｜>)?\s*([^<{\n]+)<｜tool▁sep｜>",
        continues="<｜tool▁call▁begin｜>",
        names=names,
        **_DEEPSEEK_PARSER,
    ),
)
PYTHONIC = ToolFormat(
    name="pythonic",
    rule=python_rule,
    opening="[",
    between=", ",
    closing="]",
    bare=True,
    hint="[func_name1(",
    parser=lambda names: WholeCalls(
        call_id, read_python_calls, start="[", end="]", names=names, whole=True, keeps_marks=True
    ),
)
GEMMA = ToolFormat(
    name="gemma",
    rule=lambda tool, terms: " ".join([gemma_rule(tool, "<escape>", terms), *literals("<end_function_call>", terms)]),
    opening="<start_function_call>",
    repeats=True,
    control=("<start_function_call>", "<end_function_call>", "<escape>"),
    hint="<start_function_call>",
    parser=lambda names: WholeCalls(
        call_id,
        lambda text: read_gemma_call(text, "<escape>"),
        start="<start_function_call>",
        end="<end_function_call>",
        names=names,
    ),
)
GEMMA_CODE = ToolFormat(
    name="gemma_code",
    rule=python_rule,
    opening="```tool_code\n",
    between="\n",
    closing="\n```",
    hint="```tool_code",
    parser=lambda names: WholeCalls(call_id, read_python_lines, start="```tool_code", end="```", names=names),
)


def read_python_lines(text: str) -> list[tuple[str, dict[str, Any]]]:
    """One call a line, or a list of them."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    calls = []
    for line in lines:
        call = re.fullmatch(r"\s*print\((.*)\)\s*", line)
        calls += read_python_calls(call.group(1) if call else line)
    return calls


FORMATS = {
    form.name: form
    for form in (HERMES, LLAMA3, MISTRAL, MISTRAL_NEW, DEEPSEEK_V3, DEEPSEEK_V31, PYTHONIC, GEMMA, GEMMA_CODE)
}
# Names that other servers use for the same.
ALIASES = {
    "qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json", "llama4_pythonic": "pythonic",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "functiongemma": "gemma",
}  # fmt: skip
_ORDER = (MISTRAL_NEW, MISTRAL, GEMMA, GEMMA_CODE, LLAMA3, PYTHONIC, HERMES)


def resolve_format(name: str, template: str) -> ToolFormat:
    """The format of this name; "auto": the one that the template speaks of."""
    return detect_format(template) if name == "auto" else FORMATS[ALIASES.get(name, name)]


def detect_format(template: str) -> ToolFormat:
    """The format that a model's chat template speaks of; Hermes' if it speaks of none, for it needs no control
    token."""
    if DEEPSEEK_V3.hint in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    return next((form for form in _ORDER if form.hint in template), HERMES)
