"""A program as a dataflow graph: what the tracer records, the compiler runs and a notebook draws. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

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
from jaxserve.lang.values import Value, values_in


@dataclasses.dataclass(frozen=True, eq=False)
class ForkStep:
    children: tuple[GraphBranch, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class JoinStep:
    children: tuple[GraphBranch, ...]
    mode: str


@dataclasses.dataclass(frozen=True, eq=False)
class SetStep:
    """A variable set by Python."""

    name: str
    value: Any


Step = Expr | ForkStep | JoinStep | SetStep


class GraphBranch:
    """Steps in order. Text that follows text is merged: it is one run of tokens anyhow."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps: list[Step] = []

    def add(self, expr: Expr) -> None:
        for leaf in leaves(expr):
            last = self.steps[-1] if self.steps else None
            if isinstance(leaf, Text) and isinstance(last, Text):
                self.steps[-1] = Text(last.value + leaf.value)
            elif not (isinstance(leaf, Text) and not leaf.value):
                self.steps.append(leaf)


@dataclasses.dataclass(frozen=True)
class Node:
    """One line of the graph. inputs: numbers of the nodes it needs beside the one before it in its branch; branches:
    that a fork opens or a join ends."""

    number: int
    kind: str
    label: str
    depth: int
    branch: int
    inputs: tuple[int, ...] = ()
    branches: tuple[int, ...] = ()


class Graph:
    """name: the program's. stopped: why the trace ended before the program did; None: it is whole."""

    def __init__(self, name: str, parameters: list[str]) -> None:
        self.name = name
        self.parameters = parameters
        self.root = GraphBranch(0)
        self.log: list[tuple[GraphBranch, Step]] = []  # all steps of all branches, in the order of the function
        self.calls: list[Value] = []  # of call(), in the order of the function
        self.stopped: str | None = None
        self.result: Any = None
        self._num_branches = 1

    def new_branch(self) -> GraphBranch:
        self._num_branches += 1
        return GraphBranch(self._num_branches - 1)

    @property
    def is_whole(self) -> bool:
        return self.stopped is None

    def prefix(self) -> list[Expr]:
        """The steps that every run begins with, whatever is generated and given."""
        steps = []
        for step in self.root.steps:
            if not isinstance(step, Text | RoleBegin | RoleEnd):
                break
            steps.append(step)
        return steps

    def nodes(self) -> list[Node]:
        """All steps and computed values, each after what it needs."""
        return _Numbering().of(self)

    def counts(self) -> dict[str, int]:
        """How many nodes of each kind."""
        counts: dict[str, int] = {}
        for node in self.nodes():
            counts[node.kind] = counts.get(node.kind, 0) + 1
        return counts

    def __repr__(self) -> str:
        lines = [f"{self.name}({', '.join(self.parameters)})"]
        for node in self.nodes():
            needs = f"   ← {', '.join(f'%{number}' for number in node.inputs)}" if node.inputs else ""
            lines.append(f"{'  ' * (node.depth + 1)}%{node.number} {node.kind} {node.label}".rstrip() + needs)
        if self.stopped is not None:
            lines.append(f"  … open from here: {self.stopped}")
        return "\n".join(lines)

    def _repr_svg_(self) -> str:
        from jaxserve.lang.drawing import draw  # it builds on this module

        return draw(self)


class _Numbering:
    """Walks a graph in order of its steps; values are numbered where they are first needed."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._value_nodes: dict[Value, int] = {}
        self._variables: dict[tuple[int, int, str], int] = {}  # branch, how often set before, name -> node
        self._times_set: dict[tuple[int, str], int] = {}

    def of(self, graph: Graph) -> list[Node]:
        self._walk(graph.root, 0)
        for value in graph.calls:  # those whose value nothing needs are made all the same
            self._node_of(value, 0, 0)
        return self._nodes

    def _add(
        self,
        kind: str,
        label: str,
        depth: int,
        branch: int,
        inputs: tuple[int, ...] = (),
        branches: tuple[int, ...] = (),
    ) -> int:
        number = len(self._nodes)
        self._nodes.append(Node(number, kind, label, depth, branch, inputs, branches))
        return number

    def _walk(self, branch: GraphBranch, depth: int) -> None:
        number = branch.number
        for step in branch.steps:
            if isinstance(step, ForkStep):
                opened = tuple(child.number for child in step.children)
                self._add("fork", str(len(opened)), depth, number, branches=opened)
                for child in step.children:
                    self._walk(child, depth + 1)
            elif isinstance(step, JoinStep):
                ended = tuple(child.number for child in step.children)
                label = f"{step.mode} of branches {', '.join(map(str, ended))}"
                self._add("join", label, depth, number, branches=ended)
            elif isinstance(step, SetStep):
                found = [self._node_of(each, depth, number) for each in values_in(step.value)]
                inputs = tuple(dict.fromkeys(each for each in found if each is not None))
                self._set(number, step.name, self._add("set", step.name, depth, number, inputs))
            elif isinstance(step, Reference):
                self._add("insert", step.label, depth, number, self._needs(step.value, depth, number))
            else:
                node = self._add(*_describe(step), depth, number)
                if isinstance(step, Gen | Select | VarScopeEnd) and step.name is not None:
                    self._set(number, step.name, node)

    def _set(self, branch: int, name: str, node: int) -> None:
        times = self._times_set.get((branch, name), 0)
        self._times_set[branch, name] = times + 1
        self._variables[branch, times, name] = node

    def _needs(self, value: Any, depth: int, branch: int) -> tuple[int, ...]:
        node = self._node_of(value, depth, branch)
        return () if node is None else (node,)

    def _node_of(self, value: Any, depth: int, branch: int) -> int | None:
        if not isinstance(value, Value):
            return None
        if value in self._value_nodes:
            return self._value_nodes[value]
        if value._function is not None:
            inputs = [self._node_of(each, depth, branch) for each in value._inputs]
            node = self._add(
                "call", value._label, depth, branch, tuple(dict.fromkeys(each for each in inputs if each is not None))
            )
        elif isinstance(value._source, str):
            node = self._add("argument", value._source, depth, branch)
        else:
            known = self._variables.get(value._source)
            if known is None:
                return None
            node = known
        self._value_nodes[value] = node
        return node


def _describe(step: Expr) -> tuple[str, str]:
    if isinstance(step, Text):
        text = repr(step.value)
        return "text", text if len(text) <= 60 else text[:40] + " … " + text[-16:]
    if isinstance(step, Gen):
        said = {name: value for name, value in vars(step.options).items() if value is not None}
        options = ", ".join(f"{name}={value!r}" for name, value in said.items())
        return "gen", f"{step.name or ''}({options})"
    if isinstance(step, Select):
        return "select", f"{step.name or ''} {list(step.choices)}"
    if isinstance(step, RoleBegin | RoleEnd):
        return ("role" if isinstance(step, RoleBegin) else "end role"), step.role
    if isinstance(step, VarScopeBegin | VarScopeEnd):
        return ("scope" if isinstance(step, VarScopeBegin) else "end scope"), step.name
    if isinstance(step, Media):
        return step.kind, ""
    return type(step).__name__, ""


def branches(graph: Graph) -> Iterator[GraphBranch]:
    """The root and all branches under it."""
    waiting = [graph.root]
    while waiting:
        branch = waiting.pop(0)
        yield branch
        for step in branch.steps:
            if isinstance(step, ForkStep):
                waiting += step.children
