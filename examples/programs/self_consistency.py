"""Self-consistency: one worked example, ten answers to the same question, and the one that most of them end with.

python examples/programs/self_consistency.py
"""

from __future__ import annotations

import re
from collections import Counter

from jaxserve import LLM, lang

EXAMPLES = """Question: There are 15 trees in the grove. Workers will plant trees today. After they are done, there will
be 21 trees. How many trees did the workers plant today?
Answer: There were 15 trees and there will be 21. The workers plant 21 - 15 = 6 trees. The result is 6.

Question: Leah had 32 chocolates and her sister had 42. They ate 35. How many pieces do they have left in total?
Answer: Leah had 32 chocolates and her sister 42, together 32 + 42 = 74. They ate 35, so 74 - 35 = 39 are left. The
result is 39.

"""


@lang.function
def answer_often(s, question, n=10, max_tokens=48):
    s += EXAMPLES + "Question: " + question + "\nAnswer:"
    s += lang.gen("answers", n=n, max_tokens=max_tokens, stop="\n\n")
    return lang.call(majority, s["answers"])


def majority(answers):
    """The last number of each answer, the commonest of them, and how many agree."""
    numbers = [found[-1] for found in (re.findall(r"-?\d+", answer) for answer in answers) if found]
    return Counter(numbers).most_common(1)[0] if numbers else (None, 0)


QUESTION = "Jason had 20 lollipops. He gave Denny some. Now he has 12 left. How many did he give to Denny?"


def main() -> None:
    with LLM() as llm:
        state = answer_often.run(QUESTION, backend=llm, temperature=0.7)
        number, count = state.ret_value
        print(f"{number} ({count} of 10)")


if __name__ == "__main__":
    main()
