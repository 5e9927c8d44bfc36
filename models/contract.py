"""The only types that the device side (models) and the host side (runner) share.

Models see `StepInputs` and `KVPages` and nothing else of the engine. Every field has a static shape; padding
is data. A bucket of the runner fixes T; R, P and S are fixed per engine.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import jax
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.sharding.expert_slots import ExpertSlots
from jaxserve.sharding.shape import ONE_DEVICE, MeshShape

if TYPE_CHECKING:
    from jaxserve.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One step's batch on the device.

    token_ids     [T] int32  token to embed. The runner has already replaced the host's -1 ("the last token
                             sampled for this row") from its last-token table, so values are in [0, vocab).
    batch                    positions, rows, write slots, page table: see RaggedBatch
    sample_index  [S] int32  flat token index whose hidden state the head reads; unused 0
    """

    token_ids: jax.Array
    batch: RaggedBatch
    sample_index: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPages:
    """The paged cache of every layer: layers[i] holds K and V of layer i, in one array or as codes and scales.

    Its shape belongs to the attention backend (`pallas_kernels/paged_attention/api.py`: page_array_shape); the
    page is always a leading axis, so that pages are copied by `layer.at[dst].set(layer[src])`. Donated to every
    step and returned by it; nobody else keeps a reference. Page 0 is a dummy and never belongs to a request.
    """

    layers: tuple[Pages, ...]


@dataclasses.dataclass(frozen=True)
class RuntimeOptions:
    """How a model's blocks compute; resolved once by the runner, static in every program.

    dtype           "float32" or "bfloat16": type of weights as computed with; results are float32 on CPU
    page_size       tokens per page
    page_dtype      "float32", "bfloat16", "int8" or "fp8": type of the stored K/V
    attention       backend name for paged attention ("cpu_ffi", "xla", "reference", "mosaic", "interpret")
    matmul          backend name for dense products ("cpu_ffi", "cpu_tiles", "cpu_int8", "xla", "mosaic",
                    "interpret"); see matmul.api.linear
    cascade         decode rows that share pages attend to them together, where the backend can
    deterministic   every query token is computed by the same arithmetic whatever else the step holds
    mesh            devices along each axis. With more than one a model's code runs under shard_map and its arrays,
                    also its configuration's sizes, are those of one device
    expert_dispatch   how tokens reach experts on other devices: see sharding/expert_parallel.py: DISPATCHES
    expert_slots      (layer, where its experts and their copies lie) for layers with copies of hot experts
    max_model_len   longest prompt + output that is served; None: what the model can do (only longrope asks)
    """

    dtype: str = "float32"
    page_size: int = 16
    page_dtype: str = "float32"
    attention: str = "xla"
    matmul: str = "xla"
    cascade: bool = True
    deterministic: bool = False
    max_model_len: int | None = None
    mesh: MeshShape = ONE_DEVICE
    expert_dispatch: str = "gather"
    expert_slots: tuple[tuple[int, ExpertSlots], ...] = ()


class Model(Protocol):
    """What the runner calls. Implementations are flax.nnx modules (`models/<family>.py`)."""

    config: ModelConfig

    def __call__(self, inputs: StepInputs, pages: KVPages) -> tuple[jax.Array, KVPages]:
        """Embed, run all layers, write this step's K/V. Returns hidden [T, hidden_size] float32 before the
        final norm, and the updated pages."""
        ...

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [S, hidden_size] -> logits [S, vocab_size] float32, final norm and soft cap included."""
        ...

    def compute_embeddings(self, hidden: jax.Array) -> jax.Array:
        """hidden [S, hidden_size] -> the same behind the final norm, float32: what embeddings are pooled from."""
        ...
