"""A tiny byte-level tokenizer with a chat template, as files, and the text that the toy model writes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT = 512
PAGE = 16
WORDS = (
    " the", " old", " harbour", " keeps", " seven", " boats", ",", " and", " café", " tables", " 🙂", " under", " 漢字",
    " lamps", ".", "\n", " (", "naïve", ")", " rain", " žluťoučký", "  two", " spaces", " 👩‍👩‍👧", " end",
)  # fmt: skip

TEMPLATE = """{%- if tools -%}
<|im_start|>tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('a system message must come first') }}
{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
[{{ call.function.name }} {{ call.function.arguments.a }}]
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def write_toy_tokenizer(folder: Path, *, with_template: bool = True) -> Path:
    """tokenizer.json and its companions in `folder`: bytes, some merges, three control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in ("Ġthe", "Ġand", "Ġold", "in", "er", "Ġra", "ha", "Ġb", "Ġs"):
        left = word[0]
        for right in word[1:]:
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
            left += right
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"eos_token": "<|im_end|>"}
    if with_template:
        settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": backend.token_to_id("<|im_end|>")}))
    return folder


def toy_words(key: str) -> Iterator[str | None]:
    """What the toy model says for a prompt and seed (both in `key`): words; None where it would end."""
    source = random.Random(key)
    while True:
        yield source.choice(WORDS)
        if source.random() < 0.03:
            yield None
