"""Which configuration is the cheapest that keeps a promise: candidates, simulated on the same workload. No jax."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxserve.routing.policy import make_policy
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.simulator.devices import Device
from jaxserve.simulator.fleet import FleetOptions, FleetResult, FleetSimulator
from jaxserve.simulator.model_shape import ModelShape
from jaxserve.simulator.step_cost import HostCost, MeasuredCost, Parallel, RooflineCost, StepCost
from jaxserve.simulator.workloads import Conversation

WorkloadMaker = Callable[[], Iterable[Conversation]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to serve a model. num_pages None: what the device's memory holds."""

    shape: ModelShape
    device: Device
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    replicas: int = 1
    max_num_rows: int = 256
    max_step_tokens: int = 8192
    page_size: int = 64
    num_pages: int | None = None
    route: str = "cache_aware"
    host: HostCost = dataclasses.field(default_factory=HostCost)
    max_in_flight: int = 0
    measured: MeasuredCost | None = None

    @property
    def num_devices(self) -> int:
        return self.parallel.devices * self.replicas

    @property
    def price_per_hour(self) -> float:
        return self.num_devices * self.device.price_per_hour

    @property
    def label(self) -> str:
        layout = f"tp{self.parallel.devices}"
        if self.parallel.attention_ranks > 1:
            layout += f"/dp-attention{self.parallel.attention_ranks}"
        return f"{self.replicas} x {layout} {self.device.name}, {self.max_num_rows} rows, {self.route}"

    def cost(self) -> StepCost:
        return self.measured or RooflineCost(self.shape, self.device, self.parallel, self.host)

    def geometry(self) -> CacheGeometry:
        """Raises ValueError if the weights leave no room for pages."""
        num_pages = self.num_pages
        if num_pages is None:
            num_pages = RooflineCost(self.shape, self.device, self.parallel, self.host).kv_tokens // self.page_size
        return CacheGeometry(
            num_pages=num_pages,
            page_size=self.page_size,
            max_num_rows=self.max_num_rows,
            max_num_samples=self.max_num_rows,
            max_step_tokens=max(self.max_step_tokens, self.max_num_rows),
            max_model_len=self.shape.max_model_len,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    """A service level: upper limits in seconds, infinity where nothing is promised."""

    ttft_p99: float = math.inf
    itl_p99: float = math.inf
    ttft_mean: float = math.inf
    itl_mean: float = math.inf

    def is_kept(self, result: FleetResult) -> bool:
        figures = result.figures()
        limits = dataclasses.asdict(self)
        kept = all(not limit < math.inf or figures[name] <= limit for name, limit in limits.items())
        return kept and result.num_refused == 0 and result.num_requests > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate's figures on the workload; error: why it could not be simulated."""

    candidate: Candidate
    result: FleetResult | None
    error: str = ""

    @property
    def rate_per_device(self) -> float:
        """Output tokens per second and device."""
        return self.result.output_rate / self.candidate.num_devices if self.result else 0.0

    @property
    def rate_per_user(self) -> float:
        """Output tokens per second that one user sees."""
        return 1.0 / self.result.gap.mean if self.result and self.result.gap.count else 0.0

    @property
    def price_per_million(self) -> float:
        """For a million output tokens, at this load."""
        rate = self.result.output_rate if self.result else 0.0
        return self.candidate.price_per_hour / 3600.0 / rate * 1e6 if rate else math.inf


def grid(
    shape: ModelShape,
    *,
    devices: Sequence[Device],
    layouts: Sequence[Parallel],
    replicas: Sequence[int],
    rows: Sequence[int],
    routes: Sequence[str],
    **common: object,
) -> Iterator[Candidate]:
    """All combinations."""
    for device, layout, count, num_rows, route in itertools.product(devices, layouts, replicas, rows, routes):
        if count == 1 and route != routes[0]:
            continue  # nothing to route
        yield Candidate(
            shape=shape, device=device, parallel=layout, replicas=count, max_num_rows=num_rows, route=route,
            **common,  # type: ignore[arg-type]
        )  # fmt: skip


def evaluate(candidate: Candidate, workload: WorkloadMaker) -> Outcome:
    """Simulate one candidate."""
    try:
        options = FleetOptions(
            num_replicas=candidate.replicas,
            geometry=candidate.geometry(),
            cost=candidate.cost(),
            max_in_flight=candidate.max_in_flight,
        )
        return Outcome(candidate, FleetSimulator(options, make_policy(candidate.route)).run(workload()))
    except ValueError as error:
        return Outcome(candidate, None, str(error))


def cheapest(outcomes: Iterable[Outcome], promise: Promise) -> Outcome | None:
    """The lowest price per hour that keeps the promise; of equal ones the faster for its users."""
    kept = [outcome for outcome in outcomes if outcome.result is not None and promise.is_kept(outcome.result)]
    return min(kept, key=lambda o: (o.candidate.price_per_hour, -o.rate_per_user), default=None)


def pareto(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that no other beats both in tokens per second and device and in tokens per second and user; ascending in
    the second."""
    front: list[Outcome] = []
    known = [outcome for outcome in outcomes if outcome.result is not None]
    for outcome in sorted(known, key=lambda o: (-o.rate_per_user, -o.rate_per_device)):
        if not front or outcome.rate_per_device > front[-1].rate_per_device:
            front.append(outcome)
    return front[::-1]
