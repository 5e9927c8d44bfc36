"""Keeps one engine process alive: starts it, watches its heartbeat, replaces a dead one, shuts the last one down.

An engine that never became ready is not started again: a model that cannot be loaded will not load the second time.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import zmq
from jaxserve.server.engine_client import EngineClient, EngineState
from jaxserve.server.errors import unavailable
from jaxserve.server.settings import ServerSettings

from jaxserve.config import EngineConfig
from jaxserve.engine_link import IPC_PREFIX, engine_command, make_private_folder, open_socket
from jaxserve.logs import FORMAT_VARIABLE
from jaxserve.messages import ModelInfo, Shutdown, encode

logger = logging.getLogger(__name__)

_MAX_DELAY_S = 30.0
_WATCH_S = 0.5
_EXIT_GRACE_S = 5.0  # for an engine that has said that it failed, or was asked to end
_STUCK = "the engine gave no sign of life"

Loaded = TypeVar("Loaded")


class Supervisor(Generic[Loaded]):
    """run() supervises until stop() is called or the engine is given up.

    load      makes what the routes need from the model's facts (the tokenizer); runs in a thread, after which the
              client's state becomes READY
    failure   why the engine was given up; None while it was not
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings,
        client: EngineClient,
        load: Callable[[ModelInfo], Loaded],
    ) -> None:
        self._config = config
        self._settings = settings
        self._client = client
        self._load = load
        self.loaded: Loaded | None = None
        self.failure: str | None = None
        self._was_ready = False
        self._reason: str | None = None
        self._losses: collections.deque[float] = collections.deque()
        self._stopping = asyncio.Event()
        self._broken = asyncio.Event()  # this engine cannot go on (it said so, or does not answer)
        self._loading: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        client.on_ready = self._on_ready
        client.on_failed = self._on_failed

    def stop(self) -> None:
        """Let run() shut the engine down and return."""
        self._stopping.set()

    def remove_sockets(self) -> None:
        """What run() leaves behind if the process ends without waiting for it."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def run(self) -> None:
        """Returns after stop(), or with `failure` set and the client's state FAILED."""
        self._folder = folder = make_private_folder()
        context = zmq.Context()
        try:
            number = 0
            while not self._stopping.is_set():
                number += 1
                reason = await self._run_engine(context, folder / f"engine-{number}")
                if self._stopping.is_set() or not await self._may_restart(reason):
                    break
        except Exception as error:
            logger.exception("the supervision of the engine ended")
            self._give_up(f"the engine cannot be supervised: {type(error).__name__}")
        finally:
            context.destroy(linger=0)
            self.remove_sockets()

    async def _run_engine(self, context: zmq.Context, path: Path) -> str:
        """One engine from start to end; returns why it ended."""
        self._broken.clear()
        self._reason = None
        address = f"{IPC_PREFIX}{path}"
        self._client.attach(open_socket(context, address, bind=True))
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(address), env={**os.environ, FORMAT_VARIABLE: self._settings.log_format}
            )
        except OSError as error:
            self._lose()
            return f"the engine's process could not be started: {error.strerror}"
        logger.info("engine process %d started", process.pid)
        exited = asyncio.ensure_future(process.wait())
        watch = asyncio.create_task(self._watch_heartbeat())
        events = [asyncio.ensure_future(event.wait()) for event in (self._broken, self._stopping)]
        try:
            await asyncio.wait([exited, *events], return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.is_set():
                # Nobody shall wait for the process to end: those in flight get their answer now.
                self._lose()
                await self._end(process, exited, is_asked=self._reason not in (None, _STUCK))
            else:
                self._client.fail_all(unavailable("the server is shutting down", code="shutting_down"))
                is_asked = self._was_ready and self._client.send(encode(Shutdown()))
                await self._end(process, exited, is_asked=is_asked)
        finally:
            for task in (watch, *events, self._loading):
                if task is not None:
                    task.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._lose()
        return self._reason or f"the engine's process ended with status {process.returncode}"

    def _command(self, address: str) -> list[str]:
        if not self._settings.engine_command:
            return engine_command(self._config, address)
        options = json.dumps(dataclasses.asdict(self._config))
        own = ["--config", options, "--socket", address, "--parent", str(os.getpid())]
        return [*self._settings.engine_command, *own]

    def _lose(self) -> None:
        if self._client.is_attached:
            if self._client.state is EngineState.READY:
                self._client.state = EngineState.RESTARTING
            self._client.detach(unavailable("the engine was lost while it worked on this request", retry_after=5))

    async def _end(self, process: asyncio.subprocess.Process, exited: asyncio.Future[int], *, is_asked: bool) -> None:
        """Make sure that the process ends. is_asked: it knows that it shall; the others get signals."""
        if is_asked:
            await asyncio.wait([exited], timeout=_EXIT_GRACE_S)
        if process.returncode is None and self._reason != _STUCK:
            process.terminate()
            await asyncio.wait([exited], timeout=_EXIT_GRACE_S)
        if process.returncode is None:
            process.kill()  # a stuck one listens to nothing else
            await exited

    async def _may_restart(self, reason: str) -> bool:
        """Wait before the next start; False, with the failure noted, if there shall be none."""
        if self._client.state is EngineState.STOPPING:
            return False
        if not self._was_ready:
            self._give_up(reason)
            return False
        settings, now = self._settings, time.monotonic()
        self._losses.append(now)
        while now - self._losses[0] > settings.restart_window_s:
            self._losses.popleft()
        if len(self._losses) > settings.max_restarts:
            self._give_up(
                f"the engine was lost {len(self._losses)} times in {settings.restart_window_s:g} s; last: {reason}"
            )
            return False
        delay = min(settings.restart_delay_s * 2 ** (len(self._losses) - 1), _MAX_DELAY_S)
        logger.error("the engine was lost: %s; a new one starts in %g s", reason, delay)
        try:
            await asyncio.wait_for(self._stopping.wait(), delay)
        except TimeoutError:
            return True
        return False

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._client.state = EngineState.FAILED
        logger.error("%s", reason)

    def _on_ready(self, model: ModelInfo) -> None:
        self._loading = asyncio.ensure_future(self._become_ready(model))

    async def _become_ready(self, model: ModelInfo) -> None:
        try:
            if self.loaded is None or model != self._client.model:
                self.loaded = await asyncio.to_thread(self._load, model)
        except Exception as error:
            logger.exception("the tokenizer cannot be loaded")
            self._on_failed(f"the tokenizer cannot be loaded: {type(error).__name__}: {error}")
            return
        self._client.model = model
        if self._client.state in (EngineState.STARTING, EngineState.RESTARTING):
            self._client.state = EngineState.READY
            self._was_ready = True
            logger.info("ready: %s, context %d tokens", model.name, model.max_model_len)

    def _on_failed(self, reason: str) -> None:
        self._reason = reason
        self._broken.set()

    async def _watch_heartbeat(self) -> None:
        """Notice an engine that is there and does nothing. Loading and compiling may take any time."""
        due = time.monotonic() + _WATCH_S
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            if now - due > 5 * _WATCH_S:
                # This process was not running either (a suspended machine): the engine gets its time again.
                self._client.last_heartbeat = now
            due = now + _WATCH_S
            silent = now - self._client.last_heartbeat
            if self._client.state is EngineState.READY and silent > self._settings.heartbeat_timeout_s:
                logger.error("no sign of life from the engine for %.1f s", silent)
                self._on_failed(_STUCK)
                return
