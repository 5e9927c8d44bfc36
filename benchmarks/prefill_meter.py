"""How many prompt tokens a program computed, against how many nobody could do without. An oracle by brute force.

The prompts of all requests are put into one tree of tokens. A node that was generated has been computed while it was
generated, all but the last of each output. Every other node has to be computed once, and no more: that is the ideal.
What is counted against it are the prompt tokens in the steps that the device gets. (The engine's own counter has the
tokens too that a grammar forces, which are computed in chunks like a prompt's.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BASE, _MODULUS = 1_000_003, (1 << 61) - 1


def _nodes(tokens: list[int]) -> list[int]:
    """One number for each prefix: the same for the same prefix."""
    numbers, value = [], 0
    for token in tokens:
        value = (value * _BASE + token + 1) % _MODULUS
        numbers.append(value)
    return numbers


class PrefillMeter:
    """Watches the requests of an LLM while the with block runs, from an empty prefix cache.

    ideal, computed   prompt tokens; num_requests
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._thread = llm.engine_thread
        self._prompts: list[list[int]] = []
        self._outputs: dict[tuple[str, int], list[int]] = {}
        self._prompt_of: dict[str, list[int]] = {}

    def __enter__(self) -> PrefillMeter:
        self._llm.flush_cache()
        self.computed = 0
        self._thread.call(self._watch_steps)
        self._submit = self._thread.submit
        self._thread.submit = self._watch
        return self

    def _watch(self, message: Any, deliver: Callable[[Any], None]) -> None:
        self._prompt_of[message.request_id] = message.prompt

        def take(output: Any) -> None:
            ids = getattr(output, "token_ids", None)
            if ids:
                self._outputs.setdefault((output.request_id, output.index), []).extend(ids)
            deliver(output)

        self._submit(message, take)

    def _watch_steps(self, engine: Any) -> None:
        runner, find = engine._runner, engine.scheduler.find
        dispatch = runner.dispatch

        def watched(decision: Any) -> Any:
            for row in decision.rows[decision.num_decodes :]:
                end = min(row.start + row.num_tokens, find(row.request_id).num_prompt_tokens)
                self.computed += max(end - row.start, 0)
            return dispatch(decision)

        runner.dispatch = watched

    def __exit__(self, *exception: object) -> None:
        del self._thread.submit
        self._thread.call(lambda engine: delattr(engine._runner, "dispatch"))
        needed = {node for prompt in self._prompt_of.values() for node in _nodes(prompt)}
        made: set[int] = set()
        for (request_id, _), ids in self._outputs.items():
            prompt = self._prompt_of[request_id]
            made.update(_nodes(prompt + ids)[len(prompt) : -1])
        self.ideal = len(needed - made)
        self.num_requests = len(self._prompt_of)

    @property
    def ratio(self) -> float:
        return self.computed / self.ideal
