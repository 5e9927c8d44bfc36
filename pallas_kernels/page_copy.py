"""Copying whole pages inside a layer's page array, in place."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def copy_pages(
    layers: Any,  # pytree of arrays [num_pages, ...]
    count: jax.Array,  # [] int32
    sources: jax.Array,  # [n] int32
    targets: jax.Array,  # [n] int32
    *,
    backend: str,
) -> Any:
    """Copy page sources[i] to targets[i] for i below `count`, one after the other, in every layer. Page numbers
    must lie in [0, num_pages). Donate the layers: the results are then the same memory.

    backend: that of attention. "cpu_ffi" copies bytes; others use XLA slices, which on CPU stay in place for
    float32 only (a bfloat16 update widens the whole array).
    """
    if backend == "cpu_ffi":
        pairs = jnp.concatenate([count[None], sources, targets])
        return jax.tree.map(lambda layer: _copy_bytes(layer, pairs), layers)

    def copy_one(i: jax.Array, layers: Any) -> Any:
        def copy(layer: jax.Array) -> jax.Array:
            page = lax.dynamic_slice_in_dim(layer, sources[i], 1)
            return lax.dynamic_update_slice_in_dim(layer, page, targets[i], axis=0)

        return jax.tree.map(copy, layers)

    return lax.fori_loop(0, count, copy_one, layers)


def _copy_bytes(layer: jax.Array, pairs: jax.Array) -> jax.Array:
    """pairs [1 + 2 * n] int32: how many, n sources, n targets."""
    call = jax.ffi.ffi_call(_handler(), jax.ShapeDtypeStruct(layer.shape, layer.dtype), input_output_aliases={0: 0})
    return call(layer, pairs, page_bytes=np.int32(math.prod(layer.shape[1:]) * layer.dtype.itemsize))


@functools.cache
def _handler() -> str:
    # Loaded only here: it needs numba, which other platforms do without.
    from jaxserve.pallas_kernels.cpu_ffi.parallel import register_handler

    return register_handler("jaxserve_copy_pages", _make_handler)


def _make_handler() -> tuple[Any, Any, Any]:
    from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
        arg,
        attr,
        copy_bytes,
        data,
        dim,
        free,
        load_i32,
        malloc,
        ret,
        store_i64,
    )
    from jaxserve.pallas_kernels.cpu_ffi.parallel import (
        BAD_ARGUMENTS,
        NO_MEMORY,
        PLAN_HEAD,
        PLAN_ITEMS,
        PLAN_THREADS,
        named,
    )

    @named("copy_pages")
    def plan(frame):
        pages, pairs = arg(frame, 0), arg(frame, 1)
        if data(pages) != data(ret(frame, 0)):
            return BAD_ARGUMENTS
        capacity, num_pages, words = (dim(pairs, 0) - 1) // 2, dim(pages, 0), data(pairs)
        count = load_i32(words, 0)
        if count < 0 or count > capacity:
            return BAD_ARGUMENTS
        for i in range(count):
            source, target = load_i32(words, 4 + 4 * i), load_i32(words, 4 + 4 * (capacity + i))
            if source < 0 or source >= num_pages or target < 0 or target >= num_pages:
                return BAD_ARGUMENTS
        plan_address = malloc(PLAN_HEAD)
        if plan_address == 0:
            return NO_MEMORY
        # One item: a later pair may read what an earlier one wrote.
        store_i64(plan_address, PLAN_ITEMS, 1)
        store_i64(plan_address, PLAN_THREADS, 1)
        return plan_address

    @named("copy_pages")
    def body(frame, plan_address, i, worker):
        pages, pairs = data(arg(frame, 0)), data(arg(frame, 1))
        capacity, page_bytes = (dim(arg(frame, 1), 0) - 1) // 2, load_i32(attr(frame, 0), 0)
        for pair in range(load_i32(pairs, 0)):
            source, target = load_i32(pairs, 4 + 4 * pair), load_i32(pairs, 4 + 4 * (capacity + pair))
            if source != target:
                copy_bytes(pages + target * page_bytes, pages + source * page_bytes, page_bytes)

    @named("copy_pages")
    def finish(frame, plan_address):
        free(plan_address)

    return plan, body, finish
