"""A Llama with random weights and a tokenizer of whole words, as files: a real engine that loads in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCAB = 4096


def write_small_model(folder: Path, *, hidden: int = 64, layers: int = 2) -> Path:
    """hidden is a multiple of 64: one query head for each 64, one K/V head for two of them."""
    heads = max(2, hidden // 64)
    head_dim = hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "head_dim": head_dim, "intermediate_size": 4 * hidden, "vocab_size": VOCAB, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
        "eos_token_id": 1, "bos_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(VOCAB, hidden), "model.norm.weight": np.ones(hidden, np.float32)}
    kv = heads // 2 * head_dim
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (4 * hidden, hidden),
        "mlp.up_proj": (4 * hidden, hidden), "mlp.down_proj": (hidden, 4 * hidden),
    }  # fmt: skip
    for layer in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = np.ones(hidden, np.float32)
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = weight(*shape)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    backend = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))
    return folder
