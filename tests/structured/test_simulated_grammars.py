"""Random requests with and without grammars over the simulated device, which checks every rule of a step."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from engine_fakes import EOS, VOCAB_SIZE, ByteTokenizer

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.messages import AbortRequest, AddRequest, ModelInfo, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.simulator.runner import SimulatedRunner
from jaxserve.structured.compiler import compile_grammar, make_vocabulary
from jaxserve.structured.grammar import Grammar

GRAMMARS = [
    Grammar.json_schema({"type": "object", "properties": {"name": {"enum": ["Ada", "Adam"]}, "age": {"type": "integer",
                         "maximum": 99}}, "required": ["name", "age"], "additionalProperties": False}),
    Grammar.regex("(abc|abd)+x{0,9}"),
    Grammar.choice(["a long fixed text", "another one"]),
    Grammar("start: /[0-9]{3}/", begins_after="</t>", max_free_tokens=5),
]  # fmt: skip
VOCABULARY = make_vocabulary(ByteTokenizer(), VOCAB_SIZE)


def random_params(source: random.Random) -> SamplingParams:
    return SamplingParams(
        n=source.choice([1, 1, 3]),
        max_tokens=source.randint(1, 40),
        temperature=1.0,
        seed=source.getrandbits(32),
        grammar=source.choice([None, *GRAMMARS]),
        presence_penalty=source.choice([0.0, 0.5]),
        min_tokens=source.choice([0, 1]),
        logprobs=source.choice([None, None, 0]),
        stop=source.choice([(), ("ab",), ("e",)]),
    )


def make_engine(*, jump_forward: bool, num_pages: int) -> Engine:
    geometry = CacheGeometry(num_pages, 4, 5, 12, 24, 96)
    model = ModelInfo(
        name="simulated", tokenizer_path="", vocab_size=VOCAB_SIZE, max_model_len=96, eos_token_ids=[EOS],
        max_num_rows=5, dtype="float32", num_pages=num_pages, page_size=4,
    )  # fmt: skip
    config = EngineConfig(max_num_rows=5, max_step_tokens=24, jump_forward=jump_forward)
    return Engine(SimulatedRunner(geometry, vocab_size=VOCAB_SIZE), ByteTokenizer(), config, model=model)


def run(seed: int, *, jump_forward: bool, num_pages: int, aborts: bool) -> dict[tuple[str, int], list[RequestOutput]]:
    source = random.Random(seed)
    engine = make_engine(jump_forward=jump_forward, num_pages=num_pages)
    engine.prepare_grammars()
    outputs: dict[tuple[str, int], list[RequestOutput]] = {}
    requests = [
        AddRequest(
            request_id=f"{k}", prompt=[source.randrange(97, 100) for _ in range(source.randint(1, 40))],
            params=random_params(source),
        )
        for k in range(14)
    ]  # fmt: skip
    leaving = {source.randint(0, 60): f"{k}" for k in range(14) if aborts and k % 3 == 0}
    for step in range(3000):
        if requests and step % 3 == 0:
            engine.handle(requests.pop(0))
        if step in leaving:
            engine.handle(AbortRequest(leaving[step]))
        if not requests and not engine.has_work:
            break
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.scheduler.check_integrity()
    assert not engine.has_work
    assert engine.scheduler.stats().num_pages_held == 0
    return outputs


def check_texts(seed: int, outputs: dict[tuple[str, int], list[RequestOutput]]) -> None:
    source = random.Random(seed)
    params = []
    for _ in range(14):
        [source.randrange(97, 100) for _ in range(source.randint(1, 40))]
        params.append(random_params(source))
    for (request_id, _), parts in outputs.items():
        grammar = params[int(request_id)].grammar
        last = parts[-1]
        assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        assert last.finish_reason in ("stop", "length", "abort"), last
        if grammar is None or grammar.begins_after:
            continue
        tokens = [token for part in parts for token in part.token_ids]
        matcher = compile_grammar(VOCABULARY, grammar.text)
        assert matcher.consume_tokens(tokens) or not tokens
        if last.finish_reason == "stop" and last.stop_reason is None:
            assert tokens[-1] == EOS


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_keep_to_their_grammars(seed: int) -> None:
    num_pages = 30 if seed % 2 else 80
    jumping = run(seed, jump_forward=True, num_pages=num_pages, aborts=seed % 3 == 0)
    check_texts(seed, jumping)
    if seed % 3:
        # The simulated device draws by history alone: tokens must not depend on how they were scheduled.
        walking = run(seed, jump_forward=False, num_pages=num_pages, aborts=False)
        assert {key: [t for out in parts for t in out.token_ids] for key, parts in jumping.items()} == {
            key: [t for out in parts for t in out.token_ids] for key, parts in walking.items()
        }
