"""BERT, RoBERTa and XLM-RoBERTa encoders (MiniLM, E5, BGE): one vector for a text."""

from __future__ import annotations

from jaxserve.models.config_encoder import EncoderConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.family import Family, WeightNames
from jaxserve.models.sentence_transformers import embedding_settings
from jaxserve.models.weights.renamed import RenamedTensors
from jaxserve.models.weights.tensor_file import TensorFile

_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu",
    "swish": "silu",
}  # fmt: skip
_PREFIXES = ("bert.", "roberta.")  # of files saved with a head on top
_TOP = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
_LAYER = {
    "q": "encoder.layer.{i}.attention.self.query",
    "k": "encoder.layer.{i}.attention.self.key",
    "v": "encoder.layer.{i}.attention.self.value",
    "o": "encoder.layer.{i}.attention.output.dense",
    "attention_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "up": "encoder.layer.{i}.intermediate.dense",
    "down": "encoder.layer.{i}.output.dense",
    "mlp_norm": "encoder.layer.{i}.output.LayerNorm",
}
# Heads for other tasks than embeddings, and a buffer that older files carry.
_IGNORED = (r"embeddings\.position_ids", r"pooler\.dense\..*", r"cls\..*", r"lm_head\..*")


def _read_hf(hf: HFConfig) -> EncoderConfig:
    kind = hf.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ValueError(f"{hf.path}: position_embedding_type: got {kind!r}; allowed: 'absolute'")
    if hf.flag("is_decoder", False):
        raise ValueError(f"{hf.path}: is_decoder: got True; allowed: False (an encoder)")
    activation = hf.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{hf.path}: hidden_act: got {activation!r}; allowed: {', '.join(_ACTIVATIONS)}")
    is_bert = hf.architecture.startswith("Bert")
    # RoBERTa numbers positions from behind the padding token's index on.
    offset = 0 if is_bert else hf.integer("pad_token_id", 1) + 1
    num_positions = hf.integer("max_position_embeddings")
    settings = embedding_settings(hf.path.parent)
    longest = num_positions - offset
    if settings is not None and settings.max_tokens is not None:
        longest = min(longest, settings.max_tokens)
    return EncoderConfig(
        architecture=hf.architecture,
        family="bert",
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=hf.integer("num_hidden_layers"),
        num_heads=hf.integer("num_attention_heads"),
        max_model_len=longest,
        num_positions=num_positions,
        position_offset=offset,
        num_token_types=hf.integer("type_vocab_size", 2),
        norm_eps=hf.number("layer_norm_eps", 1e-12),
        activation=_ACTIVATIONS[activation],
        pooling="mean" if settings is None else settings.pooling,
    )


def _read_gguf(gguf: GGUFConfig) -> EncoderConfig:
    raise ValueError(f"{gguf.file.path}: architecture {gguf.architecture!r}; allowed: encoders as safetensors")


def _adapt(file: TensorFile, config: object) -> TensorFile:
    """Files saved with a head have a prefix; those made from the first release call a norm's arrays gamma and beta."""

    def rename(name: str) -> str:
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")

    return RenamedTensors(file, rename)


FAMILY = Family(_read_hf, _read_gguf, WeightNames(_TOP, _LAYER, _IGNORED, adapt=_adapt), WeightNames(_TOP, _LAYER))
