"""CPU kernels against XLA: paged attention (decode and prefill) and products of a few rows.

    python benchmarks/cpu_kernels.py                      everything, SmolLM2-135M shapes
    python benchmarks/cpu_kernels.py attention --rows 16 --context 512
    python benchmarks/cpu_kernels.py linear --dtype bfloat16

Forms are timed in turn, round by round, so that a busy machine slows all of them; medians are printed. One
"step" is all layers, each with pages and weights of its own, so that data comes from memory and not the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import platform
import time
from collections.abc import Callable
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.backend import cpu_ffi_available
from jaxserve.pallas_kernels.matmul.api import linear, linear_xla
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec, paged_attention
from jaxserve.pallas_kernels.paged_attention.quantized_pages import QuantizedPages, quantize
from jaxserve.pallas_kernels.pages import abstract_pages, page_bytes
from jaxserve.pallas_kernels.ragged import RaggedBatch

from jaxserve.runner.huge_pages import move_to_huge_pages

HEADS, KV_HEADS, HEAD_DIM, LAYERS, PAGE_SIZE = 9, 3, 64, 30, 16
LAYER_SHAPES = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
SPEC = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)


def read_bandwidth() -> float:
    """Bytes per second of a sum over 512 MB, best of 7."""
    array = jax.jit(lambda: jnp.ones(1 << 27, jnp.float32))()
    move_to_huge_pages([array])
    total = jax.jit(jnp.sum)
    return array.nbytes / min(_time(lambda: total(array)) for _ in range(7))


def _time(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def median_seconds(forms: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of each form, all of them in turn in each round; the first two rounds are not counted. A step
    follows a step of the same form, as in serving: what lies in caches is its own."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds + 2):
        for name, function in forms.items():
            _time(function)
            times[name].append(_time(function))
    return {name: float(np.median(values[2:])) for name, values in times.items()}


def make_batch(num_rows: int, cached: int, new: int) -> tuple[RaggedBatch, int]:
    """(batch of equal rows, number of pages)."""
    length, tokens = cached + new, num_rows * new
    width = -(-length // PAGE_SIZE)
    table = 1 + np.random.default_rng(0).permutation(num_rows * width).reshape(num_rows, width)
    positions = np.tile(np.arange(cached, length), num_rows)
    row = np.repeat(np.arange(num_rows), new)
    slots = table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    fields = (
        positions, row, slots, np.arange(num_rows + 1) * new, np.full(num_rows, length), table, [num_rows],
    )  # fmt: skip
    assert len(slots) == tokens
    return RaggedBatch(*(jnp.asarray(field, jnp.int32) for field in fields)), 1 + num_rows * width


def gather_attention(q, k, v, pages, batch: RaggedBatch):
    """The usual XLA form: scatter the new K/V, gather every row's pages, two einsums, softmax."""
    num_pages = pages.shape[0]
    flat = pages.reshape(num_pages * PAGE_SIZE, 2, KV_HEADS, HEAD_DIM)
    flat = flat.at[batch.write_slot].set(jnp.stack([k, v], 1).astype(flat.dtype), mode="drop")
    context = flat.reshape(pages.shape)[batch.page_table].astype(jnp.float32)
    context = context.reshape(batch.page_table.shape[0], -1, 2, KV_HEADS, HEAD_DIM)
    grouped = q.reshape(context.shape[0], -1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM) * SPEC.scale
    scores = jnp.einsum("rtkgd,rnkd->rkgtn", grouped, context[:, :, 0])
    position = batch.positions.reshape(context.shape[0], -1)
    visible = jnp.arange(context.shape[1]) <= position[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), -1)
    out = jnp.einsum("rkgtn,rnkd->rtkgd", weights, context[:, :, 1])
    return out.reshape(q.shape), flat.reshape(pages.shape)


def random_pages(struct: Any, key: jax.Array) -> Any:
    """Pages of normal values."""
    if not isinstance(struct, QuantizedPages):
        return jax.random.normal(key, struct.shape).astype(struct.dtype)
    return QuantizedPages(*quantize(jax.random.normal(key, struct.shape), struct.dtype))


