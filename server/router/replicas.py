"""`jaxserve serve --replicas N`: engines' servers as child processes, each on a free port, behind a router.

A replica that ends is started again after a pause that doubles; one that cannot be started at all ends everything.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from jaxserve.server.router.fleet import Fleet
from jaxserve.server.router.settings import RouterSettings
from jaxserve.server.router.worker import Worker
from jaxserve.server.settings import ServerSettings

from jaxserve import logs
from jaxserve.config import EngineConfig

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"^jaxserve: \S+ on (http://\S+)")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0
_LONG_LIFE_S = 60.0  # a replica that lived so long has not failed at once
_LAST_LINES = 20


class ReplicaFailed(RuntimeError):
    """A replica could not be started; the message holds what it said last."""


# Options of a server that the router has in its place when replicas stand behind it.
_OF_ROUTER = ("host", "port", "allowed_hosts", "cors_origins", "ssl_certfile", "ssl_keyfile")
# Options that both have: the router has them for its own connections.
_OF_BOTH = (
    "api_keys", "max_body_bytes", "log_format", "max_connections", "header_timeout_s", "body_timeout_s",
    "write_timeout_s", "drain_s",
)  # fmt: skip
# Replicas would count every client under the router's address, or each on its own.
_REFUSED = ("max_requests_per_minute", "max_requests_at_once")
_DEFAULTS = ServerSettings()


@dataclasses.dataclass(frozen=True)
class ReplicaPlan:
    """What each replica runs."""

    config: EngineConfig
    settings: ServerSettings
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"replicas: got {self.count}; allowed: 1 or more")

    def command(self) -> list[str]:
        return [sys.executable, "-m", "jaxserve.server.router.replica"]

    def fields(self) -> bytes:
        """What a replica reads from its standard input: keys do not belong in a command, which everyone can list."""
        own = {name: getattr(_DEFAULTS, name) for name in _OF_ROUTER} | {"port": 0}
        settings = dataclasses.replace(self.settings, **own)
        fields = {"config": dataclasses.asdict(self.config), "settings": dataclasses.asdict(settings)}
        return json.dumps(fields).encode()


def plan_replicas(
    config: EngineConfig, settings: ServerSettings, *, count: int, policy: str, admin_key: str | None = None
) -> tuple[RouterSettings, ReplicaPlan]:
    """A server's options divided between `count` replicas and the router before them.

    admin_key: of the router's own admin API; None: the server's. Raises ValueError naming an option that cannot be
    kept with replicas.
    """
    for name in _REFUSED:
        if getattr(settings, name):
            raise ValueError(
                f"{name}: got {getattr(settings, name)} with {count} replicas; allowed: 0 (jaxserve router has "
                "--requests-per-second)"
            )
    # Clients reach control routes of single replicas by no path; the router itself reads /kv_events.
    worker_key = secrets.token_urlsafe(32) if settings.api_keys or settings.admin_api_key else None
    uses_events = config.kv_events and policy == "cache_aware"
    router = RouterSettings(
        policy=policy,
        prefix_source="events" if uses_events else "guess",
        tokenizer=config.model if config.kv_events else None,
        worker_key=worker_key,
        admin_key=admin_key or settings.admin_api_key,
        **{name: getattr(settings, name) for name in _OF_ROUTER + _OF_BOTH},
    )
    return router, ReplicaPlan(config, dataclasses.replace(settings, admin_api_key=worker_key), count)


def replica_environment(index: int, count: int, environment: Mapping[str, str], num_gpus: int) -> dict[str, str]:
    """The environment of replica `index` of `count`: its own share of the GPUs, if there are any.

    GPUs that CUDA_VISIBLE_DEVICES names already are divided; else all `num_gpus` are. Raises ValueError if they
    cannot be shared out evenly, since two engines cannot live on one GPU.
    """
    chosen = dict(environment)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [name for name in listed.split(",") if name] if listed is not None else list(map(str, range(num_gpus)))
    if not gpus or environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return chosen
    if len(gpus) % count:
        raise ValueError(f"replicas: got {count} for {len(gpus)} GPUs; allowed: a divisor of {len(gpus)}")
    share = len(gpus) // count
    chosen["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * share : (index + 1) * share])
    return chosen


def count_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this machine shows."""
    return sum(1 for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


class Replicas:
    """start() and stop() around the router's life; workers come and go in the fleet as processes do."""

    def __init__(self, plan: ReplicaPlan, fleet: Fleet) -> None:
        self._plan = plan
        self._fleet = fleet
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.failure: asyncio.Future[ReplicaFailed] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Raises ValueError if the GPUs cannot be shared out."""
        count, num_gpus = self._plan.count, count_gpus()
        environments = [replica_environment(index, count, os.environ, num_gpus) for index in range(count)]
        self._tasks = [
            asyncio.create_task(self._keep(index, environment)) for index, environment in enumerate(environments)
        ]

    async def stop(self, timeout_s: float) -> None:
        """Let all of them finish what they do, then end."""
        self._is_stopping = True
        for process in self._processes.values():
            if process.returncode is None:
                process.terminate()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _keep(self, index: int, environment: dict[str, str]) -> None:
        pause, was_ready = _FIRST_PAUSE_S, False
        while not self._is_stopping:
            begin = time.monotonic()
            lasted, lines, status = await self._run(index, environment)
            was_ready = was_ready or lasted
            if self._is_stopping:
                return
            if not was_ready:
                said = "\n".join(lines)
                if not self.failure.done():
                    self.failure.set_result(ReplicaFailed(f"replica {index} ended with status {status}:\n{said}"))
                return
            if time.monotonic() - begin > _LONG_LIFE_S:
                pause = _FIRST_PAUSE_S
            logger.warning("replica %d ended with status %s; again in %.1f s", index, status, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)

    async def _run(self, index: int, environment: dict[str, str]) -> tuple[bool, list[str], int | None]:
        """One life of a replica: whether it was ever ready, its last lines, its status."""
        process = await asyncio.create_subprocess_exec(
            *self._plan.command(), env=environment, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE
        )
        self._processes[index] = process
        assert process.stderr is not None and process.stdin is not None
        process.stdin.write(self._plan.fields())
        process.stdin.close()
        lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        worker: Worker | None = None
        async for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip()
            lines.append(line)
            # JSON lines stay what they are.
            print(line if logs.is_json() else f"[{index}] {line}", file=sys.stderr, flush=True)
            found = _ADDRESS.match(line)
            if found and worker is None:
                worker = self._fleet.add(found.group(1))
        if worker is not None and self._fleet.workers.get(worker.name) is worker:
            self._fleet.remove(worker.name)
        return worker is not None and worker.was_ready, list(lines), await process.wait()
