"""What a text must look like: a Grammar, made from a JSON schema, a regular expression, a choice or a grammar. No jax.

Making one is cheap and finds only what is wrong at first sight; whether it compiles is for the compiler to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import msgspec

from jaxserve.structured.json_schema import simplify

MAX_GRAMMAR_BYTES = 1 << 18  # of the text that is compiled
MAX_CHOICES = 4096

# Without white space most tokens between the values of an object are forced, and none can be repeated for ever.
_COMPACT = {"whitespace_flexible": False}
_NEVER = {"lenient": False, "coerce_one_of": False}


class GrammarError(ValueError):
    """A grammar that cannot be used; the text says why, in the terms of whoever wrote it."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """The language of a text.

    text       a grammar in llguidance's own form; "" allows every text (`begins_after` may still limit reasoning)
    parameter  the option it came from, for error messages
    begins_after  the grammar begins behind this text; what comes before is free (a model's reasoning). "": at once
    max_free_tokens   tokens at most before `forced_end` is written for the model; None: no limit
    forced_end    text that ends with, or holds, `begins_after`; "": that text alone
    only_behind   for a grammar that allows everything: the limit holds only for a text that begins with this
    """

    text: str
    parameter: str = "grammar"
    begins_after: str = ""
    max_free_tokens: int | None = None
    forced_end: str = ""
    only_behind: str = ""

    @classmethod
    def json_schema(
        cls,
        schema: dict[str, Any] | bool | str,
        *,
        whitespace_pattern: str | None = None,
        parameter: str = "json_schema",
    ) -> Grammar:
        """JSON that the schema (draft 2020-12 or 7; a dict, or JSON text) accepts.

        Compact, as json.dumps(..., separators=(",", ":")) writes it, unless whitespace_pattern (a regular
        expression) says what may stand between its parts. Properties come in the order of the schema.
        """
        options: dict[str, Any] = dict(_COMPACT)
        if whitespace_pattern is not None:
            options = {"whitespace_pattern": whitespace_pattern}
        checked = check_schema(schema)
        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(checked, overrides={**options, **_NEVER})
        except ValueError as error:  # numbers of more than 64 bits, half surrogate pairs
            raise GrammarError(f"the schema holds a value that cannot be compiled ({error})") from None
        return cls(_bounded(text), parameter)

    @classmethod
    def json_object(cls, *, parameter: str = "json_object") -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, parameter=parameter)

    @classmethod
    def regex(cls, pattern: str, *, parameter: str = "regex") -> Grammar:
        """Texts that match the pattern (syntax of Rust's regex crate: no look-around, no back-references) as a
        whole."""
        check_regex(pattern)
        return cls(_bounded(llguidance.LLMatcher.grammar_from_regex(pattern)), parameter)

    @classmethod
    def choice(cls, choices: Sequence[str], *, parameter: str = "choice") -> Grammar:
        """Exactly one of some texts."""
        if not choices or len(choices) > MAX_CHOICES:
            raise GrammarError(f"got {len(choices)} texts; allowed: 1 to {MAX_CHOICES}")
        if not all(isinstance(text, str) and text for text in choices):
            raise GrammarError("got an empty text or something else than a text; allowed: non-empty texts")
        return cls(_bounded("start: " + " | ".join(quoted(text) for text in dict.fromkeys(choices))), parameter)

    @classmethod
    def lark(cls, grammar: str, *, parameter: str = "grammar") -> Grammar:
        """A context-free grammar in llguidance's variant of Lark; the start rule is `start`."""
        if not grammar.strip():
            raise GrammarError("got an empty grammar; allowed: a grammar with a rule 'start'")
        return cls(_bounded(grammar), parameter)

    @classmethod
    def ebnf(cls, grammar: str, *, parameter: str = "grammar") -> Grammar:
        """A grammar in llama.cpp's GBNF (rules `name ::= ...`, start rule `root`), or in Lark (rules `name: ...`)."""
        _bounded(grammar)
        if not grammar.strip():
            raise GrammarError("got an empty grammar; allowed: one with a rule 'root' (GBNF) or 'start' (Lark)")
        try:
            text = llguidance.grammar_from("gbnf", grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(str(error)[:500]) from None
        return cls.lark(text, parameter=parameter)


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text)


def check_schema(schema: Any) -> dict[str, Any]:
    """The schema as a dict, simplified and without hints for the compiler. Raises GrammarError."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"got text that is no JSON ({error}); allowed: a JSON schema") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"got {json.dumps(schema)[:80]}; allowed: a JSON schema, that is an object")
    try:
        return simplify({key: value for key, value in schema.items() if key != "x-guidance"})
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


def check_regex(pattern: str) -> None:
    """Raise GrammarError for what would be read as something else than it says."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise GrammarError("a backslash at the end of a pattern escapes nothing")


def _bounded(text: str) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"got {size} bytes; allowed: at most {MAX_GRAMMAR_BYTES}")
    return text
