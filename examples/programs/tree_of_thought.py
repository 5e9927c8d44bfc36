"""Tree of thought: several plans, several ways to carry out each, a look back at every one, and a vote.

python examples/programs/tree_of_thought.py
"""

from __future__ import annotations

from collections import Counter

from jaxserve import LLM, lang

WAYS = ["Work it out step by step.", "Estimate first, then calculate.", "Check every number twice."]
VERDICTS = [" correct", " wrong"]


def propose(s, question, num_branches, max_tokens):
    """Branches that differ in the plan."""
    s += lang.user("Make a short plan for answering this question. Do not answer it yet.\n" + question)
    plans = s.fork(num_branches)
    for number, plan in enumerate(plans, start=1):
        plan += lang.assistant(f"Plan {number}:" + lang.gen("plan", max_tokens=max_tokens))
    return plans


def carry_out(s, num_branches, max_tokens):
    """Branches that differ in how the plan is carried out."""
    s += lang.user("Good. Now carry out the plan and end with the answer.")
    solutions = s.fork(num_branches)
    for way, solution in zip(WAYS, solutions):
        solution += lang.user(way)
        solution += lang.assistant(lang.gen("answer", max_tokens=max_tokens))
    return solutions


@lang.function
def tree_of_thought(s, question, num_branches=2, max_tokens=32):
    solutions = [
        solution
        for plan in propose(s, question, num_branches, max_tokens)
        for solution in carry_out(plan, num_branches, max_tokens)
    ]
    for solution in solutions:
        solution += lang.user("Look at your solution again. Is it correct?")
        solution += lang.assistant("My solution is" + lang.select("verdict", VERDICTS))
        solution += lang.user("Say the final answer in a few words.")
        solution += lang.assistant("The answer is" + lang.gen("final", max_tokens=12, stop=["\n", "."]))
    return [(solution["verdict"], solution["final"]) for solution in solutions]


def vote(results):
    """The final answer that most solutions agree on; those that were judged correct count twice."""
    counts = Counter()
    for verdict, final in results:
        counts[final.strip()] += 2 if verdict == VERDICTS[0] else 1
    return counts.most_common(1)[0][0]


QUESTION = "A farmer has 17 sheep. All but 9 run away, then 4 come back. How many sheep are there now?"


def main() -> None:
    with LLM() as llm:
        state = tree_of_thought.run(QUESTION, num_branches=3, max_tokens=96, backend=llm, temperature=0)
        for verdict, final in state.ret_value:
            print(f"{verdict}: {final}")
        print("vote:", vote(state.ret_value))


if __name__ == "__main__":
    main()
