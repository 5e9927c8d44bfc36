"""What `jaxserve deploy ray config.yaml` reads: typed, checked, without ray."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import yaml

from jaxserve.config import EngineConfig
from jaxserve.routing.policy import POLICY_NAMES


class Autoscaling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How many replicas: as many as keep each below both targets.

    target_requests   requests at one replica, running and waiting
    target_kv_use     share of its pages that running requests hold
    """

    min_replicas: int = 1
    max_replicas: int = 4
    target_requests: float = 24.0
    target_kv_use: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(
                f"min_replicas, max_replicas: got {self.min_replicas}, {self.max_replicas}; allowed: 0 or more, and at "
                "least that and 1"
            )
        if not self.target_requests > 0 or not 0 < self.target_kv_use <= 1:
            raise ValueError(
                f"target_requests, target_kv_use: got {self.target_requests}, {self.target_kv_use}; allowed: above 0, "
                "above 0 up to 1"
            )

    def desired(self, current: int, num_requests: float, kv_use: float) -> int:
        """Replicas for so many requests in all, at this mean KV use of the `current` ones."""
        by_requests = num_requests / self.target_requests
        by_pages = current * kv_use / self.target_kv_use
        wanted = math.ceil(max(by_requests, by_pages) - 1e-9)
        return min(max(wanted, self.min_replicas), self.max_replicas)


class ModelDeployment(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One model of the application.

    name          in the API; default: the model
    replicas      a number, or `autoscaling` with limits
    engine        fields of EngineConfig other than model
    api_keys      are asked for by the ingress, and keep caches apart
    route         routing policy over this model's replicas
    max_ongoing_requests   at one replica; more wait in Ray's queue
    """

    model: str
    name: str = ""
    replicas: int = 1
    autoscaling: Autoscaling | None = None
    engine: dict[str, Any] = {}
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    route: str = "cache_aware"
    max_ongoing_requests: int = 256

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.max_ongoing_requests < 1:
            raise ValueError(
                f"replicas, max_ongoing_requests: got {self.replicas}, {self.max_ongoing_requests}; allowed: 1 or more"
            )
        if self.route not in POLICY_NAMES:
            raise ValueError(f"route: got {self.route!r}; allowed: {', '.join(POLICY_NAMES)}")
        if not self.name:
            self.name = self.model
        self.config()

    def config(self) -> EngineConfig:
        """Raises ValueError naming a field that is wrong or unknown."""
        try:
            return EngineConfig(model=self.model, **self.engine)
        except TypeError as error:
            raise ValueError(f"engine: {error}") from None


class RayConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The whole file. address: of a running Ray cluster; None: one is started on this machine."""

    models: list[ModelDeployment]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: list[str] = []
    address: str | None = None
    application: str = "jaxserve"
    ingress_replicas: int = 1

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"models: got {names}; allowed: one or more, with different names")


def load_config(path: Path) -> RayConfig:
    """Raises ValueError naming the file and the field."""
    try:
        content = yaml.safe_load(path.read_text())
        return msgspec.convert(content, RayConfig)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from None
