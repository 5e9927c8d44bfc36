"""A judge that looks at an essay from four sides at once, grades each, and sums up.

python examples/programs/essay_judge.py
"""

from __future__ import annotations

from jaxserve import LLM, lang

DIMENSIONS = {
    "clarity": "Is every sentence easy to understand?",
    "originality": "Does it say something that others do not?",
    "evidence": "Is what it claims supported by examples?",
    "structure": "Does each paragraph follow from the one before?",
}
GRADES = [" poor", " fair", " good", " excellent"]


@lang.function
def judge_essay(s, essay, max_tokens=32):
    s += lang.system("You are a fair and precise judge of essays.")
    with s.user():
        s += "Read this essay.\n\n" + essay + "\n\nI will ask you about one side of it at a time."
    s += lang.assistant("I have read it. What shall I look at?")
    sides = s.fork(len(DIMENSIONS))
    for side, (name, question) in zip(sides, DIMENSIONS.items()):
        side += lang.user("Judge its " + name + ". " + question + " Answer in one sentence.")
        with side.assistant():
            side += lang.gen("reason", max_tokens=max_tokens, stop="\n")
        side += lang.user("Grade its " + name + ".")
        with side.assistant():
            side += "The grade is" + lang.select("grade", GRADES)
    sides.join()
    with s.user():
        s += "These are your judgements:\n"
        for number, name in enumerate(DIMENSIONS):
            s += name + " is" + s["grade"][number] + ": " + s["reason"][number] + "\n"
        s += "Sum up in one sentence."
    s += lang.assistant(lang.gen("summary", max_tokens=max_tokens, stop="\n"))


ESSAY = """Cities should plant more trees. A tree cools the street under it by several degrees, and people who live near
trees walk more. In the summer of 2003 the quarters of Paris without parks were the hottest of the city. Trees cost
money and leaves must be swept. But a bench in the shade is used all day, and an empty square is used by nobody."""


def main() -> None:
    with LLM() as llm:
        state = judge_essay.run(ESSAY, backend=llm, temperature=0)
        for name, grade, reason in zip(DIMENSIONS, state["grade"], state["reason"]):
            print(f"{name}:{grade} – {reason}")
        print(state["summary"])


if __name__ == "__main__":
    main()
