"""The rendered page, read back by prometheus_client's own parser."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.messages import EngineStats
from jaxserve.metrics import EngineMetrics


def samples(metrics: EngineMetrics) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[(sample.name, *labels.values())] = sample.value
    return found


STATS = EngineStats(
    num_running=3, num_waiting=2, num_pages=100, num_pages_held=25, num_pages_cached=30, num_steps=7,
    num_prompt_tokens=1000, num_cached_tokens=400, num_output_tokens=50, num_preemptions=1,
    num_finished={"stop": 4, "length": 1, "abort": 2, "error": 3},
)  # fmt: skip


def test_names_of_vllm_are_served():
    metrics = EngineMetrics("m")
    metrics.update(STATS)
    seen = samples(metrics)
    assert seen["vllm:num_requests_running",] == 3
    assert seen["vllm:num_requests_waiting",] == 2
    assert seen["vllm:kv_cache_usage_perc",] == 0.25
    assert seen["vllm:prompt_tokens_total",] == 1000
    assert seen["vllm:generation_tokens_total",] == 50
    assert seen["vllm:prefix_cache_queries_total",] == 1000
    assert seen["vllm:prefix_cache_hits_total",] == 400
    assert seen["vllm:num_preemptions_total",] == 1
    assert seen["vllm:request_success_total", "length"] == 1
    assert seen["jaxserve_requests_failed_total",] == 3
    assert seen["jaxserve_compiles_after_warmup_total",] == 0
    assert {k: seen["jaxserve_pages", k] for k in ("held", "cached", "free")} == {
        "held": 25,
        "cached": 30,
        "free": 45,
    }


def test_a_pattern_over_names_counts_each_quantity_once():
    metrics = EngineMetrics("m")
    metrics.update(STATS)
    for pattern, value in (
        ("prompt_tokens_total", 1000),
        ("generation_tokens_total", 50),
        ("output_tokens_total", None),
    ):
        hits = [v for (name, *_), v in samples(metrics).items() if name.endswith(pattern)]
        assert hits == ([] if value is None else [value])


def test_counters_survive_a_restart_and_gauges_fall():
    metrics = EngineMetrics("m")
    metrics.update(STATS)
    metrics.engine_lost()
    seen = samples(metrics)
    assert seen["vllm:prompt_tokens_total",] == 1000 and seen["vllm:num_requests_running",] == 0
    assert seen["jaxserve_engine_up",] == 0 and seen["jaxserve_engine_restarts_total",] == 1
    metrics.update(EngineStats(num_steps=1, num_prompt_tokens=10, num_finished={"stop": 1}))
    seen = samples(metrics)
    assert seen["vllm:prompt_tokens_total",] == 1010 and seen["vllm:request_success_total", "stop"] == 5
    assert seen["jaxserve_engine_up",] == 1


def test_an_unannounced_restart_is_seen_by_its_lower_step_count():
    metrics = EngineMetrics("m")
    metrics.update(STATS)
    metrics.update(msgspec.structs.replace(STATS, num_steps=1, num_output_tokens=5))
    assert samples(metrics)["vllm:generation_tokens_total",] == 55


def test_latencies_go_to_histograms():
    metrics = EngineMetrics("m")
    metrics.observe_first_token(0.25)
    metrics.observe_finished(1.25, first_token_seconds=0.25, num_output_tokens=11)
    metrics.observe_finished(0.25, first_token_seconds=0.25, num_output_tokens=1)
    seen = samples(metrics)
    assert seen["vllm:time_to_first_token_seconds_sum",] == 0.25
    assert seen["vllm:time_per_output_token_seconds_sum",] == 0.1
    assert seen["vllm:time_per_output_token_seconds_count",] == 1
    assert seen["vllm:e2e_request_latency_seconds_count",] == 2
