"""ReAct: the model thinks, calls a tool, reads what it returned, and goes on until it has an answer.

python examples/programs/react.py
"""

from __future__ import annotations

import ast
import operator

from jaxserve import LLM, lang

EXAMPLE = """Answer the question with the help of a calculator. An action is either calculate[expression] or
finish[answer].

Question: A box holds 12 eggs. How many eggs are in 7 boxes and 5 loose ones?
Thought 1: I have to multiply 12 by 7 and add 5.
Action 1: calculate[12 * 7 + 5]
Observation 1: 89
Thought 2: Now I know the number of eggs.
Action 2: finish[89]

"""
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or what is wrong with it."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError("only numbers and + - * / are known")

    try:
        return f"{value(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        return f"error: {error}"


@lang.function
def react(s, question, max_steps=4, max_tokens=40):
    s += EXAMPLE + "Question: " + question + "\n"
    for step in range(1, max_steps + 1):
        s += f"Thought {step}:" + lang.gen("thought", max_tokens=max_tokens, stop="\n")
        s += f"\nAction {step}:" + lang.select("action", [" calculate", " finish"])
        s += "[" + lang.gen("input", max_tokens=max_tokens, stop=["]", "\n"]) + "]\n"
        if s["action"] == " finish":
            return s["input"]
        s += f"Observation {step}: " + calculate(s["input"]) + "\n"
    return None


QUESTION = "A train has 9 cars with 48 seats each. 15 seats are broken. How many seats can be used?"


def main() -> None:
    with LLM() as llm:
        state = react.run(QUESTION, backend=llm, temperature=0)
        print(state.text()[len(EXAMPLE) :])
        print("answer:", state.ret_value)


if __name__ == "__main__":
    main()
