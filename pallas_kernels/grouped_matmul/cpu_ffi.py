"""Grouped products on CPU: each matrix that has rows is read once, the others are not touched.

At run time every group that has rows is cut along its outputs into work items, so that few rows of a few experts
keep all threads busy. An output's arithmetic is that of matmul/cpu_ffi.py: rows do not depend on each other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    BF16,
    F32,
    S32,
    U8,
    arg,
    data,
    dim,
    dtype,
    free,
    load_i32,
    load_i64,
    malloc,
    num_threads,
    rank,
    ret,
    store_i64,
    zero_bytes,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import (
    BAD_ARGUMENTS,
    NO_MEMORY,
    PLAN_HEAD,
    PLAN_ITEMS,
    PLAN_THREADS,
    named,
    register_handler,
)
from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_dot, has_wide_vectors
from jaxserve.pallas_kernels.cpu_ffi.vectors import ELEMENT_BYTES
from jaxserve.pallas_kernels.matmul.cpu_ffi import BLOCK_ROWS, STEP, make_block
from jaxserve.pallas_kernels.matmul.cpu_ffi_quantized import make_loader
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, QuantizedWeight, block_bytes, tail_bytes

# Rows per group, were they even, up to which this beats XLA (benchmarks/experts.py).
MAX_GROUP_ROWS = 32
MAX_GROUP_ROWS_QUANTIZED = 8  # weights are expanded again for each block of rows
_ITEM_BYTES = 65536  # weights per work item
_MIN_THREAD_BYTES = 131072  # weights below which a second thread costs more than it saves
_X, _W, _SIZES = range(3)
# The plan: outputs per item, items per group, then a record for each group that has rows.
_PER_ITEM, _PER_GROUP, _GROUPS_AT = PLAN_HEAD, PLAN_HEAD + 8, PLAN_HEAD + 16
_GROUP, _FIRST, _COUNT, _GROUP_BYTES = 0, 8, 16, 24


def fits(x_shape: tuple[int, ...], w: jax.Array | QuantizedWeight) -> bool:
    """Whether these kernels take such a product."""
    if isinstance(w, QuantizedWeight):
        most = MAX_GROUP_ROWS_QUANTIZED * w.codes.shape[0]
    else:
        most = MAX_GROUP_ROWS * w.shape[0]
    return 0 < x_shape[0] <= most and x_shape[1] > 0 and x_shape[1] % STEP == 0


def grouped_matmul_cpu(x: jax.Array, w: jax.Array | QuantizedWeight, group_sizes: jax.Array) -> jax.Array:
    """x [M, K] float32, w [E, N, K] (float32, bfloat16 or quantised), group_sizes [E] int32 -> [M, N] float32; K is a
    multiple of STEP. With bfloat16 weights x is rounded to bfloat16; quantised ones are expanded to float32."""
    if isinstance(w, QuantizedWeight):
        kind, stored, outputs = w.kind, w.codes, w.shape[0]
    else:
        kind, stored, outputs, x = np.dtype(w.dtype).name, w, w.shape[1], x.astype(w.dtype)
    call = jax.ffi.ffi_call(_handler(kind), jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32))
    return call(x, stored, group_sizes.astype(jnp.int32))


@functools.cache
def _handler(kind: str) -> str:
    is_paired = kind == "bfloat16" and has_bf16_dot()
    name = f"jaxserve_grouped_{kind}_{'dot' if is_paired else 'fma'}_w{int(has_wide_vectors())}"
    return register_handler(name, lambda: _make_handler(name, kind, is_paired))


def _make_handler(name: str, kind: str, is_paired: bool) -> tuple[Any, Any, Any]:
    is_plain = kind in ("float32", "bfloat16")
    x_kind = kind if is_plain else "float32"
    size, element = ELEMENT_BYTES[x_kind], F32 if x_kind == "float32" else BF16
    if is_plain:
        block, weight_type, step_bytes, tail = make_block(kind, is_paired), element, size * BLOCK, 0
    else:
        block = make_block("float32", False, load_weights=make_loader(kind), prefetch=1)
        weight_type, step_bytes, tail = U8, block_bytes(kind), tail_bytes(kind)

    @named(name)
    def weight_bytes(k):
        """Stored bytes of the weights of one output."""
        return k // BLOCK * step_bytes + tail

    @named(name)
    def check(frame):
        x, w, sizes, y = arg(frame, _X), arg(frame, _W), arg(frame, _SIZES), ret(frame, 0)
        if dtype(x) != element or dtype(w) != weight_type or dtype(sizes) != S32:
            return False
        if rank(x) != 2 or rank(w) != 3 or rank(sizes) != 1 or rank(y) != 2:
            return False
        k = dim(x, 1)
        if k % STEP != 0 or k == 0 or dim(w, 2) * (1 if weight_type == U8 else size) != weight_bytes(k):
            return False
        return dim(sizes, 0) == dim(w, 0) and dim(y, 0) == dim(x, 0) and dim(y, 1) == dim(w, 1)

    @named(name)
    def write_groups(frame, records):
        """A record for every group that has rows; returns how many. Sizes that do not fit are cut."""
        sizes, count, first, limit = data(arg(frame, _SIZES)), 0, 0, dim(arg(frame, _X), 0)
        for group in range(dim(arg(frame, _SIZES), 0)):
            rows = min(max(load_i32(sizes, 4 * group), 0), limit - first)
            if rows > 0:
                record = records + count * _GROUP_BYTES
                store_i64(record, _GROUP, group)
                store_i64(record, _FIRST, first)
                store_i64(record, _COUNT, rows)
                count += 1
                first += rows
        outputs = dim(arg(frame, _W), 1)
        zero_bytes(data(ret(frame, 0)) + first * outputs * 4, (limit - first) * outputs * 4)
        return count

    @named(name)
    def plan(frame):
        if not check(frame):
            return BAD_ARGUMENTS
        stored, outputs = weight_bytes(dim(arg(frame, _X), 1)), dim(arg(frame, _W), 1)
        plan_address = malloc(_GROUPS_AT + dim(arg(frame, _SIZES), 0) * _GROUP_BYTES)
        if plan_address == 0:
            return NO_MEMORY
        groups = write_groups(frame, plan_address + _GROUPS_AT)
        threads = max(1, min(num_threads(frame), groups * outputs * stored // _MIN_THREAD_BYTES))
        per_item = outputs
        if threads > 1:
            per_item = max(8, min(_ITEM_BYTES // stored, outputs) // 8 * 8)
        per_group = (outputs + per_item - 1) // per_item if outputs > 0 else 0
        store_i64(plan_address, PLAN_ITEMS, groups * per_group)
        store_i64(plan_address, PLAN_THREADS, threads)
        store_i64(plan_address, _PER_ITEM, per_item)
        store_i64(plan_address, _PER_GROUP, per_group)
        return plan_address

    @named(name)
    def body(frame, plan_address, i, worker):
        k, outputs = dim(arg(frame, _X), 1), dim(arg(frame, _W), 1)
        per_item, per_group = load_i64(plan_address, _PER_ITEM), load_i64(plan_address, _PER_GROUP)
        record = plan_address + _GROUPS_AT + i // per_group * _GROUP_BYTES
        group, first, rows = load_i64(record, _GROUP), load_i64(record, _FIRST), load_i64(record, _COUNT)
        start = i % per_group * per_item
        count = min(per_item, outputs - start)
        stored = weight_bytes(k)
        w = data(arg(frame, _W)) + (group * outputs + start) * stored
        x, y = data(arg(frame, _X)) + first * k * size, data(ret(frame, 0)) + (first * outputs + start) * 4
        for m in range(0, rows, BLOCK_ROWS):
            block(
                min(BLOCK_ROWS, rows - m), w, stored, x + m * k * size, k * size, k,
                y + m * outputs * 4, outputs * 4, count,
            )  # fmt: skip

    @named(name)
    def finish(frame, plan_address):
        free(plan_address)

    return plan, body, finish
