"""Grammars by themselves: random walks through their masks, against jsonschema, re and plain lists."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from jaxserve.structured.compiler import GrammarCompiler, compile_grammar, make_vocabulary
from jaxserve.structured.constraint import Constraint
from jaxserve.structured.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarError
from jaxserve.structured.json_schema import simplify
from jaxserve.structured.structural_tag import Tag, tags_grammar, token_terms

PIECES = [b'{"', b'":', b'","', b'"}', b" the", b"ab", b"\xf0\x9f", b"\x99\x82", b"00", b"e+", b"null", b"</"]
EOS, CALL = 256 + len(PIECES), 257 + len(PIECES)


class Pieces:
    """A token for each byte and some longer ones; the longest is taken first."""

    vocab_size = 258 + len(PIECES)
    special_ids = frozenset({EOS, CALL})
    eos_token_ids = frozenset({EOS})

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return PIECES[token_id - 256] if token_id < EOS else b"<eos>" if token_id == EOS else b"<call>"

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            best = max((p for p in PIECES if data.startswith(p)), key=len, default=data[:1])
            ids.append(256 + PIECES.index(best) if best in PIECES else best[0])
            data = data[len(best) :]
        return ids


TOKENIZER = Pieces()
VOCABULARY = make_vocabulary(TOKENIZER, TOKENIZER.vocab_size)


def walk(grammar: Grammar, seed: int, limit: int = 600) -> str | None:
    """A random text of the grammar, drawn token by token as the engine does; None if it did not end."""
    source = random.Random(seed)
    matcher = compile_grammar(VOCABULARY, grammar.text)
    constraint = Constraint(matcher, VOCABULARY, TOKENIZER.eos_token_ids)
    tokens: list[int] = []
    for _ in range(limit):
        token = constraint.forced
        if token < 0:
            limiting = constraint.limits_next
            assert limiting is not None
            bits = np.unpackbits(np.frombuffer(limiting.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: TOKENIZER.vocab_size]).tolist()
            assert allowed
            # Ends and closing quotes more often than chance has them: texts should end.
            likely = [t for t in allowed if t in (EOS, ord('"'), ord("}"), ord("]"))]
            token = source.choice(likely) if likely and source.random() < 0.3 else source.choice(allowed)
        constraint.advance(token)
        assert constraint.error is None
        tokens.append(token)
        if constraint.is_finished:
            assert tokens.pop() == EOS
            return b"".join(map(TOKENIZER.token_bytes, tokens)).decode()
    return None


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": ["x", 1, {"k": []}]}},
     "required": ["b"], "additionalProperties": False},
    {"type": "array", "items": {"anyOf": [{"type": "integer", "minimum": -3, "maximum": 300}, {"type": "boolean"}]},
     "minItems": 1, "maxItems": 4},
    {"$defs": {"tree": {"type": "object", "properties": {"v": {"const": 1}, "l": {"anyOf": [{"$ref": "#/$defs/tree"},
     {"type": "null"}]}}, "required": ["v", "l"], "additionalProperties": False}}, "$ref": "#/$defs/tree"},
    {"type": "string", "pattern": "^(ab|the)+[0-9]{2}$"},
    {"type": "number", "multipleOf": 0.5, "minimum": -2, "maximum": 2},
    {"type": "string", "format": "date-time"},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "integer", "maximum": 9, "minimum": 0}},
     "additionalProperties": False, "maxProperties": 2},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 5}]},
    {"type": ["null", "boolean"]},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:30])
def test_every_text_of_a_schema_is_valid(schema: dict) -> None:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    texts = {text for seed in range(25) if (text := walk(Grammar.json_schema(schema), seed)) is not None}
    assert texts
    for text in texts:
        value = json.loads(text)
        validator.validate(value)
        assert not re.search(r"[\n\t]", text)


def test_json_object_takes_objects_alone() -> None:
    texts = [walk(Grammar.json_object(), seed) for seed in range(20)]
    assert any(text is not None for text in texts)
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)


def test_white_space_only_where_it_is_asked_for() -> None:
    grammar = Grammar.json_schema(
        {"type": "array", "items": {"const": 1}, "minItems": 2}, whitespace_pattern="[ ]{1,2}"
    )
    texts = [text for seed in range(40) if (text := walk(grammar, seed))]
    assert any(" " in text for text in texts)
    assert not any("   " in text for text in texts)


def test_regex_choice_gbnf_and_lark() -> None:
    pattern = r"(ab)+-[0-9]{2,3}\.(the|\\)?"
    for seed in range(20):
        text = walk(Grammar.regex(pattern), seed)
        assert text is None or re.fullmatch(pattern, text)
    choices = ["ab", "abc", 'quo"te', "new\nline", "🙂", "ab"]
    assert {walk(Grammar.choice(choices), seed) for seed in range(60)} == set(choices)
    for grammar in (
        Grammar.ebnf('root ::= "a" b+\nb ::= [0-9] | "the"'),
        Grammar.ebnf('start: "a" (/[0-9]/ | "the")+'),
    ):
        texts = {walk(grammar, seed) for seed in range(30)} - {None}
        assert len(texts) > 5
        assert all(re.fullmatch(r"a([0-9]|the)+", text) for text in texts)


def test_what_is_wrong_at_first_sight() -> None:
    for make, word in (
        (lambda: Grammar.choice([]), "1 to"),
        (lambda: Grammar.choice(["a", ""]), "empty"),
        (lambda: Grammar.regex("a\\"), "backslash"),
        (lambda: Grammar.lark(" "), "empty"),
        (lambda: Grammar.ebnf("root ::= ("), "convert"),
        (lambda: Grammar.ebnf("root ::= " + "(" * 20_000), "recursion"),
        (lambda: Grammar.json_schema("{"), "no JSON"),
        (lambda: Grammar.json_schema("[1]"), "an object"),
        (lambda: Grammar.json_schema(False), "an object"),
        (lambda: Grammar.regex("a" * (MAX_GRAMMAR_BYTES + 1)), "at most"),
    ):
        with pytest.raises(GrammarError, match=re.escape(word)):
            make()


@pytest.mark.parametrize(
    ("schema", "simple"),
    [
        ({"uniqueItems": False, "maxItems": 2.0}, {"maxItems": 2}),
        ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
        ({"if": {"const": 1}, "type": "integer"}, {"type": "integer"}),
        ({"then": False, "else": True}, {}),
        ({"minContains": 2, "items": {"not": False}}, {"items": {}}),
        ({"propertyNames": {}, "unevaluatedItems": True, "dependentRequired": {}}, {}),
        ({"enum": [{"if": 1}], "const": {"not": False}}, {"enum": [{"if": 1}], "const": {"not": False}}),
        ({"properties": {"if": {"then": 1}}}, {"properties": {"if": {}}}),
        ({"$ref": "#/a", "maxItems": 1}, {"$ref": "#/a", "maxItems": 1}),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "maxItems": 1,
          "definitions": {"a": {"$ref": "#", "type": "null"}}},
         {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a",
          "definitions": {"a": {"$ref": "#"}}}),
        ({"uniqueItems": True}, {"uniqueItems": True}),
        ({"propertyNames": 1}, {"propertyNames": 1}),
    ],
)  # fmt: skip
def test_keywords_that_say_nothing_are_left_out(schema: dict, simple: dict) -> None:
    assert simplify(schema) == simple


def test_structural_tags() -> None:
    tags = [
        Tag(begin="<fn=a>", body={"type": "integer", "minimum": 0, "maximum": 9}, end="</fn>"),
        Tag(begin="<fn=b>", body="/[x-z]{2}/", end="</fn>"),
        Tag(begin="<call>", body={"enum": ["go"]}),
    ]
    terms = token_terms({"<call>": CALL})
    text = tags_grammar(tags, ["<fn", "<call>"], special_tokens=terms)
    matcher = compile_grammar(VOCABULARY, text)

    def accepts(*parts: str | int) -> bool:
        ids = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
        fresh = matcher.deep_copy()
        return bool(fresh.consume_tokens(ids)) and fresh.is_accepting()

    assert accepts("just < text")
    assert accepts("see <fn=a>7</fn> and <fn=b>xz</fn>.", CALL, '"go"', " end")
    assert not accepts("see <fn=c>")
    assert not accepts("see <fn=a>77</fn>")
    assert not accepts(CALL, '"stop"')
    assert accepts("<call> spelled out is text")
    with pytest.raises(GrammarError, match="triggers"):
        tags_grammar(tags, ["<x"])


def test_compiled_grammars_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.structured.compiler.MAX_CACHED_GRAMMARS", 3)
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
    first = compiler.submit(Grammar.regex("a0"))
    assert compiler.submit(Grammar.regex("a0")) is first
    for number in range(1, 9):
        compiler.submit(Grammar.regex(f"a{number}")).result()
    assert compiler.num_cached == 3
    assert compiler.submit(Grammar.regex("a0")) is not first
    with pytest.raises(GrammarError, match="unclosed"):
        compiler.submit(Grammar.regex("(")).result()
    compiler.close()


def test_drafts_are_checked_without_taking_them() -> None:
    matcher = compile_grammar(VOCABULARY, Grammar.regex("ab[0-9]{3}").text)
    constraint = Constraint(matcher, VOCABULARY, TOKENIZER.eos_token_ids)
    assert constraint.forced == 256 + PIECES.index(b"ab")
    assert constraint.validate([constraint.forced]) == 1
    assert constraint.validate([ord("x")]) == 0
    assert constraint.take_forced(9) == [256 + PIECES.index(b"ab")]
    assert constraint.validate([ord("1"), ord("2"), ord("x")]) == 2
    constraint.advance(ord("5"))
    assert constraint.validate([256 + PIECES.index(b"00"), EOS]) >= 1
    assert constraint.error is None
