"""Whether a client's grammar compiles, found out in a process that may be killed."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

from jaxserve.structured.check_process import HEADER
from jaxserve.structured.grammar import Grammar

MAX_REMEMBERED = 1024  # answers, by a digest of the grammar

_TOO_SLOW = "it takes too long to compile"
_TOO_DEEP = "it is too large or nested too deeply to be compiled"


class GrammarChecker:
    """One process, started when the first grammar comes and again when it is lost. Used from one event loop.

    time_limit_s   seconds that one grammar may take
    """

    def __init__(self, *, time_limit_s: float = 10.0) -> None:
        self._time_limit_s = time_limit_s
        self._answers: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._process: Process | None = None
        self._lock: asyncio.Lock | None = None

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
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            answer = await self._ask(data)
        self._answers[key] = answer
        while len(self._answers) > MAX_REMEMBERED:
            self._answers.popitem(last=False)
        return answer

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _ask(self, data: bytes) -> str:
        try:
            async with asyncio.timeout(self._time_limit_s):
                process = await self._started()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(HEADER.pack(len(data)) + data)
                await process.stdin.drain()
                size = HEADER.unpack(await process.stdout.readexactly(HEADER.size))[0]
                return (await process.stdout.readexactly(size)).decode("utf-8", "replace")
        except TimeoutError:
            await self.close()
            return _TOO_SLOW
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            return _TOO_DEEP
        except BaseException:
            await self.close()  # half an answer would be taken for that to the next question
            raise

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "jaxserve.structured.check_process", stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
        return self._process
