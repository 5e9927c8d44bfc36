"""What a program's function holds in its hands: the state, and the states of its branches. No jax."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from jaxserve.lang.branch import Branch
from jaxserve.lang.expressions import Expr, ExprList, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd, as_expr
from jaxserve.lang.program_run import ProgramRun


class ProgramState:
    """Text and variables of one branch. Appending never waits; reading waits for what is read.

    Reading raises what made the program fail; error() returns it.
    """

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self.ret_value = None

    def __iadd__(self, other: Expr | str) -> ProgramState:
        if other is None:
            raise ValueError("a program's state takes text and expressions; got None")
        self._branch.append(as_expr(other))
        return self

    @property
    def ret_value(self) -> Any:
        """What the function returned; of a compiled program once its values are there."""
        return self._result()

    @ret_value.setter
    def ret_value(self, value: Any) -> None:
        self._result: Callable[[], Any] = lambda: value

    def set_result(self, result: Callable[[], Any]) -> None:
        """ret_value is what `result` returns when it is asked for."""
        self._result = result

    def when_finished(self, callback: Callable[[], None]) -> None:
        """Call back once the program has ended and all its branches are done; at once if it is. From any thread."""
        self._branch.run.when_finished(callback)

    # Roles and scopes

    def system(self, expr: Expr | str | None = None) -> Any:
        """Append a system message; without an argument a with block whose appends are its content."""
        return self._role("system", expr)

    def user(self, expr: Expr | str | None = None) -> Any:
        return self._role("user", expr)

    def assistant(self, expr: Expr | str | None = None) -> Any:
        return self._role("assistant", expr)

    def _role(self, name: str, expr: Expr | str | None) -> Any:
        if expr is None:
            return self._role_block(name)
        message = ExprList([RoleBegin(name), as_expr(expr), RoleEnd(name)])
        self._branch.append(message)
        return message

    @contextlib.contextmanager
    def _role_block(self, name: str) -> Iterator[None]:
        self._branch.append(RoleBegin(name))
        yield
        self._branch.append(RoleEnd(name))

    @contextlib.contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """The text appended in the block becomes the variable `name`."""
        self._branch.append(VarScopeBegin(name))
        yield
        self._branch.append(VarScopeEnd(name))

    # Branches

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> ProgramStateGroup:
        """`size` states that go on from here, side by side."""
        if position_ids_offset is not None:
            raise ValueError("position_ids_offset: not supported; allowed: None")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size: got {size!r}; allowed: 1 or more")
        return ProgramStateGroup([ProgramState(branch) for branch in self._branch.fork(size)], self)

    @contextlib.contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[ProgramState]:
        """A state that goes on from here and is joined at the end of the block."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group.join()

    # Reading

    def text(self) -> str:
        """All text, once everything appended so far is there. After an error: what there is."""
        self._branch.wait_idle()
        return self._branch.text

    def messages(self) -> list[dict[str, Any]]:
        """The closed messages of the conversation, in OpenAI's form."""
        self._branch.wait_idle()
        return list(self._branch.messages)

    def sync(self) -> None:
        """Wait until everything appended so far is done."""
        self._branch.wait_idle()

    def error(self) -> BaseException | None:
        """What ended the program too early; None if nothing did. Waits as sync() does."""
        self._branch.wait_idle()
        return self._branch.error

    def get_var(self, name: str) -> Any:
        """The value of a variable. Raises KeyError for one that was never appended, and what made the program fail."""
        return self._variable(name).result()

    def set_var(self, name: str, value: Any) -> None:
        self._branch.set_variable(name, value)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """What is known of a generation beside its text: counts of tokens, why it ended, log-probabilities.

        A list of them for n > 1. Raises TimeoutError after `timeout` seconds.
        """
        variable = self._variable(name)
        variable.result(timeout)
        return variable.meta

    def _variable(self, name: str) -> Any:
        try:
            return self._branch.variables[name]
        except KeyError:
            if self._branch.error is not None:
                raise self._branch.error from None
            raise KeyError(f"no variable {name!r}; there are: {', '.join(self._branch.variables) or 'none'}") from None

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of the text, or of one variable, as they come if the program runs with stream=True; else all at
        once. Raises what made the program fail."""
        position = 0
        while True:
            text, is_over = self._next_text(var_name, position)
            position += len(text)
            if text:
                yield text
            if is_over:
                return

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """text_iter() for asyncio. return_meta_data: pairs with the variable's meta info, None while it runs."""
        position = 0
        while True:
            text, is_over = await asyncio.to_thread(self._next_text, var_name, position)
            position += len(text)
            if text:
                meta = self._variable(var_name).meta if return_meta_data and var_name is not None else None
                yield (text, meta) if return_meta_data else text
            if is_over:
                return

    def _next_text(self, name: str | None, position: int) -> tuple[str, bool]:
        """What follows the first `position` characters, once there is something or it is over."""
        branch = self._branch
        changed = branch.run.changed
        with changed:
            while True:
                if branch.error is not None:
                    raise branch.error
                is_streaming = branch.run.is_streaming
                is_over = branch.is_finished if is_streaming else branch.is_idle
                if name is None:
                    whole = branch.text
                elif name in branch.variables:
                    variable = branch.variables[name]
                    is_over = variable.done()
                    whole = str(variable.result()) if is_over else variable.partial
                elif is_over:
                    raise KeyError(f"no variable {name!r}; there are: {', '.join(branch.variables) or 'none'}")
                else:
                    whole = ""
                if is_over or (is_streaming and len(whole) > position):
                    return whole[position:], is_over
                changed.wait()

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._branch.variables

    def __repr__(self) -> str:
        return f"ProgramState({self.text()!r})"

    @property
    def run(self) -> ProgramRun:
        """The execution this state belongs to."""
        return self._branch.run


class ProgramStateGroup:
    """States forked together."""

    def __init__(self, states: list[ProgramState], source: ProgramState) -> None:
        self.states = states
        self.source = source

    def join(self, mode: str = "gather_variable") -> None:
        """End the branches and go on with the state they came from.

        "gather_variable": each variable that the branches made becomes a list of their values, in their order.
        "concate_and_append": their text is appended, one after the other.
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f"mode: got {mode!r}; allowed: 'gather_variable', 'concate_and_append'")
        self.source._branch.join([state._branch for state in self.states], mode)

    def __iadd__(self, other: Any) -> ProgramStateGroup:
        """Append to every state: an expression, one of a list for each, or what a function of its index returns."""
        if isinstance(other, Expr | str) or hasattr(other, "as_expression"):
            each = [other] * len(self.states)
        elif isinstance(other, Callable):
            each = [other(index) for index in range(len(self.states))]
        elif isinstance(other, list | tuple):
            if len(other) != len(self.states):
                raise ValueError(f"a group of {len(self.states)} states takes so many expressions; got {len(other)}")
            each = list(other)
        else:
            raise TypeError(f"a group of states takes expressions, lists and functions; got {type(other).__name__}")
        for state, expr in zip(self.states, each, strict=True):
            state += expr
        return self

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, value: ProgramState) -> None:
        if self.states[index] is not value:  # group[i] += x assigns what it got
            raise ValueError("the states of a group cannot be replaced; allowed: group[i] += ...")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)
