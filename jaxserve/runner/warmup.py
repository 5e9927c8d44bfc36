"""Compiling everything before the first request, and noticing anything that compiles after it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.runner.batch_builder import StepBuffer
from jaxserve.runner.device import StepRunner
from jaxserve.runner.step import Program
from jaxserve.scheduler.decision import PageCopy, RowReset, RowWork, StepDecision

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (what, done, total)
Key = tuple[Any, ...]
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def enable_compile_cache(directory: str | None) -> Path | None:
    """Keep compiled programs on disk between runs, in a folder only this user can write (its files are executable
    code). directory: None for `xla` in the cache folder ($JAXSERVE_CACHE, else `jaxserve` in the user's), "" for
    no cache. Returns the folder, or None without one.
    """
    if directory == "":
        return None
    if directory is None:
        user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        directory = os.path.join(os.environ.get("JAXSERVE_CACHE") or os.path.join(user, "jaxserve"), "xla")
    path = Path(directory)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022:
            logger.warning("compile cache %s is writable by others; going on without a cache", path)
            return None
    except OSError as error:
        logger.warning("compile cache %s: %s; going on without a cache", path, error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return path


def compile_programs(
    programs: dict[Key, Program],
    compiled: dict[Key, Callable[..., Any]],
    *,
    first_call: Callable[[Key], None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Lower and compile every program into `compiled`.

    Lowering holds the GIL and runs here, compiling runs in threads beside it, and a thread of its own makes the first
    call of each program as soon as it is there: first_call(key).
    """
    done = 0
    started = time.perf_counter()

    def compile_one(key: Key, lowered: jax.stages.Lowered) -> Future[None]:
        compiled[key] = lowered.compile()
        return callers.submit(finish, key)

    def finish(key: Key) -> None:
        nonlocal done
        if first_call is not None:
            first_call(key)
        done += 1  # only this one thread counts
        if progress is not None:
            progress("compile", done, len(programs))

    with ThreadPoolExecutor(1) as callers, ThreadPoolExecutor(os.cpu_count() or 1) as compilers:
        compiling = [compilers.submit(compile_one, key, program.lower()) for key, program in programs.items()]
        for future in compiling:
            future.result().result()
    logger.info("compiled %d programs in %.1f s", len(programs), time.perf_counter() - started)


class FirstCall:
    """Calls programs once, with batches from the builders that serve requests, so that the first request finds
    buffers, thread pools, product kernels and compiled kernel objects in place. (XLA:CPU prepares its matrix products
    at a program's first call: half a second for a forward of 30 layers.)

    Uses pages and rows, so all calls come before any request; one thread makes them.
    """

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self._buffer = StepBuffer(runner.batches.layout)

    def __call__(self, key: Key) -> None:
        """Call the program of `key` and wait for it."""
        runner, name = self.runner, key[0]
        if name == "forward":
            jax.block_until_ready(self._forward(key[1]))
        elif name == "copy":
            runner.copy_pages((PageCopy(1, 1),))
        elif name == "set_counts":
            empty = np.zeros(0, np.int32)
            runner.reset_rows([RowReset(0, empty, empty)])
        elif name == "set_bias":
            runner.write_biases([(0, np.zeros(runner.shapes.vocab_size, np.float32))])
        else:
            jax.block_until_ready(self._sampling(name, key[1]))

    def _forward(self, bucket: int) -> jax.Array:
        shapes = self.runner.shapes
        room = min(shapes.pages_per_row, shapes.num_pages - 1)
        tokens = np.zeros(min(bucket, room * shapes.page_size), np.int32)
        row = RowWork(0, 0, 0, tokens, np.arange(1, 1 + room, dtype=np.int32))
        decision = StepDecision(0, (row,), 0, ())
        packed, _ = self.runner.batches.build(decision, self._buffer, at_least=bucket)
        return self.runner.forward(bucket, packed)

    def _sampling(self, name: str, bucket: int) -> Any:
        runner, state = self.runner, self.runner.state
        staged = runner.samples.neutral(bucket)
        logits = np.zeros((bucket, runner.shapes.vocab_size), np.float32)
        tokens = np.zeros(bucket, np.int32)
        program = runner.programs[name, bucket]
        if name == "head":
            return program(runner.leaves, np.zeros((runner.shapes.max_num_samples, runner.hidden_size), np.float32))
        if name == "adjust":
            return program(
                logits, staged.packed, state.counts, state.bias, staged.mask, state.last_token, staged.forbidden
            )
        if name == "logprobs":
            return program(logits, tokens, staged.logprob_ids)
        if name == "count":
            state.counts = program(state.counts, staged.packed, tokens)
            return state.counts
        drawn, state.last_token = program(logits, staged.packed, state.last_token)
        return drawn


class CompileGuard:
    """Counts compilations that happen inside `watch()` on the watching thread. Other code of the process may
    compile what it likes. is_warm: everything was compiled before, so that each of them is a fault."""

    _watching = threading.local()
    _is_registered = False

    def __init__(self, *, is_warm: bool = True) -> None:
        self.count = 0
        self._is_warm = is_warm
        if not CompileGuard._is_registered:
            # jax keeps listeners for good, so there is one for all guards.
            jax.monitoring.register_event_duration_secs_listener(CompileGuard._on_event)
            CompileGuard._is_registered = True

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        outer = getattr(CompileGuard._watching, "guard", None)
        CompileGuard._watching.guard = self
        try:
            yield
        finally:
            CompileGuard._watching.guard = outer

    @staticmethod
    def _on_event(event: str, duration: float, **_: Any) -> None:
        guard = getattr(CompileGuard._watching, "guard", None)
        if guard is not None and event == _COMPILE_EVENT:
            guard.count += 1
            if guard._is_warm:
                logger.error("a program was compiled after warm-up (%.2f s)", duration)
            else:
                logger.info("a program was compiled on its first use (%.2f s)", duration)
