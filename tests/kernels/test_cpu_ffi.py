"""The machinery under the CPU kernels: support checks, narrower CPUs, the code cache, damaged inputs."""

from __future__ import annotations

import functools
import os
import platform
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_marks import needs_cpu_ffi
from jaxserve.pallas_kernels import backend as backends
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec, page_array_shape, paged_attention
from jaxserve.pallas_kernels.ragged import RaggedBatch
from ragged_cases import Row, make_case
from test_paged_attention import run

pytestmark = needs_cpu_ffi

# What AVX2 machines have; none of AVX-512.
AVX2 = "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+popcnt,+sse4.2,+cx16"

_ON_A_NARROW_CPU = """
import jax, jax.numpy as jnp, numpy as np
from jaxserve.pallas_kernels.cpu_ffi.support import has_wide_vectors
from jaxserve.pallas_kernels.matmul.api import linear
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec
from ragged_cases import Row, make_case
from test_paged_attention import assert_right, run
import test_rms_norm, test_rotary

assert not has_wide_vectors()
spec = AttentionSpec(6, 2, 32, 0.2, sliding_window=50, logit_softcap=5.0, has_sinks=True)
for page_dtype in ("bfloat16", "fp8"):
    case = make_case(np.random.default_rng(0), spec, [Row(300, 1), Row(70, 1), Row(40, 37)], 16, page_dtype)
    assert_right(case, *run(case, "cpu_ffi"))
x = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
w = jnp.asarray(np.random.default_rng(2).standard_normal((50, 96)), jnp.bfloat16)
rounded = np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(np.float64)
expected = rounded @ np.asarray(w).astype(np.float64).T
out = jax.jit(lambda x, w: linear(x, w, backend="cpu_ffi"))(jnp.asarray(x), w)
assert np.abs(np.asarray(out) - expected).max() < 1e-5 * np.abs(expected).max()
test_rms_norm.TestAddRMSNorm().test_close_to_float64("cpu_ffi", 64, 1e-5)
test_rotary.TestRotateHeads().test_close_to_float64("cpu_ffi", True, (4, 1, 96, 64))
print("right")
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")
def test_right_without_avx512(tmp_path):
    narrow = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2, "XDG_CACHE_HOME": str(tmp_path)}
    env = {**os.environ, **narrow, "PYTHONPATH": os.pathsep.join(sys.path)}  # test modules import each other
    command = [sys.executable, "-c", _ON_A_NARROW_CPU]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "right", done.stderr[-3000:]

    # The code is kept for the next process, in a folder that nobody else can write to; a damaged file is
    # ignored.
    folder = tmp_path / "jaxserve" / "cpu_kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.glob("*.obj"))
    assert len(files) >= 4
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"?")
    times = [path.stat().st_mtime_ns for path in files]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "right", done.stderr[-3000:]
    changed = [path.stat().st_mtime_ns != time for path, time in zip(files, times)]
    assert changed == [True] + [False] * (len(files) - 1)


def test_a_cpu_without_avx2_uses_xla(tmp_path):
    script = (
        "from jaxserve.pallas_kernels.backend import *\n"
        "print(cpu_ffi_available(), resolve_attention_backend('auto', 'cpu'))"
    )
    env = {**os.environ, "NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+sse4.2"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(False, 'the CPU lacks avx2 and fma') xla", done.stderr[-2000:]
    assert "using xla instead of cpu_ffi: the CPU lacks avx2 and fma" in done.stderr


def test_an_unknown_ffi_version_uses_xla(monkeypatch):
    from jaxserve.pallas_kernels.cpu_ffi import support

    monkeypatch.setattr(support, "ffi_version", lambda: (1, 0))
    assert support.check_support() == "jaxlib speaks FFI 1.0; known: 0.3 to 0.5"
    monkeypatch.setattr(backends, "cpu_ffi_available", lambda: (False, "jaxlib speaks FFI 1.0"))
    assert backends.resolve_matmul_backend("auto", "cpu") == "xla"
    with pytest.raises(ValueError, match="attention_backend: got 'cpu_ffi', which cannot run here"):
        backends.resolve_attention_backend("cpu_ffi", "cpu")


def test_offsets_agree_with_the_installed_header():
    """call_frame.py reads XLA's structures by offset: compare with the order of their fields in the header."""
    from jaxserve.pallas_kernels.cpu_ffi import call_frame

    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()

    def fields(struct: str) -> list[str]:
        body = re.search(rf"^struct {struct} {{(.*?)^}};", header, re.M | re.S).group(1)
        lines = re.findall(r"^\s*([^/\n]*);", body, re.M)
        return [re.search(r"(\w+)\)?$", line).group(1).removeprefix("XLA_FFI_") for line in lines]

    # Pointers and sizes are 8 bytes; struct_size, extension, a version of 24 bytes and one pointer come first.
    functions = fields("XLA_FFI_Api")[4:]
    for name, offset in (
        ("Error_Create", call_frame._ERROR_CREATE),
        ("Error_Destroy", call_frame._ERROR_DESTROY),
        ("ThreadPool_Schedule", call_frame._SCHEDULE),
        ("ThreadPool_NumThreads", call_frame._NUM_THREADS),
    ):
        assert functions.index(name) * 8 + 48 == offset
    assert fields("XLA_FFI_CallFrame") == [
        "struct_size", "extension_start", "api", "ctx", "stage", "args", "rets", "attrs", "future"
    ]  # fmt: skip
    assert fields("XLA_FFI_Args") == ["struct_size", "extension_start", "size", "types", "args"]
    assert fields("XLA_FFI_Attrs") == ["struct_size", "extension_start", "size", "types", "names", "attrs"]
    assert fields("XLA_FFI_Buffer") == ["struct_size", "extension_start", "dtype", "data", "rank", "dims"]


