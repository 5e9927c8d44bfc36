"""Compiling everything before the first request, and noticing anything that compiles after it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxserve.runner.step import Program

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (what, done, total)
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
    programs: dict[tuple[Any, ...], Program], progress: Progress | None = None
) -> dict[tuple[Any, ...], Callable[..., Any]]:
    """Lower and compile every program. Lowering holds the GIL and runs here, compiling in threads beside it."""
    compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
    done, lock = 0, threading.Lock()
    started = time.perf_counter()

    def finish(lowered: jax.stages.Lowered) -> Callable[..., Any]:
        nonlocal done
        result = lowered.compile()
        with lock:
            done += 1
            if progress is not None:
                progress("compile", done, len(programs))
        return result

    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        futures = {key: pool.submit(finish, program.lower()) for key, program in programs.items()}
        for key, future in futures.items():
            compiled[key] = future.result()
    logger.info("compiled %d programs in %.1f s", len(programs), time.perf_counter() - started)
    return compiled


class CompileGuard:
    """Counts compilations that happen inside `watch()` on the watching thread. Other code of the process may
    compile what it likes."""

    _watching = threading.local()
    _is_registered = False

    def __init__(self) -> None:
        self.count = 0
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
            logger.error("a program was compiled after warm-up (%.2f s)", duration)
