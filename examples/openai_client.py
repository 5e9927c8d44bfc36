"""The `openai` package (pip install openai) against a jaxserve server.

make serve                                   # in another terminal
python examples/openai_client.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    model = client.models.list().data[0].id
    print(f"model: {model}")

    completion = client.completions.create(model=model, prompt="The capital of France is", max_tokens=16, temperature=0)
    print(completion.choices[0].text)

    messages = [{"role": "user", "content": "Name three primary colors."}]
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} output tokens]")

    # Options beyond OpenAI's go into extra_body.
    completion = client.completions.create(
        model=model,
        prompt="Once upon a time",
        max_tokens=16,
        seed=7,
        extra_body={"top_k": 20, "min_p": 0.05, "return_token_ids": True},
    )
    print(completion.choices[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:2])
