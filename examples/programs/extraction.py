"""Facts from a long document: it is read once, every question is asked behind it.

python examples/programs/extraction.py
"""

from __future__ import annotations

from jaxserve import LLM, lang

QUESTIONS = {
    "place": "Where is the lighthouse?",
    "builder": "Who built the lighthouse?",
    "height": "How high is the tower?",
    "keeper": "What was the name of the last keeper?",
}


@lang.function
def extract(s, document, max_tokens=16):
    s += "Read the following report and answer questions about it in a few words.\n\n" + document + "\n\n"
    answers = {}
    for name, question in QUESTIONS.items():
        with s.copy() as asked:
            asked += "Question: " + question + "\nAnswer:"
            asked += lang.gen("answer", max_tokens=max_tokens, stop="\n")
            answers[name] = asked["answer"]
    return answers


DOCUMENT = """The lighthouse of Saint Aubin stands on a rock three miles west of the harbour of Port Elva. Sailors had
asked for a light there since the wreck of the Marguerite in 1811, but forty years went by before the
council found the money. The engineer Elisa Thornbury built it between 1852 and 1855 with stone from the
quarries of Dunmore. Every block was cut on land, numbered, and carried over in the calm weeks of
summer. The tower is 41 metres high and its walls are two metres thick at the foot. In the first winter
a storm took the landing stage, and the three keepers lived on biscuits and rain water until March. The
lamp burned oil until 1921, when it was replaced by an electric one. The light could be seen for
nineteen miles. Five families lived on the rock over the years, and their children went to school by
boat on Mondays and came home on Fridays. The last keeper, Tomas Welland, locked the door on the ninth
of May 1988. Since then the light has been watched from the harbour. Visitors may climb the 196 steps on
Sundays if the sea allows it, and a small museum in the old store room shows the first lamp, the log
books and a model of the landing stage."""


def main() -> None:
    with LLM() as llm:
        compiled = extract.compile()
        print(compiled)
        for name, answer in compiled.run(DOCUMENT, backend=llm, temperature=0).ret_value.items():
            print(f"{name}:{answer}")


if __name__ == "__main__":
    main()
