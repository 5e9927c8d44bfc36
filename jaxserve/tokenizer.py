"""Text to token ids and back, for every checkpoint format. No jax.

Control tokens are never made from user text: encode() treats their spelling as plain characters, and in a chat only
the template's own text may hold them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxserve.chat_template import END_MARK, ChatTemplate, guard_conversation
from jaxserve.control_tokens import ControlTokens
from jaxserve.gguf_tokenizer import backend_from_gguf, metadata_from_gguf
from jaxserve.models.special_tokens import gguf_end_token_ids, hf_end_token_ids, read_json, token_text


class Tokenizer:
    """Thread-safe once built. vocab_size counts ids, those without a spelling included."""

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
        prefix_ids: Sequence[int],
        templates: dict[str, str],
        strip_leading_space: bool = False,
        suffix_ids: Sequence[int] = (),
    ) -> None:
        added = backend.get_added_tokens_decoder()
        # A token that ends a text is a control token even where the file forgot to say so.
        forgotten = [added[i] for i in eos_token_ids if i in added and not added[i].special]
        for token in forgotten:
            token.special = True
        if forgotten:
            backend.add_special_tokens(forgotten)
        # Control tokens are cut out of template text below; here their spelling is text like any other.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._backend_inside = _without_first_space(backend)
        self.vocab_size = vocab_size
        self._control = ControlTokens(
            {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        )
        self.special_ids = frozenset(self._control.id_of.values())
        self.bos_token_id = bos_token_id
        self.eos_token_ids = list(eos_token_ids)
        self.strip_leading_space = strip_leading_space
        self._prefix, self._suffix = list(prefix_ids), list(suffix_ids)
        self._template_texts = templates
        self._templates: dict[str, ChatTemplate] = {}
        self._bytes = _token_bytes(backend, vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of `text`. add_special_tokens: with the begin token, if the model wants one.

        allow_special: control tokens spelled out in the text become those tokens. Raises ValueError for text that is
        not valid Unicode (a lone surrogate).
        """
        ids = self._encode_with_specials(text) if allow_special else self._encode_plain(text)
        if not add_special_tokens:
            return ids
        if self._prefix and ids[: len(self._prefix)] == self._prefix:
            return ids + self._suffix  # never a second begin token
        return self._prefix + ids + self._suffix

    def encode_inside(self, text: str) -> list[int]:
        """Tokens of a text that stands behind other text: no begin token, no space before the first word."""
        ids = self._encode_plain(text, is_first=False)
        if self._joined(ids) == text.encode():
            return ids
        # A tokenizer that puts a space before every text: cut it off together with a first character.
        ids = self._encode_plain("\n" + text, is_first=False)
        start = next((k for k in range(1, len(ids) + 1) if self._joined(ids[k:]) == text.encode()), 0)
        return ids[start:]

    def _joined(self, ids: Sequence[int]) -> bytes:
        return b"".join([self._bytes[i] for i in ids])

    def encode_parts(self, parts: Sequence[tuple[str, bool]], *, is_first: bool = True) -> list[int]:
        """Token ids of a text in parts (text, may hold control tokens); where it is cut makes no difference.

        is_first: nothing comes before it, so the begin token does if the model wants one.
        """
        ids: list[int] = []

        def encode(text: str) -> list[int]:
            if not text or is_first or ids:
                return self._encode_plain(text, is_first=not ids)
            return self.encode_inside(text)

        plain = ""
        for text, may_hold_control in parts:
            for piece, control_id in self._control.split(text) if may_hold_control else [(text, None)]:
                plain += piece
                if control_id is not None:
                    ids += [*encode(plain), control_id]
                    plain = ""
        ids += encode(plain)
        if is_first and ids[: len(self._prefix)] != self._prefix:
            return self._prefix + ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids: their bytes, joined and read as UTF-8. Ids without a spelling give nothing."""
        skipped = self.special_ids if skip_special_tokens else ()
        data = b"".join(self.token_bytes(i) for i in ids if i not in skipped)
        text = data.decode("utf-8", errors="replace")
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text. Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id: got {token_id}; allowed: 0 to {self.vocab_size - 1}")
        return self._bytes[token_id]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template_texts)

    def template_text(self, *, with_tools: bool = False) -> str:
        """The template that apply_chat_template() uses, with or without tools; "" if there is none."""
        return self._template_texts[self._template_name(with_tools)] if self._template_texts else ""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Raises ValueError, in the client's terms, if the template refuses it."""
        text, guard = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self._encode_with_specials(text, guard)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> tuple[str, str]:
        """The template's text and the guard: a character that splits control tokens spelled out in messages."""
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message: got true with add_generation_prompt true; allowed: one of them")
        guarded, guard = guard_conversation(
            messages, tools, template_kwargs, self._control, mark_end=continue_final_message
        )
        text = self._template(with_tools=bool(tools)).render(
            guarded.messages,
            tools=guarded.tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._spelling(self.bos_token_id),
            eos_token=self._spelling(self.eos_token_ids[0] if self.eos_token_ids else None),
            extra=guarded.extra,
        )
        if continue_final_message:
            if END_MARK not in text:
                raise ValueError("continue_final_message: the chat template does not print the last message's text")
            text = text[: text.rindex(END_MARK)]
        return text, guard

    def _template_name(self, with_tools: bool) -> str:
        name = "tool_use" if with_tools else "default"
        if name in self._template_texts:
            return name
        return "default" if "default" in self._template_texts else next(iter(self._template_texts))

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        if not self._template_texts:
            raise ValueError(
                "messages: this model has no chat template; allowed: /v1/completions, or a model whose files hold one"
            )
        name = self._template_name(with_tools)
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._template_texts[name])
        return self._templates[name]

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""

    def _encode_plain(self, text: str, *, is_first: bool = True) -> list[int]:
        if not text:
            return []
        backend = self._backend if is_first else self._backend_inside
        try:
            return backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):  # the package says no more than that it wants a string
            at = next((k for k, character in enumerate(text) if 0xD800 <= ord(character) < 0xE000), None)
            if at is None:
                raise
            raise ValueError(
                f"text: got the lone surrogate U+{ord(text[at]):04X} at character {at}; allowed: valid Unicode"
            ) from None

    def _encode_with_specials(self, text: str, guard: str = "") -> list[int]:
        ids: list[int] = []
        for piece, control_id in self._control.split(text):
            ids += self._encode_plain(piece.replace(guard, "") if guard else piece, is_first=not ids)
            if control_id is not None:
                ids.append(control_id)
        return ids


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a GGUF file or a Hugging Face folder. Raises ValueError naming the file and what is missing."""
    path = Path(path)
    if (path / "tokenizer.gguf").is_file():
        path = path / "tokenizer.gguf"  # of a converted GGUF file
    return _from_gguf(path) if path.is_file() else _from_folder(path)


def _from_gguf(path: Path) -> Tokenizer:
    fields = metadata_from_gguf(path)
    backend = backend_from_gguf(path, fields)
    bos = fields.get("tokenizer.ggml.bos_token_id")
    is_spm = fields["tokenizer.ggml.model"] == "llama"
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", is_spm)
    templates = {"default": fields["tokenizer.chat_template"]} if fields.get("tokenizer.chat_template") else {}
    for key, text in fields.items():
        if key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = text
    return Tokenizer(
        backend,
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        eos_token_ids=gguf_end_token_ids(fields),
        bos_token_id=bos,
        prefix_ids=[bos] if adds_bos and bos is not None else [],
        templates=templates,
        strip_leading_space=is_spm and fields.get("tokenizer.ggml.add_space_prefix", True),
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{folder}: no tokenizer.json; allowed: a folder with one, or a GGUF file")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the tokenizers package raises plain Exception
        raise ValueError(f"{path}: not a valid tokenizer ({error})") from None
    settings, config = read_json(folder / "tokenizer_config.json"), read_json(folder / "config.json")
    # Files of encoders cut and pad texts to one length, which hides what stands behind a text.
    backend.no_truncation()
    backend.no_padding()
    bos = _token_id(backend, settings.get("bos_token"))
    prefix, suffix = _around_text(backend)
    return Tokenizer(
        backend,
        vocab_size=max(config.get("vocab_size", 0), backend.get_vocab_size(with_added_tokens=True)),
        eos_token_ids=hf_end_token_ids(folder),
        bos_token_id=bos,
        prefix_ids=prefix,
        suffix_ids=suffix,
        templates=_templates(folder, settings),
        strip_leading_space=_strips_leading_space(backend),
    )


def _around_text(backend: Backend) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and behind a text."""
    bare, whole = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """A file of its own, a string, or a list of named templates."""
    templates: dict[str, str] = {}
    told = settings.get("chat_template")
    if isinstance(told, str):
        templates["default"] = told
    elif isinstance(told, list):
        templates.update({entry["name"]: entry["template"] for entry in told})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text()
    if (folder / "chat_template.jinja").exists():
        templates["default"] = (folder / "chat_template.jinja").read_text()
    return templates


