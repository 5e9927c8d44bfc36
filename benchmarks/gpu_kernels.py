"""GPU kernels on a real card: right, and how fast beside what else there is.

    python benchmarks/gpu_kernels.py                      # every case: numerics, times, rates, baselines
    python benchmarks/gpu_kernels.py --only decode --json results.json
    python benchmarks/gpu_kernels.py --dry-run            # trace every program, run none: needs no card

Rates are set against ceilings measured in the same run (a copy, a bfloat16 product). Baselines, where they apply and
can be loaded: JAX's own paged_attention (Triton; decode), jax.nn.dot_product_attention by cuDNN and torch's
scaled_dot_product_attention, both over contiguous K/V: they read no page table. Products stand beside XLA's.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gpu_cases
import gpu_products
import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.mla_attention.spec import MLASpec
from jaxserve.pallas_kernels.mla_attention.xla_blocked import mla_attention_xla
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages, QuantizedPages, quantize
from jaxserve.pallas_kernels.paged_attention.xla_blocked import paged_attention_xla

TOLERANCE = 4e-3  # relative error against float32 arithmetic on the same rounded inputs


def seconds(call: Callable[[], Any], *, repeats: int = 7, batch: int = 10) -> float:
    """Median time of one call; calls of a batch follow each other on the device."""
    jax.block_until_ready(call())
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(batch):
            out = call()
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / batch)
    return statistics.median(samples)


def ceilings(values: int = 2**30, side: int = 8192) -> tuple[float, float]:
    """(bytes/s of a copy, operations/s of a bfloat16 product), measured."""
    x = jnp.zeros(values, jnp.bfloat16)
    add = jax.jit(lambda x: x + 1)
    copy = seconds(lambda: add(x), batch=5)
    a = jnp.ones((side, side), jnp.bfloat16)
    multiply = jax.jit(lambda a: a @ a)
    product = seconds(lambda: multiply(a))
    return 2 * x.nbytes / copy, 2 * side**3 / product


def arguments(case: gpu_cases.Case) -> tuple[list[jax.Array], Pages, Any]:
    """Random arrays, pages and batch. Queries and new entries hold bfloat16 values."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    arrays = [draw(shape).astype(jnp.float32) for shape in case.arrays]
    pages = draw(case.pages.shape)
    if isinstance(case.pages, QuantizedPages):
        pages = QuantizedPages(*quantize(pages.astype(jnp.float32), case.pages.dtype))
    return arrays, pages, case.work.batch(case.page_size)


def reference(case: gpu_cases.Case) -> Callable[..., Any]:
    """The same step in jax.numpy with float32 products, page by page."""
    spec = case.spec

    def attention(*args):
        *arrays, pages, batch = args
        sinks = arrays[3] if len(arrays) > 3 else None
        if isinstance(pages, QuantizedPages):
            codes, scales = pages.codes.transpose(0, 3, 2, 1, 4), pages.scales.transpose(0, 3, 2, 1)
            tokens = QuantizedPages(codes[..., : spec.head_dim], scales)
        else:
            tokens = pages.transpose(0, 3, 2, 1, 4)[..., : spec.head_dim]
        return paged_attention_xla(*arrays[:3], tokens, batch, spec, sinks=sinks)[0]

    def latent(q, new, pages, batch):
        return mla_attention_xla(q, new, pages, batch, spec)[0]

    def step(*args):
        with jax.default_matmul_precision("highest"):
            return (latent if isinstance(spec, MLASpec) else attention)(*args)

    return step