def attention_step(
    form: str, batch: RaggedBatch, num_pages: int, dtype: str, *, cascade: bool = True
) -> Callable[[], object]:
    """A function that runs attention of all layers once and keeps the donated pages for the next call."""
    backend = "cpu_ffi" if form == "cpu_ffi" else "xla"

    def run(q, k, v, layers):
        updated = []
        for pages in layers:
            if form == "gather":
                out, pages = gather_attention(q, k, v, pages, batch)
            else:
                out, pages = paged_attention(
                    q, k, v, pages, batch, SPEC, page_size=PAGE_SIZE, backend=backend, cascade=cascade
                )
            q = q + 0.01 * out
            updated.append(pages)
        return q, updated

    struct = abstract_pages(SPEC, num_pages, PAGE_SIZE, dtype, backend)
    layers = [random_pages(struct, jax.random.key(i)) for i in range(LAYERS)]
    move_to_huge_pages(jax.tree.leaves(layers))  # as the runner does
    tokens = batch.positions.shape[0]
    q = jax.random.normal(jax.random.key(100), (tokens, HEADS, HEAD_DIM))
    k = jax.random.normal(jax.random.key(101), (tokens, KV_HEADS, HEAD_DIM))
    step = jax.jit(run, donate_argnums=3)
    state = {"layers": layers}

    def once() -> object:
        out, state["layers"] = step(q, k, k, state["layers"])
        return out

    return once


def bench_attention(num_rows: int, cached: int, new: int, rounds: int, bandwidth: float) -> None:
    batch, num_pages = make_batch(num_rows, cached, new)
    for dtype in ("float32", "bfloat16", "int8", "fp8"):
        # With bfloat16 pages XLA's scatter copies the cache: not a form anybody would serve with.
        names = ["cpu_ffi", "xla", "gather"] if dtype == "float32" else ["cpu_ffi"]
        times = median_seconds({name: attention_step(name, batch, num_pages, dtype) for name in names}, rounds)
        kv_bytes = num_rows * (cached + new) * page_bytes(SPEC, PAGE_SIZE, dtype) // PAGE_SIZE * LAYERS
        for name, seconds in times.items():
            rate = kv_bytes / seconds
            print(
                f"attention {num_rows:3d} rows x {new:3d} new over {cached:5d}  {dtype:8s} {name:8s}"
                f" {seconds * 1e3:8.2f} ms  {rate / 1e9:5.1f} GB/s of K/V ({rate / bandwidth:4.0%} of read)"
                f"  {times[names[-1]] / seconds:5.2f} x {names[-1]}"
            )


