"""Mixtures of experts: a router, routed experts, and an expert that every token passes through.

The parts are pure functions, so that they can be put together over several devices: `route` (logits to expert ids
and weights), `sort_by_expert` (ids to rows of one expert after the other), `compute_experts` (sorted rows and group
sizes to outputs) and `combine` (outputs back to tokens). Nothing here has a capacity: a token's result does not
depend on the tokens beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxserve.models.config import ModelConfig, MoEConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.layers import FeedForward, Linear, activate
from jaxserve.models.parameters import Parameters, WeightValue, layer_number
from jaxserve.pallas_kernels.grouped_matmul.api import grouped_matmul
from jaxserve.pallas_kernels.matmul.api import linear_xla
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.sharding.collectives import sum_over_tensor
from jaxserve.sharding.expert_parallel import choose_copies, choose_dispatch, exchange_tokens, gather_tokens

_SWIGLU_ALPHA = 1.702  # gpt-oss


def route(
    logits: jax.Array,  # [T, E] float32, the router's bias included
    moe: MoEConfig,
    *,
    correction: jax.Array | None = None,  # [E] float32
) -> tuple[jax.Array, jax.Array]:
    """Choose experts. Returns (ids [T, k] int32, weights [T, k] float32), the best choice first.

    softmax over all experts (Shazeer et al., 2017, arXiv:1701.06538) or over the chosen ones; sigmoid scores with a
    correction that takes part in the choice only (DeepSeek-V3, arXiv:2412.19437, section 2.1.2); choice within the
    best groups of experts (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).
    """
    if moe.scoring == "softmax_topk":
        scores = logits
    elif moe.scoring == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if moe.num_chosen_groups < moe.num_groups:
        ranked = jnp.where(_in_best_groups(ranked, moe), ranked, -jnp.inf)
    _, ids = lax.top_k(ranked, moe.num_experts_per_token)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if moe.scoring == "softmax_topk":
        weights = jax.nn.softmax(weights, axis=-1)
    elif moe.normalize_top_k:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * moe.routed_scale


def _in_best_groups(ranked: jax.Array, moe: MoEConfig) -> jax.Array:
    """[T, E] bool: experts of the best num_chosen_groups groups."""
    num_tokens, size = ranked.shape[0], moe.num_experts // moe.num_groups
    grouped = ranked.reshape(num_tokens, moe.num_groups, size)
    if moe.group_score == "max":
        score = jnp.max(grouped, axis=-1)
    else:
        score = jnp.sum(lax.top_k(grouped, min(2, size))[0], axis=-1)
    _, best = lax.top_k(score, moe.num_chosen_groups)
    is_best = jnp.any(best[:, :, None] == jnp.arange(moe.num_groups), axis=1)
    return jnp.repeat(is_best, size, axis=1)


def sort_by_expert(ids: jax.Array, num_experts: int, first_expert: int | jax.Array = 0) -> tuple[jax.Array, jax.Array]:
    """ids [T, k] -> (order [T * k], group_sizes [num_experts] int32): row r of the sorted rows is choice order[r],
    which is that of token order[r] // k. Experts are first_expert up to first_expert + num_experts; choices of any
    other (of another device, or an id past the end for a token that is padding) come last, in no group."""
    local = ids.reshape(-1) - first_expert
    key = jnp.where((local >= 0) & (local < num_experts), local, num_experts).astype(jnp.int32)
    order = jnp.argsort(key, stable=True)
    group_sizes = jnp.sum(key[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return order, group_sizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Stacked experts: gate_up [E, 2 I, H] (rows of gate, then of up), down [E, H, I], biases [E, 2 I], [E, H]."""

    gate_up: WeightValue
    down: WeightValue
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def compute_experts(
    x: jax.Array,  # [M, H] float32, sorted rows
    group_sizes: jax.Array,  # [E] int32
    weights: ExpertWeights,
    *,
    activation: str,
    swiglu_limit: float,
    backend: str,
) -> jax.Array:
    """The feed-forward part of each row's expert. Returns [M, H] float32; rows behind the last group are zero."""
    hidden = grouped_matmul(x, weights.gate_up, group_sizes, backend=backend)
    group = None
    if weights.gate_up_bias is not None or weights.down_bias is not None:
        # Group of each row; rows behind the last group get none.
        group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    if weights.gate_up_bias is not None:
        hidden = hidden + weights.gate_up_bias.at[group].get(mode="fill", fill_value=0.0)
    gate, up = jnp.split(hidden, 2, axis=-1)
    if swiglu_limit:
        gate, up = jnp.minimum(gate, swiglu_limit), jnp.clip(up, -swiglu_limit, swiglu_limit)
        hidden = gate * jax.nn.sigmoid(_SWIGLU_ALPHA * gate) * (up + 1)
    else:
        hidden = activate(gate, activation) * up
    out = grouped_matmul(hidden, weights.down, group_sizes, backend=backend)
    if weights.down_bias is not None:
        out = out + weights.down_bias.at[group].get(mode="fill", fill_value=0.0)
    return out


