"""gpt-oss: attention sinks, every other layer with a sliding window, clamped experts with biases, stored as MXFP4 or
as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxserve.models.config import LayerConfig, ModelConfig, MoEConfig, RopeConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.family import GGUF_LAYER, HF_LAYER, Family
from jaxserve.models.llama import GGUF_NAMES, HF_NAMES
from jaxserve.models.weights.derived import Derived, DerivedTensors, rearranged
from jaxserve.models.weights.mxfp4 import BLOCK, dequantize_mxfp4
from jaxserve.models.weights.tensor_file import TensorFile

_SWIGLU_LIMIT = 7.0
_EVERY = 2  # layers from one with a global view to the next


def _read_hf(hf: HFConfig) -> ModelConfig:
    common = hf.common()
    if hf.number("swiglu_alpha", 1.702) != 1.702:
        raise ValueError(f"swiglu_alpha: got {hf.get('swiglu_alpha')}; allowed: 1.702")
    has_bias = hf.flag("attention_bias", True)
    is_sliding = hf.layer_is_sliding(_alternating(common["num_layers"]))
    return ModelConfig(
        **common,
        **_shared(is_sliding, hf.integer("sliding_window", 128), hf.rope(theta=150000.0)),
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        moe=MoEConfig(
            num_experts=hf.integer("num_local_experts"),
            num_experts_per_token=hf.integer("num_experts_per_tok", hf.get("experts_per_token", 4)),
            intermediate_size=common["intermediate_size"],
            swiglu_limit=hf.number("swiglu_limit", _SWIGLU_LIMIT),
            **_ROUTER,
        ),
    )


def _read_gguf(gguf: GGUFConfig) -> ModelConfig:
    common = gguf.common(has_experts=True)
    is_sliding = gguf.layer_is_sliding(common["num_layers"], _EVERY)
    rope = dataclasses.replace(gguf.rope(common["head_dim"], theta=150000.0), truncate=False)
    return ModelConfig(
        **common,
        **_shared(is_sliding, gguf.integer("attention.sliding_window", 128), rope),
        has_qkv_bias=True,
        has_o_bias=True,
        moe=gguf.moe(swiglu_limit=_SWIGLU_LIMIT, **_ROUTER),
    )


_ROUTER = {"scoring": "softmax_topk", "has_router_bias": True, "has_expert_bias": True}


def _alternating(num_layers: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % _EVERY != 0 for layer in range(num_layers))


def _shared(is_sliding: tuple[bool, ...], window: int, rope: RopeConfig) -> dict:
    layers = tuple(
        LayerConfig(sliding_window=window if sliding else 0, rope=rope, uses_moe=True) for sliding in is_sliding
    )
    return {"family": "gpt_oss", "layers": layers, "has_sinks": True}


_EXPERTS = "model.layers.{i}.mlp.experts"


def _adapt(file: TensorFile, config: ModelConfig) -> TensorFile:
    """Experts are stored [experts, in, out], or as MXFP4 blocks of [experts, out, in]; gate and up take turns in the
    rows of one matrix."""
    derived: dict[str, Derived] = {}
    count, hidden, size = config.moe.num_experts, config.hidden_size, config.moe.intermediate_size
    for i in range(config.num_layers):
        for part, rows, columns in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
            name, order = f"{_EXPERTS.format(i=i)}.{part}", _unzip if part == "gate_up_proj" else _keep
            shape = (count, rows, columns)
            if f"{name}_blocks" in file.shapes:
                derived[f"{name}.weight"] = _from_mxfp4(name, shape, order)
            else:
                derived[f"{name}.weight"] = rearranged(
                    name, (count, columns, rows), shape, lambda values, order=order: order(values.swapaxes(1, 2))
                )
            derived[f"{name}.bias"] = rearranged(f"{name}_bias", (count, rows), (count, rows), order)
    return DerivedTensors(file, derived)


def _from_mxfp4(name: str, shape: tuple[int, int, int], order: Callable[[np.ndarray], np.ndarray]) -> Derived:
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    stored = (*shape[:2], shape[2] // BLOCK)
    raw = np.dtype(np.uint8)

    def build(file: TensorFile, dtype: np.dtype) -> np.ndarray:
        return order(dequantize_mxfp4(file.read(blocks, raw), file.read(scales, raw), dtype))

    return Derived({blocks: (*stored, BLOCK // 2), scales: stored}, shape, build)


def _unzip(values: np.ndarray) -> np.ndarray:
    """Rows gate, up, gate, up, ... -> all of gate, then all of up."""
    return np.concatenate([values[:, 0::2], values[:, 1::2]], axis=1)


def _keep(values: np.ndarray) -> np.ndarray:
    return values


_HF_NAMES = dataclasses.replace(
    HF_NAMES,
    layer=HF_LAYER
    | {
        "sinks": "model.layers.{i}.self_attn.sinks",
        "router": "model.layers.{i}.mlp.router",
        "experts.gate": f"{_EXPERTS}.gate_up_proj",
        "experts.up": f"{_EXPERTS}.gate_up_proj",
        "experts.down": f"{_EXPERTS}.down_proj",
    },
    adapt=_adapt,
)
_GGUF_NAMES = dataclasses.replace(GGUF_NAMES, layer=GGUF_LAYER | {"mlp_norm": "blk.{i}.post_attention_norm"})
FAMILY = Family(_read_hf, _read_gguf, _HF_NAMES, _GGUF_NAMES)
