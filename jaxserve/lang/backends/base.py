"""What a program needs of the place where it runs. No jax.

Nothing here waits: every call returns at once and answers by a callback, at most once, from any thread.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from jaxserve.lang.context import Context
from jaxserve.lang.options import GenOptions


@dataclasses.dataclass(frozen=True)
class Generation:
    """values: the n texts. context: what was said, with the first of them. meta: one dict for each."""

    values: list[str]
    context: Context
    meta: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Selection:
    decision: ChoicesDecision
    context: Context


@dataclasses.dataclass(frozen=True)
class Turn:
    """Where a conversation is, for servers that get messages. role, text: of the message that is open, if one is."""

    messages: Sequence[dict[str, Any]] = ()
    role: str | None = None
    text: str = ""


OnPiece = Callable[[str], None]
OnGeneration = Callable[[Generation | BaseException], None]
OnSelection = Callable[[Selection | BaseException], None]


class Stream:
    """A backend's notes about one branch of one program. program: the same for all its branches."""

    __slots__ = ("program",)

    def __init__(self, program: str) -> None:
        self.program = program


class Backend(abc.ABC):
    """is_chat_model: the server applies the chat template itself and gets messages instead of text."""

    is_chat_model = False

    @abc.abstractmethod
    def open_role(self, roles: tuple[str, ...]) -> str:
        """Text before the content of the last message of a conversation with these roles."""

    @abc.abstractmethod
    def close_role(self, roles: tuple[str, ...]) -> str:
        """Text behind it."""

    @abc.abstractmethod
    def generate(
        self,
        stream: Stream,
        context: Context,
        turn: Turn,
        options: GenOptions,
        on_piece: OnPiece | None,
        done: OnGeneration,
    ) -> None:
        """Continue the context. on_piece: text as it comes. What cannot be done here is a ValueError that names it."""

    @abc.abstractmethod
    def select(
        self,
        stream: Stream,
        context: Context,
        choices: tuple[str, ...],
        method: ChoicesSamplingMethod,
        done: OnSelection,
    ) -> None:
        """Score the choices after the context and take one."""

    def open_stream(self, program: str) -> Stream:
        return Stream(program)

    def fork_stream(self, stream: Stream) -> Stream:
        """Notes of a branch that goes on from where `stream` is."""
        return Stream(stream.program)

    def close_stream(self, stream: Stream) -> None:  # noqa: B027
        """The branch has ended."""

    def go_on_from(self, stream: Stream, other: Stream) -> None:  # noqa: B027
        """The branch of `stream` goes on with the text of another, which it forked off here."""

    def prepare_fork(self, stream: Stream, context: Context, count: int) -> None:  # noqa: B027
        """`count` branches are about to go on from this context; what they share may be computed now."""

    def cache_prefix(self, context: Context) -> object | None:
        """Compute a prefix that programs share, and keep it while the returned object lives; None: nothing to keep."""
        return None

    def start_from(self, stream: Stream, prefix: object | None) -> None:  # noqa: B027
        """A new branch begins with a prefix of cache_prefix()."""

    def flush_cache(self) -> bool:
        """Forget cached prefixes; whether the backend can."""
        return False


def finish_meta(finish_reason: str | None, stop_reason: int | str | None, num_tokens: int) -> dict[str, Any] | None:
    """finish_reason as SGLang's meta_info spells it."""
    if finish_reason == "length":
        return {"type": "length", "length": num_tokens}
    if finish_reason == "stop":
        return {"type": "stop", "matched": stop_reason}
    return None if finish_reason is None else {"type": finish_reason}
