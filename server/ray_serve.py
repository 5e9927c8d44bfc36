"""jaxserve on Ray Serve (extra `ray`): engines as a deployment, our policies as request router, an OpenAI ingress.

    client ─ HTTP ─ Ray's proxy ─ Ingress ─ PrefixRouter chooses ─ EngineReplica (server/app.py with its engine)

A replica is the whole HTTP application in a Ray actor, called without a socket: what it can do is what `jaxserve
serve` can do. Ray restarts actors, places them on machines and scales them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import ray
from jaxserve.server.app import build_app
from jaxserve.server.engine_client import EngineState
from jaxserve.server.ray_config import Autoscaling, ModelDeployment, RayConfig
from jaxserve.server.ray_ingress import Call, Head, Ingress
from jaxserve.server.router.queries import query_of
from jaxserve.server.settings import ServerSettings
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util.metrics import Gauge

from jaxserve.routing.loads import LoadTable
from jaxserve.routing.policy import Query, make_policy

logger = logging.getLogger(__name__)

_READY_S = 1800.0  # a large model may take long to load
_STATS_S = 1.0


class PrefixRouter(RequestRouter):
    """Our policies behind Ray's interface. Each router counts its own requests; Ray asks replicas for their queues."""

    def initialize_state(self, route: str = "cache_aware") -> None:
        self._policy = make_policy(route)
        self._table = LoadTable()
        self._on_the_way: dict[str, str] = {}  # request -> replica
        self._in_flight: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that the policy chooses, then all others (if it cannot take the request)."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for name in [name for name in self._table.names if name not in replicas]:
            self._forget(name)
        for name in replicas:
            self._table.set(name, self._in_flight.setdefault(name, 0))
        call = _call(pending_request)
        if call is not None and call.home in replicas:
            return [[replicas[call.home]]]
        query = _query(pending_request)
        chosen = self._policy.choose(query, self._table, () if call is None else call.without)
        chosen = chosen or self._policy.choose(query, self._table)
        if chosen is None:
            return [candidate_replicas]
        others = [replica for name, replica in replicas.items() if name != chosen]
        return [[replicas[chosen]], others] if others else [[replicas[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        name = replica_id.unique_id
        self._policy.note_sent(_query(pending_request), name)
        self._on_the_way[pending_request.metadata.internal_request_id] = name
        self._count(name, 1)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if self._on_the_way.pop(internal_request_id, None) is not None:
            self._count(replica_id.unique_id, -1)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def _count(self, name: str, change: int) -> None:
        self._in_flight[name] = max(0, self._in_flight.get(name, 0) + change)
        if name in self._table:
            self._table.set(name, self._in_flight[name])

    def _forget(self, name: str) -> None:
        self._table.remove(name)
        self._policy.remove_worker(name)
        self._in_flight.pop(name, None)


def _call(pending: PendingRequest | None) -> Call | None:
    is_call = pending is not None and pending.args and isinstance(pending.args[0], Call)
    return pending.args[0] if is_call else None  # type: ignore[union-attr]


def _query(pending: PendingRequest | None) -> Query:
    call = _call(pending)
    if call is None:
        return Query()
    headers = dict(call.headers)
    authorization = headers.get("authorization", "").encode("latin-1")
    return query_of(call.body, authorization=authorization, session=headers.get("x-session-id", ""))


class EngineReplica:
    """The server of one engine as an actor. Not ready before the engine is."""

    async def __init__(self, model: str, engine: dict[str, Any], name: str, api_keys: list[str]) -> None:
        from jaxserve.config import EngineConfig

        settings = ServerSettings(served_model_name=name, api_keys=tuple(api_keys), chat_page=False)
        self._app = build_app(EngineConfig(model=model, **engine), settings)
        self._server = self._app.state.server
        self._lifespan = contextlib.AsyncExitStack()
        await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
        self._id = serve.get_replica_context().replica_id.unique_id
        await self._wait_ready()
        labels = {"model": name, "engine_replica": self._id}
        self._gauges = {
            field: Gauge(f"jaxserve_{field}", text, tag_keys=("model", "engine_replica"))
            for field, text in (
                ("requests", "Requests that this replica has answered or answers."),
                ("prompt_tokens", "Prompt tokens of admitted requests."),
                ("cached_prompt_tokens", "Of those, found in the prefix cache."),
                ("running", "Requests in the batch."),
                ("waiting", "Requests in the engine's queue."),
                ("kv_use", "Share of pages that running requests hold."),
            )
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags(labels)
        self._num_requests = 0
        self._reporting = asyncio.create_task(self._report())

    async def _wait_ready(self) -> None:
        async with asyncio.timeout(_READY_S):
            while self._server.client.state is not EngineState.READY:
                if self._server.client.state is EngineState.FAILED:
                    raise RuntimeError(f"the engine could not be started: {self._server.supervisor.failure}")
                await asyncio.sleep(0.1)

    async def check_health(self) -> None:
        """Raises when the engine was given up: Ray then replaces the replica. (A lost engine is restarted by us.)"""
        if self._server.client.state is EngineState.FAILED:
            raise RuntimeError(f"the engine failed: {self._server.supervisor.failure}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What scale() looks at."""
        return {"kv_use": self._figures()["kv_use"]}

    async def __call__(self, call: Call) -> AsyncIterator[Any]:
        """A Head, then the pieces of the body as they come."""
        self._num_requests += 1
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        has_left = asyncio.Event()
        is_read = False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": call.body, "more_body": False}
            await has_left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._app(_scope(call), receive, messages.put))
        task.add_done_callback(lambda done: messages.put_nowait({"type": "end"}))
        try:
            while (message := await messages.get())["type"] != "end":
                if message["type"] == "http.response.start":
                    headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in message["headers"]]
                    yield Head(message["status"], headers, self._id)
                elif message.get("body"):
                    yield message["body"]
        finally:
            has_left.set()
            await asyncio.wait([task])

    def _figures(self) -> dict[str, float]:
        stats = self._server.client.latest_stats
        return {
            "requests": self._num_requests,
            "prompt_tokens": stats.num_prompt_tokens,
            "cached_prompt_tokens": stats.num_cached_tokens,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_use": stats.num_pages_held / max(stats.num_pages, 1),
        }

    async def _report(self) -> None:
        while True:
            for field, value in self._figures().items():
                self._gauges[field].set(value)
            await asyncio.sleep(_STATS_S)


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query.encode(),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in call.headers],
        "client": None,
        "server": None,
    }


def make_scaler(limits: dict[str, Any]) -> Any:
    """A policy function for one deployment; `limits`: fields of Autoscaling."""
    autoscaling = Autoscaling(**limits)

    def scale_one(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        uses = list(((context.aggregated_metrics or {}).get("kv_use") or {}).values())
        mean = sum(uses) / len(uses) if uses else 0.0
        return autoscaling.desired(context.current_num_replicas, context.total_num_requests, mean), {}

    return scale_one


def build(config: RayConfig) -> serve.Application:
    """The Ray Serve application."""
    engines = {model.name: _engine(model, config.api_keys) for model in config.models}
    ingress = serve.deployment(name="ingress", num_replicas=config.ingress_replicas, max_ongoing_requests=1000)(Ingress)
    return ingress.bind(list(engines), config.api_keys, *engines.values())


def _engine(model: ModelDeployment, api_keys: list[str]) -> Any:
    options: dict[str, Any] = {
        "name": f"engine-{model.name.replace('/', '--')}",
        "max_ongoing_requests": model.max_ongoing_requests,
        "ray_actor_options": {"num_cpus": model.num_cpus, "num_gpus": model.num_gpus},
        "request_router_config": RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"route": model.route}
        ),
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 60.0,
        "graceful_shutdown_timeout_s": 30.0,
    }
    if model.autoscaling is not None:
        limits = msgspec.structs.asdict(model.autoscaling)
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=model.autoscaling.min_replicas,
            max_replicas=model.autoscaling.max_replicas,
            target_ongoing_requests=model.autoscaling.target_requests,
            policy=AutoscalingPolicy(policy_function=make_scaler(limits)),
        )
    else:
        options["num_replicas"] = model.replicas
    deployment = serve.deployment(**options)(EngineReplica)
    return deployment.bind(model.model, model.engine, model.name, api_keys)


def deploy(config: RayConfig, *, blocking: bool = True) -> None:
    """Start (or update) the application on its cluster; blocking: until interrupted."""
    if not ray.is_initialized():
        ray.init(address=config.address, ignore_reinit_error=True)
    serve.start(http_options={"host": config.host, "port": config.port})
    serve.run(build(config), name=config.application, blocking=blocking)
