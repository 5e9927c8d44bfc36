"""Fleets in virtual time: leaps change nothing, results repeat, and routing does what it is for."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.routing.policy import make_policy
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.simulator import workloads
from jaxserve.simulator.fleet import FleetOptions, FleetResult, FleetSimulator
from jaxserve.simulator.statistics import Histogram
from jaxserve.simulator.step_cost import MeasuredCost
from jaxserve.simulator.workloads import Lengths, Part

COST = MeasuredCost(
    buckets=(1, 8, 32, 128, 512), bucket_seconds=(0.004, 0.005, 0.007, 0.02, 0.07), context=1e-7, row=5e-5
)


def geometry(num_pages: int = 600, **fields: int) -> CacheGeometry:
    base = {"page_size": 16, "max_num_rows": 16, "max_num_samples": 16, "max_step_tokens": 512, "max_model_len": 2048}
    return CacheGeometry(num_pages=num_pages, **{**base, **fields})


def simulate(policy: str, workload, *, num_replicas: int = 4, **options) -> FleetResult:
    pages = options.pop("num_pages", 600)
    options = {"cost": COST, **options}
    fleet = FleetSimulator(
        FleetOptions(num_replicas=num_replicas, geometry=geometry(pages), **options), make_policy(policy)
    )
    result = fleet.run(workload)
    for replica in fleet.replicas:
        replica.scheduler.check_integrity()
        assert not replica.scheduler.has_work
    return result


def chats(seed: int = 0, rate: float = 4.0):
    turns, user, output = Lengths(low=1, high=4), Lengths(low=5, high=120), Lengths(low=1, high=60)
    return workloads.multi_turn(60, turns, user, output, rate=rate, system_tokens=64, pause_s=0.5, seed=seed)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [90, 600])
@pytest.mark.parametrize("seed", range(3))
def test_leaps_change_nothing_but_the_time_it_takes(num_pages: int, seed: int, overlap: bool):
    # With a cost that does not grow with context a leap takes exactly what its steps take.
    cost = dataclasses.replace(COST, context=0.0)
    one, other = (
        simulate(
            "round_robin", chats(seed, rate=20.0), num_replicas=2, num_pages=num_pages, may_leap=may_leap, cost=cost,
            overlap=overlap,
        ).figures()
        for may_leap in (False, True)
    )  # fmt: skip
    kv_use = one.pop("kv_use"), other.pop("kv_use")  # looked at once a leap
    assert kv_use[1] == pytest.approx(kv_use[0], rel=0.02)
    assert other == pytest.approx(one, rel=1e-6)


def test_without_arrivals_in_between_leaps_are_exact():
    def alone():
        return workloads.unique(12, Lengths(low=20, high=200), Lengths(low=30, high=90), rate=float("inf"))

    results = [simulate("round_robin", alone(), num_replicas=1, may_leap=leap) for leap in (False, True)]
    one, other = (result.figures() for result in results)
    assert other["seconds"] == pytest.approx(one["seconds"], rel=1e-6)
    assert other["steps"] == one["steps"]
    assert other["ttft_mean"] == pytest.approx(one["ttft_mean"], rel=1e-6)


def test_the_same_seed_gives_the_same_result():
    first, second, third = (simulate("cache_aware", chats(seed)) for seed in (1, 1, 2))
    assert first.figures() == second.figures() != third.figures()


def prefixes(zipf: float = 0.0, num_requests: int = 1200, num_prefixes: int = 48, rate: float = 60.0):
    return workloads.shared_prefix(
        num_requests,
        num_prefixes,
        Lengths(low=320, high=320),
        Lengths(low=16, high=16),
        Lengths(low=8, high=8),
        rate=rate,
        zipf=zipf,
    )


def test_prefixes_that_one_cache_cannot_hold_are_held_by_the_fleet():
    # 48 prefixes of 20 pages are twice what a replica holds.
    aware = simulate("cache_aware", prefixes(), num_pages=480)
    turns = simulate("round_robin", prefixes(), num_pages=480)
    assert aware.hit_rate > 0.75
    assert turns.hit_rate < 0.6 * aware.hit_rate
    assert aware.ttft.mean < turns.ttft.mean


def test_all_unique_prompts_lose_nothing():
    def all_unique():
        return workloads.unique(800, Lengths(low=200, high=400), Lengths(low=10, high=60), rate=float("inf"))

    aware, turns = (simulate(name, all_unique(), max_in_flight=64) for name in ("cache_aware", "round_robin"))
    assert aware.total_rate > 0.98 * turns.total_rate


def test_skewed_prefixes_do_not_overload_one_replica():
    result = simulate("cache_aware", prefixes(zipf=1.1, rate=400.0), num_replicas=8, max_in_flight=96)
    assert result.imbalance < 1.3
    assert result.hit_rate > 0.5


def test_a_prefix_that_decoding_rows_share_is_read_once():
    def seconds(groups: int) -> float:
        lengths = (Lengths(low=1024, high=1024), Lengths(low=16, high=16), Lengths(low=64, high=64))
        cost = MeasuredCost(buckets=(512,), bucket_seconds=(0.01,), context=1e-5)
        workload = workloads.shared_prefix(16, groups, *lengths, rate=float("inf"), seed=0)
        return simulate("round_robin", workload, num_replicas=1, num_pages=2000, cost=cost).seconds

    # 64 steps of 16 rows: 16 x 1,056 tokens of context, or 1,024 and 16 x 32.
    assert seconds(16) - seconds(1) > 0.8 * 64 * 15 * 1024 * 1e-5


def test_agents_find_their_history():
    agents = workloads.agentic(
        20,
        3,
        rate=1.0,
        tools_tokens=Lengths(low=200, high=300),
        observation=Lengths(low=20, high=60),
        num_calls=Lengths(low=3, high=6),
        call=Lengths(low=5, high=20),
        task=Lengths(low=20, high=60),
    )
    assert simulate("cache_aware", agents, num_pages=2000).hit_rate > 0.7


def test_a_closed_loop_keeps_to_its_clients():
    result = simulate("load", prefixes(rate=float("inf")), max_in_flight=8)
    # 8 at once over 4 replicas: never more than two rows each.
    assert result.kv_use < 2.5 * 22 / 600
    assert result.num_requests == 1200


def test_requests_that_fit_nowhere_are_counted():
    long = workloads.unique(5, Lengths(low=1900, high=2000), Lengths(low=200, high=200), rate=1.0)
    result = simulate("random", long, num_pages=60)
    assert (result.num_refused, result.num_requests) == (5, 0)


def test_traces_share_what_their_blocks_say(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1030, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": 2000, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 9]},
        {"timestamp": 4000, "input_length": 40, "output_length": 4},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = workloads.trace(path, speed=2.0)
    assert [c.start for c in (first, second, third)] == [0.0, 1.0, 2.0]
    tokens = [np.concatenate([part.tokens() for part in c.turns[0].new]) for c in (first, second, third)]
    assert [len(t) for t in tokens] == [1030, 1100, 40]
    assert (tokens[0][:1024] == tokens[1][:1024]).all() and (tokens[0][1024:1030] != tokens[1][1024:1030]).any()
    result = simulate("cache_aware", workloads.trace(path), num_pages=1200)
    assert result.num_cached_tokens == 1024
    path.write_text('{"timestamp": 0, "input_length": 0, "output_length": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        list(workloads.trace(path))


def test_parts_of_one_stream_begin_alike_and_others_do_not():
    assert (Part(5, 100).tokens()[:40] == Part(5, 40).tokens()).all()
    streams = [Part(n, 200).tokens() for n in range(50)]
    for left, right in itertools.combinations(streams, 2):
        assert (left == right).mean() < 0.05


def test_a_zipf_workload_is_skewed_and_an_even_one_is_not():
    def counts(zipf: float) -> list[int]:
        found: dict[int, int] = {}
        for conversation in prefixes(zipf=zipf):
            stream = conversation.turns[0].new[0].stream
            found[stream] = found.get(stream, 0) + 1
        return sorted(found.values(), reverse=True)

    assert counts(0.0) == [25] * 48
    assert counts(1.1)[0] > 200


def test_histograms_agree_with_sorting():
    values = np.random.default_rng(0).lognormal(-3, 1.5, 5000)
    histogram = Histogram()
    for value in values:
        histogram.add(float(value))
    for share in (0.5, 0.9, 0.99):
        assert histogram.percentile(share) == pytest.approx(np.quantile(values, share), rel=0.012)
    assert histogram.mean == pytest.approx(values.mean())


@pytest.mark.parametrize("bad", ["", "0", "5:2", "x", "1:2:3"])
def test_bad_lengths_are_refused(bad: str):
    with pytest.raises(ValueError, match="length range"):
        Lengths.parse(bad)
