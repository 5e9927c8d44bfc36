"""The `anthropic` package against a running server: python examples/anthropic_client.py [URL]

Start one with `make serve`, and install the package: pip install anthropic
"""

from __future__ import annotations

import sys

from anthropic import Anthropic

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(url: str) -> None:
    client = Anthropic(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]

    message = client.messages.create(
        model=model, max_tokens=48, system="You are brief.", messages=question, extra_body={"temperature": 0}
    )
    print("plain:   ", message.content[0].text)
    print("usage:   ", message.usage.input_tokens, "computed,", message.usage.cache_read_input_tokens, "cached")

    with client.messages.stream(model=model, max_tokens=48, messages=question) as stream:
        print("streamed: ", end="")
        for text in stream.text_stream:
            print(text, end="", flush=True)
        print("\nended by:", stream.get_final_message().stop_reason)

    call = client.messages.create(
        model=model,
        max_tokens=64,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"},
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        extra_body={"temperature": 0},
    )
    use = next(block for block in call.content if block.type == "tool_use")
    print("tool:    ", use.name, use.input)
    answer = client.messages.create(
        model=model,
        max_tokens=32,
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": "What is the weather in Rome?"},
            {"role": "assistant", "content": call.content},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees, sunny"}],
            },
        ],
        extra_body={"temperature": 0},
    )
    print("answer:  ", "".join(block.text for block in answer.content if block.type == "text"))
    counted = client.messages.count_tokens(model=model, messages=question)
    print("tokens:  ", counted.input_tokens)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
