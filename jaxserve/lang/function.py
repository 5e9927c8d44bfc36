"""Programs: functions of a state, run once, in batches, traced or compiled. No jax."""

from __future__ import annotations

import concurrent.futures
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.lang.backends import as_backend
from jaxserve.lang.backends.base import Backend
from jaxserve.lang.batch_progress import ProgramProgress
from jaxserve.lang.options import GenOptions, split_arguments
from jaxserve.lang.program_run import ProgramRun
from jaxserve.lang.state import ProgramState
from jaxserve.lang.tracer import constant_prefix, trace_program

if TYPE_CHECKING:
    from jaxserve.lang.compiler import CompiledProgram
    from jaxserve.lang.graph import Graph

Arguments = dict[str, Any]
MIN_PREFIX = 32  # characters of a beginning that is kept for all runs; a shorter one costs more than it saves


class Function:
    """What @function makes of a function. Calling it runs it on the default backend.

    Options of run() that generations share: max_new_tokens, temperature, stop, ... (jaxserve.lang.options). All other
    keywords are the program's arguments.
    """

    def __init__(self, func: Callable[..., Any], bound: Arguments | None = None) -> None:
        self.func = func
        self.bound = dict(bound or {})
        parameters = list(inspect.signature(func).parameters.values())
        if not parameters:
            raise TypeError(f"{func.__name__}: takes no argument; allowed: the state first, then the program's own")
        self.parameters = {parameter.name: parameter for parameter in parameters[1:]}
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__
        self._prefixes: dict[int, tuple[Backend, object | None]] = {}

    def bind(self, **arguments: Any) -> Function:
        """The program with some arguments fixed."""
        self._check_names(arguments)
        return Function(self.func, self.bound | arguments)

    def run(self, *args: Any, backend: Any = None, stream: bool = False, **keywords: Any) -> ProgramState:
        """Run the function and return its state. Generations may still be running then; reading waits for them.

        stream=True returns at once; text_iter() then gives pieces as they come. Raises what the function raises.
        """
        options, arguments = split_arguments(keywords, self.parameters)
        return self.start(self._arguments(args, arguments), as_backend(backend), options, None, stream=stream)

    def start(
        self, arguments: Arguments, place: Backend, options: GenOptions, prefix: object | None, *, stream: bool = False
    ) -> ProgramState:
        """run() with everything settled. prefix: of Backend.cache_prefix(), what the program begins with."""
        run = ProgramRun(place, options, stream=stream)
        place.start_from(run.root.stream, prefix)
        state = ProgramState(run.root)
        if stream:
            worker = threading.Thread(target=self._execute_quietly, args=(state, arguments), daemon=True)
            worker.start()
        else:
            self._execute(state, arguments)
        return state

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
        """Run once for each set of arguments (dicts, or tuples in the function's order), many at a time.

        Returns finished states in the order of the arguments; with generator_style an iterator that gives each as
        soon as all before it are done. A program that fails does not disturb the others: its state has the error().
        The text that all programs begin with is computed once.
        """
        batch, common = self.batch_arguments(batch_kwargs, options)
        place = as_backend(backend)
        prefix = self._cached_prefix(place) if len(batch) > 1 else None
        results = self.run_all(place, batch, common, num_threads, progress_bar, prefix)
        return results if generator_style else list(results)

    def batch_arguments(
        self, batch_kwargs: Sequence[Arguments] | Sequence[Sequence[Any]], options: dict[str, Any]
    ) -> tuple[list[Arguments], GenOptions]:
        """Checked arguments of each program, and the options they share."""
        common, rest = split_arguments(options, ())
        if rest:
            raise TypeError(f"run_batch() got {min(rest)!r}; allowed: options of run(), num_threads, progress_bar")
        if not isinstance(batch_kwargs, list | tuple):
            raise TypeError(f"batch_kwargs: got {type(batch_kwargs).__name__}; allowed: a list of dicts or tuples")
        batch = [
            self._arguments((), dict(each)) if isinstance(each, dict) else self._arguments(tuple(each), {})
            for each in batch_kwargs
        ]
        return batch, common

    def run_all(
        self,
        place: Backend,
        batch: list[Arguments],
        options: GenOptions,
        num_threads: int | str,
        progress_bar: bool,
        prefix: object | None,
    ) -> Iterator[ProgramState]:
        """Finished states in the order of the batch, each as soon as all before it are done."""
        num_threads = _num_threads(num_threads, len(batch))

        def run_one(arguments: Arguments) -> ProgramState:
            run = ProgramRun(place, options)
            place.start_from(run.root.stream, prefix)
            state = ProgramState(run.root)
            self._execute_quietly(state, arguments)
            run.wait_finished()
            return state

        with (
            ProgramProgress(len(batch), is_shown=progress_bar) as bar,
            concurrent.futures.ThreadPoolExecutor(max(num_threads, 1), "jaxserve-program") as pool,
        ):
            waiting: deque[concurrent.futures.Future[ProgramState]] = deque()
            remaining = iter(batch)
            try:
                for arguments in batch[: 2 * num_threads]:
                    waiting.append(pool.submit(run_one, arguments))
                    next(remaining)
                while waiting:
                    state = waiting.popleft().result()
                    bar.advance()
                    for arguments in remaining:
                        waiting.append(pool.submit(run_one, arguments))
                        break
                    yield state
            finally:
                for future in waiting:
                    future.cancel()

    def _execute(self, state: ProgramState, arguments: Arguments) -> None:
        try:
            state.ret_value = self.func(state, **arguments)
        except BaseException as error:
            state.run.fail(error)
            raise
        finally:
            state.run.end()

    def _execute_quietly(self, state: ProgramState, arguments: Arguments) -> None:
        """An exception of the function stays in the state's error()."""
        try:
            self._execute(state, arguments)
        except Exception:
            pass

    # Looking ahead

    def trace(self, *, backend: Any = None, **arguments: Any) -> Graph:
        """The graph of what the program does, with `arguments` known and the others left open.

        Raises TraceError where the function asks for a value that only a run can know.
        """
        self._check_names(arguments)
        return trace_program(self, self.bound | arguments).graph

    def compile(self, *, backend: Any = None) -> CompiledProgram:
        """The program as a graph that runs beside the scheduler, see jaxserve.lang.compiler."""
        from jaxserve.lang.compiler import CompiledProgram  # it builds on this module

        return CompiledProgram(self, None if backend is None else as_backend(backend))

    def cache(self, backend: Any = None) -> None:
        """Compute the text that the program begins with, whatever its arguments, so that runs need not."""
        self._cached_prefix(as_backend(backend))

    def _cached_prefix(self, place: Backend) -> object | None:
        known = self._prefixes.get(id(place))
        if known is None:
            context = constant_prefix(self, place)
            prefix = place.cache_prefix(context) if context.length >= MIN_PREFIX else None
            known = self._prefixes[id(place)] = (place, prefix)
        return known[1]

    def __call__(self, *args: Any, **keywords: Any) -> ProgramState:
        return self.run(*args, **keywords)

    def __repr__(self) -> str:
        return f"<program {self.__name__}({', '.join(self.parameters)})>"

    # Arguments

    def _check_names(self, arguments: Arguments) -> None:
        unknown = arguments.keys() - self.parameters.keys()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())
        if unknown and not takes_any:
            raise TypeError(f"{self.__name__}: no argument {min(unknown)!r}; there are: {', '.join(self.parameters)}")

    def _arguments(self, args: tuple[Any, ...], keywords: Arguments) -> Arguments:
        """Arguments by name. Raises TypeError naming the program and the argument."""
        self._check_names(keywords)
        names = [name for name, p in self.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        free = [name for name in names if name not in self.bound]
        if len(args) > len(free):
            raise TypeError(f"{self.__name__}: got {len(args)} arguments; allowed: {', '.join(free) or 'none'}")
        given = dict(zip(free, args))
        twice = given.keys() & keywords.keys()
        if twice:
            raise TypeError(f"{self.__name__}: got argument {min(twice)!r} twice")
        arguments = self.bound | given | keywords
        missing = [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is parameter.empty
            and name not in arguments
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        if missing:
            raise TypeError(f"{self.__name__}: argument {missing[0]!r} is missing")
        return arguments


def _num_threads(given: int | str, count: int) -> int:
    if given == "auto":
        given = max(96, 16 * (os.cpu_count() or 1))
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"num_threads: got {given!r}; allowed: 'auto', or 1 or more")
    return min(given, max(count, 1))
