"""Grouped-query attention over paged K/V."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.layers import Linear, RMSNorm
from jaxserve.models.parameters import Parameters
from jaxserve.models.rope import Rotation
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec, paged_attention
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.pallas_kernels.rotary.api import rotate_heads


def attention_spec(config: ModelConfig, layer: LayerConfig) -> AttentionSpec:
    """What the attention backend must know about a layer."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        sliding_window=layer.sliding_window,
        logit_softcap=config.attention_softcap,
        has_sinks=config.has_sinks,
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
            splits_columns=True,
        )
        self.qk_norm, self.qkv_clip, self.eps = config.qk_norm, config.qkv_clip, config.rms_norm_eps
        q_size, k_size = (head_dim, head_dim) if self.qk_norm == "per_head" else (heads * head_dim, kv_heads * head_dim)
        has_norms = self.qk_norm != "none"
        self.q_norm = RMSNorm(params, f"{prefix}.q_norm", q_size, eps=self.eps) if has_norms else None
        self.k_norm = RMSNorm(params, f"{prefix}.k_norm", k_size, eps=self.eps) if has_norms else None
        self.sinks = nnx.Param(params.vector(f"{prefix}.sinks", heads)) if config.has_sinks else None

    def input_dtype(self, num_rows: int) -> Any:
        """As Linear has it."""
        return self.qkv.input_dtype(num_rows)

    def __call__(
        self, x: jax.Array, pages: Pages, batch: RaggedBatch, rotation: Rotation | None
    ) -> tuple[jax.Array, Pages]:
        """x [T, hidden] -> ([T, hidden] float32, updated pages of this layer)."""
        spec, num_tokens = self.spec, x.shape[0]
        q, k, v = self._project(x, rotation)
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
            sinks=None if self.sinks is None else self.sinks.get_value(),
        )
        return self.out(out.reshape(num_tokens, spec.num_heads * spec.head_dim)), pages

    def _project(self, x: jax.Array, rotation: Rotation | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [T, hidden] -> q [T, H, D], k and v [T, KV, D]."""
        spec, num_tokens = self.spec, x.shape[0]
        qkv, q_size = self.qkv(x), spec.num_heads * spec.head_dim
        if self.qk_norm == "full":
            q, k, v = jnp.split(qkv, (q_size, q_size + spec.num_kv_heads * spec.head_dim), axis=1)
            qkv = jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=1)
        if self.qkv_clip:
            qkv = jnp.clip(qkv, -self.qkv_clip, self.qkv_clip)
        qkv = qkv.reshape(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        has_norms = self.qk_norm == "per_head"
        if rotation is not None:
            norms = (self.q_norm.weight.get_value(), self.k_norm.weight.get_value()) if has_norms else None
            return rotate_heads(
                qkv,
                *rotation,
                num_heads=spec.num_heads,
                norm_weights=norms,
                eps=self.eps,
                backend=self.options.attention,
            )
        q, k, v = jnp.split(qkv, (spec.num_heads, spec.num_heads + spec.num_kv_heads), axis=1)
        return (self.q_norm(q), self.k_norm(k), v) if has_norms else (q, k, v)
