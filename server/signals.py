"""Signals of a uvicorn server: the first lets requests finish, the second ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import uvicorn


class SignalledServer(uvicorn.Server):
    """Hands SIGTERM and SIGINT to `on_signal`, on the event loop, in place of uvicorn's own handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def on_signal(self, number: int) -> None:
        """What a signal does, which each server says for itself."""
        raise NotImplementedError