def test_choice_of_backend():
    assert backends.resolve_attention_backend("auto", "cpu") == "cpu_ffi"
    assert backends.resolve_attention_backend("xla", "cpu") == "xla"
    assert backends.resolve_attention_backend("auto", "gpu") == "xla"
    with pytest.raises(ValueError, match="matmul_backend: got 'cpu_ffi' on platform 'gpu'"):
        backends.resolve_matmul_backend("cpu_ffi", "gpu")
    with pytest.raises(ValueError, match=r"matmul_backend: got 'cpu_tiles', which cannot run here \(platform 'gpu'"):
        backends.resolve_matmul_backend("cpu_tiles", "gpu")
    with pytest.raises(ValueError, match=r"matmul_backend: got 'cpu_int8', which cannot run here \(platform 'gpu'"):
        backends.resolve_matmul_backend("cpu_int8", "gpu")
    with pytest.raises(ValueError, match="attention_backend: got 'triton'; allowed: auto, cpu_ffi, xla, reference"):
        backends.resolve_attention_backend("triton", "cpu")


def test_a_head_dim_without_kernel_falls_back():
    spec = AttentionSpec(4, 2, 40, 0.2)
    assert page_array_shape(spec, 8, 16, "cpu_ffi") == page_array_shape(spec, 8, 16, "xla")


def _damaged(**changes: np.ndarray) -> jax.Array:
    spec = AttentionSpec(4, 2, 64, 0.125)
    fields = {
        "positions": np.arange(4),
        "row_of_token": np.array([0, 1, 1, 1]),
        "write_slot": np.array([16, 32, 33, 34]),
        "query_start": np.array([0, 1, 4]),
        "seq_len": np.array([1, 3]),
        "page_table": np.array([[1], [2]]),
        "num_rows": np.array([2]),
    } | changes
    batch = RaggedBatch(**{name: jnp.asarray(value, jnp.int32) for name, value in fields.items()})
    ones = jnp.ones((4, 2, 64))
    pages = jnp.zeros(page_array_shape(spec, 8, 16, "cpu_ffi"))
    step = jax.jit(lambda q, k, pages: paged_attention(q, k, k, pages, batch, spec, page_size=16, backend="cpu_ffi"))
    return step(jnp.ones((4, 4, 64)), ones, pages)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"page_table": np.array([[-7], [10**6]])},
        {"seq_len": np.array([10**8, -5])},
        {"query_start": np.array([3, -1, 10**6])},
        {"num_rows": np.array([99])},
        {"num_rows": np.array([-1])},
        {"write_slot": np.array([-1, 10**8, -(10**8), 127])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_damaged_batches_do_not_crash_the_process(changes):
    jax.block_until_ready(_damaged(**changes))


@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16"])
def test_refusals_are_ordinary_errors(page_dtype):
    from jaxserve.pallas_kernels.paged_attention.cpu_ffi import _handler

    name = _handler(64, page_dtype, 16)
    shapes = jax.ShapeDtypeStruct((1, 2, 64), jnp.float32), jax.ShapeDtypeStruct((4, 1, 2, 16, 64), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="unacceptable argument types or shapes"):
        jax.block_until_ready(jax.ffi.ffi_call(name, shapes)(*[jnp.zeros((1, 2, 64))] * 10))


@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16"])
def test_many_threads_and_layers_at_once(page_dtype):
    """Eight threads, each with pages of its own through a chain of calls: all get what one alone gets."""
    spec = AttentionSpec(6, 2, 64, 0.125)
    case = make_case(np.random.default_rng(7), spec, [Row(700, 1), Row(90, 1), Row(30, 45)], 16, page_dtype)
    pages = np.nan_to_num(case.token_pages.transpose(0, 3, 2, 1, 4))

    @functools.partial(jax.jit, donate_argnums=1)
    def step(q: jax.Array, layers: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        updated = []
        for layer in layers:
            out, layer = paged_attention(q, case.k, case.v, layer, case.batch, spec, page_size=16, backend="cpu_ffi")
            q = q + 0.1 * out
            updated.append(layer)
        return q, updated

    def run() -> bytes:
        layers = [jnp.array(pages, copy=True) for _ in range(6)]
        for _ in range(5):
            out, layers = step(jnp.asarray(case.q), layers)
        return np.asarray(out).tobytes()

    with ThreadPoolExecutor(8) as pool:
        results = [future.result() for future in [pool.submit(run) for _ in range(8)]]
    assert set(results) == {run()}


@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16"])
def test_subnormal_numbers_have_the_same_bits_in_every_thread(page_dtype):
    """Values times 1e-36, and a sink far above every score: some weighted values are subnormal."""
    spec = AttentionSpec(6, 2, 64, 0.125, has_sinks=True)
    case = make_case(np.random.default_rng(7), spec, [Row(0, 400)], 16, page_dtype)
    case.v[:] *= 1e-36
    case.sinks[:] = 3
    assert len({run(case, "cpu_ffi")[0].tobytes() for _ in range(10)}) == 1


def test_kept_code_belongs_to_one_ffi_version(monkeypatch):
    """Environments with different jaxlibs share the folder, and a handler answers with the version it was
    compiled for."""
    from jaxserve.pallas_kernels.cpu_ffi import object_cache

    key = object_cache._environment_key.__wrapped__
    here = key()
    monkeypatch.setattr(object_cache, "ffi_version", lambda: (0, 99))
    assert key() != here
