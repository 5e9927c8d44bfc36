"""A two-layer attention model small enough to recompute by hand, and that recomputation in numpy float64."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.models.contract import KVPages, RuntimeOptions, StepInputs
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec, paged_attention

from jaxserve.config import EngineConfig
from jaxserve.runner.runner import ModelRunner

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 203, 32, 4, 2, 16, 2
EOS = 5


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    vocab_size: int = VOCAB
    hidden_size: int = HIDDEN
    max_position_embeddings: int = 64
    eos_token_ids: tuple[int, ...] = (EOS,)
    task: str = "generate"
    pooling: str = "last"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["embed", "layers", "head"], meta_fields=["config", "options"]
)
@dataclasses.dataclass(frozen=True)
class TinyModel:
    """hidden = embed + position, then per layer: hidden + attention(hidden) W_o, tanh; logits = hidden head."""

    embed: jax.Array  # [V, HIDDEN]
    layers: tuple[tuple[jax.Array, ...], ...]  # w_q, w_k, w_v, w_o
    head: jax.Array  # [HIDDEN, V]
    config: TinyConfig
    options: RuntimeOptions

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return (AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5),) * len(self.layers)

    def __call__(self, inputs: StepInputs, pages: KVPages) -> tuple[jax.Array, KVPages]:
        batch = inputs.batch
        x = self.embed[inputs.token_ids] + 0.1 * jnp.sin(batch.positions[:, None] * jnp.arange(1.0, HIDDEN + 1))
        updated = []
        for weights, spec, layer in zip(self.layers, self.attention_specs, pages.layers):
            w_q, w_k, w_v, w_o = weights
            q, k, v = (_matmul(x, w).reshape(x.shape[0], -1, HEAD_DIM) for w in (w_q, w_k, w_v))
            out, layer = paged_attention(
                q, k, v, layer, batch, spec,
                page_size=self.options.page_size, backend=self.options.attention,
                deterministic=self.options.deterministic,
            )  # fmt: skip
            updated.append(layer)
            x = jnp.tanh(x + _matmul(out.reshape(x.shape[0], -1), w_o))
        return x, KVPages(tuple(updated))

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        return _matmul(hidden, self.head)

    def compute_embeddings(self, hidden: jax.Array) -> jax.Array:
        return 2 * hidden


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(w.dtype), w, preferred_element_type=jnp.float32, precision="highest")


def build_model(*, dtype: str = "float32", options: RuntimeOptions | None = None) -> TinyModel:
    random = np.random.default_rng(11)

    def weight(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape) * scale / math.sqrt(shape[0]), dtype)

    layers = tuple(
        (
            weight(HIDDEN, HEADS * HEAD_DIM, scale=2.0),
            weight(HIDDEN, KV_HEADS * HEAD_DIM, scale=2.0),
            weight(HIDDEN, KV_HEADS * HEAD_DIM),
            weight(HEADS * HEAD_DIM, HIDDEN),
        )
        for _ in range(LAYERS)
    )
    embed = jnp.asarray(random.standard_normal((VOCAB, HIDDEN)), dtype)
    options = options or RuntimeOptions(page_size=4, attention="xla")
    return TinyModel(embed, layers, weight(HIDDEN, VOCAB, scale=3.0), TinyConfig(), options)


def build_runner(**changes: object) -> ModelRunner:
    """A runner with 4 rows, 16 tokens a step and 63 usable pages of 4 tokens."""
    wanted = {
        "max_num_rows": 4, "max_step_tokens": 16, "num_pages": 64, "page_size": 4, "compile_cache_dir": "",
        "dtype": "float32", "attention_backend": "xla", "matmul_backend": "xla",
    }  # fmt: skip
    config = EngineConfig(**(wanted | changes))
    options = RuntimeOptions(
        dtype=config.dtype, page_size=4, page_dtype="float32", attention="xla", deterministic=config.deterministic
    )
    return ModelRunner.from_model(config, build_model(dtype=config.dtype, options=options), options)


def full_logits(model: TinyModel, token_ids: list[int]) -> np.ndarray:
    """Logits [tokens, V] of a whole sequence by dense attention in float64."""
    return full_hidden(model, token_ids) @ np.asarray(model.head, np.float64)


def full_hidden(model: TinyModel, token_ids: list[int]) -> np.ndarray:
    """Hidden states [tokens, HIDDEN] of a whole sequence in float64."""
    embed = np.asarray(model.embed, np.float64)
    length = len(token_ids)
    position = np.arange(length)[:, None] * np.arange(1.0, HIDDEN + 1)
    x = embed[token_ids] + 0.1 * np.sin(position)
    causal = np.tril(np.ones((length, length), bool))
    for weights in model.layers:
        w_q, w_k, w_v, w_o = (np.asarray(w, np.float64) for w in weights)
        q = (x @ w_q).reshape(length, HEADS, HEAD_DIM)
        k = np.repeat((x @ w_k).reshape(length, KV_HEADS, HEAD_DIM), HEADS // KV_HEADS, axis=1)
        v = np.repeat((x @ w_v).reshape(length, KV_HEADS, HEAD_DIM), HEADS // KV_HEADS, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
        scores = np.where(causal, scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        x = np.tanh(x + np.einsum("hqk,khd->qhd", weight, v).reshape(length, -1) @ w_o)
    return x