def combine(out: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """out [T * k, H] of sorted rows, weights [T, k] -> [T, H]: each token's outputs, weighted and summed in the
    order of its choices. Rows that `out` leaves off count as zero."""
    num_tokens, count = weights.shape
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    if out.shape[0] < order.shape[0]:
        place = jnp.minimum(place, out.shape[0])
        out = jnp.pad(out, ((0, 1), (0, 0)))
    return jnp.einsum("tkh,tk->th", out[place].reshape(num_tokens, count, -1), weights, precision="highest")


class MoE(nnx.Module):
    """The feed-forward part of a layer with experts.

    Slots: router, router_correction (a full name), experts.gate, experts.up, experts.down, shared.gate, shared.up,
    shared.down, shared_gate.
    """

    def __init__(self, params: Parameters, prefix: str, config: ModelConfig, options: RuntimeOptions) -> None:
        moe = config.moe
        if moe is None:
            raise ValueError("moe: got none; allowed: a description of the experts")
        self.moe, self.activation, self.options = moe, config.activation, options
        hidden, size, total = config.hidden_size, moe.intermediate_size, moe.num_experts
        self.router = nnx.Param(params.exact(f"{prefix}.router", total, hidden))
        self.router_bias = nnx.Param(params.bias((f"{prefix}.router",), (total,))) if moe.has_router_bias else None
        self.correction = (
            nnx.Param(params.vector(f"{prefix}.router_correction", total)) if moe.has_correction_bias else None
        )
        self.slots = dict(options.expert_slots).get(layer_number(prefix))
        self.num_local = count = total // options.mesh.expert if self.slots is None else self.slots.per_device
        gate_up, down = (f"{prefix}.experts.gate", f"{prefix}.experts.up"), (f"{prefix}.experts.down",)
        has_bias = moe.has_expert_bias
        self.gate_up = nnx.Param(params.stack(gate_up, (size, size), hidden, count))
        self.gate_up_bias = nnx.Param(params.stack_bias(gate_up, (size, size), count)) if has_bias else None
        self.down = nnx.Param(params.stack(down, (hidden,), size, count))
        self.down_bias = nnx.Param(params.stack_bias(down, (hidden,), count)) if has_bias else None
        self.shared = (
            FeedForward(
                params,
                f"{prefix}.shared",
                hidden,
                moe.shared_size,
                activation=config.activation,
                has_bias=False,
                options=options,
                is_summed=False,
            )
            if moe.shared_size
            else None
        )
        self.shared_gate = (
            Linear(params, (f"{prefix}.shared_gate",), (1,), hidden, options=options) if moe.has_shared_gate else None
        )

    @property
    def experts(self) -> ExpertWeights:
        bias = self.gate_up_bias, self.down_bias
        return ExpertWeights(
            self.gate_up.get_value(),
            self.down.get_value(),
            *(None if param is None else param.get_value() for param in bias),
        )

    def route(self, x: jax.Array, batch: RaggedBatch) -> tuple[jax.Array, jax.Array]:
        """x [T, H] -> (ids [T, k], weights [T, k]) as `route`; tokens that are padding have ids past the end."""
        # In float32 on every device: a rounded logit may choose another expert.
        with jax.default_matmul_precision("highest"):
            logits = linear_xla(x, self.router.get_value())
        if self.router_bias is not None:
            logits = logits + self.router_bias.get_value()
        correction = None if self.correction is None else self.correction.get_value()
        ids, weights = route(logits, self.moe, correction=correction)
        is_token = jnp.arange(x.shape[0]) < batch.query_start[-1]
        return jnp.where(is_token[:, None], ids, self.moe.num_experts), weights

    def input_dtype(self, num_rows: int) -> Any:
        """As Linear has it: the router does not round."""
        return jnp.float32

    def __call__(self, x: jax.Array, batch: RaggedBatch) -> jax.Array:
        """x [T, H] -> [T, H] float32."""
        ids, weights = self.route(x, batch)
        mesh = self.options.mesh
        if mesh.num_devices > 1:
            # How many of this rank's tokens chose each expert; whoever runs the model may read it (expert_counts).
            chosen = jnp.zeros(self.moe.num_experts, jnp.int32).at[ids.reshape(-1)].add(1, mode="drop")
            self.load = nnx.Intermediate(chosen)
        if self.slots is not None:
            ids = choose_copies(ids, self.slots)
        out = self.compute_local(x, ids, weights) if mesh.expert == 1 else self._dispatch(x, ids, weights)
        if self.shared is not None:
            out = out + self.compute_shared(x)
        # One sum for the routed experts and the shared one.
        return sum_over_tensor(out, mesh)

    def compute_local(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """x [M, H], ids and weights [M, k] -> [M, H] float32: what the experts of this device add to each token. ids
        number experts, or slots where experts have copies."""
        count, num_chosen, mesh = self.num_local, self.moe.num_experts_per_token, self.options.mesh
        first = lax.axis_index("expert") * count if mesh.expert > 1 else 0
        order, group_sizes = sort_by_expert(ids, count, first)
        # A token has no more choices here than there are experts.
        rows = order[: x.shape[0] * min(num_chosen, count)]
        out = compute_experts(
            x[rows // num_chosen],
            group_sizes,
            self.experts,
            activation=self.activation,
            swiglu_limit=self.moe.swiglu_limit,
            backend=self.options.matmul,
        )
        return combine(out, order, weights)

    def _dispatch(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """x [T, H], ids and weights [T, k] of this rank -> [T, H] float32, over the devices that share the experts."""
        moe, mesh, stack = self.moe, self.options.mesh, self.gate_up.get_value()
        # What the product would round anyway: fewer bytes travel. The CPU kernels take float32 beside blocks.
        if not isinstance(stack, QuantizedWeight):
            x = x.astype(stack.dtype)
        elif self.options.matmul in ("xla", "mosaic", "interpret"):
            x = x.astype(stack.expanded)
        scheme = self.options.expert_dispatch
        if scheme == "auto":
            scheme = choose_dispatch(
                num_devices=mesh.expert,
                num_tokens=x.shape[0],
                hidden=x.shape[1],
                num_experts=moe.num_experts,
                num_chosen=moe.num_experts_per_token,
                value_bytes=x.dtype.itemsize,
            )
        if scheme == "gather":
            return gather_tokens(x, ids, weights, self.compute_local)
        return exchange_tokens(
            x, ids, weights, self.compute_local, num_devices=mesh.expert, num_experts=self.num_local * mesh.expert
        )

    def compute_shared(self, x: jax.Array) -> jax.Array:
        """The shared expert's part [T, H], under tensor parallelism this device's summand; only where the
        configuration has one."""
        out = self.shared(x)
        return out if self.shared_gate is None else out * jax.nn.sigmoid(self.shared_gate(x))


def expert_counts(parts: Iterable[nnx.Module]) -> jax.Array | None:
    """[layers with experts, E] int32: what the feed-forward `parts` of a model have counted in the call just traced;
    None without any."""
    counted = [part.load.get_value() for part in parts if isinstance(part, MoE)]
    return jnp.stack(counted) if counted else None
