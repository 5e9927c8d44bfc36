"""Compiled programs: the function is traced into a graph, and the graph runs beside the scheduler. No jax.

A run calls the function once with its arguments and no model behind it. What it would do becomes a graph: values that
are still to be generated are nodes, and so is what Python computes of them. All of the graph is then handed over at
once. Every branch goes as far as it can; nothing waits for the function to read something. What one program computes
before all its arguments, the constant prefix, is computed once and kept; programs of a batch that begin alike run
together.

Where the function needs a generated value itself (a condition, a loop, a library), the graph has an end, and the
interpreter runs the program, from the same kept prefix.
"""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.lang.backends import as_backend
from jaxserve.lang.backends.base import Backend
from jaxserve.lang.batch_progress import ProgramProgress
from jaxserve.lang.branch import Branch
from jaxserve.lang.expressions import Expr, Gen, Reference, Select, VarScopeBegin
from jaxserve.lang.function import MIN_PREFIX, Arguments
from jaxserve.lang.graph import ForkStep, Graph, GraphBranch, JoinStep, SetStep
from jaxserve.lang.options import GenOptions, split_arguments
from jaxserve.lang.program_run import ProgramRun
from jaxserve.lang.reasoning import SUFFIX
from jaxserve.lang.state import ProgramState
from jaxserve.lang.tracer import TracedState, constant_prefix, trace_program
from jaxserve.lang.values import Value, is_opaque, replace_values

if TYPE_CHECKING:
    from jaxserve.lang.function import Function

MAX_RUNNING = 128  # programs of a batch that have begun and not ended
_PREFIX_AGE_S = 300.0  # kept anew if no run has used it for so long
_MAX_TRIES = 3  # traces that may end too early before a program is only interpreted

# Functions given to call() may take their time; the engine's thread has none.
_calls = concurrent.futures.ThreadPoolExecutor(32, "jaxserve-call")