def baselines(case: gpu_cases.Case) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """name -> (function, shapes of its arguments), of those that compute the same thing."""
    spec, work = case.spec, case.work
    if isinstance(spec, MLASpec) or (work.decodes and work.chunks) or isinstance(case.pages, QuantizedPages):
        return {}
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    bf16 = jnp.bfloat16
    length, new = work.context + max(work.chunk, 1), max(work.chunk, 1)
    plain = not spec.sliding_window and not spec.logit_softcap and not spec.has_sinks
    if work.decodes and plain:
        try:
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as triton_paged
        except ImportError:
            triton_paged = None
        if triton_paged is not None:
            pages = (spec.num_kv_heads, case.pages.shape[0], case.page_size, spec.head_dim)
            shapes = [((work.rows, spec.num_heads, spec.head_dim), bf16), (pages, bf16), (pages, bf16)]
            shapes += [((work.rows, work.pages_per_row(case.page_size)), jnp.int32), ((work.rows,), jnp.int32)]
            found["JAX paged_attention (Triton)"] = triton_paged, tuple(jax.ShapeDtypeStruct(*s) for s in shapes)
    if not spec.logit_softcap and not spec.has_sinks:
        q = jax.ShapeDtypeStruct((work.rows, new, spec.num_heads, spec.head_dim), bf16)
        kv = jax.ShapeDtypeStruct((work.rows, length, spec.num_kv_heads, spec.head_dim), bf16)
        window = {"local_window_size": (spec.sliding_window - 1, 0)} if spec.sliding_window else {}

        def dense(q, k, v):
            # Queries are the last tokens: pad them to the whole length would compute more than is asked for.
            is_causal = q.shape[1] > 1 and q.shape[1] == k.shape[1]
            return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn", **window)

        found["cuDNN, contiguous K/V" + ("" if new == 1 else ", no causal mask")] = dense, (q, kv, kv)
    return found


def fill(struct: jax.ShapeDtypeStruct, case: gpu_cases.Case) -> jax.Array:
    if struct.dtype != jnp.int32:
        return jax.random.normal(jax.random.key(1), struct.shape, struct.dtype)
    batch = case.work.batch(case.page_size)
    return batch.page_table if len(struct.shape) == 2 else batch.seq_len


def torch_seconds(case: gpu_cases.Case) -> float | None:
    """torch's scaled_dot_product_attention over contiguous K/V, where torch with CUDA is there and it applies."""
    spec, work = case.spec, case.work
    if isinstance(spec, MLASpec) or spec.logit_softcap or spec.has_sinks or (work.decodes and work.chunks):
        return None
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    new, length = max(work.chunk, 1), work.context + max(work.chunk, 1)
    q = torch.randn(work.rows, spec.num_heads, new, spec.head_dim, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(work.rows, spec.num_kv_heads, length, spec.head_dim, dtype=torch.bfloat16, device="cuda")
    samples = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / 10)
    return statistics.median(samples[1:])


def measure(case: gpu_cases.Case, copy_rate: float, product_rate: float) -> dict[str, Any]:
    arrays, pages, batch = arguments(case)
    expected = jax.jit(reference(case))(*arrays, pages, batch)
    step = jax.jit(case.function, donate_argnums=len(arrays))
    out, pages = step(*arrays, pages, batch)
    error = float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))
    state = [pages]

    def call():
        out, state[0] = step(*arrays, state[0], batch)
        return out

    used = seconds(call)
    result = {
        "case": case.name, "relative_error": error, "right": error <= TOLERANCE, "us": used * 1e6,
        "bytes_per_s": case.bytes / used, "of_copy": case.bytes / used / copy_rate,
        "flops_per_s": case.flops / used, "of_product": case.flops / used / product_rate, "baselines": {},
    }  # fmt: skip
    del state[0]
    for name, (function, structs) in baselines(case).items():
        try:
            call = functools.partial(jax.jit(function), *(fill(struct, case) for struct in structs))
            result["baselines"][name] = seconds(call) * 1e6
        except Exception as error:  # a baseline that does not run here must not end the measurement
            result["baselines"][name] = f"{type(error).__name__}: {str(error)[:100]}"
    if (torch_time := torch_seconds(case)) is not None:
        result["baselines"]["torch SDPA, contiguous K/V, no causal mask"] = torch_time * 1e6
    return result


