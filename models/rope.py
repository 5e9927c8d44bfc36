"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and the ways to stretch it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxserve.models.config import RopeConfig

# cos and sin of each token's position, [T, dim / 2] each
Rotation = tuple[jax.Array, jax.Array]


def inverse_frequencies(rope: RopeConfig, *, is_long: bool = False) -> np.ndarray:
    """[dim / 2] float32, rounded as the reference implementations do (float32 throughout).

    is_long: which divisors of longrope (Ding et al., 2024, arXiv:2402.13753) apply, those of requests beyond the
    trained context or those of requests within.
    """
    exponent = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    power = np.power(np.float32(rope.theta), exponent)
    if rope.type == "longrope":
        power = np.asarray(rope.long_divisors if is_long else rope.short_divisors, np.float32) * power
    frequency = (np.float32(1.0) / power).astype(np.float32)
    if rope.freq_divisors:
        frequency = frequency / np.asarray(rope.freq_divisors, np.float32)
    if rope.type == "linear":
        frequency = frequency / np.float32(rope.factor)
    elif rope.type == "llama3":
        frequency = _stretch_llama3(frequency, rope)
    elif rope.type == "yarn":
        frequency = _stretch_yarn(frequency, rope)
    return frequency.astype(np.float32)


def cos_sin_scale(rope: RopeConfig) -> float:
    """Factor on cos and sin: 1 but for yarn (Peng et al., 2023, arXiv:2309.00071, section 3.4) and longrope."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "longrope":
        trained = rope.original_max_position_embeddings
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(trained))
    if rope.type != "yarn":
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1; 1 when nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotation(rope: RopeConfig, positions: jax.Array, *, is_long: bool = False) -> Rotation:
    """positions [T] -> cos, sin [T, dim / 2] float32. is_long as in `inverse_frequencies`."""
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(rope, is_long=is_long))[None, :]
    scale = cos_sin_scale(rope)

    def compute() -> Rotation:
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)

    def compute_once() -> Rotation:
        # XLA:CPU would compute cos and sin again for every head of every layer, inside the fusions that use them.
        # It does not fuse across a branch; this one is always taken, which the compiler cannot know.
        nothing = jnp.zeros_like(angle)
        return lax.cond(positions[0] > np.iinfo(np.int32).min, compute, lambda: (nothing, nothing))

    return lax.platform_dependent(cpu=compute_once, default=compute)


def _stretch_llama3(frequency: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    trained = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    smooth = (trained / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequency / rope.factor + smooth * frequency
    out = np.where(wavelength > trained / rope.low_freq_factor, frequency / rope.factor, frequency)
    is_between = (wavelength >= trained / rope.high_freq_factor) & (wavelength <= trained / rope.low_freq_factor)
    return np.where(is_between, between, out)


def _stretch_yarn(frequency: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Dimensions that turn more than beta_fast times in the trained context are kept, those that turn less than
    beta_slow times are stretched, a ramp lies between (arXiv:2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        trained = rope.original_max_position_embeddings
        return rope.dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / width, 0, 1)
    return frequency / rope.factor * ramp + frequency * (1 - ramp)
