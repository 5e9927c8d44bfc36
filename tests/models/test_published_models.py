"""Configurations of published models, in the keys that matter: what is read, and how many weights that makes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxserve.models.config import ModelConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.decoder import Decoder
from jaxserve.models.loading import load_config
from jaxserve.pallas_kernels.pages import page_bytes

from jaxserve.config import EngineConfig
from jaxserve.hub import ModelSource
from jaxserve.runner.runner import resolve_options

YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
MODELS: dict[str, tuple[dict, int]] = {
    "DeepSeek-V3": (
        {
            "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
            "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "attention_bias": False,
            "max_position_embeddings": 163840, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        671_026_419_200,
    ),
    "DeepSeek-V2-Lite": (
        {
            "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
            "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
            "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "q_lora_rank": None,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "first_k_dense_replace": 1, "moe_layer_freq": 1, "attention_bias": False,
            "max_position_embeddings": 163840, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        15_706_484_224,
    ),
    "gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
            "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
            "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True, "max_position_embeddings": 131072,
            "rope_theta": 150000, "initial_context_length": 4096,
            "rope_scaling": YARN | {"type": "yarn", "factor": 32.0, "truncate": False},
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        20_914_757_184,
    ),
    "Mixtral-8x7B": (
        {
            "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1e6,
            "max_position_embeddings": 32768,
        },
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
            "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
            "use_sliding_window": False, "sliding_window": None, "max_window_layers": 48, "rope_theta": 1000000.0,
            "max_position_embeddings": 40960,
        },
        30_532_122_624,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
            "intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
            "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
            "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1, "use_sliding_window": False,
            "sliding_window": 32768, "max_window_layers": 21, "max_position_embeddings": 8192,
        },
        14_315_784_192,
    ),
    "OLMoE-1B-7B": (
        {
            "architectures": ["OlmoeForCausalLM"], "vocab_size": 50304, "hidden_size": 2048,
            "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None,
            "max_position_embeddings": 4096,
        },
        6_919_161_856,
    ),
    "OLMo-2-7B": (
        {
            "architectures": ["Olmo2ForCausalLM"], "vocab_size": 100352, "hidden_size": 4096,
            "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "rope_theta": 500000,
        },
        7_298_617_344,
    ),
    "SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"], "vocab_size": 128256, "hidden_size": 2048,
            "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
            "tie_word_embeddings": True, "no_rope_layer_interval": 4, "max_position_embeddings": 65536,
            "rope_theta": 5000000.0,
        },
        3_075_098_624,
    ),
    "Phi-3-mini-128k": (
        {
            "architectures": ["Phi3ForCausalLM"], "vocab_size": 32064, "hidden_size": 3072,
            "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
            "rope_scaling": {"type": "su", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48},
        },
        3_821_079_552,
    ),
    "Phi-4-mini": (
        {
            "architectures": ["Phi3ForCausalLM"], "vocab_size": 200064, "hidden_size": 3072,
            "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
            "tie_word_embeddings": True, "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096, "sliding_window": 262144, "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48},
        },
        3_836_021_760,
    ),
}  # fmt: skip


class _Counting:
    """Answers with shapes alone and counts the values."""

    def __init__(self) -> None:
        self.total = 0

    def _shape(self, *shape: int) -> jax.ShapeDtypeStruct:
        self.total += math.prod(shape)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def matrix(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> jax.ShapeDtypeStruct:
        return self._shape(sum(rows), columns)

    def table(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self._shape(rows, columns)

    def exact(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self._shape(rows, columns)

    def stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> jax.ShapeDtypeStruct:
        return self._shape(count, sum(rows), columns)

    def stack_bias(self, slots: Sequence[str], rows: Sequence[int], count: int) -> jax.ShapeDtypeStruct:
        return self._shape(count, sum(rows))

    def bias(self, slots: Sequence[str], rows: Sequence[int]) -> jax.ShapeDtypeStruct:
        return self._shape(sum(rows))

    def vector(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        return self._shape(size)

    def norm(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        return self._shape(size)


def read(name: str, folder: Path) -> ModelConfig:
    content = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False} | MODELS[name][0]
    (folder / "config.json").write_text(json.dumps(content))
    return load_config(ModelSource(name, "safetensors", folder))


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_weights_is_that_of_the_published_files(name: str, tmp_path: Path) -> None:
    params = _Counting()
    Decoder(read(name, tmp_path), RuntimeOptions(), params)
    assert params.total == MODELS[name][1]


def test_deepseek_v3(tmp_path: Path) -> None:
    config = read("DeepSeek-V3", tmp_path)
    assert [layer.uses_moe for layer in config.layers] == [False] * 3 + [True] * 58
    assert config.num_draft_layers == 1
    mscale = 0.1 * math.log(40) + 1
    assert config.attention_scale == pytest.approx(192**-0.5 * mscale**2)
    specs = Decoder(config, RuntimeOptions(), _Counting()).attention_specs
    assert sum(page_bytes(spec, 1, "bfloat16") for spec in specs) == 70272  # of one token


def test_how_long_requests_may_be(tmp_path: Path) -> None:
    """longrope computes as in training up to the trained length, unless someone asks for more."""
    config = read("Phi-4-mini", tmp_path)
    assert resolve_options(EngineConfig(), "cpu", config).max_model_len == 4096
    assert resolve_options(EngineConfig(max_model_len=20000), "cpu", config).max_model_len == 20000
    with pytest.raises(ValueError, match="max_model_len: got 200000; allowed: up to 131072"):
        resolve_options(EngineConfig(max_model_len=200000), "cpu", config)
    assert resolve_options(EngineConfig(), "cpu", read("Mixtral-8x7B", tmp_path)).max_model_len == 8192


def test_latent_pages_are_float32_where_bfloat16_would_be_copied(tmp_path: Path) -> None:
    config = read("DeepSeek-V3", tmp_path)
    for platform, backend, expected in (("cpu", "auto", "float32"), ("gpu", "xla", "bfloat16")):
        options = resolve_options(EngineConfig(attention_backend=backend), platform, config)
        assert (options.dtype, options.page_dtype) == ("bfloat16", expected)
