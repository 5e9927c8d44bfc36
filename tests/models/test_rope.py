"""The rotation of positions, and how often a program computes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.models.config import RopeConfig
from jaxserve.models.rope import rotation
from jaxserve.pallas_kernels.rotary.reference import rotate

ROPE = RopeConfig(dim=32, theta=10000.0)


def test_cos_and_sin_are_computed_once_for_all_layers() -> None:
    """XLA:CPU copies cheap producers into every fusion that uses them, and takes these two for cheap."""

    def layers(positions: jax.Array, x: jax.Array) -> jax.Array:
        turn = rotation(ROPE, positions)
        for _ in range(3):
            x = jnp.sort(rotate(x, *turn), axis=0)  # not fused with its neighbours, like attention
        return x

    compiled = jax.jit(layers).lower(jnp.arange(8), jnp.ones((8, 2, 32))).compile().as_text()
    assert (compiled.count(" cosine("), compiled.count(" sine(")) == (1, 1)


def test_halves_turn_against_each_other_as_complex_numbers() -> None:
    positions = np.array([0, 1, 7, 100, 1000])
    x = np.random.default_rng(0).standard_normal((5, 2, 40)).astype(np.float32)
    angle = positions[:, None] * 10000.0 ** (-np.arange(0, 32, 2) / 32)
    turned = (x[..., :16] + 1j * x[..., 16:32]) * np.exp(1j * angle)[:, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 32:]], axis=-1)
    found = jax.jit(lambda positions, x: rotate(x, *rotation(ROPE, positions)))(positions, x)
    np.testing.assert_allclose(found, expected, atol=3e-4, rtol=0)  # angles are float32, as the reference has them
