"""Values that are not known yet: what a traced program reads and computes with. No jax.

A traced program gets a Value where a running one gets text. Adding text to it, methods of str, indexing and call()
give further Values; anything that needs the text itself (a condition, a number, an f-string, a library) raises
NeedsValue, and the program is run by the interpreter from there on.
"""

from __future__ import annotations

import contextvars
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jaxserve.lang.expressions import Expr, Reference, as_expr

# While a program is traced: the calls it has made so far.
_tracing: contextvars.ContextVar[list[Value] | None] = contextvars.ContextVar("jaxserve_lang_tracing", default=None)


class NeedsValue(BaseException):
    """Python asked for a value that only a run can know. is_argument: it comes from the program's arguments alone.

    Not an Exception: a program's own `except Exception` must not take it for one of its own.
    """

    def __init__(self, value: Value, what: str) -> None:
        super().__init__(f"{what} of {value._label} needs its value")
        self.is_argument = value._is_argument


class Value:
    """node: what the graph calls it. function, args, keywords: how it is computed; None: a variable or an argument."""

    def __init__(
        self,
        label: str,
        *,
        source: Any = None,
        function: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> None:
        self._label = label
        self._source = source  # of a variable: (branch, how often the name was set, name); of an argument: its name
        self._function = function
        self._args = args
        self._keywords = keywords or {}
        inputs = self._inputs = list(values_in((args, self._keywords)))
        self._is_argument = isinstance(source, str) or (bool(inputs) and all(each._is_argument for each in inputs))

    def as_expression(self) -> Expr:
        if self._function is operator.add and all(isinstance(each, str | Value) for each in self._args):
            left, right = self._args
            return as_expr(left) + right  # so that known text stays text
        return Reference(self, self._label)

    def __repr__(self) -> str:
        return f"<value {self._label}>"

    # What gives further values

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Expr):
            return self.as_expression() + other
        return _computed(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, Expr):
            return other + self.as_expression()
        return _computed(operator.add, other, self)

    def __getitem__(self, key: Any) -> Value:
        return _computed(operator.getitem, self, key)

    def __getattr__(self, name: str) -> Callable[..., Value]:
        if name.startswith("_") or not hasattr(str, name):
            raise AttributeError(name)
        return functools.partial(_computed, _method(name), self)

    # What needs the value itself

    def __bool__(self) -> NoReturn:
        raise NeedsValue(self, "the truth")

    def __str__(self) -> NoReturn:
        raise NeedsValue(self, "the text")

    def __format__(self, spec: str) -> NoReturn:
        raise NeedsValue(self, "an f-string")

    def __int__(self) -> NoReturn:
        raise NeedsValue(self, "the number")

    def __float__(self) -> NoReturn:
        raise NeedsValue(self, "the number")

    def __index__(self) -> NoReturn:
        raise NeedsValue(self, "the number")

    def __len__(self) -> NoReturn:
        raise NeedsValue(self, "the length")

    def __iter__(self) -> Iterator[Any]:
        raise NeedsValue(self, "the items")

    def __contains__(self, item: Any) -> NoReturn:
        raise NeedsValue(self, "a search")

    def __eq__(self, other: object) -> NoReturn:  # type: ignore[override]
        raise NeedsValue(self, "a comparison")

    def __ne__(self, other: object) -> NoReturn:  # type: ignore[override]
        raise NeedsValue(self, "a comparison")

    def __lt__(self, other: object) -> NoReturn:
        raise NeedsValue(self, "a comparison")

    __le__ = __gt__ = __ge__ = __lt__
    __hash__ = object.__hash__


def _method(name: str) -> Callable[..., Any]:
    def apply(text: Any, *args: Any, **keywords: Any) -> Any:
        return getattr(text, name)(*args, **keywords)

    apply.__name__ = name
    return apply


def _computed(function: Callable[..., Any], *args: Any, **keywords: Any) -> Value:
    return Value(describe_call(function, args, keywords), function=function, args=args, keywords=keywords)


def describe_call(function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    def show(thing: Any) -> str:
        return thing._label if isinstance(thing, Value) else _short(repr(thing))

    shown = [show(each) for each in args] + [f"{name}={show(each)}" for name, each in keywords.items()]
    return f"{getattr(function, '__name__', 'call')}({', '.join(shown)})"


def _short(text: str, width: int = 24) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """function(*args, **keywords), in a compiled program as soon as its arguments are known.

    Give functions to call() that need the text of what was generated (a tool, a parser) or that must not be called
    while a program is only traced. Of two calls neither waits for the other, unless it takes its value.
    """
    calls = _tracing.get()
    if calls is None:
        return function(*args, **keywords)
    value = _computed(function, *args, **keywords)
    calls.append(value)
    return value


def values_in(thing: Any) -> Iterator[Value]:
    """The Values in nested lists, tuples and dicts."""
    if isinstance(thing, Value):
        yield thing
    elif isinstance(thing, list | tuple):
        for item in thing:
            yield from values_in(item)
    elif isinstance(thing, dict):
        for item in thing.values():
            yield from values_in(item)


def replace_values(thing: Any, known: Callable[[Value], Any]) -> Any:
    """The same lists, tuples and dicts with what is known of each Value in its place."""
    if isinstance(thing, Value):
        return known(thing)
    if isinstance(thing, list):
        return [replace_values(item, known) for item in thing]
    if isinstance(thing, tuple):
        return tuple([replace_values(item, known) for item in thing])
    if isinstance(thing, dict):
        return {key: replace_values(item, known) for key, item in thing.items()}
    return thing


def is_opaque(value: Value) -> bool:
    """Whether a function of the user computes it, which may take its time; those of str do not."""
    return value._function is not None and getattr(value._function, "__module__", "") not in ("_operator", __name__)
