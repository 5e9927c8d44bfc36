"""Running a program's function without a model, to see what it would do. No jax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxserve.lang.backends.base import Backend
from jaxserve.lang.context import Context
from jaxserve.lang.expressions import Expr, Gen, RoleBegin, RoleEnd, Select, Text, VarScopeBegin, leaves
from jaxserve.lang.graph import ForkStep, Graph, GraphBranch, JoinStep, SetStep
from jaxserve.lang.reasoning import SUFFIX
from jaxserve.lang.state import ProgramState, ProgramStateGroup
from jaxserve.lang.values import NeedsValue, Value, _tracing, call

if TYPE_CHECKING:
    from jaxserve.lang.function import Function

__all__ = ["Trace", "TraceError", "call", "constant_prefix", "trace_program"]


class TraceError(Exception):
    """A program cannot be traced to its end; it can be run."""


class _Stop(BaseException):
    """The function asked for something that no trace can answer."""


class Trace:
    """graph, and what stopped the trace: needs_generation tells whether it was a generated value or anything but an
    argument."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.needs_generation = False

    def stop(self, reason: str, *, needs_generation: bool) -> None:
        self.graph.stopped = reason
        self.needs_generation = needs_generation


class TracedState(ProgramState):
    """Records into a graph. Variables are Values."""

    def __init__(self, graph: Graph, branch: GraphBranch) -> None:
        self.ret_value = None
        self._graph = graph
        self._record = branch
        self._variables: dict[str, Any] = {}
        self._times_set: dict[str, int] = {}
        self._branch = self  # what ProgramState's own methods append to

    # What ProgramState asks of a branch

    def append(self, expr: Expr) -> None:
        self._record.add(expr)
        for leaf in leaves(expr):
            self._graph.log.append((self._record, leaf))
            if isinstance(leaf, Gen | Select | VarScopeBegin) and leaf.name is not None:
                self._declare(leaf.name)
                if isinstance(leaf, Gen) and leaf.reasoning is not None:
                    self._declare(leaf.name + SUFFIX)

    def _declare(self, name: str) -> None:
        self._variables[name] = Value(name, source=self._source(name))

    def _source(self, name: str) -> tuple[int, int, str]:
        times = self._times_set.get(name, 0)
        self._times_set[name] = times + 1
        return self._record.number, times, name

    @property
    def variables(self) -> dict[str, Any]:
        return self._variables

    def fork(self, size: int = 1, position_ids_offset: Any = None) -> ProgramStateGroup:
        if position_ids_offset is not None:
            raise ValueError("position_ids_offset: not supported; allowed: None")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size: got {size!r}; allowed: 1 or more")
        children = [TracedState(self._graph, self._graph.new_branch()) for _ in range(size)]
        for child in children:
            child._variables = dict(self._variables)
        self._add(ForkStep(tuple(child._record for child in children)))
        return ProgramStateGroup(list(children), self)

    def join(self, children: list[TracedState], mode: str) -> None:
        self._add(JoinStep(tuple(child._record for child in children), mode))
        if mode == "gather_variable":
            names = [name for child in children for name in child._variables if name not in self._variables]
            for name in dict.fromkeys(names):
                # A list that Python may index and count at once.
                self._variables[name] = [child._variables[name] for child in children if name in child._variables]
                self._source(name)

    def _add(self, step: ForkStep | JoinStep | SetStep) -> None:
        self._record.steps.append(step)
        self._graph.log.append((self._record, step))

    # Reading

    def get_var(self, name: str) -> Any:
        try:
            return self._variables[name]
        except KeyError:
            raise KeyError(f"no variable {name!r}; there are: {', '.join(self._variables) or 'none'}") from None

    def set_var(self, name: str, value: Any) -> None:
        self._add(SetStep(name, value))
        self._source(name)
        self._variables[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def sync(self) -> None:
        """Nothing to wait for."""

    def text(self) -> Any:
        raise _Stop("text() needs what was generated")

    def messages(self) -> Any:
        raise _Stop("messages() needs what was generated")

    def error(self) -> Any:
        raise _Stop("error() needs the end of what was appended")

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        raise _Stop("get_meta_info() needs what was generated")

    def _next_text(self, name: str | None, position: int) -> Any:
        raise _Stop("text_iter() needs what was generated")

    def __repr__(self) -> str:
        return "<traced state>"


@contextlib.contextmanager
def _tracing_on(graph: Graph) -> Iterator[None]:
    token = _tracing.set(graph.calls)
    try:
        yield
    finally:
        _tracing.reset(token)


def trace_program(program: Function, arguments: dict[str, Any]) -> Trace:
    """Record what the program does. Arguments that are not given and have no default stay open."""
    graph = Graph(program.__name__, list(program.parameters))
    trace = Trace(graph)
    given = dict(arguments)
    for name, parameter in program.parameters.items():
        has_default = parameter.default is not parameter.empty
        is_single = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if name not in given and is_single and not has_default:
            given[name] = Value(name, source=name)
    state = TracedState(graph, graph.root)
    with _tracing_on(graph):
        try:
            graph.result = program.func(state, **given)
        except NeedsValue as need:
            trace.stop(str(need), needs_generation=not need.is_argument)
        except _Stop as stop:
            trace.stop(str(stop), needs_generation=True)
        except Exception as error:
            # A library that wants text and got a Value, or a mistake of the program, which a run will show.
            trace.stop(f"{type(error).__name__}: {error}", needs_generation=False)
    return trace


def constant_prefix(program: Function, backend: Backend) -> Context:
    """The text that every run of a program begins with."""
    trace = trace_program(program, program.bound)
    context, roles = Context(), ()
    for step in trace.graph.prefix():
        if isinstance(step, Text):
            context = context.add_text(step.value)
        elif isinstance(step, RoleBegin):
            roles = (*roles, step.role)
            context = context.add_text(backend.open_role(roles), is_template=True)
        elif isinstance(step, RoleEnd):
            context = context.add_text(backend.close_role(roles), is_template=True)
    return context
