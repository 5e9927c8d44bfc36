"""A conversation of several turns, streamed.

python examples/programs/chat.py
"""

from __future__ import annotations

from jaxserve import LLM, lang

QUESTIONS = (
    "What is the capital of Italy?",
    "Which river flows through it?",
    "Name one dish that people eat there.",
)


@lang.function
def conversation(s, questions=QUESTIONS, max_tokens=32):
    s += lang.system("You answer in one short sentence.")
    for number, question in enumerate(questions):
        s += lang.user(question)
        s += lang.assistant(lang.gen(f"answer_{number}", max_tokens=max_tokens))


def main() -> None:
    with LLM() as llm:
        state = conversation.run(backend=llm, temperature=0, stream=True)
        for piece in state.text_iter():
            print(piece, end="", flush=True)
        print(state.messages()[-1])


if __name__ == "__main__":
    main()
