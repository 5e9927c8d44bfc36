"""Free text with constrained parts: once a trigger is written, what follows is the body of one of its tags. No jax."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.structured.grammar import GrammarError, check_schema, quoted

MAX_TAGS = 256
NO_TOKENS: Mapping[str, str] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tag:
    """begin + body + end. body: a JSON schema, or a rule of Lark (a str)."""

    begin: str
    body: dict[str, Any] | str
    end: str = ""


def tags_grammar(
    tags: Sequence[Tag],
    triggers: Sequence[str],
    *,
    special_tokens: Mapping[str, str] = NO_TOKENS,
    at_least_one: bool = False,
    at_most_one: bool = False,
    free_text: bool = True,
) -> str:
    """A Lark grammar of text in which tags occur, each behind the longest of `triggers` that its `begin` starts with.

    special_tokens   spelling -> how a grammar names the control token (token_terms): in triggers and tags such a
                     spelling is the token, never plain characters
    at_least_one     the text ends with a tag
    free_text        False: tags alone, with nothing but white space between them
    """
    if not 1 <= len(tags) <= MAX_TAGS:
        raise GrammarError(f"got {len(tags)} tags; allowed: 1 to {MAX_TAGS}")
    rules = ["%llguidance {}"]
    names = []
    for number, tag in enumerate(tags):
        rules.append(f"tag_{number}: {_rest(tag, '', special_tokens)}")
        names.append(f"tag_{number}")
    if not free_text:
        any_tag = " | ".join(names)
        many = "" if at_most_one else " (SPACE? any_tag)*"
        rules += [f"any_tag: {any_tag}", f"start: any_tag{many}", r"SPACE: /[ \n]{1,2}/"]
        return "\n".join(rules)
    return _free(tags, triggers, special_tokens, at_least_one=at_least_one, at_most_one=at_most_one)


def token_terms(tokens: Mapping[str, int]) -> dict[str, str]:
    """spelling -> term of a grammar, for control tokens by their spelling."""
    return {name: f"<[{number}]>" for name, number in tokens.items() if name}


def _free(
    tags: Sequence[Tag],
    triggers: Sequence[str],
    special: Mapping[str, str],
    *,
    at_least_one: bool,
    at_most_one: bool,
) -> str:
    rules = ["%llguidance {}"]
    options = []
    for number, (trigger, members) in enumerate(_by_trigger(tags, triggers)):
        bodies = []
        for place, tag in enumerate(members):
            rules.append(f"tag_{number}_{place}: {_rest(tag, trigger, special)}")
            bodies.append(f"tag_{number}_{place}")
        if trigger in special:
            head = f"TEXT? {special[trigger]}"
        else:
            rules.append(f"head_{number}[lazy]: TEXT {quoted(trigger)}")
            head = f"head_{number}"
        options.append(f"{head} ({' | '.join(bodies)})")
    many = {(False, False): "*", (True, False): "+", (False, True): "?", (True, True): ""}[at_least_one, at_most_one]
    rules += [f"any_tag: {' | '.join(options)}", f"start: any_tag{many} tail", "tail: TEXT", r"TEXT: /(.|\n)*/"]
    return "\n".join(rules)


def _by_trigger(tags: Sequence[Tag], triggers: Sequence[str]) -> list[tuple[str, list[Tag]]]:
    groups: dict[str, list[Tag]] = {}
    for tag in tags:
        found = max((trigger for trigger in triggers if trigger and tag.begin.startswith(trigger)), key=len, default="")
        if not found:
            raise GrammarError(f"got the begin {tag.begin[:60]!r}; allowed: texts that start with one of the triggers")
        groups.setdefault(found, []).append(tag)
    return list(groups.items())


def _rest(tag: Tag, trigger: str, special: Mapping[str, str]) -> str:
    """The parts of a tag behind its trigger."""
    body = tag.body if isinstance(tag.body, str) else "%json " + json.dumps(compact(tag.body))
    parts = [*literals(tag.begin.removeprefix(trigger), special), body, *literals(tag.end, special)]
    return " ".join(parts)


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that a grammar embeds, written without white space."""
    return {**check_schema(schema), "x-guidance": {"whitespace_flexible": False}}


def literals(text: str, special: Mapping[str, str]) -> list[str]:
    """A text as terms of a Lark rule: control tokens by name, everything else quoted."""
    terms = []
    while text:
        found = [(text.find(name), -len(name), name) for name in special if name in text]
        at, _, name = min(found, default=(len(text), 0, ""))
        if at:
            terms.append(quoted(text[:at]))
        if name:
            terms.append(special[name])
        text = text[at + len(name) :]
    return terms
