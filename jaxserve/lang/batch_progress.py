"""A progress bar of programs on standard error. No jax."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgramProgress:
    """Finished programs of a batch."""

    def __init__(self, num_programs: int, *, is_shown: bool) -> None:
        self._bar: Progress | None = None
        if is_shown:
            columns = (TextColumn("programs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=num_programs)

    def __enter__(self) -> ProgramProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
