"""Prometheus metrics of the router. The hot path adds to plain numbers; the text is made at a scrape."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.server.router.fleet import Fleet
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_OVERHEAD_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
_STATES = ("ready", "draining", "not_ready", "open", "half_open", "full")


class RouterMetrics:
    """num_unserved: requests that no worker answered. num_cut: answers that broke after they had begun."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.num_unserved = self.num_cut = self.num_clients_left = self.num_limited = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.observe_overhead = Histogram(
            "jaxserve_router_wait_seconds",
            "From reading a request to sending it to a worker: choosing, and waiting for one.",
            registry=self.registry,
            buckets=_OVERHEAD_BUCKETS,
        ).observe

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at each scrape."""
        workers = list(self._fleet.workers.values())
        for name, text, value in (
            ("unserved", "Requests that no worker answered.", self.num_unserved),
            ("cut", "Answers that broke after they had begun.", self.num_cut),
            ("clients_left", "Clients that left before the end.", self.num_clients_left),
            ("limited", "Requests over a client's rate.", self.num_limited),
        ):
            yield _one(CounterMetricFamily(f"jaxserve_router_{name}", text), value)
        loads = [worker.in_flight for worker in workers if worker.is_ready and not worker.is_draining]
        mean = sum(loads) / len(loads) if loads else 0.0
        yield _one(
            GaugeMetricFamily("jaxserve_router_queue", "Requests that wait for a worker."), self._fleet.num_waiting
        )
        yield _one(
            GaugeMetricFamily("jaxserve_router_imbalance", "Requests at the busiest ready worker over the mean."),
            max(loads) / mean if mean else 1.0,
        )
        for kind, name, text, value_of in (
            (CounterMetricFamily, "requests", "Requests sent.", lambda w: w.counts.requests),
            (CounterMetricFamily, "failures", "Requests that the worker failed.", lambda w: w.counts.failures),
            (CounterMetricFamily, "retries", "Requests tried elsewhere after it.", lambda w: w.counts.retries),
            (CounterMetricFamily, "prefix_bytes", "Prompt bytes sent.", lambda w: w.counts.bytes_sent),
            (CounterMetricFamily, "prefix_bytes_known", "Of those, believed to be cached.",
             lambda w: w.counts.bytes_known),
            (CounterMetricFamily, "prompt_tokens", "Prompt tokens, as it reports.",
             lambda w: w.report.num_prompt_tokens),
            (CounterMetricFamily, "cached_tokens", "Of those, found in its cache, as it reports.",
             lambda w: w.report.num_cached_tokens),
            (GaugeMetricFamily, "in_flight", "Requests under way.", lambda w: w.in_flight),
            (GaugeMetricFamily, "running", "Requests in its batch, as it reports.", lambda w: w.report.num_running),
            (GaugeMetricFamily, "waiting", "Requests in its queue, as it reports.", lambda w: w.report.num_waiting),
            (GaugeMetricFamily, "cache_usage", "Share of its pages in use, as it reports.",
             lambda w: w.report.cache_usage),
        ):  # fmt: skip
            family = kind(f"jaxserve_router_worker_{name}", text, labels=["worker"])
            for worker in workers:
                family.add_metric([worker.name], value_of(worker))
            yield family
        states = GaugeMetricFamily("jaxserve_router_worker_state", "1 for its state.", labels=["worker", "state"])
        for worker in workers:
            current = worker.state
            for state in _STATES:
                states.add_metric([worker.name, state], int(state == current))
        yield states


def _one(family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
    family.add_metric([], value)
    return family
