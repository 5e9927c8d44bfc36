"""What a program appends to its state: text, generations, selections, roles. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxserve.lang.choices import ChoicesSamplingMethod
from jaxserve.lang.options import GenOptions


class Expr:
    """Expressions are added to each other and to text with +; the sum is appended in order."""

    def __add__(self, other: Expr | str) -> ExprList:
        return ExprList([self, as_expr(other)])

    def __radd__(self, other: Expr | str) -> ExprList:
        return ExprList([as_expr(other), self])


class ExprList(Expr):
    """Expressions one after another; nested lists are flattened."""

    def __init__(self, parts: Sequence[Expr]) -> None:
        self.parts: list[Expr] = []
        for part in parts:
            self.parts += part.parts if isinstance(part, ExprList) else [part]

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


@dataclasses.dataclass(frozen=True, eq=False)
class Text(Expr):
    value: str

    def __repr__(self) -> str:
        return repr(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class Gen(Expr):
    """reasoning: the kind of model whose thoughts are cut off into a variable of their own; None: nothing is cut."""

    name: str | None
    options: GenOptions
    reasoning: str | None = None

    def __repr__(self) -> str:
        return f"gen({self.name!r})"


@dataclasses.dataclass(frozen=True, eq=False)
class Select(Expr):
    name: str | None
    choices: tuple[str, ...]
    method: ChoicesSamplingMethod

    def __repr__(self) -> str:
        return f"select({self.name!r}, {list(self.choices)})"


@dataclasses.dataclass(frozen=True, eq=False)
class RoleBegin(Expr):
    role: str


@dataclasses.dataclass(frozen=True, eq=False)
class RoleEnd(Expr):
    role: str


@dataclasses.dataclass(frozen=True, eq=False)
class VarScopeBegin(Expr):
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class VarScopeEnd(Expr):
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Media(Expr):
    """An image or a video, which no model here takes: executing it is an error."""

    kind: str


@dataclasses.dataclass(frozen=True, eq=False)
class Reference(Expr):
    """Text that is not known yet: a value of a traced program. `resolve` is asked when the text is needed."""

    value: Any
    label: str
    resolve: Callable[[], str] | None = None

    def __repr__(self) -> str:
        return f"⟨{self.label}⟩"


def as_expr(value: object) -> Expr:
    """Raises TypeError for what cannot be appended."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    if hasattr(value, "as_expression"):  # a value of a traced program
        return value.as_expression()
    raise TypeError(f"a program's state takes text and expressions; got {type(value).__name__}: {value!r}")


def leaves(expr: Expr) -> Iterator[Expr]:
    """The expressions in an expression, in order."""
    if isinstance(expr, ExprList):
        yield from expr.parts
    else:
        yield expr
