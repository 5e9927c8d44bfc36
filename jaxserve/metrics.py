"""Prometheus metrics of one engine, made from EngineStats by the process that talks to clients. No jax.

Two families of names. `vllm:*` are those that dashboards for vLLM ask for. `jaxserve_*` hold what those cannot
say. A quantity that has a vLLM name is not repeated under a name that ends alike, so that sums over name patterns
do not count it twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxserve.messages import FINISH_ERROR, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_PER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_TOKEN_BUCKETS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_LATENCY_BUCKETS = (0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", "num_prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "num_output_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_cached_tokens"),
    ("vllm:num_preemptions", "Requests taken off the device for lack of pages.", "num_preemptions"),
    ("jaxserve_prefill_tokens_computed", "Prompt tokens computed, recomputed ones included.",
     "num_computed_prefill_tokens"),
    ("jaxserve_steps", "Steps run.", "num_steps"),
    ("jaxserve_step_seconds", "Time between dispatch and read, summed over steps.", "step_seconds"),
    ("jaxserve_host_seconds", "Host time between two dispatches not spent waiting.", "host_seconds"),
    ("jaxserve_reads_without_queue", "Reads at which no later step was in flight.", "num_reads_without_queue"),
    ("jaxserve_grammar_forced", "Output tokens that a grammar left no choice of.", "num_forced_tokens"),
    ("jaxserve_grammar_jumped", "Forced tokens computed without a step of their own.", "num_jumped_tokens"),
    ("jaxserve_compiles_after_warmup", "Programs compiled late; 0 is right.", "num_compiles_after_warmup"),
)  # fmt: skip
_COUNTED = sorted({field for _, _, field in _COUNTERS})


class EngineMetrics:
    """Collectors of one engine in a registry of their own. Thread-safe.

    update() takes a snapshot; counters go on rising over restarts of the engine, whose own begin at zero again.
    The observe methods are for the server, which alone knows when a client's request arrived.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._lock = threading.Lock()
        self._stats = EngineStats()
        self._is_up = False
        self._num_restarts = 0
        self._earlier: dict[str, float] = dict.fromkeys(_COUNTED, 0)
        self._earlier_finished: dict[str, int] = {}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between a request's output tokens.", _PER_TOKEN_BUCKETS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_BUCKETS
        )

        self._gap = self._histogram(
            "inter_token_latency_seconds", "Time between two outputs of a stream, per token.", _PER_TOKEN_BUCKETS
        )
        self._per_request = self._histogram(
            "request_time_per_output_token_seconds", "The same as a mean over a request.", _PER_TOKEN_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival until a request was given a row.", _LATENCY_BUCKETS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From being given a row to the first token.", _LATENCY_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCY_BUCKETS
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From being given a row to the last token.", _LATENCY_BUCKETS
        )
        self._num_prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKEN_BUCKETS)
        self._num_output = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKEN_BUCKETS)
        self._http = Counter(
            "jaxserve_http_requests",
            "HTTP requests by method, route and status; 0: the client left first.",
            ["method", "route", "status"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name)

    def update(self, stats: EngineStats) -> None:
        """The engine's latest snapshot. One that counts fewer steps than the last comes from a new engine."""
        with self._lock:
            if stats.num_steps < self._stats.num_steps:
                self._keep_counts()
            self._stats = stats
            self._is_up = True

    def engine_lost(self) -> None:
        """The engine died: its gauges fall to zero, its counts are kept."""
        with self._lock:
            self._keep_counts()
            self._stats = EngineStats()
            self._is_up = False
            self._num_restarts += 1

    def _keep_counts(self) -> None:
        for field in _COUNTED:
            self._earlier[field] += getattr(self._stats, field)
        for reason, count in self._stats.num_finished.items():
            self._earlier_finished[reason] = self._earlier_finished.get(reason, 0) + count

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_gap(self, seconds: float) -> None:
        """Time per token between two outputs of a stream."""
        self._gap.observe(seconds)

    def observe_finished(
        self,
        seconds: float,
        *,
        first_token_seconds: float,
        num_output_tokens: int,
        num_prompt_tokens: int = 0,
        queue_seconds: float | None = None,
    ) -> None:
        """A request answered in full: its latency and its parts, its sizes, and the mean time per token after the
        first."""
        self._latency.observe(seconds)
        self._num_prompt.observe(num_prompt_tokens)
        self._num_output.observe(num_output_tokens)
        if num_output_tokens > 1:
            mean = (seconds - first_token_seconds) / (num_output_tokens - 1)
            self._per_token.observe(mean)
            self._per_request.observe(mean)
        self._decode.observe(seconds - first_token_seconds)
        if queue_seconds is not None:
            self._queue.observe(queue_seconds)
            self._prefill.observe(max(0.0, first_token_seconds - queue_seconds))
            self._inference.observe(max(0.0, seconds - queue_seconds))

    def count_http(self, method: str, route: str, status: int) -> None:
        """An HTTP request that has been answered (or left)."""
        self._http.labels(method if method in _METHODS else "other", route, str(status)).inc()

    def render(self) -> bytes:
        """The text of /metrics; its type is CONTENT_TYPE."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at each scrape."""
        with self._lock:
            stats, is_up, num_restarts = self._stats, self._is_up, self._num_restarts
            counts = {field: self._earlier[field] + getattr(stats, field) for field in _COUNTED}
            finished = dict(self._earlier_finished)
        for reason, count in stats.num_finished.items():
            finished[reason] = finished.get(reason, 0) + count
        yield from self._gauges(stats, is_up)
        for name, text, field in _COUNTERS:
            yield self._counter(name, text, counts[field])
        yield self._counter("jaxserve_engine_restarts", "Engines that were lost.", num_restarts)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason in sorted(finished.keys() - {FINISH_ERROR}):
            success.add_metric([self._model_name, reason], finished[reason])
        yield success
        yield self._counter(
            "jaxserve_requests_failed", "Requests refused or ended by an error.", finished.get(FINISH_ERROR, 0)
        )

    def _gauges(self, stats: EngineStats, is_up: bool) -> Iterator[Metric]:
        labels = ["model_name"]
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests waiting to run.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of cache pages that running requests hold, 0 to 1.",
             stats.num_pages_held / max(stats.num_pages, 1)),
            ("jaxserve_grammars_cached", "Compiled grammars that are kept.", stats.num_grammars_cached),
            ("jaxserve_engine_up", "1 while the engine answers, 0 while it starts or is down.", int(is_up)),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric([self._model_name], value)
            yield gauge
        pages = GaugeMetricFamily("jaxserve_pages", "Pages of the cache by state.", labels=[*labels, "state"])
        free = stats.num_pages - stats.num_pages_held - stats.num_pages_cached
        for state, value in (("held", stats.num_pages_held), ("cached", stats.num_pages_cached), ("free", free)):
            pages.add_metric([self._model_name, state], value)
        yield pages

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([self._model_name], value)
        return counter
