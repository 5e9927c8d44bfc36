"""Whole steps (embed, layers, head, sampling) of real model shapes, with abstract weights, for gpu_compile.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve.models.config import LayerConfig, ModelConfig, MoEConfig, RopeConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.decoder import Decoder
from jaxserve.pallas_kernels.pages import page_array_shape

from jaxserve.runner.buckets import StepShapes, sample_ladder, token_ladder
from jaxserve.runner.step import StepPrograms, split_model

ROWS, CONTEXT, PAGE_SIZE = 64, 4096, 64


class AbstractParameters:
    """Answers with shapes and dtypes only: bfloat16 matrices, float32 vectors."""

    def matrix(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sum(rows), columns), jnp.bfloat16)

    def table(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self.matrix((slot,), (rows,), columns)

    def exact(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), jnp.float32)

    def stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, sum(rows), columns), jnp.bfloat16)

    def stack_bias(self, slots: Sequence[str], rows: Sequence[int], count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, sum(rows)), jnp.float32)

    def vector(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.float32)

    def bias(self, slots: Sequence[str], rows: Sequence[int]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sum(rows),), jnp.float32)

    def norm(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        return self.vector(slot, size)


def _config(name: str) -> ModelConfig:
    """The published config.json of each model."""
    if name == "Llama-3-8B":
        layer = LayerConfig(rope=RopeConfig(theta=500000.0, dim=128))
        return ModelConfig(
            architecture="LlamaForCausalLM",
            family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
            num_heads=32, num_kv_heads=8, head_dim=128, max_position_embeddings=8192, rms_norm_eps=1e-5,
            layers=(layer,) * 32, activation="silu", attention_scale=128**-0.5, tie_word_embeddings=False,
        )  # fmt: skip
    if name == "Qwen3-30B-A3B":
        layer = LayerConfig(rope=RopeConfig(theta=1000000.0, dim=128), uses_moe=True)
        return ModelConfig(
            architecture="Qwen3MoeForCausalLM",
            family="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=48,
            num_heads=32, num_kv_heads=4, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
            layers=(layer,) * 48, activation="silu", attention_scale=128**-0.5, qk_norm="per_head",
            tie_word_embeddings=False,
            moe=MoEConfig(num_experts=128, num_experts_per_token=8, intermediate_size=768),
        )  # fmt: skip
    raise ValueError(f"step: got {name!r}; allowed: Llama-3-8B, Qwen3-30B-A3B")


def make(case: str) -> tuple[Any, tuple[Any, ...], tuple[int, ...], Any]:
    """(function, abstract arguments, donated arguments, page pool) of "step <model>": 64 rows that decode."""
    config = _config(case.removeprefix("step "))
    options = RuntimeOptions(
        dtype="bfloat16", page_size=PAGE_SIZE, page_dtype="bfloat16", attention="mosaic", matmul="mosaic"
    )
    model = split_model(Decoder(config, options, AbstractParameters()))
    width = CONTEXT // PAGE_SIZE
    shapes = StepShapes(
        max_num_rows=ROWS, pages_per_row=width, page_size=PAGE_SIZE, num_pages=ROWS * width + 1,
        vocab_size=config.vocab_size, token_buckets=token_ladder(256), sample_buckets=sample_ladder(ROWS, 256),
    )  # fmt: skip
    spec = model.rebuild(model.leaves).attention_specs[0]
    page = jax.ShapeDtypeStruct(page_array_shape(spec, shapes.num_pages, PAGE_SIZE, "mosaic"), jnp.bfloat16)
    programs = StepPrograms(
        model=model, shapes=shapes, pages=(page,) * config.num_layers, hidden_size=config.hidden_size,
        attention="mosaic", branch=False,
    )  # fmt: skip
    forward, head, sample = (programs.program(key) for key in (("forward", ROWS), ("head", ROWS), ("random", ROWS)))

    def step(leaves, pages, last_token, packed, samples):
        hidden, _, pages = forward.function(leaves, pages, last_token, packed)
        tokens, last_token = sample.function(head.function(leaves, hidden), samples, last_token)
        return tokens, pages, last_token

    return step, (*forward.arguments, sample.arguments[1]), (1, 2), forward.arguments[1]
