"""Page counts from bytes, what is free, and the compile cache folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading import load_config

from jaxserve.config import EngineConfig
from jaxserve.hub import ModelSource
from jaxserve.runner.memory import _control_group_available, _system_available, free_bytes, plan_pages
from jaxserve.runner.runner import resolve_max_model_len, resolve_options
from jaxserve.runner.warmup import enable_compile_cache

MIB = 2**20


def tiny_config(name: str) -> ModelConfig:
    return load_config(ModelSource(name, "safetensors", Path(__file__).parents[1] / "fixtures" / "tiny" / name))


def plan(**changes: Any) -> int:
    wanted: dict[str, Any] = {
        "bytes_per_page": MIB, "pages_per_request": 10, "max_num_rows": 4, "num_pages": None,
        "kv_cache_bytes": None, "memory_fraction": 0.5, "free_bytes": 1000 * MIB, "platform": "cpu",
    }  # fmt: skip
    return plan_pages(**(wanted | changes)).num_pages


def test_plan() -> None:
    assert plan() == 41  # four full requests and the dummy page
    assert plan(free_bytes=60 * MIB) == 30
    assert plan(num_pages=11) == 11
    assert plan(kv_cache_bytes=200 * MIB) == 200
    assert plan(kv_cache_bytes=12 * MIB + 5) == 12
    many = {"max_num_rows": 10**6, "free_bytes": 10**5 * MIB}
    assert plan(**many) == 2048  # on CPU an engine that nobody told how much takes 2 GiB
    assert plan(**many, platform="gpu") == 50_000
    assert plan(**many, pages_per_request=1000) == 4 * 1001  # or four full requests


def test_without_a_length_of_its_own_a_small_pool_takes_shorter_requests() -> None:
    found = plan_pages(
        bytes_per_page=MIB, pages_per_request=10, max_num_rows=4, num_pages=8, kv_cache_bytes=None,
        memory_fraction=0.5, free_bytes=1000 * MIB, platform="cpu", may_shorten=True,
    )  # fmt: skip
    assert (found.num_pages, found.pages_per_request) == (8, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 10}, "num_pages: got 10; allowed: at least 11 pages"),
        ({"kv_cache_bytes": 10 * MIB}, r"kv_cache_bytes: got 10485760 \(10 pages of 1048576 bytes\)"),
        ({"free_bytes": 21 * MIB}, r"memory_fraction: 0.5 of 0.02 GiB free memory is 10 pages.*max_model_len"),
        ({"num_pages": 1001}, "num_pages: got 1001; allowed: 1000 pages"),
    ],
)
def test_too_little_memory_is_an_error_with_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_free_memory_is_the_smaller_of_system_and_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert _system_available(meminfo) == 5000 * 1024
    assert _system_available(tmp_path / "absent") > 0
    assert _control_group_available(tmp_path) == 2**63 - 1
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 150000\n")
    assert _control_group_available(tmp_path) == 550_000
    (tmp_path / "memory.max").write_text("max\n")
    assert _control_group_available(tmp_path) == 2**63 - 1
    assert 0 < free_bytes(jax.devices()[0]) <= _system_available()


@pytest.fixture
def cache_settings() -> Iterator[None]:
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_compile_cache_folder_is_private(
    tmp_path: Path, cache_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXSERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = enable_compile_cache(None)
    assert found == tmp_path / "jaxserve" / "xla"
    assert found.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(found)
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "elsewhere"))
    assert enable_compile_cache(None) == tmp_path / "elsewhere" / "xla"
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert enable_compile_cache(str(shared)) is None
    assert enable_compile_cache("") is None
    assert enable_compile_cache(str(tmp_path / "own")) == tmp_path / "own"
    (tmp_path / "file").write_text("")
    assert enable_compile_cache(str(tmp_path / "file")) is None


def test_options_of_the_platform() -> None:
    plain = resolve_options(EngineConfig(attention_backend="xla", matmul_backend="xla"), "cpu")
    assert (plain.dtype, plain.page_dtype, plain.page_size) == ("bfloat16", "float32", 16)
    exact = resolve_options(EngineConfig(dtype="float32", deterministic=True, page_size=4), "cpu")
    with pytest.raises(ValueError, match="matmul_backend: got 'cpu_ffi' with deterministic; allowed: auto, xla"):
        resolve_options(EngineConfig(dtype="float32", deterministic=True, matmul_backend="cpu_ffi"), "cpu")
    assert (exact.dtype, exact.page_dtype, exact.page_size, exact.matmul) == ("float32", "float32", 4, "xla")
    other = resolve_options(EngineConfig(attention_backend="xla", matmul_backend="xla"), "gpu")
    assert (other.page_dtype, other.page_size) == ("bfloat16", 64)


def test_quantised_pages_are_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="page_dtype: got 'int4'; allowed: auto, float32, bfloat16, int8, fp8"):
        EngineConfig(page_dtype="int4")
    config = EngineConfig(page_dtype="int8")
    assert resolve_options(config, "cpu", tiny_config("llama")).page_dtype == "int8"
    with pytest.raises(ValueError, match="page_dtype: got 'int8' with latent attention; allowed: float32, bfloat16"):
        resolve_options(config, "cpu", tiny_config("deepseek_v3"))


def test_context_length() -> None:
    assert resolve_max_model_len(None, 2048) == 2048
    assert resolve_max_model_len(None, 131072) == 8192
    assert resolve_max_model_len(100_000, 131072) == 100_000
    with pytest.raises(ValueError, match="got 3000; allowed: up to 2048"):
        resolve_max_model_len(3000, 2048)
