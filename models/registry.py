"""Which module declares an architecture. Modules are loaded when they are asked for."""

from __future__ import annotations

import importlib

from jaxserve.models.family import Family

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "BertModel": "bert",
    "BertForMaskedLM": "bert",
    "RobertaModel": "bert",
    "XLMRobertaModel": "bert",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen_moe",
    "Qwen3MoeForCausalLM": "qwen_moe",
    "Phi3ForCausalLM": "phi",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmo",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
}
GGUF_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "qwen2moe": "qwen_moe",
    "qwen3moe": "qwen_moe",
    "phi3": "phi",
    "smollm3": "smollm3",
    "olmo2": "olmo",
    "olmoe": "olmo",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek",
}


def family_of(architecture: str, *, known: dict[str, str], where: str) -> Family:
    """The declaration of an architecture. ValueError naming it, `where` it was read and the known ones."""
    if architecture not in known:
        raise ValueError(f"{where}: architecture: got {architecture!r}; allowed: {', '.join(known)}")
    return importlib.import_module(f"jaxserve.models.{known[architecture]}").FAMILY


def family_named(module: str) -> Family:
    """The declaration in a module of this package, as ModelConfig.family names it. ValueError for an unknown one."""
    known = sorted({*HF_ARCHITECTURES.values(), *GGUF_ARCHITECTURES.values()})
    if module not in known:
        raise ValueError(f"family: got {module!r}; allowed: {', '.join(known)}")
    return importlib.import_module(f"jaxserve.models.{module}").FAMILY
