"""GGUF to a Hugging Face folder, dequantised, for peers that read nothing else. Needs torch and transformers >= 5.

    python convert_gguf.py model.gguf OUT_FOLDER [bfloat16|float32]

Prints two continuations, to be looked at.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import quantization_config


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    folder, name = os.path.split(os.path.abspath(sys.argv[1]))
    target, dtype = sys.argv[2], (*sys.argv[3:], "bfloat16")[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    options = {}
    config_class = getattr(quantization_config, "GgufConfig", None) or getattr(quantization_config, "GGUFConfig", None)
    if config_class is not None:
        try:
            options["quantization_config"] = config_class(gguf_file=name, dequantize=True)
        except TypeError:
            options["quantization_config"] = config_class(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=getattr(torch, dtype), **options)
    # save_pretrained would otherwise write the quantisation that has just been undone.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if getattr(model, attribute, None) is not None:
            setattr(model, attribute, None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)

    ids = tokenizer("The capital of France is", return_tensors="pt")
    print(tokenizer.decode(model.generate(**ids, max_new_tokens=20, do_sample=False)[0]))
    messages = [{"role": "user", "content": "Name three primary colors."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    print(tokenizer.decode(model.generate(**ids, max_new_tokens=40, do_sample=False)[0]))


if __name__ == "__main__":
    main()
