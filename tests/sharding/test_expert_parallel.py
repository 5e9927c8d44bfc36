"""How tokens reach experts: both schemes against a plain sum in float64, under every kind of skew; bytes and plans."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from jaxserve.sharding import expert_parallel
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.shape import MeshShape

P, T, H, E, K = 4, 6, 8, 12, 3
EXPERTS = PartitionSpec("expert")


def everything(random: np.random.Generator) -> np.ndarray:
    return np.stack([random.permutation(E)[:K] for _ in range(P * T)])


def one_expert(random: np.random.Generator) -> np.ndarray:
    """All tokens choose expert 7 and two neighbours: one device computes everything."""
    return np.tile([7, 6, 8], (P * T, 1))


def idle_ranks(random: np.random.Generator) -> np.ndarray:
    """Only the second rank has tokens; the others hold padding."""
    ids = np.full((P, T, K), E)
    ids[1] = np.stack([random.permutation(E)[:K] for _ in range(T)])
    return ids.reshape(P * T, K)


def first_device_only(random: np.random.Generator) -> np.ndarray:
    return np.tile([0, 1, 2], (P * T, 1))


def expected(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape)
    for token in range(len(x)):
        for choice, weight in zip(ids[token], weights[token]):
            if choice < E:
                out[token] += weight * (matrices[choice].astype(np.float64) @ x[token])
    return out


def over_mesh(scheme: str, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    mesh = make_mesh(MeshShape(expert=P))

    def step(x: jax.Array, ids: jax.Array, weights: jax.Array, own: jax.Array) -> jax.Array:
        first = lax.axis_index("expert") * (E // P)

        def compute(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            local = ids - first
            is_here = (local >= 0) & (local < E // P)
            outputs = jnp.einsum("mkoi,mi->mko", own[jnp.where(is_here, local, 0)], x, precision="highest")
            return jnp.sum(jnp.where(is_here, weights, 0.0)[..., None] * outputs, axis=1)

        if scheme == "gather":
            return expert_parallel.gather_tokens(x, ids, weights, compute)
        if scheme == "ragged":
            goes = jnp.any((ids // (E // P))[:, :, None] == jnp.arange(P), axis=1)
            return expert_parallel.exchange_ragged(x, ids, weights, goes, compute=compute, num_experts=E)
        return expert_parallel.exchange_tokens(x, ids, weights, compute, num_devices=P, num_experts=E)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(EXPERTS,) * 4, out_specs=EXPERTS, check_vma=False)
    return np.asarray(jax.jit(mapped)(x, ids, weights, matrices))


def ragged_in_jax(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """lax.ragged_all_to_all as its documentation describes it, for XLA:CPU, which has none. Besides, what a receiver
    was told to expect must be what it is sent: a difference comes out as NaN or as -1."""
    everything = [lax.all_gather(one, axis_name) for one in (operand, input_offsets, send_sizes, output_offsets)]
    operands, starts, sizes, targets = everything
    mine = lax.axis_index(axis_name)
    rows = jnp.arange(operand.shape[0])
    for source in range(P):
        size = sizes[source, mine]
        place = rows - starts[source, mine]
        is_sent = (place >= 0) & (place < size)
        at = jnp.where(is_sent, targets[source, mine] + place, output.shape[0])
        output = output.at[at].set(operands[source], mode="drop")
    bad = jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else -1
    return jnp.where(jnp.all(recv_sizes == sizes[:, mine]), output, bad)


@pytest.mark.parametrize("scheme", ["gather", "all_to_all", "ragged"])
@pytest.mark.parametrize("choose", [everything, one_expert, idle_ranks, first_device_only])
def test_every_scheme_computes_the_sum(
    scheme: str, choose: Callable[[np.random.Generator], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((P * T, H)).astype(np.float32)
    ids = choose(random).astype(np.int32)
    weights = random.random((P * T, K)).astype(np.float32)
    matrices = random.standard_normal((E, H, H)).astype(np.float32)
    monkeypatch.setattr(expert_parallel.lax, "ragged_all_to_all", ragged_in_jax)
    found = over_mesh(scheme, x, ids, weights, matrices)
    np.testing.assert_allclose(found, expected(x, ids, weights, matrices), atol=1e-5)


@functools.cache
def _even_choices() -> np.ndarray:
    random = np.random.default_rng(0)
    return np.argsort(random.random((20000, 256)), axis=1)[:, :8]


@pytest.mark.parametrize("num_devices", [2, 8, 64])
def test_visited_devices_is_their_mean_number(num_devices: int) -> None:
    owners = _even_choices() // (256 // num_devices)
    counted = np.mean([len(set(row)) for row in owners[:5000].tolist()])
    assert expert_parallel.visited_devices(num_devices, 256, 8) == pytest.approx(counted, rel=0.02)


def test_many_tokens_are_exchanged_and_few_are_gathered() -> None:
    sizes = {"num_devices": 8, "hidden": 7168, "num_experts": 256, "num_chosen": 8, "value_bytes": 2}
    schemes = [expert_parallel.choose_dispatch(num_tokens=1 << n, **sizes) for n in range(12)]
    assert schemes == sorted(schemes, reverse=True)  # "gather" sorts behind "all_to_all"
    assert schemes[0] == "gather" and schemes[-1] == "all_to_all"
