"""One branch of a running program: a queue of expressions, carried out one after another without a thread. No jax.

Whoever makes something possible carries on with it: the program's own thread when it appends to an idle branch, the
backend's when it delivers an answer. One lock per program; nobody waits for anything while holding it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.lang.backends.base import Generation, Selection, Stream, Turn
from jaxserve.lang.context import Context
from jaxserve.lang.expressions import (
    Expr,
    Gen,
    Media,
    Reference,
    RoleBegin,
    RoleEnd,
    Select,
    Text,
    VarScopeBegin,
    VarScopeEnd,
    leaves,
)
from jaxserve.lang.reasoning import SUFFIX, split_reasoning
from jaxserve.lang.variables import Variable

if TYPE_CHECKING:
    from jaxserve.lang.program_run import ProgramRun


@dataclasses.dataclass(frozen=True, eq=False)
class _Fork(Expr):
    children: tuple[Branch, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _AppendText(Expr):
    """The text of branches that have ended, one after the other."""

    children: tuple[Branch, ...]


class Branch:
    """All methods may be called from any thread.

    context    what was said so far; messages: the closed messages of a conversation
    variables  those appended here and those of the branch it forked from, by name; the latest of a name counts
    error      what ended it too early
    """

    def __init__(self, run: ProgramRun, stream: Stream | None = None) -> None:
        self.run = run
        self.stream = stream  # None until its parent reaches the fork
        self.context = Context()
        self.fork_context = Context()
        self.variables: dict[str, Variable] = {}
        self.messages: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.partial = ""  # of the generation that is being streamed
        self._roles: tuple[str, ...] = ()
        self._open_role: int | None = None  # where the content of the open message begins, in characters
        self._scopes: dict[str, int] = {}
        self._queue: deque[tuple[Expr, Variable | None]] = deque()
        self._unsettled: set[Variable] = set()
        self.waiters: list[Callable[[], None]] = []  # called once when the branch has finished
        self._joined: set[Branch] = set()  # branches that were gathered and have not finished
        self._is_waiting = False  # for the backend, another branch or a value
        self._is_running = False  # _advance() is at work
        self._is_closed = False
        self._was_released = False
        self._heir: Branch | None = None  # the branch that goes on with this one's text
        run.branches.append(self)

    # What a program does

    def append(self, expr: Expr) -> None:
        """Queue an expression. Raises RuntimeError when the program has ended."""
        with self.run.changed:
            if self._is_closed:
                raise RuntimeError("the program has ended; nothing can be appended to its state any more")
            for leaf in leaves(expr):
                self._queue.append((leaf, self._declare(leaf)))
            if self.error is not None:
                self._drop(self.error)
            self._advance()

    def fork(self, count: int) -> list[Branch]:
        """Branches that go on from here, once this one has got here."""
        with self.run.changed:
            children = tuple(Branch(self.run) for _ in range(count))
            for child in children:
                child.variables = dict(self.variables)
            self.append(_Fork(children))
            return list(children)

    def join(self, children: list[Branch], mode: str) -> None:
        """End branches. Gathering their variables changes no text, so nothing that is appended later waits for it;
        appending their text takes its turn in the queue. Idle is who has joined when they are."""
        with self.run.changed:
            if mode == "gather_variable":
                new: dict[str, list[Variable]] = {}
                for child in children:
                    for name, variable in child.variables.items():
                        if name not in self.variables:
                            new.setdefault(name, []).append(variable)
                for name, variables in new.items():
                    self._gather(self._new_variable(name), variables)
                for child in children:
                    self._joined.add(child)
                    child.close()
                    child.when_finished(self._take_joined)
            else:
                children[0]._heir = self
                for child in children:
                    child.close()
                self.append(_AppendText(tuple(children)))

    def _gather(
        self, target: Variable, variables: Sequence[concurrent.futures.Future], *, is_list: bool = True
    ) -> None:
        """Make `target` the list of the values, once all are there; or the only one."""
        missing = len(variables)

        def settled(_: Any) -> None:
            nonlocal missing
            with self.run.changed:
                missing -= 1
                if missing:
                    return
                errors = [variable.exception() for variable in variables if variable.exception() is not None]
                if errors:
                    target.fail(errors[0])
                else:
                    values = [variable.result() for variable in variables]
                    target.settle(values if is_list else values[0])

        for variable in variables:
            variable.add_done_callback(settled)

    def _take_joined(self) -> None:
        """A joined branch has ended. Its error is that of the program."""
        ended = [child for child in self._joined if child.is_finished]
        for child in ended:
            if child.error is not None:
                self.fail(child.error)
        self._joined.difference_update(ended)
        self._release_when_idle()
        self._notify()

    def close(self) -> None:
        """Nothing more will be appended."""
        with self.run.changed:
            self._is_closed = True
            self._release_when_idle()

    def set_variable(self, name: str, value: Any) -> None:
        """value: also a future of it."""
        with self.run.changed:
            if isinstance(value, concurrent.futures.Future):
                self._gather(self._new_variable(name), [value], is_list=False)
            else:
                self.variables[name] = Variable.of(name, value)

    def wait_idle(self) -> None:
        """Until everything appended so far is done, or the branch has failed."""
        with self.run.changed:
            self.run.changed.wait_for(lambda: self.is_idle)

    def when_finished(self, callback: Callable[[], None]) -> None:
        with self.run.changed:
            self.waiters.append(callback)
            if self.is_finished:
                self._notify()

    @property
    def is_idle(self) -> bool:
        if self.error is not None:
            return True
        return not (self._queue or self._is_waiting or self._joined or self.stream is None)

    @property
    def is_finished(self) -> bool:
        return self._is_closed and self.is_idle

    @property
    def text(self) -> str:
        """What was said so far, what is being streamed included."""
        with self.run.changed:
            return self.context.text + self.partial

    def fail(self, error: BaseException) -> None:
        """End with an error: everybody who waits for something of this branch gets it."""
        with self.run.changed:
            if self.error is not None or (self._is_closed and self.is_idle):
                return
            self.error = error
            self._is_waiting = False
            self._drop(error)
            self._release_when_idle()
            self._notify()

    # The queue

    def _declare(self, leaf: Expr) -> Variable | None:
        if isinstance(leaf, Gen | Select | VarScopeBegin) and leaf.name is not None:
            if isinstance(leaf, Gen) and leaf.reasoning is not None:
                self._new_variable(leaf.name + SUFFIX)
            return self._new_variable(leaf.name)
        if isinstance(leaf, VarScopeEnd):
            return self.variables.get(leaf.name)
        return None

    def _new_variable(self, name: str) -> Variable:
        variable = self.variables[name] = Variable(name)
        self._unsettled.add(variable)
        variable.add_done_callback(self._unsettled.discard)
        return variable

    def _drop(self, error: BaseException) -> None:
        """Tell what is still queued of the error."""
        queued = list(self._queue)
        self._queue.clear()
        for variable in list(self._unsettled):
            variable.fail(error)
        for leaf, _ in queued:
            if isinstance(leaf, _Fork):
                for child in leaf.children:
                    child.fail(error)

    def _start(self, parent: Branch) -> None:
        """The parent has reached the fork."""
        self.context = self.fork_context = parent.context
        self.messages = list(parent.messages)
        self._roles, self._open_role = parent._roles, parent._open_role
        self._scopes = dict(parent._scopes)
        self.stream = self.run.backend.fork_stream(parent.stream)
        self._advance()

    def _advance(self) -> None:
        """Carry out what is queued, up to the first thing that has to be waited for."""
        if self._is_running or self.stream is None:
            return
        self._is_running = True
        try:
            while self._queue and not self._is_waiting and self.error is None:
                leaf, variable = self._queue.popleft()
                try:
                    self._execute(leaf, variable)
                except Exception as error:
                    self.fail(error)
        finally:
            self._is_running = False
        self._release_when_idle()
        self._notify()

    def _resume(self) -> None:
        self._is_waiting = False
        self._advance()

    def _notify(self) -> None:
        self.run.changed.notify_all()
        if self.is_finished and self.waiters:
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                waiter()

    def _release_when_idle(self) -> None:
        if self.is_finished and not self._was_released:
            self._was_released = True
            if self.stream is not None:
                heir = self._heir
                if heir is not None and heir.stream is not None and heir.context is self.fork_context:
                    self.run.backend.go_on_from(heir.stream, self.stream)
                self.run.backend.close_stream(self.stream)
            self._notify()

    # What is in it

    def _execute(self, leaf: Expr, variable: Variable | None) -> None:
        if isinstance(leaf, Text):
            self.context = self.context.add_text(leaf.value)
        elif isinstance(leaf, Gen):
            self._generate(leaf, variable)
        elif isinstance(leaf, Select):
            self._select(leaf, variable)
        elif isinstance(leaf, RoleBegin):
            self._begin_role(leaf.role)
        elif isinstance(leaf, RoleEnd):
            self._end_role(leaf.role)
        elif isinstance(leaf, VarScopeBegin):
            self._scopes[leaf.name] = self.context.length
        elif isinstance(leaf, VarScopeEnd):
            if variable is not None:
                variable.settle(self.context.text[self._scopes.pop(leaf.name) :])
        elif isinstance(leaf, _Fork):
            self.run.backend.prepare_fork(self.stream, self.context, len(leaf.children))
            for child in leaf.children:
                child._start(self)
        elif isinstance(leaf, _AppendText):
            self._append_text(leaf)
        elif isinstance(leaf, Reference):
            self._insert(leaf)
        elif isinstance(leaf, Media):
            raise ValueError(f"{leaf.kind}: got one; allowed: text, no model here takes other inputs")
        else:
            raise TypeError(f"got {type(leaf).__name__}; allowed: expressions of jaxserve.lang")

    def _generate(self, leaf: Gen, variable: Variable | None) -> None:
        before = self.context

        def on_piece(text: str) -> None:
            with self.run.changed:
                self.partial += text
                if variable is not None:
                    variable.partial += text
                self.run.changed.notify_all()

        def done(result: Generation | BaseException) -> None:
            with self.run.changed:
                self.partial = ""
                if self.error is not None:
                    return
                if isinstance(result, BaseException):
                    self.fail(result)
                    return
                self._take(leaf, variable, before, result)
                self._resume()

        self._is_waiting = True
        self.run.backend.generate(
            self.stream,
            before,
            self._turn(),
            leaf.options.over(self.run.defaults),
            on_piece if self.run.is_streaming and leaf.reasoning is None else None,
            done,
        )

    def _turn(self) -> Turn:
        if self._open_role is None:
            return Turn(self.messages)
        return Turn(self.messages, self._roles[-1], self.context.text[self._open_role :])

    def _take(self, leaf: Gen, variable: Variable | None, before: Context, result: Generation) -> None:
        self.context = result.context
        values = result.values
        if leaf.reasoning is not None:
            pairs = [split_reasoning(value, leaf.reasoning) for value in values]
            values = [answer for _, answer in pairs]
            self.context = before.add_text(values[0])
            if leaf.name is not None:
                thoughts = [thought for thought, _ in pairs]
                self.variables[leaf.name + SUFFIX].settle(thoughts if len(thoughts) > 1 else thoughts[0])
        if variable is not None:
            is_one = len(values) == 1
            variable.settle(values[0] if is_one else values, result.meta[0] if is_one else result.meta)

    def _select(self, leaf: Select, variable: Variable | None) -> None:
        def done(result: Selection | BaseException) -> None:
            with self.run.changed:
                if self.error is not None:
                    return
                if isinstance(result, BaseException):
                    self.fail(result)
                    return
                self.context = result.context
                if variable is not None:
                    variable.settle(result.decision.decision, result.decision.meta_info)
                self._resume()

        self._is_waiting = True
        self.run.backend.select(self.stream, self.context, leaf.choices, leaf.method, done)

    def _begin_role(self, role: str) -> None:
        if self._open_role is not None:
            raise ValueError(f"role: got {role!r} inside {self._roles[-1]!r}; allowed: one message after another")
        self._roles = (*self._roles, role)
        self.context = self.context.add_text(self.run.backend.open_role(self._roles), is_template=True)
        self._open_role = self.context.length

    def _end_role(self, role: str) -> None:
        if self._open_role is None or self._roles[-1] != role:
            opened = self._roles[-1] if self._open_role is not None else None
            raise ValueError(f"role: got the end of {role!r}; allowed: the end of the open message ({opened!r})")
        self.messages = [*self.messages, {"role": role, "content": self.context.text[self._open_role :]}]
        self._open_role = None
        self.context = self.context.add_text(self.run.backend.close_role(self._roles), is_template=True)

    def _append_text(self, leaf: _AppendText) -> None:
        unfinished = [child for child in leaf.children if not child.is_finished]
        if unfinished:
            self._is_waiting = True
            self._queue.appendleft((leaf, None))
            unfinished[0].waiters.append(self._resume)
            return
        for child in leaf.children:
            if child.error is not None:
                raise child.error
        for child in leaf.children:
            self.context = self.context.add_runs(child.context.since(child.fork_context))

    def _insert(self, leaf: Reference) -> None:
        """Text of a value that may still have to come."""
        value = leaf.value
        if not value.done():
            self._is_waiting = True
            self._queue.appendleft((leaf, None))
            value.add_done_callback(lambda _: self._resume_locked())
            return
        text = value.result()
        if not isinstance(text, str):
            raise TypeError(f"a program's state takes text and expressions; got {type(text).__name__}: {text!r}")
        self.context = self.context.add_text(text)

    def _resume_locked(self) -> None:
        with self.run.changed:
            if self.error is None:
                self._resume()
