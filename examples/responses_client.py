"""OpenAI's Responses API against a running server: python examples/responses_client.py [URL]"""

from __future__ import annotations

import json
import sys
import time

from openai import OpenAI

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    first = client.responses.create(
        model=model, input="What is the capital of France?", instructions="You are brief.", max_output_tokens=24,
        temperature=0,
    )  # fmt: skip
    print("plain:     ", first.output_text)
    second = client.responses.create(
        model=model, input="And of Italy?", previous_response_id=first.id, max_output_tokens=24, temperature=0
    )
    print("continued: ", second.output_text)

    print("streamed:   ", end="")
    with client.responses.stream(model=model, input="Count to five.", max_output_tokens=24) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
    print()

    shaped = client.responses.create(
        model=model, input="Name a city as JSON.", max_output_tokens=64, temperature=0,
        text={"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}},
    )  # fmt: skip
    print("structured:", json.loads(shaped.output_text))

    tool = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
    called = client.responses.create(
        model=model, input="What is the weather in Rome?", tools=[tool], tool_choice="required", max_output_tokens=64,
        temperature=0,
    )  # fmt: skip
    call = next(item for item in called.output if item.type == "function_call")
    print("tool:      ", call.name, json.loads(call.arguments))

    slow = client.responses.create(model=model, input="Tell me a story.", max_output_tokens=32, background=True)
    while slow.status == "in_progress":
        time.sleep(0.1)
        slow = client.responses.retrieve(slow.id)
    print("background:", slow.status, len(slow.output_text), "characters")
    client.responses.delete(first.id)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
