"""Tool calls as families of models write them: what the grammar lets through is what the parser reads."""

from __future__ import annotations

import json
import random
import re

import pytest
from jaxserve.server.answer_parts import PartParser, WholeAnswer, read_answer
from jaxserve.server.reasoning.harmony import CONTROL, HarmonyParser, harmony_grammar
from jaxserve.server.reasoning.thinking import ThinkingParser
from jaxserve.server.tools.formats import FORMATS, HERMES, LLAMA3, PYTHONIC, Tool, detect_format

from jaxserve.structured.compiler import compile_grammar, make_vocabulary
from jaxserve.structured.structural_tag import token_terms

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
TIME = Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, TIME)
NAMES = frozenset(tool.name for tool in TOOLS)
ARGUMENTS = {"city": "Łódź", "days": 3, "metric": True}

# One call of get_weather, then two calls, as each format writes them (arguments compact, as grammars force them).
_JSON = json.dumps(ARGUMENTS, separators=(",", ":"), ensure_ascii=False)
ONE = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {_JSON}}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {_JSON}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_JSON}}}]',
    "mistral_args": f"[TOOL_CALLS]get_weather[ARGS]{_JSON}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": '[get_weather(city="Łódź", days=3, metric=true)]',
    "gemma": "<start_function_call>call:get_weather{city:<escape>Łódź<escape>,days:3,metric:true}<end_function_call>",
    "gemma_code": '```tool_code\nget_weather(city="Łódź", days=3, metric=true)\n```',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "llama3_json": ONE["llama3_json"] + '; {"name": "get_time", "parameters": {}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "get_time", "arguments": {}}]',
    "mistral_args": ONE["mistral_args"] + "[TOOL_CALLS]get_time[ARGS]{}",
    "deepseek_v3": ONE["deepseek_v3"].removesuffix("<｜tool▁calls▁end｜>")
    + "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": ONE["deepseek_v31"].removesuffix("<｜tool▁calls▁end｜>")
    + "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": ONE["pythonic"][:-1] + ", get_time()]",
    "gemma": ONE["gemma"] + "<start_function_call>call:get_time{}<end_function_call>",
    "gemma_code": ONE["gemma_code"].removesuffix("\n```") + "\nget_time()\n```",
}


class ByteVocabulary:
    """One token a byte, an end token, and harmony's control tokens."""

    vocab_size = 257 + len(CONTROL)
    special_ids = frozenset(range(256, 257 + len(CONTROL)))
    eos_token_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else ("<eos>", *CONTROL)[token_id - 256].encode()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


BYTES = make_vocabulary(ByteVocabulary(), ByteVocabulary.vocab_size)
HARMONY = {name: 257 + place for place, name in enumerate(CONTROL)}


def accepts(grammar: str, text: str, tokens: dict[str, int] | None = None) -> bool:
    """tokens: spellings in the text that are control tokens."""
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]:
        ids += [tokens[piece]] if tokens and piece in tokens else piece.encode()
    matcher = compile_grammar(BYTES, grammar)
    return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()


def read_in_pieces(parser: PartParser, text: str, seed: int) -> WholeAnswer:
    source, whole = random.Random(seed), WholeAnswer()
    while text:
        size = source.randint(1, 7)
        whole.add(parser.feed(text[:size]))
        text = text[size:]
    return whole.add(parser.finish())


def calls_of(whole: WholeAnswer) -> list[tuple[str, dict]]:
    return [(call.name, json.loads(call.arguments)) for call in whole.calls]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_the_grammar_forces_is_what_the_parser_reads(name: str) -> None:
    form = FORMATS[name]
    both = [("get_weather", ARGUMENTS), ("get_time", {})]
    required = form.grammar(TOOLS, {}, must_call=True, parallel=True)
    single = form.grammar(TOOLS, {}, must_call=True, parallel=False)
    assert accepts(required, ONE[name])
    assert accepts(required, TWO[name])
    assert accepts(single, ONE[name])
    assert not accepts(single, TWO[name])
    assert not accepts(required, "Hello")
    assert calls_of(read_answer(form.parser(NAMES), ONE[name])) == both[:1]
    for seed in range(20):
        whole = read_in_pieces(form.parser(NAMES), TWO[name], seed)
        assert calls_of(whole) == both
        assert whole.content is None
        assert len({call.call_id for call in whole.calls}) == 2


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_auto_allows_text_and_keeps_calls_to_their_schema(name: str) -> None:
    form = FORMATS[name]
    auto = form.grammar(TOOLS, {}, must_call=False, parallel=True)
    for text in ("", "Hello. Is 1 < 2?", ONE[name], TWO[name]):
        assert accepts(auto, text), text
    assert not accepts(auto, ONE[name].replace("get_weather", "get_whether"))
    assert not accepts(auto, ONE[name].replace("city", "town"))
    if not form.bare:
        assert accepts(auto, "I look it up.\n" + ONE[name])
        for seed in range(20):
            whole = read_in_pieces(form.parser(NAMES), "I look it up.\n\n" + TWO[name] + "\n", seed)
            assert whole.content == "I look it up."
            assert [name for name, _ in calls_of(whole)] == ["get_weather", "get_time"]


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("text", ["", "  Hello\n\nWorld <b> [1, 2] {x} \n", "a [TOOL_CALL", "x <tool_cal", '{"a": 1}'])
def test_text_without_calls_is_left_as_it_is(name: str, text: str) -> None:
    for seed in range(5):
        whole = read_in_pieces(FORMATS[name].parser(NAMES), text, seed)
        assert (whole.content or "") == text
        assert not whole.calls


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_only_looks_like_a_call_is_content(name: str) -> None:
    unknown = ONE[name].replace("get_weather", "rm_rf")
    broken = {"hermes": "<tool_call>\nno json</tool_call>", "mistral": "[TOOL_CALLS] none"}.get(name, unknown)
    for text in (unknown, broken):
        for seed in range(5):
            whole = read_in_pieces(FORMATS[name].parser(NAMES), text, seed)
            assert not whole.calls
            assert (whole.content or "").replace("\n", "") == text.replace("\n", "")


