"""One execution of a program: what all its branches share. No jax."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from jaxserve.lang.backends.base import Backend
from jaxserve.lang.branch import Branch
from jaxserve.lang.options import GenOptions

_run_numbers = itertools.count()


class ProgramRun:
    """One execution of a program: what all its branches share.

    changed   notified whenever anything of it changes; its lock is the program's
    """

    def __init__(self, backend: Backend, defaults: GenOptions, *, stream: bool = False) -> None:
        self.backend = backend
        self.defaults = defaults
        self.is_streaming = stream
        self.name = f"run-{next(_run_numbers)}"
        self.changed = threading.Condition(threading.RLock())
        self.branches: list[Branch] = []
        self.root = Branch(self, backend.open_stream(self.name))

    def end(self) -> None:
        """Nothing more will be appended to any branch."""
        with self.changed:
            for branch in self.branches:
                branch.close()

    @property
    def is_finished(self) -> bool:
        """Whether all branches have ended and are done, those too that were never joined."""
        return all([branch.is_finished for branch in self.branches])

    def wait_finished(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.is_finished)

    def when_finished(self, callback: Callable[[], None]) -> None:
        """Call back once, when the whole program is done; at once if it is."""
        with self.changed:
            unfinished = next((branch for branch in self.branches if not branch.is_finished), None)
            if unfinished is not None:
                unfinished.when_finished(lambda: self.when_finished(callback))
                return
        callback()

    def fail(self, error: BaseException) -> None:
        """End every branch with an error."""
        with self.changed:
            for branch in self.branches:
                branch.fail(error)
