"""Multi-head latent attention over paged latent vectors (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

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
from jaxserve.pallas_kernels.matmul.api import linear_per_head
from jaxserve.pallas_kernels.mla_attention.api import MLASpec, mla_attention
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.pallas_kernels.rotary.reference import rotate


class MLAAttention(nnx.Module):
    """Queries (through a latent of their own, or straight), one latent vector per token, attention, output.

    The key up-projection is absorbed into the queries and the value up-projection follows attention, in decodes and
    in prefill alike: pages are read as they are stored, and a token's arithmetic does not depend on the step.

    Slots: q_a, q_a_norm, q_b (with a query latent) or q; kv_a (latent, then the rotated key), kv_a_norm, o, and the
    stacks k_b [H, R, nope] and v_b [H, value, R].
    """

    def __init__(
        self, params: Parameters, prefix: str, config: ModelConfig, layer: LayerConfig, options: RuntimeOptions
    ) -> None:
        mla = config.mla
        if mla is None or layer.rope is None:
            raise ValueError("mla: got none, or no rotation; allowed: a description of both")
        heads, hidden, eps = config.num_heads, config.hidden_size, config.rms_norm_eps
        self.mla, self.options, self.is_interleaved = mla, options, layer.rope.is_interleaved
        self.spec = MLASpec(heads, mla.kv_lora_rank, mla.rope_head_dim, config.attention_scale)
        q_rows, kv_rows = heads * (mla.nope_head_dim + mla.rope_head_dim), mla.kv_lora_rank + mla.rope_head_dim
        first, rows = ("q_a", mla.q_lora_rank) if mla.q_lora_rank else ("q", q_rows)
        # Both read the layer's input: one product.
        self.down = Linear(params, (f"{prefix}.{first}", f"{prefix}.kv_a"), (rows, kv_rows), hidden, options=options)
        rank = mla.q_lora_rank
        self.q_a_norm = RMSNorm(params, f"{prefix}.q_a_norm", rank, eps=eps) if rank else None
        self.q_b = Linear(params, (f"{prefix}.q_b",), (q_rows,), rank, options=options) if rank else None
        self.kv_a_norm = RMSNorm(params, f"{prefix}.kv_a_norm", mla.kv_lora_rank, eps=eps)
        self.k_b = nnx.Param(params.stack((f"{prefix}.k_b",), (mla.kv_lora_rank,), mla.nope_head_dim, heads))
        self.v_b = nnx.Param(params.stack((f"{prefix}.v_b",), (mla.value_head_dim,), mla.kv_lora_rank, heads))
        self.out = Linear(
            params, (f"{prefix}.o",), (hidden,), heads * mla.value_head_dim, options=options, splits_columns=True
        )

    def input_dtype(self, num_rows: int) -> Any:
        """As Linear has it."""
        return self.down.input_dtype(num_rows)

    def __call__(
        self, x: jax.Array, pages: jax.Array, batch: RaggedBatch, rotation: Rotation | None
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, hidden] -> ([T, hidden] float32, updated pages of this layer)."""
        mla, num_tokens = self.mla, x.shape[0]
        both = self.down(x)
        q, latent, k_rope = jnp.split(both, (both.shape[1] - self.spec.head_dim, both.shape[1] - mla.rope_head_dim), 1)
        if self.q_b is not None:
            q = self.q_b(self.q_a_norm(q))
        q = q.reshape(num_tokens, self.spec.num_heads, mla.nope_head_dim + mla.rope_head_dim)
        q_nope, q_rope = q[..., : mla.nope_head_dim], q[..., mla.nope_head_dim :]
        q_rope = rotate(q_rope, *rotation, is_interleaved=self.is_interleaved)
        k_rope = rotate(k_rope[:, None], *rotation, is_interleaved=self.is_interleaved)[:, 0]
        out, pages = mla_attention(
            linear_per_head(q_nope, self.k_b.get_value(), backend=self.options.matmul),
            q_rope,
            self.kv_a_norm(latent),
            k_rope,
            pages,
            batch,
            self.spec,
            page_size=self.options.page_size,
            backend=self.options.attention,
            deterministic=self.options.deterministic,
        )
        values = linear_per_head(out, self.v_b.get_value(), backend=self.options.matmul)
        return self.out(values.reshape(num_tokens, -1)), pages
