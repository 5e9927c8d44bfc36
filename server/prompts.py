"""Prompts of a request to token ids inside the context. Long texts are tokenised in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxserve.server.errors import ApiError, invalid_value, shown
from jaxserve.server.protocol import Message, ToolCall
from jaxserve.server.reasoning.styles import ReasoningStyle
from jaxserve.server.tokens import Tokenizer, TokenTable
from jaxserve.server.tools.formats import HERMES, ToolFormat
from jaxserve.server.tools.prompting import describe_tools, knows_calls, knows_tools, write_calls_out

from jaxserve.messages import ModelInfo
from jaxserve.structured.structural_tag import token_terms

_INLINE_CHARACTERS = 1000  # shorter texts cost less on the event loop than a thread's hand-over
_NUM_THREADS = 2

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """text: as the client wrote it, None for token ids."""

    token_ids: list[int]
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TextOptions:
    add_special_tokens: bool
    allow_special_tokens: bool


class LoadedModel:
    """What the server knows of a ready model: its facts, its tokenizer, and how prompts become token ids."""

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        *,
        tool_format: ToolFormat | None = None,
        reasoning_style: ReasoningStyle | None = None,
    ) -> None:
        """tool_format, reasoning_style: as the model writes calls and reasons; None: tools as Hermes writes them, no
        reasoning."""
        self.tool_format = tool_format or HERMES
        self.reasoning_style = reasoning_style
        self.info = info
        self.tokenizer = tokenizer
        self.tokens = TokenTable(tokenizer)
        self.control_terms = token_terms({self.tokens.text_of(i): i for i in self.tokens.special_ids})
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    async def encode_prompts(
        self, prompt: str | list[Any], options: TextOptions, *, max_prompts: int, name: str = "prompt"
    ) -> list[Prompt]:
        """Every prompt of the field `name`. Raises ApiError 400 for a mixture, too many, or an id out of range."""
        items = split_prompts(prompt, name)
        if len(items) > max_prompts:
            raise ApiError(
                400, f"{name}: got {len(items)} prompts; allowed: at most {max_prompts}", param=name,
                code="invalid_value",
            )  # fmt: skip
        if not isinstance(items[0], str):
            for place, ids in enumerate(items):
                self._check_ids(ids, name if len(items) == 1 else f"{name}[{place}]")
            return [Prompt(ids) for ids in items]
        num_characters = sum(map(len, items))
        return await self._run(num_characters, lambda: [self._encode(text, options) for text in items])

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        template_kwargs: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Raises ApiError 400 for what the template refuses."""
        if not self.tokenizer.has_chat_template:
            raise ApiError(
                400,
                f"messages: the model {self.info.name!r} has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        if continue_final_message and add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message: got true together with add_generation_prompt; allowed: one of the two",
                param="continue_final_message",
                code="invalid_value",
            )
        turns = [_as_template_sees_it(message, place) for place, message in enumerate(messages)]
        template = self.tokenizer.template_text(with_tools=bool(tools))
        if not knows_calls(template):
            turns = write_calls_out(turns)
        if tools and not knows_tools(template):
            turns, tools = describe_tools(turns, tools), None
        opens_turn = not continue_final_message if add_generation_prompt is None else add_generation_prompt

        def render() -> list[int]:
            return self.tokenizer.apply_chat_template(
                turns,
                add_generation_prompt=opens_turn,
                continue_final_message=bool(continue_final_message),
                tools=tools or None,
                template_kwargs=template_kwargs or None,
            )

        try:
            return list(await self._run(sum(len(str(turn["content"])) for turn in turns), render))
        except ValueError as error:
            # The tokenizer names the field itself.
            text = str(error)
            name = text.partition(":")[0]
            param = name if name in ("messages", "continue_final_message") else "messages"
            raise ApiError(400, text, param=param, code="chat_template_error") from None
        except RecursionError:
            text = "chat_template_kwargs: nested too deeply for the chat template"
            raise ApiError(400, text, param="chat_template_kwargs", code="chat_template_error") from None

    async def encode_text(self, text: str, options: TextOptions) -> list[int]:
        return await self._run(len(text), lambda: self._encode(text, options).token_ids)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self._check_ids(token_ids, "tokens")
        return await self._run(
            len(token_ids), lambda: self.tokens.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of bad words: each as it stands at the start of a text and behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False, allow_special=False)
                if ids:
                    found[tuple(ids)] = None
        return tuple(found)

    def fit(
        self, token_ids: list[int], truncate: int | None, max_tokens: int | None, *, side: str = "left"
    ) -> list[int]:
        """The prompt, cut at `side` to as many tokens as truncate_prompt_tokens says (-1: as many as leave room)."""
        if truncate is None:
            return token_ids
        if truncate == 0:
            raise invalid_value("truncate_prompt_tokens", 0, "1 or more, or -1 for as many as fit")
        if truncate < 0:
            truncate = max(self.info.max_model_len - (max_tokens or 1), 1)
        return token_ids[-truncate:] if side == "left" else token_ids[:truncate]

    def cut(self, prompt: Prompt, truncate: int, limit: int, *, side: str) -> list[int]:
        """The prompt with at most `truncate` tokens (-1: `limit`). Of a text only its own tokens are taken away: those
        that the tokenizer puts around it stay."""
        if truncate == 0:
            raise invalid_value("truncate_prompt_tokens", 0, "1 or more, or -1 for as many as fit")
        size = limit if truncate < 0 else truncate
        ids = prompt.token_ids
        if len(ids) <= size:
            return ids
        head, tail = self._around(prompt)
        inner = ids[head : len(ids) - tail]
        keep = max(0, size - head - tail)
        kept = inner[len(inner) - keep :] if side == "left" else inner[:keep]
        return [*ids[:head], *kept, *ids[len(ids) - tail :]][:size]

    def _around(self, prompt: Prompt) -> tuple[int, int]:
        """How many tokens stand before and behind a text's own."""
        if prompt.text is None:
            return 0, 0
        inner = list(self.tokenizer.encode(prompt.text, add_special_tokens=False, allow_special=False))
        extra = len(prompt.token_ids) - len(inner)
        for head in range(extra + 1):
            if prompt.token_ids[head : head + len(inner)] == inner:
                return head, extra - head
        return 0, 0

    def room(self, token_ids: list[int], max_tokens: int | None, *, prompt: str, limit: str) -> int:
        """Tokens that may follow. Raises ApiError 400 unless the prompt and `max_tokens` fit into the context.

        prompt, limit: names of the fields they came from.
        """
        context = self.info.max_model_len
        room = context - len(token_ids)
        if not token_ids or room < 1:
            raise ApiError(
                400,
                f"{prompt}: got {len(token_ids)} tokens; allowed: 1 to {context - 1} tokens "
                f"(the context holds {context}, and one token must follow)",
                param=prompt,
                code="context_length_exceeded" if token_ids else "invalid_value",
            )
        if max_tokens is not None and max_tokens > room:
            raise ApiError(
                400,
                f"{limit}: got {max_tokens}; allowed: at most {room}, as the prompt has {len(token_ids)} tokens "
                f"and the context holds {context}",
                param=limit,
                code="context_length_exceeded",
            )
        return room

    def _encode(self, text: str, options: TextOptions) -> Prompt:
        ids = self.tokenizer.encode(
            text, add_special_tokens=options.add_special_tokens, allow_special=options.allow_special_tokens
        )
        return Prompt(list(ids), text)

    def _check_ids(self, ids: list[int], name: str) -> None:
        size = self.info.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            place, bad = next((place, token) for place, token in enumerate(ids) if not 0 <= token < size)
            raise invalid_value(f"{name}[{place}]", bad, f"token ids 0 to {size - 1}")

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def split_prompts(prompt: str | list[Any], name: str = "prompt") -> list[str] | list[list[int]]:
    """The field `name` as a list of prompts. Raises ApiError 400 for an empty list or a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, f"{name}: got an empty list; allowed: a text, token ids, or lists of them", param=name)
    kind = type(prompt[0])
    if set(map(type, prompt)) != {kind}:
        place = next(place for place, item in enumerate(prompt) if type(item) is not kind)
        raise invalid_value(f"{name}[{place}]", prompt[place], "items of the same type as the first")
    return [prompt] if kind is int else prompt


def _as_template_sees_it(message: Message, place: int) -> dict[str, Any]:
    """A turn as chat templates expect it: text as one string, calls with their arguments as an object."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None:
        if role != "assistant":
            raise invalid_value(f"messages[{place}].content", None, f"text for the role {message.role!r}")
        content = ""
    turn: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            turn[name] = value
    if message.reasoning is not None:
        turn.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, place, index) for index, call in enumerate(message.tool_calls)]
    return turn


def _call(call: ToolCall, place: int, index: int) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            name = f"messages[{place}].tool_calls[{index}].function.arguments"
            raise ApiError(400, f"{name}: got {shown(call.function.arguments)}; allowed: a JSON object", param=name)
    result: dict[str, Any] = {
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }
    return result if call.id is None else {"id": call.id, **result}
