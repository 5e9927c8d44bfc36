"""Page copies against a numpy loop, and that they stay in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve.pallas_kernels.backend import cpu_ffi_available
from jaxserve.pallas_kernels.paged_attention.quantized_pages import page_struct

from jaxserve.runner.step import COPIES_PER_CALL, copy_pages

NUM_PAGES, SHAPE = 40, (40, 2, 2, 4, 16)


def packed(pairs: list[tuple[int, int]]) -> np.ndarray:
    words = np.zeros(1 + 2 * COPIES_PER_CALL, np.int32)
    words[0] = len(pairs)
    for index, (source, target) in enumerate(pairs):
        words[1 + index], words[1 + COPIES_PER_CALL + index] = source, target
    return words


def compiled(backend: str, page_dtype: str, shape: tuple[int, ...] = SHAPE):
    if backend == "cpu_ffi" and not cpu_ffi_available()[0]:
        pytest.skip(f"cpu_ffi: {cpu_ffi_available()[1]}")
    layers = tuple(page_struct(shape, page_dtype) for _ in range(2))
    words = jax.ShapeDtypeStruct((1 + 2 * COPIES_PER_CALL,), jnp.int32)
    return jax.jit(functools.partial(copy_pages, backend), donate_argnums=0).lower(layers, words).compile()


@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("backend", ["cpu_ffi", "xla"])
def test_copies_equal_a_loop(backend: str, page_dtype: str) -> None:
    program = compiled(backend, page_dtype)
    structs, structure = jax.tree.flatten((page_struct(SHAPE, page_dtype),) * 2)
    random = np.random.default_rng(0)
    for count in (0, 1, 5, COPIES_PER_CALL):
        values = [(9 * random.standard_normal(struct.shape)).astype(struct.dtype) for struct in structs]
        pairs = [tuple(pair) for pair in random.integers(0, NUM_PAGES, (count, 2)).tolist()]
        layers = jax.tree.unflatten(structure, [jnp.array(value) for value in values])
        found = jax.tree.leaves(program(layers, packed(pairs)))
        for value, layer in zip(values, found, strict=True):
            for source, target in pairs:  # in order: a page may be read after it was written
                value[target] = value[source]
            np.testing.assert_array_equal(np.asarray(layer), value)


@pytest.mark.parametrize(("backend", "page_dtype"), [("cpu_ffi", "float32"), ("cpu_ffi", "fp8"), ("xla", "float32")])
def test_copies_need_no_memory(backend: str, page_dtype: str) -> None:
    sizes = [
        compiled(backend, page_dtype, (num_pages, *SHAPE[1:])).memory_analysis().temp_size_in_bytes
        for num_pages in (40, 4000)
    ]
    assert sizes[0] == sizes[1]  # nothing that grows with the pool


@pytest.mark.parametrize("pair", [(-1, 3), (3, 40), (40, 3)])
def test_the_kernel_refuses_pages_that_do_not_exist(pair: tuple[int, int]) -> None:
    program = compiled("cpu_ffi", "float32")
    layers = tuple(jnp.zeros(SHAPE) for _ in range(2))
    with pytest.raises(Exception, match="jaxserve_copy_pages"):
        jax.block_until_ready(program(layers, packed([pair])))
