"""Products at serving shapes on GPUs, of quantised weights and of experts: for gpu_compile.py and gpu_kernels.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.grouped_matmul.mosaic import grouped_matmul_mosaic
from jaxserve.pallas_kernels.grouped_matmul.xla import grouped_matmul_xla
from jaxserve.pallas_kernels.matmul.api import linear_xla
from jaxserve.pallas_kernels.matmul.mosaic import quant_matmul_mosaic
from jaxserve.pallas_kernels.matmul.planar import expand
from jaxserve.pallas_kernels.matmul.quantized import CODES_PER_WORD, PlanarWeight


@dataclasses.dataclass(frozen=True)
class Product:
    """One product. function and reference take x [rows, in] float32 and the rest of the arguments, which are abstract
    here. flops, bytes: what it needs at least. needs: instructions that the machine code must contain."""

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: tuple[Any, ...]
    flops: int
    bytes: int
    needs: tuple[str, ...] = ("HGMMA", "UTMALDG")

    def random_arguments(self) -> tuple[Any, ...]:
        """Values for the arguments: codes of all sizes, floats around one, groups as even as they can be."""
        rng = np.random.default_rng(0)
        rows = self.arguments[0].shape[0]

        def draw(struct: jax.ShapeDtypeStruct) -> jax.Array:
            if struct.dtype == jnp.int32:
                (groups,) = struct.shape
                return jnp.asarray(rows // groups + (np.arange(groups) < rows % groups), jnp.int32)
            if jnp.issubdtype(struct.dtype, jnp.integer):
                info = jnp.iinfo(struct.dtype)
                return jnp.asarray(rng.integers(info.min, info.max, struct.shape, struct.dtype, endpoint=True))
            return jnp.asarray(rng.standard_normal(struct.shape, np.float32)).astype(struct.dtype)

        return jax.tree.map(draw, self.arguments)


# kind -> (form, inputs that share a scale or 0, type of scales, whether there are offsets)
KINDS = {
    "int8, a scale per output": ("int8", 0, jnp.float32, False),
    "fp8, a scale per output": ("fp8", 0, jnp.float32, False),
    "fp8, a scale per 32": ("fp8", 32, jnp.float32, False),
    "int4, scale and offset per 32": ("int4", 32, jnp.float16, True),
    "Q6_K": ("int8", 16, jnp.float32, False),
}


def planar_struct(kind: str, shape: tuple[int, int]) -> PlanarWeight:
    """An abstract weight [out, in], both multiples of 128."""
    form, group, scale_dtype, has_offsets = KINDS[kind]
    num_outputs, num_inputs = shape
    codes = jax.ShapeDtypeStruct((num_outputs, num_inputs // CODES_PER_WORD[form]), jnp.uint16)
    scales = jax.ShapeDtypeStruct((num_inputs // group if group else 1, num_outputs), scale_dtype)
    return PlanarWeight(codes, scales, scales if has_offsets else None, form, shape, group)


def expanded_product(x: jax.Array, w: PlanarWeight) -> jax.Array:
    """What XLA does with such a weight."""
    return linear_xla(x, expand(w).astype(jnp.bfloat16))


def quantized(label: str, kind: str, rows: int, shape: tuple[int, int]) -> Product:
    weight = planar_struct(kind, shape)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
    num_outputs, num_inputs = shape
    return Product(
        f"{label}, {kind}, {rows} row{'s' * (rows > 1)}", quant_matmul_mosaic, expanded_product,
        (jax.ShapeDtypeStruct((rows, num_inputs), jnp.float32), weight),
        flops=2 * rows * num_outputs * num_inputs, bytes=stored + rows * (2 * num_inputs + 4 * num_outputs),
    )  # fmt: skip


def experts_product(label: str, rows: int, experts: int, shape: tuple[int, int]) -> Product:
    num_outputs, num_inputs = shape
    arguments = (
        jax.ShapeDtypeStruct((rows, num_inputs), jnp.float32),
        jax.ShapeDtypeStruct((experts, *shape), jnp.bfloat16),
        jax.ShapeDtypeStruct((experts,), jnp.int32),
    )
    read = min(rows, experts) * num_outputs * num_inputs * 2
    return Product(
        f"{label}, {rows} rows of {experts} experts", grouped_matmul_mosaic, grouped_matmul_xla, arguments,
        flops=2 * rows * num_outputs * num_inputs, bytes=read + rows * (2 * num_inputs + 4 * num_outputs),
    )  # fmt: skip


def all_products() -> list[Product]:
    """Steps of 1, 64 and 256 rows for matrices of the models in the table of docs/kernels.md."""
    return [
        *(quantized("Llama-3-8B down", kind, rows, (4096, 14336)) for kind in KINDS for rows in (1, 64)),
        *(
            quantized("Qwen3-32B gate and up", kind, rows, (51200, 5120))
            for kind in ("int8, a scale per output", "int4, scale and offset per 32", "Q6_K")
            for rows in (16, 256)
        ),
        quantized("Gemma-3 down", "int4, scale and offset per 32", 16, (3840, 15360)),
        quantized("SmolLM2-135M down", "int4, scale and offset per 32", 16, (640, 1536)),
        quantized("DeepSeek-V3 output", "fp8, a scale per 32", 64, (7168, 16384)),
        quantized("gpt-oss-20b output", "int8, a scale per output", 64, (2944, 4096)),
        experts_product("Qwen3-30B-A3B gate and up", 64 * 8, 128, (1536, 2048)),
        experts_product("Qwen3-30B-A3B down", 64 * 8, 128, (2048, 768)),
        experts_product("gpt-oss-20b gate and up", 64 * 4, 32, (5760, 2880)),
        experts_product("DeepSeek-V3 gate and up, 32 experts of one device", 256, 32, (4096, 7168)),
    ]
