"""Is the engine right on the real model? Each check prints its figures and ends in PASS or FAIL.

    python benchmarks/acceptance.py reference       # greedy tokens and log-probabilities equal transformers, float32
    python benchmarks/acceptance.py reference --model gemma3-270m --fixture tests/fixtures/gemma3_270m_greedy.json
    python benchmarks/acceptance.py quality         # bfloat16 weights beside float32: KL and top-1 agreement
    python benchmarks/acceptance.py quality --page-dtype int8    # with quantised K/V
    python benchmarks/acceptance.py quality --weights stored     # products with the file's own blocks, token by token
    python benchmarks/acceptance.py quality --weights stored --matmul-backend cpu_int8           # inputs in 8 bits
    python benchmarks/acceptance.py equality        # same tokens whatever overlap, prefix cache, chunk and page size
    python benchmarks/acceptance.py deterministic   # bitwise the same alone, in company, with a cold and a warm prefix
    python benchmarks/acceptance.py options         # no compilation after warm-up, whatever a request asks for

The references were made by tests/fixtures/make_reference.py. Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.config import MATMUL_BACKENDS, PAGE_DTYPES

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
SPLIT_GAP = 1e-4  # a smaller gap between the two best logits may be decided by rounding
MAX_LOGPROB_ERROR = 1e-3

# One way of running each: everything at once, then each mechanism by itself.
MODES: dict[str, dict[str, Any]] = {
    "one at a time": {"prefix_cache": False, "max_num_rows": 1},
    "batched": {"prefix_cache": False, "max_num_rows": 20},
    "chunked prefill": {"prefix_cache": False, "max_num_rows": 4, "max_step_tokens": 16},
    "prefix hits": {"max_num_rows": 8},
    "preempted": {"max_num_rows": 20, "num_pages": 40, "max_model_len": 500},
}


class Report:
    def __init__(self) -> None:
        self.num_failed = 0

    def check(self, ok: bool, text: str) -> None:
        self.num_failed += not ok
        print(f"{'PASS' if ok else 'FAIL'}  {text}", flush=True)


def make_llm(model: str, **config: Any) -> LLM:
    defaults = {"max_model_len": 2048, "max_num_rows": 8, "max_step_tokens": 256, "warmup": False, "progress": False}
    return LLM(model, **{**defaults, **config})


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def compare_with_reference(llm: LLM, rows: list[dict[str, Any]]) -> tuple[int, int, float, int]:
    """(equal prompts, allowed splits, largest log-probability error before a split, wrong prompts)."""
    outputs = llm.generate([row["prompt"] for row in rows], greedy(len(rows[0]["tokens"]), logprobs=0))
    equal = splits = wrong = 0
    error = 0.0
    for row, output in zip(rows, outputs, strict=True):
        same = [a == b for a, b in zip(row["tokens"], output.token_ids, strict=True)]
        end = same.index(False) if False in same else len(same)
        scores = [entry.logprob for entry in output.logprobs or ()]
        error = max([error, *(abs(a - b) for a, b in zip(row["logprobs"][:end], scores[:end]))])
        if end == len(same):
            equal += 1
        elif row["gaps"][end] < SPLIT_GAP:
            splits += 1
        else:
            wrong += 1
    return equal, splits, error, wrong


def check_reference(options: argparse.Namespace, report: Report) -> None:
    rows = json.loads(Path(options.fixture).read_text())["rows"]
    for name, config in MODES.items():
        with make_llm(options.model, dtype="float32", **config) as llm:
            rounds = 2 if name == "prefix hits" else 1  # the second round finds every prompt in the cache
            for _ in range(rounds):
                equal, splits, error, wrong = compare_with_reference(llm, rows)
            stats = llm.stats()
        enough = {
            "prefix hits": stats.num_cached_tokens > 0,
            "preempted": stats.num_preemptions > 0,
        }.get(name, True)
        report.check(
            not wrong and error <= MAX_LOGPROB_ERROR and enough,
            f"{name:16} {equal}/{len(rows)} prompts equal, {splits} allowed splits, largest log-probability error "
            f"{error:.1e}, {stats.num_cached_tokens} cached tokens, {stats.num_preemptions} preemptions",
        )


def make_scorer(
    model: str,
    dtype: str,
    longest: int,
    *,
    page_dtype: str = "auto",
    weights: str = "dense",
    matmul_backend: str = "auto",
    by_token: bool = False,
) -> Callable[[list[int]], np.ndarray]:
    """A function from token ids to log-probabilities [len, vocab], by the model itself over fresh pages.

    page_dtype    "auto": dtype
    weights       as load_model takes it
    by_token      one token a step, as one stream is decoded, which takes other products than long prompts
    """
    import jax
    import jax.numpy as jnp
    from jaxserve.models.contract import KVPages, RuntimeOptions, StepInputs
    from jaxserve.models.loading import load_config, load_model
    from jaxserve.pallas_kernels.backend import resolve_attention_backend, resolve_matmul_backend
    from jaxserve.pallas_kernels.pages import abstract_pages
    from jaxserve.pallas_kernels.ragged import RaggedBatch

    from jaxserve.hub import resolve_model

    source = resolve_model(model)
    config = load_config(source)
    runtime = RuntimeOptions(
        dtype=dtype,
        page_dtype=dtype if page_dtype == "auto" else page_dtype,
        attention=resolve_attention_backend("auto", "cpu"),
        matmul=resolve_matmul_backend(matmul_backend, "cpu"),
    )
    network = load_model(source, config, runtime, weights=weights)
    num_pages = -(-longest // 16) + 1
    size = 1 if by_token else (num_pages - 1) * 16

    @functools.partial(jax.jit, donate_argnums=3)
    def run(token_ids: jax.Array, start: jax.Array, length: jax.Array, pages: KVPages) -> tuple[jax.Array, KVPages]:
        """Log-probabilities after `length` tokens from position `start` on; token_ids [size]."""
        index = jnp.arange(size, dtype=jnp.int32)
        used = index < length
        batch = RaggedBatch(
            positions=jnp.where(used, start + index, 0),
            row_of_token=jnp.where(used, 0, 1),
            write_slot=jnp.where(used, start + index + 16, num_pages * 16),
            query_start=jnp.stack([jnp.int32(0), length]),
            seq_len=(start + length)[None],
            page_table=jnp.arange(1, num_pages, dtype=jnp.int32)[None],
            num_rows=jnp.ones(1, jnp.int32),
        )
        hidden, pages = network(StepInputs(token_ids, batch, jnp.zeros(1, jnp.int32)), pages)
        return jax.nn.log_softmax(network.compute_logits(hidden), axis=-1), pages

    def score(sequence: list[int]) -> np.ndarray:
        structs = [
            abstract_pages(spec, num_pages, 16, runtime.page_dtype, runtime.attention)
            for spec in network.attention_specs
        ]
        pages = KVPages(jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), tuple(structs)))
        found = []
        for start in range(0, len(sequence), size):
            part = sequence[start : start + size]
            token_ids = np.zeros(size, np.int32)
            token_ids[: len(part)] = part
            scores, pages = run(jnp.asarray(token_ids), jnp.int32(start), jnp.int32(len(part)), pages)
            found.append(np.asarray(scores)[: len(part)])
        return np.concatenate(found)

    return score


def check_quality(options: argparse.Namespace, report: Report) -> None:
    rows = json.loads(Path(options.fixture).read_text())["rows"]
    longest = max(len(row["prompt"]) + len(row["tokens"]) for row in rows)
    exact = make_scorer(options.model, "float32", longest)
    rough = make_scorer(
        options.model,
        "bfloat16",
        longest,
        page_dtype=options.page_dtype,
        weights=options.weights,
        matmul_backend=options.matmul_backend,
        by_token=options.weights == "stored" and options.matmul_backend != "cpu_int8",
    )
    divergence: list[float] = []
    agreed = 0
    for row in rows:  # one at a time: a [len, vocabulary] table is large
        sequence = row["prompt"] + row["tokens"][:-1]
        start = len(row["prompt"]) - 1
        p, q = (score(sequence)[start:].astype(np.float64) for score in (exact, rough))
        divergence += (np.exp(p) * (p - q)).sum(-1).tolist()
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    mean, share = float(np.mean(divergence)), agreed / len(divergence)
    what = {"dense": "bfloat16", "stored": "weights in blocks, token by token"}[options.weights]
    if options.matmul_backend != "auto":
        what = f"weights {options.weights}, {options.matmul_backend}"
    what += "" if options.page_dtype == "auto" else f", {options.page_dtype} pages"
    limit = 1e-2 if options.page_dtype == "fp8" else 2e-3  # fp8 has 3 bits of mantissa
    report.check(
        mean <= limit and share >= 0.97,
        f"{what}, beside float32 over {len(divergence)} positions: mean KL {mean:.2e} (at most {limit:.0e}), "
        f"top-1 agreement {share:.2%} (at least 97 %)",
    )


def check_equality(options: argparse.Namespace, report: Report) -> None:
    rows = json.loads(Path(options.fixture).read_text())["rows"]
    prompts = [row["prompt"] for row in rows]
    expected = None
    variants: list[tuple[str, dict[str, Any]]] = [("as configured", {})]
    variants += [("overlap off", {"overlap": False}), ("prefix cache off", {"prefix_cache": False})]
    variants += [(f"chunks of {n}", {"max_step_tokens": n}) for n in (16, 64, 512, 2048)]
    variants += [(f"page size {n}", {"page_size": n}) for n in (1, 64)]
    for name, config in variants:
        with make_llm(options.model, dtype="float32", **config) as llm:
            tokens = [output.token_ids for output in llm.generate(prompts, greedy(64))]
        expected = expected or tokens
        same = sum(a == b for a, b in zip(tokens, expected, strict=True))
        report.check(same == len(prompts), f"{name:18} {same}/{len(prompts)} continuations equal")


def check_deterministic(options: argparse.Namespace, report: Report) -> None:
    rows = json.loads(Path(options.fixture).read_text())["rows"]
    prompts = [row["prompt"] for row in rows]
    target, others = prompts[16], prompts[:16]
    for dtype in ("float32", "bfloat16"):
        sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=64, ignore_eos=True, logprobs=5)
        for kind, params in (("greedy", greedy(64, logprobs=5)), ("sampled", sampled)):
            seen = {}
            with make_llm(options.model, dtype=dtype, deterministic=True, max_num_rows=17) as llm:
                for name, batch in (
                    ("alone, cold", [target]),
                    ("alone, warm prefix", [target]),
                    ("among 16, warm", [*others[:8], target, *others[8:]]),
                ):
                    seen[name] = _bits(llm.generate(batch, params)[batch.index(target)])
                llm.flush_cache()
                batch = [*others[:8], target, *others[8:]]
                seen["among 16, cold"] = _bits(llm.generate(batch, params)[8])
                hits = llm.stats().num_cached_tokens
            first = seen["alone, cold"]
            equal = [name for name, bits in seen.items() if bits == first]
            report.check(
                len(equal) == len(seen) and hits > 0,
                f"{dtype} {kind}: tokens and log-probabilities bitwise equal in {len(equal)}/{len(seen)} situations, "
                f"{hits} cached tokens",
            )


def _bits(output: Any) -> tuple[Any, ...]:
    entries = output.logprobs or ()
    scores = np.array([entry.logprob for entry in entries], np.float64).tobytes()
    top = [tuple(entry.top) for entry in entries]
    return tuple(output.token_ids), scores, tuple(top)


REQUEST_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {100: 5.0, 200: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": (100, 200, 300)},
    "min_tokens": {"min_tokens": 8},
    "seed": {"seed": 3},
    "n": {"n": 3},
    "stop": {"stop": ("the",)},
    "stop_token_ids": {"stop_token_ids": (28,)},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 20},
    "prompt_logprobs": {"prompt_logprobs": 5},
    "everything": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}, "min_tokens": 2, "seed": 1,
        "logprobs": 3, "n": 2, "stop": ("zzz",),
    },
}  # fmt: skip


def check_options(options: argparse.Namespace, report: Report) -> None:
    rows = json.loads(Path(options.fixture).read_text())["rows"]
    prompts = [row["prompt"] for row in rows[:6]]
    with make_llm(options.model, warmup=True) as llm:
        for name, fields in REQUEST_OPTIONS.items():
            llm.generate(prompts, SamplingParams(max_tokens=12, **fields))
            compiles = llm.stats().num_compiles_after_warmup
            report.check(compiles == 0, f"{name:20} {compiles} programs compiled after warm-up so far")
        mixed = [SamplingParams(max_tokens=12, **fields) for fields in list(REQUEST_OPTIONS.values())[: len(prompts)]]
        llm.generate(prompts, mixed)
        llm.generate(prompts, [SamplingParams(max_tokens=12, **f) for f in list(REQUEST_OPTIONS.values())[6:12]])
        stats = llm.stats()
    report.check(stats.num_compiles_after_warmup == 0, f"{'mixed in one batch':20} {stats.num_compiles_after_warmup}")
    held = stats.num_pages_held
    report.check(held == 0, f"{'pages held when idle':20} {held}")


CHECKS = {
    "reference": check_reference,
    "quality": check_quality,
    "equality": check_equality,
    "deterministic": check_deterministic,
    "options": check_options,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--fixture", default=str(FIXTURES / "smollm2_135m_greedy.json"))
    parser.add_argument("--page-dtype", default="auto", choices=PAGE_DTYPES, help="of K/V, in the quality check")
    parser.add_argument("--matmul-backend", default="auto", choices=MATMUL_BACKENDS, help="in the quality check")
    parser.add_argument("--weights", default="dense", choices=("dense", "stored"), help="in the quality check")
    options = parser.parse_args()
    report = Report()
    CHECKS[options.check](options, report)
    sys.exit(1 if report.num_failed else 0)


if __name__ == "__main__":
    main()
