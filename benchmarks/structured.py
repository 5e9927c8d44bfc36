"""Is structured output right, and what does it cost?

    python benchmarks/structured.py schemas [--count 200]      # random schemas: every answer is valid
    python benchmarks/structured.py jumps                      # forward passes saved by forced tokens, same text
    python benchmarks/structured.py cost [--rows 16]           # time per token under a grammar beside free text

Exit status 1 if an answer is not valid, a text differs, or a ratio misses its bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from typing import Any

import alternating
from jsonschema import Draft202012Validator

from jaxserve import LLM, SamplingParams
from jaxserve.structured.grammar import Grammar

MAX_COST = 1.05
MIN_SAVED = 1.5

# A record as games and evaluations ask for it: short values between long names.
CHARACTER = {
    "type": "object",
    "properties": {
        "character_name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "character_class": {"enum": ["warrior", "wizard", "ranger", "cleric"]},
        "level": {"type": "integer", "minimum": 1, "maximum": 99},
        "hit_points": {"type": "integer", "minimum": 1, "maximum": 999},
        "weapon": {"enum": ["sword", "staff", "longbow", "mace"]},
        "armor": {"enum": ["leather", "chainmail", "plate"]},
        "is_alive": {"type": "boolean"},
    },
    "required": ["character_name", "character_class", "level", "hit_points", "weapon", "armor", "is_alive"],
    "additionalProperties": False,
}
ROWS_SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "count": {"type": "integer", "maximum": 10**9}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}


def random_schema(source: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are of bounded length."""
    kinds = ["string", "pattern", "enum", "const", "integer", "number", "boolean", "null", "format"]
    if depth:
        kinds += ["object"] * 4 + ["array"] * 3 + ["anyOf", "ref"]
    kind = source.choice(kinds)
    words = ["red", "green", "a b", 'quo"te', "naïve", "漢字", "x" * 9]
    match kind:
        case "string":
            return {"type": "string", "minLength": source.randint(0, 3), "maxLength": source.randint(3, 30)}
        case "pattern":
            pattern = source.choice(["^[a-z]{2,6}$", "^[A-Z]{3}-[0-9]{4}$", "^(yes|no)!?$", "^[0-9]{1,3}%$"])
            return {"type": "string", "pattern": pattern}
        case "enum":
            return {"enum": source.sample([*words, 3, -1.5, True, None], source.randint(1, 5))}
        case "const":
            return {"const": source.choice([*words, 42, {"k": [1, "v"]}])}
        case "integer":
            low = source.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 5000)}
        case "number":
            low = source.randint(-100, 100)
            return {"type": "number", "multipleOf": 0.25, "minimum": low, "maximum": low + source.randint(1, 50)}
        case "format":
            return {"type": "string", "format": source.choice(["date", "time", "date-time", "uuid", "ipv4"])}
        case "object":
            names = source.sample(["id", "name", "first_name", "tags", "a b", "ключ", "nested", "value"], 4)
            count = source.randint(1, 4)
            properties = {name: random_schema(source, depth - 1) for name in names[:count]}
            required = [name for name in properties if source.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = source.randint(0, 2)
            items = random_schema(source, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + source.randint(0, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(source, depth - 1) for _ in range(source.randint(2, 3))]}
        case "ref":
            inner = random_schema(source, 0)
            wrapped = {"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a", "b"]}
            return {**wrapped, "additionalProperties": False}
        case _:
            return {"type": kind}


def make_llm(options: argparse.Namespace, **config: Any) -> LLM:
    defaults = {"max_model_len": 2048, "max_num_rows": 16, "max_step_tokens": 64, "progress": False}
    return LLM(options.model, dtype=options.dtype, **{**defaults, **config})


def ask(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def check_schemas(options: argparse.Namespace) -> bool:
    source = random.Random(options.seed)
    schemas = [random_schema(source) for _ in range(options.count)]
    with make_llm(options) as llm:
        prompts = [ask(llm, f"Reply with JSON for this schema: {json.dumps(schema)[:600]}") for schema in schemas]
        params = [
            SamplingParams(
                grammar=Grammar.json_schema(schema), temperature=source.choice([0.0, 0.7, 1.2]), seed=n, max_tokens=1024
            )
            for n, schema in enumerate(schemas)
        ]
        outputs = llm.generate(prompts, params)
    valid, tokens = 0, 0
    for schema, output in zip(schemas, outputs, strict=True):
        completion = output.outputs[0]
        tokens += len(completion.token_ids)
        try:
            value = json.loads(completion.text)
            Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)
            assert completion.finish_reason == "stop", completion.finish_reason
            valid += 1
        except Exception as error:
            print(f"FAIL  {json.dumps(schema)[:300]}\n      {completion.text[:300]!r}\n      {str(error)[:200]}")
    ok = valid == len(schemas)
    print(f"{'PASS' if ok else 'FAIL'}  {valid} of {len(schemas)} answers to random schemas are valid; {tokens} tokens")
    return ok


