"""Block sizes of the GPU kernels: what is shipped, what is searched."""

from __future__ import annotations

import json

import pytest
from jaxserve.pallas_kernels import tuning


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_shipped_values_say_where_they_come_from_and_fit(card):
    content = json.loads((tuning.SHIPPED / f"{card}.json").read_text())
    assert content["source"] == "modelled" and "Not timed" in content["how"]
    for head_dim in tuning.HEAD_DIMS:
        sizes = tuning.block_sizes(card, "paged_attention", head_dim)
        decode = sizes["decode"]
        used = tuning.decode_smem(head_dim, decode["stages"])
        assert (used + 1024) * decode["blocks_per_sm"] <= 233472
        assert tuning.prefill_smem(head_dim, **sizes["prefill"]) <= 232448


def test_shared_memory_is_that_of_the_compiled_kernels():
    """Sizes that benchmarks/gpu_compile.py reports; barriers and scratch add up to 4 KiB."""
    for estimate, compiled in (
        (tuning.decode_smem(128, 3), 108648),
        (tuning.decode_smem(64, 3), 56424),
        (tuning.decode_smem(256, 2), 147528),
        (tuning.prefill_smem(128, 128, 2), 199768),
        (tuning.prefill_smem(64, 128, 2), 101464),
        (tuning.prefill_smem(256, 64, 2), 199768),
        (tuning.grouped_smem(128, 64, 4), 229440),
        (tuning.grouped_smem(64, 64, 6), 180320),
        (tuning.quant_smem(64, 128, 3), 173104),
    ):
        assert 0 <= compiled - estimate <= 4096


def test_names_of_cards():
    assert tuning.card_name("NVIDIA H100 80GB HBM3") == "h100"
    assert tuning.card_name("NVIDIA H200") == "h200"
    assert tuning.card_name("cpu") == tuning.FALLBACK


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_every_operation_has_shipped_values_among_the_candidates(card):
    for operation, classes in tuning.OPERATIONS.items():
        for shape_class, kinds in classes.items():
            sizes = tuning.block_sizes(card, operation, shape_class)
            assert set(sizes) == set(kinds)
            if operation != "paged_attention":
                assert sizes["blocks"] in list(tuning.candidates(operation, shape_class, "blocks"))


def test_the_fastest_candidate_is_written_and_used(tmp_path, monkeypatch):
    def timer(operation: str, shape_class: str, kind: str, sizes: dict[str, int]) -> float:
        return abs(sizes["stages"] - 3) + 1.0 + sizes.get("min_blocks", 0) / 100 + sizes.get("keys", 0) / 1000

    path = tuning.tune(tmp_path, timer=timer)
    content = json.loads(path.read_text())
    assert content["source"] == "measured"
    assert {name: set(classes) for name, classes in content["operations"].items()} == {
        name: set(classes) for name, classes in tuning.OPERATIONS.items()
    }
    monkeypatch.setenv("JAXSERVE_TUNED", str(tmp_path))
    tuning.block_sizes.cache_clear()
    try:
        sizes = tuning.block_sizes("h200", "paged_attention", 128)
        assert tuning.block_sizes("h200", "quant_matmul", "many")["blocks"]["stages"] == 3
        # What a file knows nothing of is taken from the shipped one.
        del content["operations"]["mla_attention"]
        path.write_text(json.dumps(content))
        tuning.block_sizes.cache_clear()
        assert tuning.block_sizes("h200", "mla_attention", "any")["blocks"]["min_blocks"] == 8
    finally:
        tuning.block_sizes.cache_clear()
    assert (sizes["decode"]["stages"], sizes["decode"]["min_blocks"]) == (3, 4)
    assert (sizes["prefill"]["stages"], sizes["prefill"]["keys"]) == (3, 64)


def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(ValueError, match="tune: the GPU kernels do not run here"):
        tuning.tune(tmp_path)


def test_a_file_without_a_source_is_refused(tmp_path, monkeypatch):
    (tmp_path / "h200.json").write_text("{}")
    monkeypatch.setenv("JAXSERVE_TUNED", str(tmp_path))
    tuning.block_sizes.cache_clear()
    with pytest.raises(ValueError, match="source: got None; allowed: modelled, measured"):
        tuning.block_sizes("h200", "paged_attention", 64)
    tuning.block_sizes.cache_clear()
