"""Tiny checkpoints on meshes of virtual devices, run as the engine runs them, with the logits of every sample."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any
from unittest import mock

import numpy as np
from jaxserve.models.loading import load_config, load_model
from tiny_weights import FIXTURES as TINY
from tiny_weights import checkpoint

from jaxserve.config import EngineConfig
from jaxserve.hub import ModelSource
from jaxserve.request import Request
from jaxserve.runner.placement import place_on_mesh
from jaxserve.runner.runner import ModelRunner, resolve_options
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import RankedDecision, RankedResult
from jaxserve.scheduler.dp_balance import make_scheduler

_NUMBERS = itertools.count()  # a runner tells requests apart by their numbers
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def build(name: str, mesh: str, *, source: ModelSource | None = None, **changes: Any) -> ModelRunner:
    """A runner of 4 rows and 32 tokens a step for each rank. Programs are compiled when they are first needed, and for
    one or two sizes only: the tests that want more sizes are those of one device. source: a model that is no fixture.
    """
    wanted = {
        "dtype": "float32", "max_num_rows": 4, "max_step_tokens": 32, "num_pages": 64, "page_size": 8,
        "attention_backend": "reference", "matmul_backend": "xla", "compile_cache_dir": "", "warmup": False,
        "weights": "dense",
    }  # fmt: skip
    config = EngineConfig(model=name, mesh=mesh, **(wanted | changes))
    source = source or ModelSource(name, "safetensors", checkpoint(TINY / name))
    model_config = load_config(source)
    options, devices = place_on_mesh(config, model_config, resolve_options(config, "cpu", model_config))
    model = load_model(
        source,
        model_config,
        options,
        weights=config.weights,
        quantization="" if config.quantization == "none" else config.quantization,
        mesh=devices,
    )
    with (
        mock.patch("jaxserve.runner.runner.token_ladder", lambda most: (8, most) if config.warmup else (most,)),
        mock.patch("jaxserve.runner.runner.sample_ladder", lambda rows, most: (rows + min(most, 8),)),
    ):
        return ModelRunner.from_model(config, model, options, mesh=devices, model_config=model_config)


@functools.cache
def warm_runner(name: str, mesh: str) -> ModelRunner:
    """One with all its programs, for several tests."""
    return build(name, mesh, warmup=True, max_step_tokens=16)


@functools.cache
def reference(name: str) -> tuple[tuple[np.ndarray, list[int], np.ndarray], ...]:
    """(prompt, greedy tokens, the logits that chose them) of each prompt, by transformers."""
    with np.load(TINY / name / "reference.npz") as data:
        return tuple(
            (data[f"prompt_{i}"].astype(np.int32), data[f"greedy_{i}"].tolist(), data[f"greedy_logits_{i}"])
            for i in range(int(data["num_prompts"]))
        )


class _Recording(dict):
    """Programs whose head's logits are kept."""

    def __init__(self, programs: dict) -> None:
        super().__init__()
        self.programs = programs
        self.logits: Any = None

    def __missing__(self, key: tuple) -> Any:
        program = self.programs[key]
        if key[0] != "head":
            return program

        def head(*arguments: Any) -> Any:
            self.logits = program(*arguments)
            return self.logits

        return head


@dataclasses.dataclass
class Served:
    """requests as they ended; logits[number]: one row [V] per sampled token; decisions in order."""

    requests: list[Request]
    logits: dict[int, list[np.ndarray]]
    decisions: list[Any]
    scheduler: Any
    logprobs: list[list[float]]

    @property
    def tokens(self) -> list[list[int]]:
        return [request.output_ids for request in self.requests]


def serve(
    runner: ModelRunner,
    prompts: list[np.ndarray],
    params: SamplingParams | list[SamplingParams] = GREEDY,
    *,
    depth: int = 2,
    scheduler: Any = None,
) -> Served:
    """Serve all prompts at once with `depth` steps in flight, checking the books after each."""
    if scheduler is None:
        scheduler = make_scheduler(
            runner.geometry, policy="fcfs", prefix_cache=True, deterministic=runner.options.deterministic
        )
    steps = runner._steps
    recording = steps.programs = _Recording(steps.programs)
    options = params if isinstance(params, list) else [params] * len(prompts)
    requests = [
        Request(next(_NUMBERS), prompt, one, 100 + i, len(prompt) + (one.max_tokens or 8))
        for i, (prompt, one) in enumerate(zip(prompts, options, strict=True))
    ]
    served = Served(requests, {r.number: [] for r in requests}, [], scheduler, [[] for _ in requests])
    for request in requests:
        scheduler.add(request)
    flying: list[tuple] = []
    while scheduler.has_work or flying:
        while len(flying) < depth:
            decision = scheduler.schedule()
            if decision is None:
                break
            flying.append((decision, runner.dispatch(decision), recording.logits))
            served.decisions.append(decision)
        if not flying:
            raise AssertionError("nothing runs and nothing can be scheduled")
        decision, handle, logits = flying.pop(0)
        result = runner.collect(handle)
        _keep_logits(served, decision, result, logits, runner)
        for event in scheduler.apply(decision, result):
            if event.logprob is not None and not event.prompt_index:
                served.logprobs[requests.index(event.request)].append(event.logprob)
        scheduler.check_integrity()
    steps.programs = recording.programs
    return served


def _keep_logits(served: Served, decision: Any, result: Any, logits: Any, runner: ModelRunner) -> None:
    is_ranked = isinstance(decision, RankedDecision)
    assert is_ranked == isinstance(result, RankedResult)
    parts = decision.ranks if is_ranked else (decision,)
    if not any(part is not None and part.samples for part in parts):
        return
    rows = np.asarray(logits)[:, : runner.model_config.vocab_size].reshape(
        len(parts), -1, runner.model_config.vocab_size
    )
    for rank, part in enumerate(parts):
        for index, sample in enumerate(part.samples if part is not None else ()):
            request = next(r for r in served.requests if r.number == sample.request_id)
            if not sample.is_score and not request.is_finished:
                served.logits[sample.request_id].append(rows[rank, index])


def largest_difference(served: Served, expected: list[np.ndarray]) -> float:
    """Of the logits that chose each token: served[i] and expected[i] [tokens, V]."""
    return max(
        float(np.abs(np.stack(served.logits[request.number])[: len(rows)] - rows).max())
        for request, rows in zip(served.requests, expected, strict=True)
    )
