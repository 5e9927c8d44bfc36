"""Commands for more than one engine: `jaxserve router`, and the replicas of `jaxserve serve`. No jax."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.config import EngineConfig
from jaxserve.routing.policy import DEFAULT_CAPACITY, POLICY_NAMES

_BALANCE_HELP = "A worker is left alone while its load exceeds the lowest by more than this"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Options of the router that both commands have; the fields are those of RouterSettings."""

    policy: Annotated[str, typer.Option("--route", help=f"Which worker gets a request: {', '.join(POLICY_NAMES)}.")] = (
        "cache_aware"
    )
    prefix_source: Annotated[
        str, typer.Option(help="Picture of the workers' caches: guess (what was sent where) or events (they tell).")
    ] = "guess"
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer reads prompts; for --prefix-source events.")
    ] = None
    prefix_bytes: Annotated[int, typer.Option(help="Bytes of prefixes remembered of each worker.")] = DEFAULT_CAPACITY
    min_share: Annotated[float, typer.Option(help="Shortest share of a prompt that counts as a match.")] = 0.3
    balance_absolute: Annotated[int, typer.Option(help=f"{_BALANCE_HELP} ...")] = 32
    balance_relative: Annotated[float, typer.Option(help="... and is more than so many times it.")] = 1.5
    admin_key: Annotated[
        str | None, typer.Option(help="Key of the admin API at /workers.", envvar="JAXSERVE_ADMIN_KEY")
    ] = None
    requests_per_second: Annotated[float, typer.Option(help="Per API key, or per address; 0: no limit.")] = 0.0
    burst: Annotated[int, typer.Option(help="Requests that a client may send at once under that limit.")] = 20
    max_worker_in_flight: Annotated[
        int, typer.Option(help="Requests at one worker; more wait in the router. 0: no limit.")
    ] = 0
    queue_timeout_s: Annotated[float, typer.Option(help="Seconds a request may wait for a worker.")] = 30.0
    first_byte_timeout_s: Annotated[
        float, typer.Option(help="Seconds until an answer begins; then another worker is tried.")
    ] = 600.0

    ssl_certfile: Annotated[str | None, typer.Option(help="PEM file: serve HTTPS.")] = None
    ssl_keyfile: Annotated[str | None, typer.Option(help="PEM file with the key of --ssl-certfile.")] = None
    log_format: Annotated[str, typer.Option(help="text, or json: one JSON object a line.")] = "text"
    max_connections: Annotated[int, typer.Option(help="Open connections; more are answered with 503.")] = 16384

    def fields(self) -> dict[str, Any]:
        """For RouterSettings(**...)."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def run_router_command(
    options: RoutingOptions,
    *,
    workers: list[str],
    host: str,
    port: int,
    api_keys: list[str],
    worker_key: str | None,
    allowed_hosts: list[str],
    cors_origins: list[str],
) -> int:
    """Serve the router; returns the exit status. Raises ValueError for bad options."""
    from jaxserve.server.router.app import run_router
    from jaxserve.server.router.settings import RouterSettings

    settings = RouterSettings(
        workers=tuple(workers),
        host=host,
        port=port,
        api_keys=tuple(api_keys),
        worker_key=worker_key,
        allowed_hosts=tuple(allowed_hosts),
        cors_origins=tuple(cors_origins),
        **options.fields(),
    )
    return run_router(settings)


def serve_replicas(config: EngineConfig, server: dict[str, Any], *, count: int, policy: str) -> int:
    """Serve `count` engines behind a router; returns the exit status. server: fields of ServerSettings. Raises
    ValueError for those that replicas cannot keep."""
    from jaxserve.server.router.app import run_router
    from jaxserve.server.router.replicas import plan_replicas
    from jaxserve.server.settings import ServerSettings

    admin_key = os.environ.get("JAXSERVE_ADMIN_KEY") or None
    return run_router(*plan_replicas(config, ServerSettings(**server), count=count, policy=policy, admin_key=admin_key))


def deploy_ray(path: Path) -> None:
    """Deploy what a YAML file says on Ray Serve, and stay until interrupted."""
    from jaxserve.server.ray_config import load_config

    config = load_config(path)
    try:
        from jaxserve.server.ray_serve import deploy
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{error.name} is missing; install jaxserve with the extra: pip install 'jaxserve[ray]'"
        ) from error
    deploy(config)
