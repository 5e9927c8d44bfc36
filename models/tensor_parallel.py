"""A model's sizes on one device of a mesh, and what each tensor device holds of the whole. No jax.

Query heads are split evenly. Key and value heads follow them: a device has those that its query heads read, so where
they do not divide some are on several devices (Shoeybi et al., 2019, arXiv:1909.08053; Pope et al., 2022,
arXiv:2211.05102).
"""

from __future__ import annotations

import dataclasses
import math

from jaxserve.models.config import ModelConfig
from jaxserve.sharding.shape import MeshShape

# A device's part of the vocabulary is a multiple of this: whole words of packed masks, whole blocks of the sampler.
VOCAB_MULTIPLE = 64


def check_mesh(config: ModelConfig, shape: MeshShape) -> None:
    """Raise ValueError naming the axis and the sizes allowed, unless the model can be split over this mesh."""
    tensor = shape.tensor
    wanted = [("heads", config.num_heads)]
    if any(not layer.uses_moe for layer in config.layers):
        wanted.append(("intermediate_size", config.intermediate_size))
    if config.qk_norm == "full" and tensor > 1:
        raise ValueError(f"mesh: got tensor={tensor} for a model with norms over all heads; allowed: 1")
    if config.moe is not None:
        wanted.append(("intermediate_size of an expert", config.moe.intermediate_size))
        wanted.append(("shared expert's width", config.moe.shared_size))
        if config.moe.num_experts % shape.expert:
            raise ValueError(
                f"mesh: got expert={shape.expert}; allowed: a divisor of the model's {config.moe.num_experts} experts"
            )
    elif shape.expert > 1:
        raise ValueError(f"mesh: got expert={shape.expert} for a model without experts; allowed: 1")
    for what, size in wanted:
        if size % tensor:
            raise ValueError(f"mesh: got tensor={tensor}; allowed: a divisor of the model's {what}, {size}")


def shard_config(config: ModelConfig, shape: MeshShape) -> ModelConfig:
    """The configuration of what one device computes. The experts' number stays that of the whole model: the router
    needs it."""
    check_mesh(config, shape)
    tensor = shape.tensor
    if tensor == 1:
        return config
    moe = config.moe
    if moe is not None:
        moe = dataclasses.replace(
            moe, intermediate_size=moe.intermediate_size // tensor, shared_size=moe.shared_size // tensor
        )
    has_dense = any(not layer.uses_moe for layer in config.layers)
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // tensor,
        num_kv_heads=len(kv_heads_of(config, tensor, 0)),
        intermediate_size=config.intermediate_size // tensor if has_dense else config.intermediate_size,
        vocab_size=local_vocab_size(config.vocab_size, tensor),
        moe=moe,
    )


def local_vocab_size(vocab_size: int, tensor: int) -> int:
    """Tokens of one tensor device, those past the end of the vocabulary included."""
    if tensor == 1:
        return vocab_size
    return -(-vocab_size // (tensor * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE


def kv_heads_of(config: ModelConfig, tensor: int, index: int) -> list[int]:
    """Key/value heads that tensor device `index` holds, in the order in which its query heads read them.

    Each serves the same number of its query heads: the largest that divides both the group of the whole model and
    the heads of a device.
    """
    heads = config.num_heads // tensor
    group = config.num_heads // config.num_kv_heads
    size = math.gcd(group, heads)
    return [(index * heads + first) // group for first in range(0, heads, size)]
