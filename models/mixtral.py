"""Mixtral: the plain decoder with experts in every layer."""

from __future__ import annotations

import dataclasses

from jaxserve.models import llama
from jaxserve.models.config import LayerConfig, ModelConfig, MoEConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.family import HF_LAYER, Family


def _read_hf(hf: HFConfig) -> ModelConfig:
    common = hf.common()
    layer = LayerConfig(sliding_window=hf.integer("sliding_window", 0), rope=hf.rope(), uses_moe=True)
    return ModelConfig(
        **common,
        family="mixtral",
        layers=(layer,) * common["num_layers"],
        moe=MoEConfig(
            num_experts=hf.integer("num_local_experts"),
            num_experts_per_token=hf.integer("num_experts_per_tok"),
            intermediate_size=common["intermediate_size"],
        ),
    )


_EXPERTS = "model.layers.{i}.block_sparse_moe"
HF_NAMES = dataclasses.replace(
    llama.HF_NAMES,
    layer=HF_LAYER
    | {
        "router": f"{_EXPERTS}.gate",
        "experts.gate": f"{_EXPERTS}.experts.{{e}}.w1",
        "experts.up": f"{_EXPERTS}.experts.{{e}}.w3",
        "experts.down": f"{_EXPERTS}.experts.{{e}}.w2",
    },
)
# In GGUF files a Mixtral is a "llama" with experts.
FAMILY = Family(_read_hf, llama.FAMILY.read_gguf, HF_NAMES, llama.FAMILY.gguf_names)