def bench_cascade(num_rows: int, shared: int, own: int, rounds: int) -> None:
    """Decode rows over `shared` common tokens and `own` of their own: read together, and each by itself."""
    batch, num_pages = make_batch(num_rows, shared + own - 1, 1)
    table = np.asarray(batch.page_table).copy()
    table[:, : shared // PAGE_SIZE] = table[0, : shared // PAGE_SIZE]
    batch = dataclasses.replace(batch, page_table=jnp.asarray(table))
    forms = {
        name: attention_step("cpu_ffi", batch, num_pages, "bfloat16", cascade=name == "cascade")
        for name in ("cascade", "each alone")
    }
    times = median_seconds(forms, rounds)
    for name, seconds in times.items():
        print(
            f"attention {num_rows:3d} rows, {shared} shared + {own} own tokens  bfloat16 {name:10s}"
            f" {seconds * 1e3:8.2f} ms  {times['each alone'] / seconds:5.2f} x each alone"
        )


def _as_q4_1(w: jax.Array) -> QuantizedWeight:
    codes = gguf.quants.quantize(np.asarray(w, np.float32), gguf.GGMLQuantizationType.Q4_1)
    return QuantizedWeight(jnp.asarray(codes), "q4_1", w.shape)


def bench_linear(dtype: str, rows: list[int], rounds: int) -> None:
    weights = [
        [(jax.random.normal(jax.random.key(i), shape) * 0.05).astype(dtype) for i, shape in enumerate(LAYER_SHAPES)]
        for _ in range(LAYERS)
    ]
    weight_bytes = sum(w.nbytes for layer in weights for w in layer)

    def chain(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def run(x, weights):
            for q, k, v, o, gate, up, down in weights:
                side = product(x, k).sum() + product(x, v).sum()
                x = x + 0.01 * product(product(x, q), o) + 1e-9 * side
                x = x + 0.01 * product(product(x, gate) * product(x, up), down)
            return x

        return jax.jit(run)

    forms: dict[str, tuple[Callable[..., jax.Array], list]] = {"xla": (linear_xla, weights)}
    if cpu_ffi_available()[0]:
        from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_dot, has_byte_dot
        from jaxserve.pallas_kernels.matmul.cpu_ffi import linear_cpu
        from jaxserve.pallas_kernels.matmul.cpu_ffi_quantized import MAX_ROWS as MAX_QUANTIZED_ROWS
        from jaxserve.pallas_kernels.matmul.cpu_ffi_quantized import linear_cpu_quantized
        from jaxserve.pallas_kernels.matmul.cpu_ffi_tiles import linear_tiles

        stored = [[_as_q4_1(w) for w in layer] for layer in weights]
        if max(rows) <= MAX_QUANTIZED_ROWS:
            forms["q4_1 blocks"] = linear_cpu_quantized, stored
        if dtype == "bfloat16" and has_bf16_dot():
            forms["tiles"] = linear_tiles, weights
            forms["q4_1 tiles"] = linear_tiles, stored
        if has_byte_dot():
            forms["q4_1 bytes"] = functools.partial(linear_tiles, in_bytes=True), stored
        forms["cpu_ffi"] = linear_cpu, weights
        forms["linear()"] = (lambda x, w: linear(x, w, backend="cpu_ffi")), weights
    move_to_huge_pages(jax.tree.leaves([values for _, values in forms.values()]))
    steps = {name: (chain(product), values) for name, (product, values) in forms.items()}
    for num_rows in rows:
        x = jnp.ones((num_rows, 576)) * 0.1
        calls = {name: (lambda step=step, x=x, w=w: step(x, w)) for name, (step, w) in steps.items()}
        times = median_seconds(calls, rounds)
        for name, seconds in times.items():
            print(
                f"linear {num_rows:3d} rows  {dtype:8s} {name:10s} {seconds * 1e3:8.2f} ms"
                f"  {sum(w.nbytes for w in jax.tree.leaves(forms[name][1])) / seconds / 1e9:5.1f} GB/s of weights"
                f"  {weight_bytes / jnp.dtype(dtype).itemsize * 2 * num_rows / seconds / 1e9:6.1f} GFLOP/s"
                f"  {times['xla'] / seconds:5.2f} x xla"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "attention", "cascade", "linear"], default="all")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights; both by default")
    parser.add_argument("--linear-rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    bandwidth = read_bandwidth()
    print(
        f"{platform.processor() or platform.machine()}, {jax.devices()[0]}, jax {jax.__version__}, "
        f"read {bandwidth / 1e9:.1f} GB/s, cpu_ffi {cpu_ffi_available()}"
    )
    if options.what in ("all", "attention"):
        bench_attention(options.rows, options.context - 1, 1, options.rounds, bandwidth)
        bench_attention(1, options.context, options.chunk, options.rounds, bandwidth)
    if options.what in ("all", "cascade") and cpu_ffi_available()[0]:
        bench_cascade(32, 1024, 64, options.rounds)
    if options.what in ("all", "linear"):
        for dtype in [options.dtype] if options.dtype else ["float32", "bfloat16"]:
            bench_linear(dtype, options.linear_rows, options.rounds)


if __name__ == "__main__":
    main()
