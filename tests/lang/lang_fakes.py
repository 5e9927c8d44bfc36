"""An LLM of one token per ASCII character over the simulated runner: what it writes is a hash of all before it."""

from __future__ import annotations

import time

import numpy as np

from jaxserve import SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.llm import LLM
from jaxserve.messages import ModelInfo
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.simulator.runner import SimulatedRunner, expected_tokens

VOCAB = 128
END = 0


class AsciiTokenizer:
    """Character n is token n; 0 ends a text. The chat template is [role]content and a newline."""

    special_ids = frozenset({END})
    eos_token_ids = frozenset({END})
    vocab_size = VOCAB
    strip_leading_space = False
    has_chat_template = True

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode(self, text: str, **options) -> list[int]:
        return list(text.encode("ascii"))

    def encode_parts(self, parts, *, is_first: bool = True) -> list[int]:
        return self.encode("".join(text for text, _ in parts))

    def render_chat(self, messages, *, add_generation_prompt: bool = True):
        text = "".join(f"[{message['role']}]{message['content']}\n" for message in messages)
        return text + ("[assistant]" if add_generation_prompt else ""), ""


class SlowRunner(SimulatedRunner):
    """Takes its time for each step, as a device does."""

    def collect(self, handle):
        time.sleep(0.005)
        return super().collect(handle)


def make_llm(
    *,
    num_pages: int = 600,
    page_size: int = 4,
    max_num_rows: int = 16,
    max_model_len: int = 1024,
    runner_class: type[SimulatedRunner] = SimulatedRunner,
    **options,
) -> LLM:
    geometry = CacheGeometry(
        num_pages=num_pages,
        page_size=page_size,
        max_num_rows=max_num_rows,
        max_num_samples=max_num_rows + 32,
        max_step_tokens=128,
        max_model_len=max_model_len,
    )
    model = ModelInfo(
        name="ascii",
        tokenizer_path="",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        eos_token_ids=[END],
        max_num_rows=max_num_rows,
        dtype="float32",
        num_pages=num_pages,
        page_size=page_size,
    )
    config = EngineConfig(max_num_rows=max_num_rows, max_step_tokens=128, **options)
    runner = runner_class(geometry, vocab_size=VOCAB)
    return LLM.from_engine(
        Engine(runner, AsciiTokenizer(), config, model=model), default_params=SamplingParams(max_tokens=8)
    )


def written(prompt: str, count: int, seed: int = 1) -> str:
    """What the model writes after a prompt: computed directly, up to the end token."""
    tokens = expected_tokens(np.array(list(prompt.encode("ascii")), np.int32), seed, count, VOCAB)
    text = "".join(map(chr, tokens))
    return text.split(chr(END))[0]
