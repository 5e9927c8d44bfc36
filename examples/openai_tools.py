"""Tool calls with the `openai` package (pip install openai) against a jaxserve server.

make serve                                   # in another terminal
python examples/openai_tools.py [http://127.0.0.1:8000]
"""

import json
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 30},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str, unit: str) -> str:
    return f"21 degrees {unit} and sunny in {city}"


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]

    # "required" and a named function hold: the call is always valid. "auto" leaves the choice to the model.
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    message = answer.choices[0].message
    call = message.tool_calls[0]
    print(f"{answer.choices[0].finish_reason}: {call.function.name}({call.function.arguments})")
    result = get_weather(**json.loads(call.function.arguments))

    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0)
    print(answer.choices[0].message.content)

    # Arguments stream as they are written.
    stream = client.chat.completions.create(
        model=model, messages=messages[:1], tools=TOOLS, temperature=0, stream=True,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )  # fmt: skip
    for chunk in stream:
        for delta in chunk.choices[0].delta.tool_calls or ():
            print(delta.function.name or delta.function.arguments, end="|", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
