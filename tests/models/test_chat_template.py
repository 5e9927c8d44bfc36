"""Chat templates: what reaches them, what they may do, and whose fault an error is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import byte_level, folder_of

from jaxserve.tokenizer import Tokenizer, load_tokenizer

USER = [{"role": "user", "content": "hi"}]


def with_template(folder: Path, template: Any) -> Tokenizer:
    return load_tokenizer(folder_of(folder, byte_level(), chat_template=template))


def rendered(tokenizer: Tokenizer, messages: list[dict], **options: Any) -> str:
    return tokenizer.decode(tokenizer.apply_chat_template(messages, **options), skip_special_tokens=False)


@pytest.mark.parametrize("attack", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__['os'].system('touch ' ~ 'MARKER') }}",
    "{{ raise_exception.__globals__.__builtins__.open('MARKER', 'w') }}",
    "{% for x in range(999999999) %}x{% endfor %}",
    "{{ messages.append(1) }}",
])  # fmt: skip
def test_the_sandbox_refuses(attack: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    tokenizer = with_template(tmp_path, attack.replace("MARKER", str(marker)))
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.apply_chat_template(USER)
    assert not marker.exists()


def test_a_refusal_carries_the_templates_own_words(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = with_template(tmp_path, template)
    assert rendered(tokenizer, USER) == "hi"
    with pytest.raises(ValueError, match="System role not supported"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}, *USER])


@pytest.mark.parametrize(
    "template", ["{{ messages[7].content + 'a' }}", "{{ 1 / 0 }}", "{{ messages[0].content.nope.x }}"]
)
def test_a_template_that_stumbles_is_a_value_error(template: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chat template"):
        with_template(tmp_path, template).apply_chat_template(USER)


def test_a_broken_template_and_none_at_all_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not valid"):
        with_template(tmp_path, "{% if %}").apply_chat_template(USER)
    tokenizer = load_tokenizer(folder_of(tmp_path, byte_level()))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template(USER)


def test_null_content_and_empty_calls(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.content }}{% if 'tool_calls' in m %}+{{ m.tool_calls | length }}{% endif %}]"
        "{% endfor %}"
    )
    tokenizer = with_template(tmp_path, template)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    for message in ({"content": None}, {"content": ""}, {}):
        assert rendered(tokenizer, [{"role": "assistant", "tool_calls": calls} | message]) == "[+1]"
        assert rendered(tokenizer, [{"role": "assistant", "tool_calls": []} | message]) == "[]"


def test_parts_are_joined_and_others_are_refused(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ messages[0].content }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(tokenizer, [{"role": "user", "content": parts}]) == "ab"
    with pytest.raises(ValueError, match="image_url"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image_url"}]}])


def test_tools_and_extra_values_never_make_control_tokens(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ tools | tojson }}{{ extra }}<|end|>")
    tools = [{"type": "function", "function": {"name": "f", "description": "<|end|>", "<|end|>": 1}}]
    ids = tokenizer.apply_chat_template(USER, tools=tools, template_kwargs={"extra": "é<|end|>"})
    assert ids.count(1) == 1 and ids[-1] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == json.dumps(tools) + "é<|end|><|end|>"


def test_extra_values_do_not_replace_the_conversation(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ messages[0].content }}{{ add_generation_prompt }}{{ mode }}")
    extra = {"messages": [{"content": "other"}], "add_generation_prompt": 7, "mode": "m"}
    assert rendered(tokenizer, USER, template_kwargs=extra) == "hiTruem"


def test_what_templates_expect_of_their_environment(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}\n"
        "  {% if loop.index0 == 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% endfor %}{{ {'é': '<'} | tojson }}{{ strftime_now('%Y') | length }}"
    )
    assert rendered(with_template(tmp_path, template), USER * 2) == 'hi{"é": "<"}4'


def test_named_templates_and_files(tmp_path: Path) -> None:
    tokenizer = with_template(
        tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    )
    assert rendered(tokenizer, USER) == "plain"
    assert rendered(tokenizer, USER, tools=[{"type": "function"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(load_tokenizer(tmp_path), USER) == "file"


def test_a_message_that_the_template_trims_can_be_continued(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{% for m in messages %}{{ m.content | trim }}<|end|>{% endfor %}")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(tokenizer, [*USER, {"role": "assistant", "content": "Sure \n"}], **options) == "hi<|end|>Sure \n"
    silent = with_template(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(ValueError, match="continue_final_message"):
        silent.apply_chat_template([*USER, {"role": "assistant", "content": "x"}], **options)
    with pytest.raises(ValueError, match="messages"):
        tokenizer.apply_chat_template([], **options)
