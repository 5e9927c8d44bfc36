"""Few-shot classification: examples once, one select() for each text.

python examples/programs/few_shot.py
"""

from __future__ import annotations

from jaxserve import LLM, lang

LABELS = [" positive", " negative", " neutral"]
EXAMPLES = """Review: The room was spotless and the breakfast was the best I have ever had in a hotel.
Sentiment: positive

Review: We waited two hours for a cold pizza and nobody said a word of excuse.
Sentiment: negative

Review: The book has 320 pages and came in a cardboard box.
Sentiment: neutral

Review: I have bought this lamp three times now, for every room one.
Sentiment: positive

Review: The zip broke on the first day and the shop does not answer.
Sentiment: negative

"""


@lang.function
def classify(s, review):
    s += EXAMPLES + "Review: " + review + "\nSentiment:" + lang.select("sentiment", LABELS)


REVIEWS = [
    "My children have not put it down since their birthday.",
    "It smells of glue and two screws were missing.",
    "The parcel weighed about two kilograms.",
    "Quiet, quick and half the price of the old one.",
    "I want my money back.",
]


def main() -> None:
    with LLM() as llm:
        states = classify.run_batch([{"review": review} for review in REVIEWS], backend=llm)
        for review, state in zip(REVIEWS, states):
            print(f"{state['sentiment'].strip():9} {review}")


if __name__ == "__main__":
    main()
