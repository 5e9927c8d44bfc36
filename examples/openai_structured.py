"""Structured output with the `openai` package (pip install openai pydantic) against a jaxserve server.

make serve                                       # in another terminal
python examples/openai_structured.py [http://127.0.0.1:8000]
"""

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Character(BaseModel):
    name: str = Field(max_length=20)
    role: Literal["warrior", "wizard", "ranger"]
    level: int = Field(ge=1, le=99)


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Invent a character of a fantasy game and describe it as JSON."}]

    # A pydantic model becomes a JSON schema; the answer comes back as an instance of it.
    answer = client.chat.completions.parse(model=model, messages=messages, response_format=Character, temperature=0)
    character = answer.choices[0].message.parsed
    assert isinstance(character, Character)
    print(f"schema: {character!r}")

    # Other forms are options beyond OpenAI's.
    for form in (
        {"regex": r"[A-Z][a-z]{2,8}, level [1-9][0-9]?"},
        {"choice": ["warrior", "wizard", "ranger"]},
        {"grammar": 'root ::= "roll " [1-6] (" and " [1-6])?'},
    ):
        answer = client.chat.completions.create(
            model=model, messages=messages, temperature=0, extra_body={"structured_outputs": form}
        )
        print(f"{next(iter(form))}: {answer.choices[0].message.content}")

    stream = client.chat.completions.create(
        model=model, messages=messages, temperature=0, stream=True, response_format={"type": "json_object"},
        max_tokens=60,
    )  # fmt: skip
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
