"""Progress bars on standard error. No jax."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_PATIENCE_S = 0.5  # a bar appears only when the work takes longer


class GenerationProgress:
    """Finished prompts and tokens per second of one call. Appears after half a second, and stays as a line."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        self._num_prompts = num_prompts
        self._num_done = 0
        self._num_tokens = 0
        self._start = time.perf_counter()
        self._is_shown = is_shown
        self._bar: Progress | None = None

    def __enter__(self) -> GenerationProgress:
        return self

    def advance(self, num_tokens: int, *, is_done: bool) -> None:
        """Count new tokens, and a prompt if it is done."""
        self._num_tokens += num_tokens
        self._num_done += is_done
        if not self._is_shown:
            return
        seconds = time.perf_counter() - self._start
        if self._bar is None and seconds > _PATIENCE_S:
            self._open()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._num_done, rate=f"{self._num_tokens / seconds:.1f} tok/s")

    def _open(self) -> None:
        columns = (
            TextColumn("generate"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("", total=self._num_prompts, rate="")
        self._bar.start()

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class LoadingProgress:
    """What the runner reports while it loads and compiles: call it with (what, done, total)."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LoadingProgress:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._is_shown:
            return
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total or None)
        self._bar.update(self._tasks[what], completed=done, total=total or None)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