def measure_product(product: gpu_products.Product, copy_rate: float, product_rate: float) -> dict[str, Any]:
    values = product.random_arguments()
    call, by_xla = (functools.partial(jax.jit(one), *values) for one in (product.function, product.reference))
    expected = by_xla()
    error = float(jnp.linalg.norm(call() - expected) / jnp.linalg.norm(expected))
    used = seconds(call)
    return {
        "case": product.name, "relative_error": error, "right": error <= TOLERANCE, "us": used * 1e6,
        "bytes_per_s": product.bytes / used, "of_copy": product.bytes / used / copy_rate,
        "flops_per_s": product.flops / used, "of_product": product.flops / used / product_rate,
        "baselines": {"XLA": seconds(by_xla) * 1e6},
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['case']}: relative error {result['relative_error']:.1e} {'ok' if result['right'] else 'WRONG'}, "
        f"{result['us']:.0f} us, {result['bytes_per_s'] / 1e9:.0f} GB/s ({result['of_copy']:.0%} of a copy), "
        f"{result['flops_per_s'] / 1e12:.0f} Tflop/s ({result['of_product']:.0%} of a product)",
        flush=True,
    )
    for name, used in result["baselines"].items():
        print(f"    {name}: " + (used if isinstance(used, str) else f"{used:.0f} us, {used / result['us']:.2f} x ours"))


def dry_run(case: gpu_cases.Case) -> None:
    """Trace what would run."""
    out, pages = jax.eval_shape(case.function, *case.abstract_arguments())
    expected = jax.eval_shape(reference(case), *case.abstract_arguments())
    assert out.shape == expected.shape and out.dtype == expected.dtype, (out, expected)
    assert pages.shape == case.pages.shape and case.flops > 0 and case.bytes > 0
    print(f"{case.name}: {case.flops / 1e9:.1f} Gflop, {case.bytes / 2**20:.0f} MiB; baselines: "
          f"{', '.join(baselines(case)) or 'none'}", flush=True)  # fmt: skip


def dry_run_product(product: gpu_products.Product) -> None:
    out, expected = (jax.eval_shape(one, *product.arguments) for one in (product.function, product.reference))
    assert out.shape == expected.shape and out.dtype == expected.dtype, (out, expected)
    print(
        f"{product.name}: {product.flops / 1e9:.1f} Gflop, {product.bytes / 2**20:.0f} MiB; baselines: XLA", flush=True
    )


def measure_all(
    cases: Sequence[gpu_cases.Case], products: Sequence[gpu_products.Product], copy_rate: float, product_rate: float
) -> list[dict[str, Any]]:
    results = []
    for measured, works in ((measure, cases), (measure_product, products)):
        for work in works:
            results.append(measured(work, copy_rate, product_rate))
            show(results[-1])
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--dry-run", action="store_true", help="trace every program and run none")
    options = parser.parse_args()
    cases = [case for case in gpu_cases.all_cases() if options.only.lower() in case.name.lower()]
    products = [product for product in gpu_products.all_products() if options.only.lower() in product.name.lower()]
    if options.dry_run:
        for case in cases:
            dry_run(case)
        for product in products:
            dry_run_product(product)
        return 0
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"SKIPPED: this is {device.platform}; a Hopper GPU is needed. Nothing is measured, nothing is claimed.")
        return 2
    copy_rate, product_rate = ceilings()
    print(f"{device.device_kind}, jax {jax.__version__}, {datetime.date.today()}: copy {copy_rate / 1e9:.0f} GB/s, "
          f"bfloat16 product {product_rate / 1e12:.0f} Tflop/s")  # fmt: skip
    results = measure_all(cases, products, copy_rate, product_rate)
    if options.json:
        head = {"card": device.device_kind, "jax": jax.__version__, "date": str(datetime.date.today())}
        ceiling = {"copy_bytes_per_s": copy_rate, "product_flops_per_s": product_rate}
        with open(options.json, "w") as file:
            json.dump(head | ceiling | {"results": results}, file, indent=1)
    return 0 if all(result["right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
