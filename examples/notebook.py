"""Cells for a notebook (`# %%`): Jupyter, VS Code, or a plain `python examples/notebook.py [MODEL]`.

An LLM keeps running between cells, its prefix cache too; the last expression of a cell shows what it is.
"""

# %% Load once. Loading and compiling show a bar.
import sys

from jaxserve import LLM, SamplingParams
from jaxserve.trace import summarize

llm = LLM(sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None)
llm  # noqa: B018

# %% Several continuations of one prompt: its keys and values are computed once.
(result,) = llm.generate("A good name for a cat is", SamplingParams(n=4, seed=3, max_tokens=12, temperature=0.9))
for output in result.outputs:
    print(output.index, repr(output.text))
result  # noqa: B018

# %% How sure was the model? Log-probabilities of the tokens taken, and of the best alternatives.
(result,) = llm.generate("The sky is", SamplingParams(temperature=0, max_tokens=4, logprobs=3))
for token in result.logprobs:
    alternatives = [(llm.tokenizer.decode([other]), round(value, 2)) for other, value in token.top]
    print(repr(llm.tokenizer.decode([token.token_id])), round(token.logprob, 2), alternatives)

# %% Ask about one text again and again: from the second question on, the text is found in the cache.
text = "The lighthouse was built in 1871 by fishermen from the village. " * 12
for question in ("When was it built?", "Who built it?"):
    messages = [{"role": "user", "content": f"{text}\n{question}"}]
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))
    print(f"{answer.num_cached_tokens} of {answer.num_prompt_tokens} tokens cached: {answer.text!r}")

# %% What the engine did so far, and how its last steps went.
print(llm.stats())
print(summarize(llm.trace))

# %% Free the memory before loading another model.
llm.close()
