"""A runner that continues requests by a script instead of a model, and a tokenizer of bytes. No jax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.messages import ModelInfo, RequestOutput
from jaxserve.scheduler.decision import CacheGeometry, SampleWork, StepConstraints, StepDecision, StepResult

EOS = 256
VOCAB_SIZE = 258  # 0..255: bytes; 256: end of sequence; 257: another control token

Script = Callable[[SampleWork], int]
Handle = tuple[int, StepDecision, StepConstraints | None]


class ByteTokenizer:
    """One token for each byte, as used by the engine and by LLM."""

    special_ids = frozenset({EOS, 257})
    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB_SIZE
    strip_leading_space = False
    has_chat_template = True

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<eos>" if token_id == EOS else b"<ctl>"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages, *, add_generation_prompt, continue_final_message, tools, template_kwargs):
        turns = "".join(f"[{m['role']}]{m['content']}" for m in messages)
        return self.encode(turns + ("[assistant]" if add_generation_prompt else ""))


def scripted(texts: dict[int, bytes]) -> Script:
    """A request with seed s writes texts[s], then ends."""

    def script(work: SampleWork) -> int:
        text = texts[work.seed]
        return text[work.num_outputs] if work.num_outputs < len(text) else EOS

    return script


def alphabet(work: SampleWork) -> int:
    """abcdef... for ever."""
    return ord("a") + work.num_outputs % 26


class ScriptedRunner:
    """Answers each sample with script(work); logprob of token t is -t / 100, its rank t + 1, its rivals 0, 1, ...

    Checks that steps are collected in the order of dispatch and within the geometry.
    """

    def __init__(self, script: Script, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        self.script = script
        self.is_closed = False
        self.compiles_after_warmup = 0
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.num_dispatched = 0
        self.fails_at: int | None = None
        self._next_collect = 0
        self._unsampled: int | None = None

    def dispatch(self, decision: StepDecision) -> Handle:
        assert self._unsampled is None, "a constrained step is sampled before the next is dispatched"
        assert 0 < decision.num_tokens <= self.geometry.max_step_tokens
        assert len(decision.rows) <= self.geometry.max_num_rows
        if self.num_dispatched == self.fails_at:
            raise RuntimeError("the device is gone")
        number = self.num_dispatched
        self.num_dispatched += 1
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        if decision.is_constrained:
            self._unsampled = number
        return number, decision, None

    def sample(self, handle: Handle, constraints: StepConstraints) -> Handle:
        """A sample takes what the script says if it may, else the first token allowed."""
        assert handle[0] == self._unsampled
        self._unsampled = None
        return handle[0], handle[1], constraints

    def collect(self, handle: Handle) -> StepResult:
        number, decision, constraints = handle
        assert number != self._unsampled
        assert number == self._next_collect
        self._next_collect += 1
        self.num_in_flight -= 1
        tokens = np.array(
            [work.forced_token if work.forced_token >= 0 else self.script(work) for work in decision.samples],
            np.int32,
        )
        if constraints is not None:
            for place, mask in zip(constraints.indices.tolist(), constraints.masks):
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                if tokens[place] not in allowed:
                    tokens[place] = allowed[0]
            for place, token in constraints.forced.items():
                tokens[place] = token
        top = np.tile(np.arange(20, dtype=np.int32), (len(tokens), 1))
        return StepResult(
            decision.step_id,
            tokens,
            logprobs=(-tokens / 100).astype(np.float32),
            ranks=tokens + 1,
            top_ids=top,
            top_logprobs=(-top / 100).astype(np.float32),
        )

    def close(self) -> None:
        self.is_closed = True


def make_engine(
    script: Script = alphabet,
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_num_rows: int = 8,
    max_step_tokens: int = 16,
    max_model_len: int = 64,
    clock: Callable[[], float] | None = None,
    **options,
) -> Engine:
    geometry = CacheGeometry(num_pages, page_size, max_num_rows, 64, max_step_tokens, max_model_len)
    config = EngineConfig(max_num_rows=max_num_rows, max_step_tokens=max_step_tokens, **options)
    model = ModelInfo(
        name="scripted",
        tokenizer_path="",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=[EOS],
        max_num_rows=max_num_rows,
        dtype="float32",
        num_pages=num_pages,
        page_size=page_size,
    )
    more = {} if clock is None else {"clock": clock}
    return Engine(ScriptedRunner(script, geometry), ByteTokenizer(), config, model=model, **more)


def run_dry(engine: Engine, max_steps: int = 10_000) -> list[RequestOutput]:
    """All outputs until nothing is left to do."""
    outputs = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
    raise AssertionError(f"still at work after {max_steps} steps")


def text_of(outputs: list[RequestOutput], request_id: str = "r", index: int = 0) -> str:
    return "".join(out.text for out in outputs if out.request_id == request_id and out.index == index)


def last_of(outputs: list[RequestOutput], request_id: str = "r", index: int = 0) -> RequestOutput:
    """The only output with a finish_reason, which must be the last one."""
    mine = [out for out in outputs if out.request_id == request_id and out.index == index]
    assert [out.finish_reason is not None for out in mine] == [False] * (len(mine) - 1) + [True]
    return mine[-1]
