"""The decoder that every family declares: embedding, layers, final norm, head."""

from __future__ import annotations

import jax
from flax import nnx
from jaxserve.models.attention import Attention
from jaxserve.models.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.models.contract import KVPages, RuntimeOptions, StepInputs
from jaxserve.models.layers import Embedding, FeedForward, Linear, RMSNorm, soft_cap
from jaxserve.models.mla import MLAAttention
from jaxserve.models.moe import MoE
from jaxserve.models.parameters import Parameters
from jaxserve.models.rope import Rotation, rotation
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages
from jaxserve.pallas_kernels.pages import LayerSpec
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.pallas_kernels.rms_norm.api import add_rms_norm

Block = Attention | MLAAttention | FeedForward | MoE


class DecoderLayer(nnx.Module):
    """x + attention(x), then x + feed_forward(x), with norms where the configuration has them."""

    def __init__(
        self, params: Parameters, prefix: str, config: ModelConfig, layer: LayerConfig, options: RuntimeOptions
    ) -> None:
        self.backend = options.matmul

        def norm(slot: str, is_there: bool) -> RMSNorm | None:
            if not is_there:
                return None
            return RMSNorm(params, f"{prefix}.{slot}", config.hidden_size, eps=config.rms_norm_eps)

        self.attention_norm = norm("attention_norm", config.has_pre_norms)
        kind = Attention if config.mla is None else MLAAttention
        self.attention = kind(params, prefix, config, layer, options)
        self.attention_post_norm = norm("attention_post_norm", config.has_post_norms)
        self.mlp_norm = norm("mlp_norm", config.has_pre_norms)
        self.mlp: FeedForward | MoE = (
            MoE(params, prefix, config, options)
            if layer.uses_moe
            else FeedForward(
                params,
                prefix,
                config.hidden_size,
                config.intermediate_size,
                activation=config.activation,
                has_bias=config.has_mlp_bias,
                options=options,
            )
        )
        self.mlp_post_norm = norm("mlp_post_norm", config.has_post_norms)

    def __call__(
        self, x: jax.Array, change: jax.Array | None, pages: Pages, batch: RaggedBatch, rotation: Rotation | None
    ) -> tuple[jax.Array, jax.Array, Pages]:
        """x and what is still to be added to it, [T, hidden] float32 -> the same, and updated pages of this layer.

        Sums are left to whoever needs them, since sum and norm are one pass over memory.
        """
        x, normed = self._add_and_norm(self.attention_norm, x, change, self.attention)
        out, pages = self.attention(normed, pages, batch, rotation)
        x, normed = self._add_and_norm(self.mlp_norm, x, _apply(self.attention_post_norm, out), self.mlp)
        out = self.mlp(normed, batch) if isinstance(self.mlp, MoE) else self.mlp(normed)
        return x, _apply(self.mlp_post_norm, out), pages

    def _add_and_norm(
        self, norm: RMSNorm | None, x: jax.Array, change: jax.Array | None, then: Block
    ) -> tuple[jax.Array, jax.Array]:
        """x + change, and its norm in the type that the block `then` takes."""
        if change is None or norm is None:
            x = x if change is None else x + change
            return x, _apply(norm, x)
        weight, dtype = norm.weight.get_value(), then.input_dtype(x.shape[0])
        return add_rms_norm(x, change, weight, eps=norm.eps, backend=self.backend, dtype=dtype)


class Decoder(nnx.Module):
    """Implements contract.Model. Layers are unrolled: a scan would copy each layer's weights on CPU."""

    def __init__(self, config: ModelConfig, options: RuntimeOptions, params: Parameters) -> None:
        self.config = config
        self.options = options
        self.embedding = Embedding(
            params,
            "embedding",
            config.vocab_size,
            config.hidden_size,
            options=options,
            scale=config.embedding_scale,
        )
        self.layers = nnx.List(
            [
                DecoderLayer(params, f"layers.{index}", config, layer, options)
                for index, layer in enumerate(config.layers)
            ]
        )
        self.final_norm = RMSNorm(params, "final_norm", config.hidden_size, eps=config.rms_norm_eps)
        self.head = (
            None
            if config.tie_word_embeddings or config.task == "embed"
            else Linear(params, ("head",), (config.vocab_size,), config.hidden_size, options=options)
        )

    @property
    def attention_specs(self) -> tuple[LayerSpec, ...]:
        """One per layer."""
        return tuple(layer.attention.spec for layer in self.layers)

    def __call__(self, inputs: StepInputs, pages: KVPages) -> tuple[jax.Array, KVPages]:
        """Hidden [T, hidden] float32 before the final norm, and the updated pages."""
        with self._precision():
            x = self.embedding(inputs.token_ids)
            ropes = {layer.rope for layer in self.config.layers if layer.rope is not None}
            rotations = {rope: rotation(rope, inputs.batch.positions, is_long=self._is_long(rope)) for rope in ropes}
            updated, change = [], None
            for layer, described, layer_pages in zip(self.layers, self.config.layers, pages.layers, strict=True):
                turn = None if described.rope is None else rotations[described.rope]
                x, change, layer_pages = layer(x, change, layer_pages, inputs.batch, turn)
                updated.append(layer_pages)
        return x + change, KVPages(tuple(updated))

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [S, hidden] -> logits [S, vocab] float32."""
        with self._precision():
            x = self.final_norm(hidden)
            logits = self.embedding.logits(x) if self.head is None else self.head(x)
            return soft_cap(logits, self.config.logit_softcap)

    def compute_embeddings(self, hidden: jax.Array) -> jax.Array:
        """hidden [S, hidden] -> [S, hidden] float32 behind the final norm."""
        return self.final_norm(hidden)

    def _is_long(self, rope: RopeConfig) -> bool:
        served = self.options.max_model_len or self.config.max_position_embeddings
        return rope.type == "longrope" and served > rope.original_max_position_embeddings

    def _precision(self) -> jax.default_matmul_precision:
        # Accelerators multiply float32 in fewer bits unless told otherwise.
        return jax.default_matmul_precision("highest" if self.options.dtype == "float32" else "default")


def _apply(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
