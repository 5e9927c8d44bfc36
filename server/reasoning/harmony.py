"""The harmony format of gpt-oss: messages of several channels, and calls as messages to a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxserve.server.answer_parts import CallArguments, CallStart, Content, Part, Reasoning, held_length
from jaxserve.server.tools.formats import Tool, call_id, json_rule

from jaxserve.structured.structural_tag import literals

CONTROL = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_MESSAGE = "<|message|>"
_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
FINAL = "<|start|>assistant<|channel|>final<|message|>"


class HarmonyParser:
    """Reads an answer behind `<|start|>assistant`.

    analysis is reasoning; commentary to a function is a call, its body the arguments; everything else is content.
    """

    def __init__(self, names: Collection[str] | None = None, new_id: Callable[[], str] = call_id) -> None:
        self._names = names
        self._new_id = new_id
        self._held = ""
        self._kind: Callable[[str], Part] | None = None  # None: in a header
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._held += text
        return self._run(is_end=False)

    def finish(self) -> list[Part]:
        parts = self._run(is_end=True)
        if self._kind is None and self._held.strip() and not self._held.lstrip().startswith(CONTROL):
            parts.append(Content(self._held))  # a text without any message is an answer
        self._held = ""
        return parts

    def _run(self, *, is_end: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self._kind is None:
                header, found, rest = self._held.partition(_MESSAGE)
                if not found:
                    return parts
                self._held = rest
                parts += self._open(header)
            ends = [(self._held.find(mark), mark) for mark in _BODY_ENDS if mark in self._held]
            if not ends:
                size = len(self._held) - (0 if is_end else held_length(self._held, _BODY_ENDS))
                if size:
                    parts.append(self._kind(self._held[:size]))
                self._held = self._held[size:]
                return parts
            at, _ = min(ends)
            if at:
                parts.append(self._kind(self._held[:at]))
            self._held = self._held[at:]
            if self._held.startswith(("<|end|>", "<|call|>", "<|return|>")):
                self._held = self._held[self._held.index("|>") + 2 :]
            self._kind = None

    def _open(self, header: str) -> list[Part]:
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and (self._names is None or recipient.group(1) in self._names):
            index = self._num_calls
            self._num_calls += 1
            self._kind = lambda text: CallArguments(index, text)
            return [CallStart(index, self._new_id(), recipient.group(1))]
        is_reasoning = channel is not None and channel.group(1) == "analysis"
        self._kind = Reasoning if is_reasoning else Content
        return []


def harmony_grammar(
    tools: Sequence[Tool], terms: Mapping[str, str], *, must_call: bool, answer: str | None = None
) -> str:
    """Answers behind `<|start|>assistant`: reasoning and remarks, then a call or a final message.

    answer   a rule's body that the final message must follow
    """

    def rule(text: str) -> str:
        return " ".join(literals(text, terms))

    rules = [
        "%llguidance {}",
        f"analysis: {rule('<|channel|>analysis<|message|>')} TEXT {rule('<|end|><|start|>assistant')}",
        f"remark: {rule('<|channel|>commentary<|message|>')} TEXT {rule('<|end|><|start|>assistant')}",
        f"final: {rule('<|channel|>final<|message|>')} body",
        f"body: {answer or 'TEXT'}",
        r"TEXT: /(.|\n)*/",
    ]
    for number, tool in enumerate(tools):
        before = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        rules.append(f"call_{number}: {json_rule(tool, before, '', terms)}")
    calls = [f"call_{number}" for number in range(len(tools))]
    last = " | ".join(calls if must_call else [*calls, "final"])
    return "\n".join([*rules, f"start: (analysis | remark)* ({last})"])
