"""Write the fixed-seed workload that every peer runs. Needs `transformers` (vLLM's environment has it).

    python make_workload.py --tokenizer HF_FOLDER --out workload.json

Prompts are made of single-token, English-like words of the model's own vocabulary, so that text and token ids
agree: encode(text) == ids is checked for every prompt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

Prompt = dict[str, Any]


def word_tokens(tokenizer: Any) -> list[tuple[int, str]]:
    """(id, text) of the tokens that are one lower-case word with a space before it."""
    words = []
    for token, number in tokenizer.get_vocab().items():
        text = tokenizer.convert_tokens_to_string([token])
        if re.fullmatch(r" [a-z]{3,9}", text):
            words.append((number, text))
    return sorted(words)


def make_workload(tokenizer: Any, seed: int) -> dict[str, Any]:
    words = word_tokens(tokenizer)
    generator = random.Random(seed)

    def prompt(length: int) -> Prompt:
        while True:
            ids, texts = zip(*(generator.choice(words) for _ in range(length)))
            text = "".join(texts)
            if tokenizer.encode(text, add_special_tokens=False) == list(ids):
                return {"ids": list(ids), "text": text}

    def join(first: Prompt, second: Prompt, max_tokens: int) -> Prompt:
        ids, text = first["ids"] + second["ids"], first["text"] + second["text"]
        return {"ids": ids, "text": text, "max_tokens": max_tokens}

    workload: dict[str, Any] = {"seed": seed, "n_words": len(words)}
    workload["single_128_128"] = [dict(prompt(128), max_tokens=128) for _ in range(4)]
    workload["ttft_512"] = [dict(prompt(512), max_tokens=2) for _ in range(8)]
    workload["mixed_64"] = [
        dict(prompt(generator.randint(32, 512)), max_tokens=generator.randint(16, 128)) for _ in range(64)
    ]
    prefix = prompt(1024)
    workload["shared_prefix_64"] = [join(prefix, prompt(64), 32) for _ in range(64)]
    # Another prefix: warms every code path without warming the measured prefix.
    other = prompt(1024)
    workload["warmup"] = [dict(prompt(length), max_tokens=8) for length in (32, 128, 256, 512)]
    workload["warmup"] += [join(other, prompt(64), 8) for _ in range(2)]
    return workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="Hugging Face model folder")
    parser.add_argument("--out", type=Path, default=Path("workload.json"))
    parser.add_argument("--seed", type=int, default=20261129)
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    workload = make_workload(AutoTokenizer.from_pretrained(arguments.tokenizer), arguments.seed)
    text = json.dumps(workload)
    arguments.out.write_text(text, encoding="utf-8")
    for name, requests in workload.items():
        if isinstance(requests, list):
            prompts, outputs = sum(len(r["ids"]) for r in requests), sum(r["max_tokens"] for r in requests)
            print(f"{name}: {len(requests)} requests, {prompts} prompt tokens, {outputs} output tokens")
    print("sha256", hashlib.sha256(text.encode()).hexdigest()[:16])


if __name__ == "__main__":
    main()
