"""Counts of published models, and what the roofline says where the answer can be worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.simulator.devices import DEVICES, Device, device_named
from jaxserve.simulator.model_shape import PRESETS, load_shape, shape_of
from jaxserve.simulator.step_cost import (
    HostCost,
    MeasuredCost,
    Parallel,
    RooflineCost,
    StepLoad,
    decode_load,
    shared_tokens,
)

NO_HOST = HostCost(step=0.0, row=0.0)


@pytest.mark.parametrize(
    ("name", "billions", "active", "kv_bytes"),
    [
        # Parameter counts as published; K/V bytes of a token in bfloat16.
        ("llama-3.1-8b", 8.03, None, 2 * 32 * 8 * 128 * 2),
        ("llama-3.1-70b", 70.6, None, 2 * 80 * 8 * 128 * 2),
        ("mixtral-8x7b", 46.7, 12.9, 2 * 32 * 8 * 128 * 2),
        ("qwen3-30b-a3b", 30.5, 3.3, 2 * 48 * 4 * 128 * 2),
        ("deepseek-v2", 236, 21, 60 * (512 + 64) * 2),
        ("deepseek-v3", 671, 37, 61 * (512 + 64) * 2),
    ],
)
def test_published_models_have_their_published_sizes(name: str, billions: float, active: float | None, kv_bytes: int):
    shape = load_shape(name)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=0.01)
    if active is not None:
        # Published counts of active parameters count the input embedding too, or not: both are in reach.
        assert shape.num_active_params / 1e9 == pytest.approx(active, rel=0.1)
    assert shape.kv_token_bytes == kv_bytes


def test_one_row_reads_all_weights_and_its_context():
    shape, device = load_shape("llama-3.1-8b"), DEVICES["h100"]
    cost = RooflineCost(shape, device, host=NO_HOST)
    bandwidth = device.memory_bandwidth * device.memory_share
    weights = (shape.num_params - shape.embedding_params) * 2
    assert cost.seconds(decode_load(1, 1000)) == pytest.approx((weights + 1000 * shape.kv_token_bytes) / bandwidth)


def test_a_long_prefill_is_bound_by_arithmetic():
    shape, device = load_shape("llama-3.1-8b"), DEVICES["h100"]
    cost = RooflineCost(shape, device, host=NO_HOST)
    size = 8192
    load = StepLoad(size, 0, 1, size, size * (size + 1) / 2, 1)
    layers = 2 * (shape.num_params - 2 * shape.embedding_params) * size
    attention = 4 * 32 * 128 * 32 * load.pairs
    expected = (layers + attention) / (device.flops * device.compute_share)
    assert cost.seconds(load) == pytest.approx(expected, rel=0.02)  # the head is bound by its weights


def test_a_step_is_never_shorter_than_its_host_work_or_as_long_as_both_without_overlap():
    slow_host = HostCost(step=1.0, row=0.5)
    cost = RooflineCost(load_shape("smollm2-135m"), DEVICES["h100"], host=slow_host)
    assert cost.seconds(decode_load(2, 100)) == 2.0
    without = dataclasses.replace(cost, host=dataclasses.replace(slow_host, overlap=False))
    assert without.seconds(decode_load(2, 100)) > 2.0


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_costs_more_the_more_it_does(name: str):
    cost = RooflineCost(load_shape(name), DEVICES["b200"], Parallel(devices=8), NO_HOST)
    loads = [decode_load(1, 10), decode_load(8, 80), decode_load(8, 80000), decode_load(256, 80000)]
    loads.append(StepLoad(8192, 256, 260, 90000, 8192 * 4096.0, 260))
    seconds = [cost.seconds(load) for load in loads]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_tensor_parallelism_divides_weights_and_adds_links():
    shape = load_shape("llama-3.1-70b")
    one, eight = (RooflineCost(shape, DEVICES["b200"], Parallel(devices=n), NO_HOST) for n in (1, 8))
    assert eight.weight_bytes_per_device == pytest.approx(one.weight_bytes_per_device / 8)
    load = decode_load(1, 100)
    alone, shared = one.parts(load), eight.parts(load)
    assert shared["feed-forward"] == pytest.approx(alone["feed-forward"] / 8)
    assert alone["links"] == 0 < shared["links"]
    with pytest.raises(ValueError, match="more devices"):
        _ = RooflineCost(shape, DEVICES["h100"]).kv_tokens


def test_dp_attention_keeps_the_latent_once_and_holds_a_larger_batch():
    shape = load_shape("deepseek-v3", weight_bytes=1.0)
    layouts = [Parallel(devices=8, attention_ranks=ranks) for ranks in (1, 8)]
    tensor, data = (RooflineCost(shape, DEVICES["h200"], layout, NO_HOST) for layout in layouts)
    # Tensor parallelism keeps all of the latent on every device: 8 ranks hold nearly 8 times as much, less what
    # their own copies of the attention weights take.
    assert 5 < data.kv_tokens / tensor.kv_tokens < 8
    rates = [
        rows / cost.seconds(decode_load(rows, 4096 * rows))
        for cost in (tensor, data)
        if (rows := cost.kv_tokens // 4096)
    ]
    assert rates[1] > 1.5 * rates[0]


def test_experts_that_nobody_chose_are_not_read():
    cost = RooflineCost(load_shape("qwen3-30b-a3b"), DEVICES["h100"], host=NO_HOST)
    assert cost._experts_read(1) == pytest.approx(8)
    assert cost._experts_read(4096) == pytest.approx(128)
    assert 8 < cost._experts_read(4) < 32


def test_grouped_heads_can_be_split_only_so_far():
    shape = load_shape("qwen3-30b-a3b")  # 4 K/V heads
    four, eight = (RooflineCost(shape, DEVICES["h100"], Parallel(devices=n), NO_HOST) for n in (4, 8))
    load = decode_load(64, 64 * 8000)
    assert eight.parts(load)["attention"] == pytest.approx(four.parts(load)["attention"])


def test_windows_make_long_contexts_cheaper():
    config = PRESETS["smollm2-135m"]
    full = shape_of(config)
    windowed = shape_of({**config, "sliding_window": 512, "layer_types": ["sliding_attention"] * 20 + ["full"] * 10})
    assert (windowed.window, windowed.num_window_layers) == (512, 20)
    costs = [RooflineCost(shape, DEVICES["h100"], host=NO_HOST) for shape in (full, windowed)]
    short, long = decode_load(4, 4 * 200), decode_load(4, 4 * 8000)
    assert costs[0].seconds(short) == costs[1].seconds(short)
    ratio = costs[1].parts(long)["attention"] / costs[0].parts(long)["attention"]
    assert ratio == pytest.approx((10 + 20 * 512 / 8000) / 30)


def test_shapes_come_from_files_too(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["llama-3.1-8b"]))
    assert load_shape(str(tmp_path)).num_params == load_shape("llama-3.1-8b").num_params
    with pytest.raises(ValueError, match=r"llama-3\.1-8b"):
        load_shape("no-such-model")
    with pytest.raises(ValueError, match="hidden_size"):
        shape_of({"num_attention_heads": 3})


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="h100"):
        device_named("z80")
    with pytest.raises(ValueError, match="flops"):
        dataclasses.replace(DEVICES["h100"], flops=0)
    with pytest.raises(ValueError, match="attention_ranks"):
        Parallel(devices=8, attention_ranks=3)
    assert isinstance(device_named("h100"), Device)


def test_a_measured_cost_pads_to_its_buckets():
    cost = MeasuredCost(buckets=(1, 8, 64), bucket_seconds=(0.01, 0.02, 0.08), context=1e-6, row=1e-4)
    assert cost.seconds(decode_load(3, 1000)) == pytest.approx(0.02 + 1000e-6 + 3e-4)
    assert cost.seconds(decode_load(8, 0)) == pytest.approx(cost.seconds(decode_load(8, 0)))
    with pytest.raises(ValueError, match="at most 64"):
        cost.seconds(decode_load(65, 0))
    with pytest.raises(ValueError, match="ascending"):
        MeasuredCost(buckets=(8, 1), bucket_seconds=(0.1, 0.2))


def test_rows_that_begin_with_the_same_pages_read_them_once():
    tables = [[5, 6, 7, 8], [5, 6, 9], [2, 6, 7], [5, 6, 7, 8, 3], [5]]
    assert shared_tokens([np.array(table, np.int32) for table in tables], 16) == (2 + 4 + 1) * 16
    load = decode_load(5, 250, 112)
    assert (load.context, load.pairs) == (138, 250)
