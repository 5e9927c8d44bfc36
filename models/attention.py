"""Grouped-query attention over paged K/V."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.layers import Linear, RMSNorm
from jaxserve.models.parameters import Parameters
from jaxserve.models.rope import rotate
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec, paged_attention
from jaxserve.pallas_kernels.ragged import RaggedBatch

Rotation = tuple[jax.Array, jax.Array]


def attention_spec(config: ModelConfig, layer: LayerConfig) -> AttentionSpec:
    """What the attention backend must know about a layer."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        sliding_window=layer.sliding_window,
        logit_softcap=config.attention_softcap,
    )


class Attention(nnx.Module):
    """Queries, keys and values in one product; optional norm per head; rotation; paged attention; output."""

    def __init__(
        self, params: Parameters, prefix: str, config: ModelConfig, layer: LayerConfig, options: RuntimeOptions
    ) -> None:
        self.spec = attention_spec(config, layer)
        self.options = options
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(
            params,
            (f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"),
            (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim),
            config.hidden_size,
            options=options,
            has_bias=config.has_qkv_bias,
        )
        self.out = Linear(
            params,
            (f"{prefix}.o",),
            (config.hidden_size,),
            heads * head_dim,
            options=options,
            has_bias=config.has_o_bias,
        )
        has_norms = config.qk_norm == "per_head"
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(params, f"{prefix}.q_norm", head_dim, eps=eps) if has_norms else None
        self.k_norm = RMSNorm(params, f"{prefix}.k_norm", head_dim, eps=eps) if has_norms else None

    def __call__(
        self, x: jax.Array, pages: jax.Array, batch: RaggedBatch, rotation: Rotation | None
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, hidden] -> ([T, hidden] float32, updated pages of this layer)."""
        spec, num_tokens = self.spec, x.shape[0]
        qkv = self.qkv(x).reshape(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q, k, v = jnp.split(qkv, (spec.num_heads, spec.num_heads + spec.num_kv_heads), axis=1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        out, pages = paged_attention(
            q,
            k,
            v,
            pages,
            batch,
            spec,
            page_size=self.options.page_size,
            backend=self.options.attention,
            deterministic=self.options.deterministic,
            cascade=self.options.cascade,
        )
        return self.out(out.reshape(num_tokens, spec.num_heads * spec.head_dim)), pages
