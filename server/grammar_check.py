"""Whether a client's grammar compiles, found out in a process that may be killed."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

from jaxserve.server.errors import unavailable

from jaxserve.structured.check_process import HEADER, READY
from jaxserve.structured.grammar import Grammar

MAX_REMEMBERED = 1024  # answers, by a digest of the grammar
MAX_PROCESSES = 4  # one slow grammar must not keep the others waiting
_START_S = 60.0

_TOO_SLOW = "it takes too long to compile"
_TOO_DEEP = "it is too large or nested too deeply to be compiled"


class GrammarChecker:
    """A few processes, started when grammars come and again when one is lost. Used from one event loop.

    time_limit_s   seconds that one grammar may take
    """

    def __init__(self, *, time_limit_s: float = 5.0) -> None:
        self._time_limit_s = time_limit_s
        self._answers: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._idle: list[Process] = []
        self._busy: set[Process] = set()
        self._places: asyncio.Semaphore | None = None

    @property
    def num_remembered(self) -> int:
        return len(self._answers)

    async def error(self, grammar: Grammar) -> str:
        """What is wrong with it; "" if it compiles."""
        if not grammar.text:
            return ""
        data = grammar.text.encode("utf-8", "surrogatepass")
        key = hashlib.sha256(data).digest()
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
            return answer
        self._places = self._places or asyncio.Semaphore(MAX_PROCESSES)
        async with self._places:
            answer = await self._ask(data)
        if answer == _TOO_SLOW:
            return answer  # perhaps the machine was busy
        self._answers[key] = answer
        while len(self._answers) > MAX_REMEMBERED:
            self._answers.popitem(last=False)
        return answer

    async def close(self) -> None:
        for process in (*self._idle, *self._busy):
            await _end(process)
        self._idle.clear()

    async def _ask(self, data: bytes) -> str:
        process = await self._take_process()
        self._busy.add(process)
        assert process.stdin is not None and process.stdout is not None
        is_whole = False  # after half an answer the process cannot be asked again
        try:
            async with asyncio.timeout(self._time_limit_s):
                process.stdin.write(HEADER.pack(len(data)) + data)
                await process.stdin.drain()
                size = HEADER.unpack(await process.stdout.readexactly(HEADER.size))[0]
                answer = (await process.stdout.readexactly(size)).decode("utf-8", "replace")
                is_whole = True
                return answer
        except TimeoutError:
            return _TOO_SLOW
        except (asyncio.IncompleteReadError, ConnectionError):
            return _TOO_DEEP
        finally:
            self._busy.discard(process)
            if is_whole:
                self._idle.append(process)
            else:
                await _end(process)

    async def _take_process(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jaxserve.structured.check_process", stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                await process.stdout.readexactly(len(READY))
        except (TimeoutError, asyncio.IncompleteReadError):
            await _end(process)
            raise unavailable("grammars cannot be checked at present; try again") from None
        except BaseException:
            await _end(process)
            raise
        return process


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
