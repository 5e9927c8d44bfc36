"""Many requests from asyncio: each awaits its own answer, all share the engine's batch and its prefix cache.

python examples/async_many.py [MODEL]
"""

import asyncio
import sys
import time

from jaxserve import LLM, SamplingParams

CITIES = ["Paris", "Rome", "Lima", "Oslo", "Cairo", "Delhi", "Tokyo", "Quito"]


async def ask(llm: LLM, city: str) -> str:
    # The prompts begin alike, so the common beginning is computed once.
    prompt = f"Answer with the name of a country. The city lies in which country? {city} lies in"
    result = await llm.async_generate(prompt, SamplingParams(temperature=0, max_tokens=8))
    return f"{city}:{result.text!r} ({result.num_cached_tokens} of {result.num_prompt_tokens} tokens cached)"


async def ask_all(llm: LLM) -> None:
    start = time.perf_counter()
    for answer in await asyncio.gather(*(ask(llm, city) for city in CITIES)):
        print(answer)
    print(f"{len(CITIES)} answers in {time.perf_counter() - start:.2f} s")

    # Cancelling a task aborts its request.
    task = asyncio.create_task(llm.async_generate("Tell me everything.", SamplingParams(max_tokens=1000)))
    await asyncio.sleep(0.2)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print("cancelled")


def main(model: str | None = None) -> None:
    with LLM(model) as llm:
        asyncio.run(ask_all(llm))


if __name__ == "__main__":
    main(*sys.argv[1:2])
