"""The fields that say what a text must look like, and the grammar that they ask for.

Three spellings are known: OpenAI's response_format, vLLM's structured_outputs (and its older guided_*), SGLang's
regex, ebnf and json_schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from jaxserve.server.errors import ApiError
from msgspec import Meta

from jaxserve.structured.grammar import Grammar, GrammarError
from jaxserve.structured.structural_tag import NO_TOKENS, Tag, tags_grammar

Schema = dict[str, Any] | bool | str
Backend = Literal["auto", "guidance", "llguidance"]


class _Format(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    pass


class TextFormat(_Format, tag="text"):
    """No constraint."""


class JsonObjectFormat(_Format, tag="json_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """strict: always taken as true, the schema is kept to exactly or refused."""

    schema: dict[str, Any]
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Format, tag="json_schema"):
    json_schema: JsonSchema


class Structure(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """begin, JSON that the schema accepts, end."""

    begin: Annotated[str, Meta(min_length=1, max_length=1024)]
    schema: dict[str, Any] | None = None
    end: Annotated[str, Meta(max_length=1024)] = ""


class StructuralTagFormat(_Format, tag="structural_tag"):
    """Free text; behind a trigger one of the structures that start with it follows."""

    structures: Annotated[list[Structure], Meta(min_length=1, max_length=256)]
    triggers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=256)]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of json, regex, choice, grammar (GBNF or Lark), json_object, structural_tag (JSON text).

    whitespace_pattern       what may stand between the parts of JSON; default: nothing
    disable_any_whitespace, disable_fallback   ask for what is so here anyway
    """

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None


class StructuredFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """At most one of these may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Backend | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None


def asked_grammar(fields: StructuredFields, *, special_tokens: Mapping[str, str] = NO_TOKENS) -> Grammar | None:
    """The grammar that a request asks for. Raises ApiError 400 naming the field for two of them, or a wrong one."""
    wanted: list[tuple[str, Callable[[], Grammar]]] = []

    def want(name: str, value: Any, make: Callable[[], Grammar]) -> None:
        if value is not None:
            wanted.append((name, make))

    _want_format(fields.response_format, special_tokens, want)
    if fields.structured_outputs is not None:
        _want_outputs(fields.structured_outputs, special_tokens, want)
    space = fields.guided_whitespace_pattern
    want("guided_json", fields.guided_json, lambda: _schema(fields.guided_json, space))
    want("guided_regex", fields.guided_regex, lambda: Grammar.regex(fields.guided_regex or ""))
    want("guided_choice", fields.guided_choice, lambda: Grammar.choice(fields.guided_choice or []))
    want("guided_grammar", fields.guided_grammar, lambda: Grammar.ebnf(fields.guided_grammar or ""))
    want("json_schema", fields.json_schema, lambda: _schema(fields.json_schema, None))
    want("regex", fields.regex, lambda: Grammar.regex(fields.regex or ""))
    want("ebnf", fields.ebnf, lambda: Grammar.ebnf(fields.ebnf or ""))
    if not wanted:
        return None
    if len(wanted) > 1:
        names = ", ".join(name for name, _ in wanted)
        raise ApiError(400, f"{wanted[1][0]}: got {names}; allowed: one of them", param=wanted[1][0])
    name, make = wanted[0]
    try:
        return msgspec.structs.replace(make(), parameter=name)
    except (GrammarError, UnicodeEncodeError) as error:
        raise refused(name, str(error)) from None


def refused(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name, code="invalid_grammar")


def _want_format(asked: ResponseFormat | None, special: Mapping[str, str], want: Callable[..., None]) -> None:
    if isinstance(asked, JsonSchemaFormat):
        schema = asked.json_schema.schema
        want("response_format", asked, lambda: Grammar.json_schema(schema))
    elif isinstance(asked, JsonObjectFormat):
        want("response_format", asked, Grammar.json_object)
    elif isinstance(asked, StructuralTagFormat):
        want("response_format", asked, lambda: _tags(asked, special))


def _want_outputs(asked: StructuredOutputs, special: Mapping[str, str], want: Callable[..., None]) -> None:
    at = "structured_outputs"
    want(f"{at}.json", asked.json, lambda: _schema(asked.json, asked.whitespace_pattern))
    want(f"{at}.regex", asked.regex, lambda: Grammar.regex(asked.regex or ""))
    want(f"{at}.choice", asked.choice, lambda: Grammar.choice(asked.choice or []))
    want(f"{at}.grammar", asked.grammar, lambda: Grammar.ebnf(asked.grammar or ""))
    want(f"{at}.json_object", asked.json_object or None, lambda: _schema({"type": "object"}, asked.whitespace_pattern))
    want(f"{at}.structural_tag", asked.structural_tag, lambda: _tag_text(asked.structural_tag or "", special))


def _schema(schema: Schema | None, whitespace_pattern: str | None) -> Grammar:
    return Grammar.json_schema({} if schema is None else schema, whitespace_pattern=whitespace_pattern)


def _tag_text(text: str, special: Mapping[str, str]) -> Grammar:
    try:
        asked = msgspec.json.decode(text, type=StructuralTagFormat)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"got text that describes no structural tag ({error})") from None
    return _tags(asked, special)


def _tags(asked: StructuralTagFormat, special: Mapping[str, str]) -> Grammar:
    tags = [Tag(begin=item.begin, body=item.schema or {}, end=item.end) for item in asked.structures]
    return Grammar.lark(tags_grammar(tags, asked.triggers, special_tokens=special))
