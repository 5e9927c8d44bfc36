"""Blocks that every decoder is made of: products, norms, embedding, feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.parameters import Parameters
from jaxserve.pallas_kernels.matmul.api import activate, gated_linear, input_dtype, linear, take_rows
from jaxserve.pallas_kernels.rms_norm.reference import rms_norm
from jaxserve.sharding.collectives import lookup_ids, sum_over_tensor


class Linear(nnx.Module):
    """y = x W^T (+ b) with W [out, in]; several outputs that share an input are one product.

    The weight stays in the compute dtype (or quantised); y is float32, and so is x unless `input_dtype` allows another
    type. splits_columns: under tensor parallelism each device has part of the columns (and of x), and the parts of y
    are summed.
    """

    def __init__(
        self,
        params: Parameters,
        slots: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        options: RuntimeOptions,
        has_bias: bool = False,
        splits_columns: bool = False,
    ) -> None:
        self.weight = nnx.Param(params.matrix(slots, rows, columns))
        self.bias = nnx.Param(params.bias(slots, rows)) if has_bias else None
        self.backend = options.matmul
        self.mesh = options.mesh if splits_columns else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, in] float32, or in input_dtype(T), -> [T, out] float32."""
        out = linear(x, self.weight.get_value(), backend=self.backend)
        if self.mesh is not None:
            out = sum_over_tensor(out, self.mesh)
        return out if self.bias is None else out + self.bias.get_value()

    def input_dtype(self, num_rows: int) -> Any:
        """The type in which whoever computes so many rows of x may hand them over: see matmul.api.input_dtype."""
        return input_dtype(num_rows, self.weight.get_value(), backend=self.backend)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich, 2019, arXiv:1910.07467), in float32."""

    def __init__(self, params: Parameters, slot: str, size: int, *, eps: float) -> None:
        self.weight = nnx.Param(params.norm(slot, size))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight.get_value(), eps=self.eps)


class Embedding(nnx.Module):
    """Token table [vocab, hidden], which is also the head of a model that ties the two. Under tensor parallelism each
    device has some of its rows: it looks those up, and the sum over devices is the embedding."""

    def __init__(
        self, params: Parameters, slot: str, rows: int, columns: int, *, options: RuntimeOptions, scale: float
    ) -> None:
        self.table = nnx.Param(params.table(slot, rows, columns))
        self.backend = options.matmul
        self.scale = scale
        self.mesh = options.mesh

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids [T] -> [T, hidden] float32."""
        table = self.table.get_value()
        is_here = None
        if self.mesh.tensor > 1:
            token_ids, is_here = lookup_ids(token_ids, table.shape[0], self.mesh)
        x = take_rows(table, token_ids)
        if is_here is not None:
            x = sum_over_tensor(jnp.where(is_here[:, None], x, 0.0), self.mesh)
        return x if self.scale == 1.0 else x * self.scale

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [S, hidden] -> [S, vocab] float32."""
        return linear(hidden, self.table.get_value(), backend=self.backend)


class FeedForward(nnx.Module):
    """down(activation(gate x) * up x) (Shazeer, 2020, arXiv:2002.05202). is_summed=False: under tensor parallelism the
    caller sums over the devices."""

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        has_bias: bool,
        options: RuntimeOptions,
        is_summed: bool = True,
    ) -> None:
        self.gate_up = Linear(
            params,
            (f"{prefix}.gate", f"{prefix}.up"),
            (intermediate_size, intermediate_size),
            hidden_size,
            options=options,
            has_bias=has_bias,
        )
        self.down = Linear(
            params,
            (f"{prefix}.down",),
            (hidden_size,),
            intermediate_size,
            options=options,
            has_bias=has_bias,
            splits_columns=is_summed,
        )
        self.activation = activation

    def input_dtype(self, num_rows: int) -> Any:
        """As Linear has it."""
        return self.gate_up.input_dtype(num_rows)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate_up.bias is None:
            weight, backend = self.gate_up.weight.get_value(), self.gate_up.backend
            dtype = self.down.input_dtype(x.shape[0])
            return self.down(gated_linear(x, weight, activation=self.activation, backend=backend, dtype=dtype))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(activate(gate, self.activation) * up)


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(x / cap); x when cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x
