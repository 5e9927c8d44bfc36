"""The encoder that BERT-like families declare: embedding, layers with bidirectional attention, pooling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve.models.config_encoder import EncoderConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.layers import Embedding, Linear
from jaxserve.models.parameters import Parameters

POOL_CODES = {"mean": 0, "cls": 1, "last": 2}  # values of `pooling` in Encoder.__call__
_FAR = jnp.finfo(jnp.float32).min


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al., 2016, arXiv:1607.06450)."""

    def __init__(self, params: Parameters, slot: str, size: int, *, eps: float) -> None:
        self.weight = nnx.Param(params.norm(slot, size))
        self.bias = nnx.Param(params.bias((slot,), (size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + self.eps) * self.weight.get_value() + self.bias.get_value()


class EncoderLayer(nnx.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x))."""

    def __init__(self, params: Parameters, prefix: str, config: EncoderConfig, options: RuntimeOptions) -> None:
        size, inner = config.hidden_size, config.intermediate_size

        def linear(slots: tuple[str, ...], rows: int, columns: int) -> Linear:
            names = tuple(f"{prefix}.{slot}" for slot in slots)
            return Linear(params, names, (rows,) * len(slots), columns, options=options, has_bias=True)

        self.num_heads = config.num_heads
        self.activation = config.activation
        self.qkv = linear(("q", "k", "v"), size, size)
        self.out = linear(("o",), size, size)
        self.attention_norm = LayerNorm(params, f"{prefix}.attention_norm", size, eps=config.norm_eps)
        self.up = linear(("up",), inner, size)
        self.down = linear(("down",), size, inner)
        self.mlp_norm = LayerNorm(params, f"{prefix}.mlp_norm", size, eps=config.norm_eps)

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """x [B, L, hidden], bias [B, 1, 1, L] on the scores -> [B, L, hidden]."""
        batch, length, size = x.shape
        flat = x.reshape(batch * length, size)
        q, k, v = jnp.split(self.qkv(flat).reshape(batch, length, 3 * self.num_heads, -1), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(scores + bias, axis=-1)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch * length, size)
        flat = self.attention_norm(flat + self.out(attended))
        flat = self.mlp_norm(flat + self.down(_activate(self.up(flat), self.activation)))
        return flat.reshape(batch, length, size)


class Encoder(nnx.Module):
    """Texts of one padded length -> vectors."""

    def __init__(self, config: EncoderConfig, options: RuntimeOptions, params: Parameters) -> None:
        self.config = config
        self.options = options
        size = config.hidden_size
        self.embedding = Embedding(params, "embedding", config.vocab_size, size, options=options, scale=1.0)
        self.positions = nnx.Param(params.exact("positions", config.num_positions, size))
        self.token_types = nnx.Param(params.exact("token_types", config.num_token_types, size))
        self.embedding_norm = LayerNorm(params, "embedding_norm", size, eps=config.norm_eps)
        self.layers = nnx.List(
            [EncoderLayer(params, f"layers.{index}", config, options) for index in range(config.num_layers)]
        )

    def __call__(self, token_ids: jax.Array, lengths: jax.Array, pooling: jax.Array) -> jax.Array:
        """token_ids [B, L] int32 (padding: anything in the vocabulary), lengths [B] (at least 1), pooling [B] of
        POOL_CODES -> [B, hidden] float32. A row does not depend on its padding or on the other rows."""
        batch, length = token_ids.shape
        with jax.default_matmul_precision("highest" if self.options.dtype == "float32" else "default"):
            x = self.embedding(token_ids.reshape(-1)).reshape(batch, length, -1)
            first = self.config.position_offset
            x = x + self.positions.get_value()[first : first + length] + self.token_types.get_value()[0]
            x = self.embedding_norm(x)
            is_text = jnp.arange(length) < lengths[:, None]
            bias = jnp.where(is_text, 0.0, _FAR)[:, None, None, :]
            for layer in self.layers:
                x = layer(x, bias)
        mean = jnp.sum(jnp.where(is_text[:, :, None], x, 0.0), axis=1) / lengths[:, None]
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        code = pooling[:, None]
        return jnp.where(code == POOL_CODES["mean"], mean, jnp.where(code == POOL_CODES["cls"], x[:, 0], last))


def _activate(x: jax.Array, name: str) -> jax.Array:
    if name == "relu":
        return jax.nn.relu(x)
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x, approximate=name == "gelu_tanh")
