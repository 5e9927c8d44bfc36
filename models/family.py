"""What a family module declares: how its files describe a model, and what they call its weights. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.config_encoder import EncoderConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.weights.tensor_file import TensorFile


@dataclasses.dataclass(frozen=True)
class WeightNames:
    """Names of one file format.

    top, layer        slot -> name without ".weight" or ".bias"; `{i}` in a layer's name is its index. Slots of a
                      layer: q, k, v, o, gate, up, down, q_norm, k_norm, attention_norm, attention_post_norm,
                      mlp_norm, mlp_post_norm, those of models/moe.py and models/mla.py; of the top: embedding,
                      final_norm, head. Slots that are asked for together and have one name are one tensor, their
                      rows in this order. In the name of a stack `{e}` is the index of a matrix; without it the file
                      stores the stack as one tensor. Sinks and the router's correction are full names
    ignored           patterns (re.fullmatch) of names that may be there and are not weights
    has_interleaved_qk   rows of q and k are ordered for a rotation of neighbouring pairs (GGUF's "llama")
    norms_have_offset    stored norm weights are weight - ModelConfig.norm_offset
    adapt                presents a file whose tensors lie otherwise under the names above (None: they do not)
    """

    top: Mapping[str, str]
    layer: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    has_interleaved_qk: bool = False
    norms_have_offset: bool = False
    adapt: Callable[[TensorFile, Any], TensorFile] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """One family: readers of both kinds of description, and the weight names of both kinds of file."""

    read_hf: Callable[[HFConfig], ModelConfig | EncoderConfig]
    read_gguf: Callable[[GGUFConfig], ModelConfig | EncoderConfig]
    hf_names: WeightNames
    gguf_names: WeightNames


HF_TOP = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
HF_LAYER = {
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "o": "model.layers.{i}.self_attn.o_proj",
    "q_norm": "model.layers.{i}.self_attn.q_norm",
    "k_norm": "model.layers.{i}.self_attn.k_norm",
    "gate": "model.layers.{i}.mlp.gate_proj",
    "up": "model.layers.{i}.mlp.up_proj",
    "down": "model.layers.{i}.mlp.down_proj",
    "attention_norm": "model.layers.{i}.input_layernorm",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
}
HF_EXPERTS = {
    "router": "model.layers.{i}.mlp.gate",
    "experts.gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "experts.up": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "experts.down": "model.layers.{i}.mlp.experts.{e}.down_proj",
}
HF_IGNORED = (r".*rotary_emb\.inv_freq", r".*\.attn\.masked_bias")

GGUF_TOP = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}
GGUF_LAYER = {
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "o": "blk.{i}.attn_output",
    "q_norm": "blk.{i}.attn_q_norm",
    "k_norm": "blk.{i}.attn_k_norm",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
    "attention_norm": "blk.{i}.attn_norm",
    "mlp_norm": "blk.{i}.ffn_norm",
    "sinks": "blk.{i}.attn_sinks.weight",
    "q_a": "blk.{i}.attn_q_a",
    "q_a_norm": "blk.{i}.attn_q_a_norm",
    "q_b": "blk.{i}.attn_q_b",
    "kv_a": "blk.{i}.attn_kv_a_mqa",
    "kv_a_norm": "blk.{i}.attn_kv_a_norm",
    "k_b": "blk.{i}.attn_k_b",
    "v_b": "blk.{i}.attn_v_b",
    "router": "blk.{i}.ffn_gate_inp",
    "router_correction": "blk.{i}.exp_probs_b.bias",
    "experts.gate": "blk.{i}.ffn_gate_exps",
    "experts.up": "blk.{i}.ffn_up_exps",
    "experts.down": "blk.{i}.ffn_down_exps",
    "shared.gate": "blk.{i}.ffn_gate_shexp",
    "shared.up": "blk.{i}.ffn_up_shexp",
    "shared.down": "blk.{i}.ffn_down_shexp",
    "shared_gate": "blk.{i}.ffn_gate_inp_shexp",
}
# The divisors of rotation frequencies are read with the configuration.
GGUF_IGNORED = (r"rope_freqs\.weight",)