def check_jumps(options: argparse.Namespace) -> bool:
    texts: dict[bool, list[str]] = {}
    passes: dict[bool, float] = {}
    for jump_forward in (True, False):
        with make_llm(options, jump_forward=jump_forward, max_num_rows=1, warmup=False) as llm:
            texts[jump_forward], steps, tokens = [], 0, 0
            for n in range(options.count):
                prompt = ask(llm, f"Invent character number {n} of a game and describe it as JSON.")
                params = SamplingParams(grammar=Grammar.json_schema(CHARACTER), temperature=0.8, seed=n, max_tokens=256)
                before = llm.stats().num_steps
                output = llm.generate([prompt], params)[0].outputs[0]
                steps += llm.stats().num_steps - before - -(-len(prompt) // 64)  # without those of the prompt
                tokens += len(output.token_ids)
                texts[jump_forward].append(output.text)
            passes[jump_forward] = steps / tokens
    saved = passes[False] / passes[True]
    same = sum(a == b for a, b in zip(texts[True], texts[False], strict=True))
    ok = saved >= MIN_SAVED and same == options.count
    print(
        f"{'PASS' if ok else 'FAIL'}  forward passes per output token: {passes[False]:.3f} one by one, "
        f"{passes[True]:.3f} with jumps: {saved:.2f} x fewer (wanted {MIN_SAVED}); "
        f"{same} of {options.count} texts equal"
    )
    return ok


def check_cost(options: argparse.Namespace) -> bool:
    """Time per output token, that is per step, while all rows decode; and the processor time of all threads, which
    says more than the clock on a machine that does other work. Every round has an engine of its own, because the ratio
    differs between engines by a few percent, and measures each variant twice: a b b a."""
    grammars = {"free": None, "grammar": Grammar.json_schema(ROWS_SCHEMA)}
    measured: alternating.Rounds = {variant: [] for variant in grammars}
    for number in range(options.rounds):
        with make_llm(
            options, max_num_rows=options.rows, jump_forward=False, max_model_len=options.output_tokens + 256
        ) as llm:
            figures: alternating.Rounds = {variant: [] for variant in grammars}
            for grammar in grammars.values():
                measure_decode(llm, options, grammar, 99)
            order = ("free", "grammar", "grammar", "free") if number % 2 else ("grammar", "free", "free", "grammar")
            for place, variant in enumerate(order):
                figures[variant].append(measure_decode(llm, options, grammars[variant], place))
        for variant, runs in figures.items():
            measured[variant].append({name: statistics.fmean(run[name] for run in runs) for name in runs[0]})
    mean = alternating.median_ratio(measured, "grammar", "free", "ms a token, mean")
    p50 = alternating.median_ratio(measured, "grammar", "free", "ms a token, p50")
    busy = alternating.median_ratio(measured, "grammar", "free", "processor ms a token")
    ok = p50 <= MAX_COST and busy <= MAX_COST
    told = f"grammar : free = {p50:.3f} (p50), {mean:.3f} (mean), {busy:.3f} (processor time); wanted {MAX_COST}"
    alternating.show(
        f"decode of {options.rows} rows, free and under a grammar",
        measured,
        notes=[f"{'PASS' if ok else 'FAIL'}  {told}"],
        json_file=options.json,
        model=options.model,
        dtype=options.dtype,
        rounds=options.rounds,
    )
    return ok


def measure_decode(llm: LLM, options: argparse.Namespace, grammar: Grammar | None, number: int) -> alternating.Figures:
    """`options.rows` requests of one length, decoding side by side."""
    prompts = [ask(llm, f"List the parts of machine {number}-{n} as JSON.") for n in range(options.rows)]
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True, grammar=grammar)
    llm.trace.clear()
    before = time.process_time()
    llm.generate(prompts, params)
    busy = (time.process_time() - before) / len(llm.trace)
    steps = [step for step in llm.trace if step.num_decodes == options.rows == step.num_tokens][1:-2]
    periods = [b.collect_end - a.collect_end for a, b in itertools.pairwise(steps)]
    return {
        "ms a token, mean": statistics.fmean(periods) * 1e3,
        "ms a token, p50": _median(periods),
        "processor ms a token": busy * 1e3,
    }


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def main() -> int:
    parser = alternating.make_parser(__doc__, rounds=7)
    parser.add_argument("what", choices=("schemas", "jumps", "cost"))
    parser.add_argument("--count", type=int, help="schemas (200) or records (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=96)
    options = parser.parse_args()
    options.count = options.count or (200 if options.what == "schemas" else 20)
    checks = {"schemas": check_schemas, "jumps": check_jumps, "cost": check_cost}
    return int(not checks[options.what](options))


if __name__ == "__main__":
    sys.exit(main())
