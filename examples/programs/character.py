"""A character as a JSON record: field by field between fixed text, and by a schema.

python examples/programs/character.py
"""

from __future__ import annotations

import json

from jaxserve import LLM, lang

HOUSES = ['"Gryffindor"', '"Slytherin"', '"Ravenclaw"', '"Hufflepuff"']
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "house": {"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
        "year": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["name", "house", "year"],
    "additionalProperties": False,
}


@lang.function
def fields(s, name):
    """The text between the values is given, so the model writes values and nothing else."""
    s += name + " is a character in Harry Potter. These are the facts about " + name + " as JSON:\n"
    s += '{"name": "' + name + '", "house": ' + lang.select("house", HOUSES)
    s += ', "year": ' + lang.gen("year", regex="[1-7]", max_tokens=2)
    s += ', "wand": "' + lang.gen("wand", regex="[A-Za-z ]{3,24}", max_tokens=12)
    s += '", "alive": ' + lang.select("alive", ["true", "false"])
    s += ', "friend": "' + lang.gen("friend", regex="[A-Za-z ]{3,24}", max_tokens=12) + '"}'


@lang.function
def record(s, name):
    """The whole record by a schema."""
    s += lang.user("Describe the Harry Potter character " + name + " as JSON with name, house and year.")
    s += lang.assistant(lang.gen("json", json_schema=SCHEMA, max_tokens=64))
    return lang.call(json.loads, s["json"])


def main() -> None:
    with LLM() as llm:
        for name in ("Hermione Granger", "Draco Malfoy"):
            state = fields.run(name, backend=llm, temperature=0)
            print(json.loads(state.text().split("\n", 1)[1]))
            print(record.run(name, backend=llm, temperature=0).ret_value)


if __name__ == "__main__":
    main()