def _token_id(backend: Backend, token: str | dict[str, Any] | None) -> int | None:
    spelling = token_text(token)
    return None if spelling is None else backend.token_to_id(spelling)


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A pipeline of the tokenizers package as a flat list of its parts."""
    if not part:
        return []
    inner = part.get("decoders") or part.get("pretokenizers") or part.get("normalizers")
    return [step for child in inner for step in _steps(child)] if inner is not None else [part]


def _described(part: Any) -> list[dict[str, Any]]:
    """The steps of a decoder or pre-tokenizer (None: no steps) as the tokenizers package writes them to files."""
    # Its state for pickling is that text; the whole tokenizer's would hold every token and merge as well.
    return [] if part is None else _steps(json.loads(part.__getstate__()))


def _without_first_space(backend: Backend) -> Backend:
    """For text behind a control token: the same tokenizer, but one that puts a space before the first word of a text
    only does not do so."""
    if not any(step.get("prepend_scheme") == "first" for step in _described(backend.pre_tokenizer)):
        return backend
    described = json.loads(backend.to_str())
    for step in _steps(described["pre_tokenizer"]):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    inside = Backend.from_str(json.dumps(described))
    inside.encode_special_tokens = True
    return inside


def _strips_leading_space(backend: Backend) -> bool:
    decoders = _described(backend.decoder)
    return any(d["type"] == "Strip" and d.get("start") for d in decoders) or any(
        d["type"] == "Metaspace" and d.get("prepend_scheme", "always") != "never" for d in decoders
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


def _token_bytes(backend: Backend, vocab_size: int) -> list[bytes]:
    """What every id adds to the text, by the decoder's own kind (byte-level, or sentencepiece with byte fallback)."""
    decoders = {step["type"] for step in _described(backend.decoder)}
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    table = [b""] * vocab_size
    alphabet = _byte_alphabet() if "ByteLevel" in decoders else {}
    byte_token = re.compile(r"<0x([0-9A-Fa-f]{2})>")
    for token, i in backend.get_vocab(with_added_tokens=True).items():
        if i >= vocab_size:
            continue
        if i in added:
            table[i] = added[i].replace("▁", " ").encode() if not alphabet else added[i].encode()
        elif alphabet:
            table[i] = b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in token)
        elif (match := byte_token.fullmatch(token)) is not None:
            table[i] = bytes([int(match.group(1), 16)])
        else:
            table[i] = token.replace("▁", " ").encode()
    return table
