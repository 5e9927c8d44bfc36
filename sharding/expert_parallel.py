"""Experts on several devices: how tokens reach them and how results come back. Called under shard_map.

Each rank has T tokens of its own, each device of the `expert` axis E / P of the E experts of a layer. Two schemes, both
exact: no device has a capacity, and a token's result does not depend on where other tokens go.

gather        Every device of the axis gets all P T tokens, computes what its experts have to do with them, and the
              partial sums are scattered back and added (all-gather, reduce-scatter). A device receives

                  (P - 1) T (H b + 8 k)  and  (P - 1) T 4 H  bytes,

              with b bytes for a value of the experts' inputs, k choices of 4 + 4 bytes and float32 sums.
all_to_all    A token goes once to each device that has one of its experts, with all its choices; that device sums what
              its experts make of it, and one row comes back. A token visits d = P (1 - C(E - E/P, k) / C(E, k)) devices
              if choices are even, at most min(k, P), so that a device receives on average

                  d (P - 1) / P T (H b + 8 k)  and  d (P - 1) / P T 4 H  bytes

              and a little for counts. On GPU and TPU rows lie close together (ragged_all_to_all); XLA:CPU has no such
              operation, and its twin sends all T rows to each device, those that do not go there as zeros.

all_to_all moves d / P of the bytes, but starts EXTRA_CALLS more collectives: see `choose_dispatch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxserve.sharding.expert_slots import ExpertSlots

AXIS = "expert"
DISPATCHES = ("auto", "gather", "all_to_all")
# (tokens [M, H], ids [M, k], weights [M, k]) -> [M, H] float32: the weighted sums over this device's experts
Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

EXTRA_CALLS = 4  # collectives of all_to_all (counts, offsets, rows, choices, results) beyond two of gather
CALL_SECONDS = 10e-6  # to start a collective among GPUs of one host
LINK_BYTES = 400e9  # bytes a second that one GPU receives over NVLink in practice


def visited_devices(num_devices: int, num_experts: int, num_chosen: int) -> float:
    """d: devices that have one of num_chosen different experts, when all choices are equally likely."""
    elsewhere = num_experts - num_experts // num_devices
    missed = math.comb(elsewhere, num_chosen) / math.comb(num_experts, num_chosen)
    return num_devices * (1 - missed)


def received_bytes(
    scheme: str, *, num_devices: int, num_tokens: int, hidden: int, num_experts: int, num_chosen: int, value_bytes: int
) -> tuple[float, float]:
    """Bytes that a device receives in one layer (with inputs, with results), of other devices only; T = num_tokens."""
    share = (num_devices - 1) * num_tokens
    if scheme == "all_to_all":
        share *= visited_devices(num_devices, num_experts, num_chosen) / num_devices
    return share * (hidden * value_bytes + 8 * num_chosen), share * 4 * hidden


def choose_dispatch(
    *, num_devices: int, num_tokens: int, hidden: int, num_experts: int, num_chosen: int, value_bytes: int
) -> str:
    """ "all_to_all" where the bytes it saves take longer than the calls it adds:

    T > EXTRA_CALLS CALL_SECONDS LINK_BYTES / ((P - 1) (1 - d / P) (H (b + 4) + 8 k))
    """
    sizes = {
        "num_devices": num_devices, "num_tokens": num_tokens, "hidden": hidden, "num_experts": num_experts,
        "num_chosen": num_chosen, "value_bytes": value_bytes,
    }  # fmt: skip
    saved = sum(received_bytes("gather", **sizes)) - sum(received_bytes("all_to_all", **sizes))
    return "all_to_all" if saved / LINK_BYTES > EXTRA_CALLS * CALL_SECONDS else "gather"


def choose_copies(ids: jax.Array, slots: ExpertSlots) -> jax.Array:
    """Experts [T, k] -> slots [T, k]: token t of a rank takes copy (t + number of the rank) mod copies of each of its
    experts. Ids past the end (padding) become slots past the end."""
    places, counts = slots.copies()
    places = jnp.asarray(np.pad(places, ((0, 1), (0, 0)), constant_values=slots.num_slots))
    counts = jnp.asarray(np.pad(counts, (0, 1), constant_values=1))
    turn = jnp.arange(ids.shape[0], dtype=jnp.int32) + lax.axis_index(AXIS)
    return places[ids, turn[:, None] % counts[ids]]


def gather_tokens(x: jax.Array, ids: jax.Array, weights: jax.Array, compute: Compute) -> jax.Array:
    """Scheme gather. x [T, H], ids and weights [T, k] of this rank -> [T, H] float32."""
    x, ids, weights = (lax.all_gather(part, AXIS, tiled=True) for part in (x, ids, weights))
    return lax.psum_scatter(compute(x, ids, weights), AXIS, scatter_dimension=0, tiled=True)


def exchange_tokens(
    x: jax.Array, ids: jax.Array, weights: jax.Array, compute: Compute, *, num_devices: int, num_experts: int
) -> jax.Array:
    """Scheme all_to_all; as gather_tokens. Ids past the end (padding) go nowhere."""
    owner = ids // (num_experts // num_devices)
    goes = jnp.any(owner[:, :, None] == jnp.arange(num_devices), axis=1)  # [T, P]

    def dense(*parts: jax.Array) -> jax.Array:
        return _exchange_dense(*parts, compute=compute, num_experts=num_experts)

    def ragged(*parts: jax.Array) -> jax.Array:
        return exchange_ragged(*parts, compute=compute, num_experts=num_experts)

    return lax.platform_dependent(x, ids, weights, goes, cpu=dense, default=ragged)


def _exchange_dense(
    x: jax.Array, ids: jax.Array, weights: jax.Array, goes: jax.Array, *, compute: Compute, num_experts: int
) -> jax.Array:
    num_tokens, num_devices = goes.shape
    goes = goes.T[:, :, None]  # [P, T, 1]

    def swap(values: jax.Array) -> jax.Array:  # [P, T, n], by destination -> by source
        return lax.all_to_all(values, AXIS, split_axis=0, concat_axis=0, tiled=True)

    def flat(values: jax.Array) -> jax.Array:
        return values.reshape(num_devices * num_tokens, -1)

    received = swap(jnp.where(goes, x, 0)), swap(jnp.where(goes, ids, num_experts)), swap(jnp.where(goes, weights, 0))
    out = compute(*(flat(part) for part in received))
    return jnp.sum(swap(out.reshape(num_devices, num_tokens, -1)), axis=0)


def exchange_ragged(
    x: jax.Array, ids: jax.Array, weights: jax.Array, goes: jax.Array, *, compute: Compute, num_experts: int
) -> jax.Array:
    """exchange_tokens with rows close together. goes [T, P] bool: to which devices each token goes.

    Rows are sent by destination, then token; each source has room for all its tokens at the receiver.
    """
    num_tokens, num_devices = goes.shape
    num_chosen = ids.shape[1]
    num_rows = num_tokens * min(num_chosen, num_devices)
    sizes = jnp.sum(goes, axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    # Rows that go somewhere first, in order.
    flat = goes.T.reshape(-1)
    token = jnp.argsort(~flat, stable=True)[:num_rows] % num_tokens
    swapped = lax.all_to_all(jnp.stack([sizes, starts], axis=1), AXIS, split_axis=0, concat_axis=0, tiled=True)
    received_sizes, starts_at_source = swapped[:, 0], swapped[:, 1]
    room = jnp.arange(num_devices, dtype=jnp.int32) * num_tokens  # where each source's rows lie at a receiver
    mine = jnp.full(num_devices, lax.axis_index(AXIS) * num_tokens, jnp.int32)

    def send(values: jax.Array, empty: jax.Array) -> jax.Array:
        return lax.ragged_all_to_all(values[token], empty, starts, sizes, mine, received_sizes, axis_name=AXIS)

    total = num_devices * num_tokens
    choices = jnp.concatenate([ids, lax.bitcast_convert_type(weights, jnp.int32)], axis=1)
    rows = send(x, jnp.zeros((total, x.shape[1]), x.dtype))
    choices = send(choices, jnp.full((total, 2 * num_chosen), num_experts, jnp.int32))
    received = lax.bitcast_convert_type(choices[:, num_chosen:], jnp.float32)
    out = compute(rows, choices[:, :num_chosen], received)
    empty = jnp.zeros((num_rows, out.shape[1]), out.dtype)
    back = lax.ragged_all_to_all(out, empty, room, received_sizes, starts_at_source, sizes, axis_name=AXIS)
    # Each token's rows are read in the order of their devices: a scatter would add them in any order on a GPU.
    visited = jnp.argsort(~goes, axis=1, stable=True)[:, : min(num_chosen, num_devices)]  # [T, m]
    row_of = (jnp.cumsum(flat, dtype=jnp.int32) - 1).reshape(num_devices, num_tokens)
    place = row_of[visited, jnp.arange(num_tokens)[:, None]]
    place = jnp.where(jnp.take_along_axis(goes, visited, axis=1), place, num_rows)
    return jnp.sum(back.at[place].get(mode="fill", fill_value=0.0), axis=1)
