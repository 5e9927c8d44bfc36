"""Print an answer as it is made; leave another one early.

python examples/streaming.py [MODEL]
"""

import sys

from jaxserve import LLM, SamplingParams


def main(model: str | None = None) -> None:
    with LLM(model) as llm:
        question = llm.chat_tokens([{"role": "user", "content": "Write one sentence about the sea."}])
        for piece in llm.stream(question, SamplingParams(temperature=0, max_tokens=48)):
            print(piece, end="", flush=True)
        print(f"\n[{piece.num_output_tokens} tokens, {piece.finish_reason}]")

        # Leaving the loop aborts the request: nothing more is computed for it.
        text = ""
        for piece in llm.stream("One, two, three,", SamplingParams(temperature=0, max_tokens=1000)):
            text += piece.text
            if piece.num_output_tokens >= 12:
                break
        print(text)


if __name__ == "__main__":
    main(*sys.argv[1:2])
