"""The one entry to latent attention over paged vectors, whatever the backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.backend import ATTENTION_BACKENDS
from jaxserve.pallas_kernels.mla_attention.reference import mla_attention_reference
from jaxserve.pallas_kernels.mla_attention.spec import MLASpec, latent_page_shape
from jaxserve.pallas_kernels.mla_attention.xla_blocked import mla_attention_xla
from jaxserve.pallas_kernels.paged_attention.spec import check_page_size
from jaxserve.pallas_kernels.ragged import RaggedBatch

__all__ = ["MLASpec", "mla_attention"]


def mla_attention(
    q_latent: jax.Array,  # [T, H, R] float32, the key up-projection absorbed
    q_rope: jax.Array,  # [T, H, P] float32, rotated
    latent: jax.Array,  # [T, R] float32, normalised
    k_rope: jax.Array,  # [T, P] float32, rotated
    pages: jax.Array,  # [num_pages, page_size, R + P], float32 or bfloat16
    batch: RaggedBatch,
    spec: MLASpec,
    *,
    page_size: int,
    backend: str,
    deterministic: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write this step's latent vectors into the pages, then attend to them. Returns (out [T, H, R] float32, to be
    multiplied with the value up-projection; pages).

    Donate `pages`: the returned array is then the same memory. Tokens past the last row give zeros. With
    `deterministic` a query token's result is bitwise the same whether it decodes or lies anywhere in a chunk.

    backend: that of attention; "cpu_ffi" has no form of its own here and stands for "xla".
    Raises ValueError when shapes or the page dtype do not agree with `spec`.
    """
    check_page_size(page_size)
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attention backend: got {backend!r}; allowed: {', '.join(ATTENTION_BACKENDS)}")
    heads, tokens = spec.num_heads, q_latent.shape[0]
    for name, array, allowed in (
        ("q_latent", q_latent, (tokens, heads, spec.latent_dim)),
        ("q_rope", q_rope, (tokens, heads, spec.rope_dim)),
        ("latent", latent, (tokens, spec.latent_dim)),
        ("k_rope", k_rope, (tokens, spec.rope_dim)),
        ("pages", pages, latent_page_shape(spec, pages.shape[0], page_size)),
    ):
        if array.shape != allowed:
            raise ValueError(f"{name}: got shape {array.shape}; allowed: {allowed}")
    uses_mosaic = backend in ("mosaic", "interpret")
    dtypes = (jnp.bfloat16, jnp.float16) if uses_mosaic else (jnp.float32, jnp.bfloat16)
    if pages.dtype not in dtypes:
        names = ", ".join(dtype.__name__ for dtype in dtypes)
        raise ValueError(f"pages: got dtype {pages.dtype}; allowed: {names}")
    q = jnp.concatenate([q_latent, q_rope], axis=-1).astype(jnp.float32)
    new = jnp.concatenate([latent, k_rope], axis=-1).astype(jnp.float32)
    if uses_mosaic:
        # Loaded only here: it needs JAX 0.12.
        from jaxserve.pallas_kernels.mla_attention.mosaic import mla_attention_mosaic
        from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params

        interpret = interpreter_params() if backend == "interpret" else None
        return mla_attention_mosaic(q, new, pages, batch, spec, deterministic=deterministic, interpret=interpret)
    if backend == "reference":
        return mla_attention_reference(q, new, pages, batch, spec)
    return mla_attention_xla(q, new, pages, batch, spec, deterministic=deterministic)