def test_arguments_stream_as_they_come() -> None:
    parser = HERMES.parser(NAMES)
    seen = []
    for char in ONE["hermes"]:
        seen += [(part.__class__.__name__, getattr(part, "text", "")) for part in parser.feed(char)]
    pieces = [text for kind, text in seen if kind == "CallArguments"]
    assert len(pieces) > 10
    assert json.loads("".join(pieces)) == ARGUMENTS


def test_a_call_cut_off_keeps_what_there_is() -> None:
    cut = ONE["hermes"][:70]
    whole = read_in_pieces(HERMES.parser(NAMES), cut, 1)
    assert whole.calls[0].name == "get_weather"
    assert _JSON.startswith(whole.calls[0].arguments)


def test_variants_that_models_write() -> None:
    spaced = '<tool_call>{"arguments": {"city": "a}]\\"{"} , "name" : "get_weather"}</tool_call>'
    assert calls_of(read_in_pieces(HERMES.parser(NAMES), spaced, 3)) == [("get_weather", {"city": 'a}]"{'})]
    as_text = '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"x\\"}"}</tool_call>'
    assert calls_of(read_in_pieces(HERMES.parser(NAMES), as_text, 3)) == [("get_weather", {"city": "x"})]
    none = '<tool_call>{"name": "get_time"}</tool_call>'
    assert calls_of(read_in_pieces(HERMES.parser(NAMES), none, 3)) == [("get_time", {})]
    tagged = '<|python_tag|>{"name": "get_weather", "parameters": {"city": "x"}}'
    assert calls_of(read_in_pieces(LLAMA3.parser(NAMES), tagged, 3)) == [("get_weather", {"city": "x"})]
    python = "[get_weather(city='it\\'s ]', days=-2, metric=False)]"
    found = calls_of(read_in_pieces(PYTHONIC.parser(NAMES), python, 3))
    assert found == [("get_weather", {"city": "it's ]", "days": -2, "metric": False})]


def test_the_format_is_found_in_the_template() -> None:
    for template, name in (
        ("{{ tools }} <tool_call>", "hermes"), ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]{{ n }}[ARGS]", "mistral_args"), ("<|python_tag|>", "llama3_json"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"), ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<start_function_call>", "gemma"), ("nothing", "hermes"),
    ):  # fmt: skip
        assert detect_format(template).name == name


def test_harmony_channels_become_reasoning_content_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_JSON}"
    )
    terms = token_terms(HARMONY)
    assert accepts(harmony_grammar(TOOLS, terms, must_call=True), text, HARMONY)
    assert not accepts(harmony_grammar(TOOLS, terms, must_call=True), text.replace("city", "town"), HARMONY)
    for seed in range(20):
        whole = read_in_pieces(HarmonyParser(NAMES), text, seed)
        assert (whole.reasoning, whole.content) == ("Look it up.", "One moment.")
        assert calls_of(whole) == [("get_weather", ARGUMENTS)]
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert accepts(harmony_grammar(TOOLS, terms, must_call=False), final, HARMONY)
    assert not accepts(harmony_grammar(TOOLS, terms, must_call=True), final, HARMONY)
    form = '%json {"enum": ["Yes."]}'
    assert not accepts(harmony_grammar((), terms, must_call=False, answer=form), final, HARMONY)
    assert accepts(harmony_grammar((), terms, must_call=False, answer=form), final.replace("Yes.", '"Yes."'), HARMONY)
    whole = read_in_pieces(HarmonyParser(NAMES), final + "<|return|>", 1)
    assert (whole.reasoning, whole.content) == ("Hm.", "Yes.")
    assert read_answer(HarmonyParser(), "Just text.").content == "Just text."


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nhm, 1 < 2\n</think>\n\nYes </think> no", False, "hm, 1 < 2", "Yes </think> no"),
        ("hm\n\nso\n</think>\nYes", True, "hm\n\nso", "Yes"),
        ("<think>hm</think>Yes", True, "hm", "Yes"),
        ("Yes, <think> is a tag", False, None, "Yes, <think> is a tag"),
        ("hm </thin", True, "hm </thin", None),
        ("<think></think>\nYes", False, None, "Yes"),
        ("  plain ", False, None, "  plain "),
        ("", True, None, None),
        ("<thi", False, None, "<thi"),
    ],
)
def test_reasoning_between_marks(text: str, is_open: bool, reasoning: str | None, content: str | None) -> None:
    for seed in range(10):
        whole = read_in_pieces(ThinkingParser("<think>", "</think>", is_open=is_open), text, seed)
        assert (whole.reasoning, whole.content) == (reasoning, content)