class CompiledProgram:
    """run() and run_batch() as those of a Function. Printed, it is the graph; a notebook draws it.

    graph   with the arguments open, as far as it does not depend on them
    """

    def __init__(self, function: Function, backend: Backend | None = None) -> None:
        self.function = function
        trace = trace_program(function, function.bound)
        self.graph = trace.graph
        self._backend = backend
        self._tries_left = 0 if trace.needs_generation else _MAX_TRIES
        self._prefixes: dict[int, tuple[Backend, object | None, float]] = {}

    def run(self, *args: Any, backend: Any = None, stream: bool = False, **keywords: Any) -> ProgramState:
        """Start a run and return its state at once; reading waits. See Function.run()."""
        options, arguments = split_arguments(keywords, self.function.parameters)
        place = self._place(backend)
        arguments = self.function._arguments(args, arguments)
        graph = self._traced(arguments)
        if graph is not None:
            return self._start(graph, place, options, self._prefix(place), stream=stream)
        return self.function.start(arguments, place, options, self._prefix(place), stream=stream)

    def run_batch(
        self,
        batch_kwargs: Sequence[Arguments] | Sequence[Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **options: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """See Function.run_batch(). num_threads matters only where the function needs generated values itself."""
        place = self._place(backend)
        batch, common = self.function.batch_arguments(batch_kwargs, options)
        graphs = [self._traced(arguments) for arguments in batch]
        if any(graph is None for graph in graphs):
            results = self.function.run_all(place, batch, common, num_threads, progress_bar, self._prefix(place))
        else:
            results = self._run_graphs(place, batch, graphs, common, progress_bar)
        return results if generator_style else list(results)

    @property
    def is_whole(self) -> bool:
        """Whether the graph reaches the program's end whatever its arguments."""
        return self.graph.is_whole

    def __call__(self, *args: Any, **keywords: Any) -> ProgramState:
        return self.run(*args, **keywords)

    def __repr__(self) -> str:
        return repr(self.graph)

    def _repr_svg_(self) -> str:
        return self.graph._repr_svg_()

    def _place(self, backend: Any) -> Backend:
        return self._backend if backend is None and self._backend is not None else as_backend(backend)

    def _traced(self, arguments: Arguments) -> Graph | None:
        """The graph of one run; None if only the interpreter can run it."""
        if not self._tries_left:
            return None
        trace = trace_program(self.function, arguments)
        if trace.graph.is_whole:
            return trace.graph
        self._tries_left -= 1
        return None

    def _prefix(self, place: Backend) -> object | None:
        """The constant prefix, kept on this backend."""
        now = time.monotonic()
        known = self._prefixes.get(id(place))
        if known is None or now - known[2] > _PREFIX_AGE_S:
            context = constant_prefix(self.function, place)
            prefix = place.cache_prefix(context) if context.length >= MIN_PREFIX else None
            known = (place, prefix, now)
        self._prefixes[id(place)] = (place, known[1], now)
        return known[1]

    def _start(
        self, graph: Graph, place: Backend, options: GenOptions, prefix: object | None, *, stream: bool = False
    ) -> ProgramState:
        run = ProgramRun(place, options, stream=stream)
        place.start_from(run.root.stream, prefix)
        return _Execution(graph, run).state

    def _run_graphs(
        self, place: Backend, batch: list[Arguments], graphs: list[Graph], options: GenOptions, progress_bar: bool
    ) -> Iterator[ProgramState]:
        """Programs in an order in which those that begin alike are neighbours; results in the order given."""
        prefix = self._prefix(place)
        names = [node.label for node in self.graph.nodes() if node.kind == "argument"]
        order = sorted(range(len(batch)), key=lambda index: [str(batch[index].get(name)) for name in names])
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        done: dict[int, ProgramState] = {}
        states: dict[int, ProgramState] = {}
        next_index = num_running = 0
        with ProgramProgress(len(batch), is_shown=progress_bar) as bar:
            try:
                while next_index < len(batch):
                    while order and num_running < MAX_RUNNING:
                        index = order.pop(0)
                        states[index] = state = self._start(graphs[index], place, options, prefix)
                        num_running += 1
                        state.when_finished(lambda index=index: ended.put(index))
                    index = ended.get()
                    done[index] = states[index]
                    num_running -= 1
                    bar.advance()
                    while next_index in done:
                        yield done.pop(next_index)
                        next_index += 1
            finally:
                for index, state in states.items():
                    if index >= next_index:
                        state.run.fail(RuntimeError("the batch was given up"))


class _Execution:
    """One run of a graph: its steps are appended to real branches all at once."""

    def __init__(self, graph: Graph, run: ProgramRun) -> None:
        self._branches: dict[GraphBranch, Branch] = {graph.root: run.root}
        self._variables: dict[tuple[int, int, str], concurrent.futures.Future] = {}
        self._times_set: dict[tuple[int, str], int] = {}
        self._futures: dict[Value, concurrent.futures.Future] = {}
        self.state = ProgramState(run.root)
        with run.changed:
            for graph_branch, step in graph.log:
                self._play(graph_branch, step)
            for value in graph.calls:
                self._future(value)
            run.end()
        result = graph.result
        self.state.set_result(lambda: self._known(result))

    def _play(self, graph_branch: GraphBranch, step: Any) -> None:
        branch = self._branches[graph_branch]
        if isinstance(step, ForkStep):
            self._branches.update(zip(step.children, branch.fork(len(step.children)), strict=True))
        elif isinstance(step, JoinStep):
            before = set(branch.variables)
            branch.join([self._branches[child] for child in step.children], step.mode)
            for name in branch.variables.keys() - before:
                self._count(graph_branch, name)
        elif isinstance(step, SetStep):
            branch.set_variable(step.name, self._future_or_known(step.value))
            self._count(graph_branch, step.name)
        elif isinstance(step, Reference):
            branch.append(Reference(self._future(step.value), step.label))
        else:
            branch.append(step)
            self._note_variables(graph_branch, branch, step)

    def _note_variables(self, graph_branch: GraphBranch, branch: Branch, step: Expr) -> None:
        if isinstance(step, Gen | Select | VarScopeBegin) and step.name is not None:
            names = [step.name]
            if isinstance(step, Gen) and step.reasoning is not None:
                names.append(step.name + SUFFIX)
            for name in names:
                self._variables[graph_branch.number, self._count(graph_branch, name), name] = branch.variables[name]

    def _count(self, graph_branch: GraphBranch, name: str) -> int:
        """How often the name had been set before, as the tracer counts."""
        times = self._times_set.get((graph_branch.number, name), 0)
        self._times_set[graph_branch.number, name] = times + 1
        return times

    def _future_or_known(self, thing: Any) -> Any:
        return self._future(thing) if isinstance(thing, Value) else thing

    def _future(self, value: Value) -> concurrent.futures.Future:
        if value._function is None:
            return self._variables[value._source]
        future = self._futures.get(value)
        if future is None:
            future = self._futures[value] = concurrent.futures.Future()
            self._compute_when_ready(value, future)
        return future

    def _compute_when_ready(self, value: Value, future: concurrent.futures.Future) -> None:
        inputs = [self._future(each) for each in value._inputs]

        def compute() -> None:
            try:
                args, keywords = replace_values(
                    (value._args, value._keywords), lambda each: self._future(each).result()
                )
                future.set_result(value._function(*args, **keywords))
            except BaseException as error:
                future.set_exception(error)

        def start(_: Any = None) -> None:
            waiting = next((each for each in inputs if not each.done()), None)
            if waiting is not None:
                waiting.add_done_callback(start)
            elif is_opaque(value):
                _calls.submit(compute)
            else:
                compute()

        start()

    def _known(self, thing: Any) -> Any:
        """What the function returned, with real values and states in it. Waits for them."""
        if isinstance(thing, TracedState):
            return ProgramState(self._branches[thing._record])
        if isinstance(thing, list | tuple) and any(isinstance(item, TracedState) for item in thing):
            return type(thing)([self._known(item) for item in thing])
        return replace_values(thing, lambda value: self._future(value).result())
