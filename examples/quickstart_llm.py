"""Load a model, continue several prompts at once, and chat.

python examples/quickstart_llm.py [MODEL]
"""

import sys

from jaxserve import LLM, SamplingParams


def main(model: str | None = None) -> None:
    with LLM(model) as llm:
        print(llm)

        # Several prompts are computed together. temperature=0 takes the likeliest token every time.
        prompts = ["The capital of France is", "Water boils at", "The first man on the moon was"]
        greedy = SamplingParams(temperature=0, max_tokens=16)
        for prompt, result in zip(prompts, llm.generate(prompts, greedy)):
            print(f"{prompt!r} -> {result.text!r}")

        # Options may differ from prompt to prompt. A seed makes a sampled text repeatable.
        options = [SamplingParams(seed=seed, max_tokens=24, stop=(".",)) for seed in (1, 2)]
        for result in llm.generate(["Once upon a time"] * 2, options):
            print(f"{result.text!r} ({result.finish_reason}, {result.num_cached_tokens} prompt tokens cached)")

        (answer,) = llm.chat([{"role": "user", "content": "Name three primary colors."}], greedy)
        print(answer.text)


if __name__ == "__main__":
    main(*sys.argv[1:2])
