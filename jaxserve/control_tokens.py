"""Finding the spellings of control tokens in text, and breaking them where a client wrote them. No jax."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from tokenizers import AddedToken

# Roles that templates may build control tokens from ("<|" + role + "|>"); any other one is a client's free text.
_KNOWN_ROLES = frozenset(
    {"system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation", "environment"}
)
_SPACE = re.compile(r"\s*")


class ControlTokens:
    """The control tokens of one tokenizer: id -> AddedToken, whose lstrip and rstrip say that it swallows the white
    space beside it."""

    def __init__(self, tokens: dict[int, AddedToken]) -> None:
        self.id_of = {token.content: token_id for token_id, token in tokens.items() if token.content}
        self._strips_left = {token.content for token in tokens.values() if token.lstrip}
        self._strips_right = {token.content for token in tokens.values() if token.rstrip}
        self._pattern = re.compile(_longest_of(self.id_of), re.DOTALL) if self.id_of else None

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(plain text, the control token behind it); None after the last piece. The longest spelling wins."""
        start = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() < start:
                continue
            spelling = match.group()
            piece, start = text[start : match.start()], match.end()
            if spelling in self._strips_left:
                piece = piece.rstrip()
            if spelling in self._strips_right:
                start = _SPACE.match(text, start).end()
            yield piece, self.id_of[spelling]
        yield text[start:], None

    def breaker(self, guard: str) -> Callable[[str], str]:
        """A function that puts `guard` inside every control token spelled out in a text."""
        pattern = self._pattern
        if pattern is None:
            return lambda text: text
        return lambda text: pattern.sub(lambda match: match.group()[0] + guard + match.group()[1:], text)

    def can_come_from_role(self, role: str) -> bool:
        """Whether a template that prints a role between its own marks could make a control token of this one."""
        return role not in _KNOWN_ROLES and bool(role) and any(role in spelling for spelling in self.id_of)


def _longest_of(spellings: Iterable[str]) -> str:
    """A pattern for the longest of many spellings at a place, in time that does not grow with their number."""
    tree: dict[str, dict] = {}
    for spelling in spellings:
        node = tree
        for character in spelling:
            node = node.setdefault(character, {})
        node[""] = {}  # a spelling ends here

    # Deepest first without recursion: spellings may be longer than Python's stack allows.
    patterns: dict[int, str] = {}
    stack = [(tree, False)]
    while stack:
        node, is_ready = stack.pop()
        if not is_ready:
            stack.append((node, True))
            stack.extend((child, False) for character, child in node.items() if character)
            continue
        branches = [re.escape(character) + patterns[id(child)] for character, child in node.items() if character]
        pattern = "" if not branches else branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
        patterns[id(node)] = f"(?:{pattern})?" if "" in node and branches else pattern
    return patterns[id(tree)]
