"""Named values of a program, each set once: by a generation, a selection, a scope or a join. No jax."""

from __future__ import annotations

import concurrent.futures
from typing import Any


class Variable(concurrent.futures.Future):
    """A value to come. result() waits for it, and raises what made its program fail.

    meta     what get_meta_info() returns
    partial  the text so far, while the program streams
    """

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.name = name
        self.meta: Any = None
        self.partial = ""

    def settle(self, value: Any, meta: Any = None) -> None:
        """Set the value, unless the program has failed in the meantime."""
        if not self.done():
            self.meta = meta
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        if not self.done():
            self.set_exception(error)

    @classmethod
    def of(cls, name: str, value: Any) -> Variable:
        variable = cls(name)
        variable.set_result(value)
        return variable
