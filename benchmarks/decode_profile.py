"""Where a decode step spends its time on CPU: products, attention, what XLA computes between them, and the host.

    python benchmarks/decode_profile.py [--rows 1] [--context 128] [--steps 64]
    python benchmarks/decode_profile.py --prefill 512     of a prompt instead, chunk by chunk

XLA's profiler times every operation of the compiled programs while --steps decode steps run. The medians of those of
one kernel and shape of result are added up, and so are those of XLA's own of one program. The profiler costs up to a
microsecond an operation; the period between steps is measured without it.
"""

from __future__ import annotations

import argparse
import collections
import re
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jaxserve.pallas_kernels.cpu_ffi import helpers

from jaxserve import LLM, SamplingParams, trace
from jaxserve.config import DEFAULT_MODEL, MATMUL_BACKENDS, EngineConfig
from jaxserve.engine_process import build_engine

_CALL = re.compile(r"\s*(?:ROOT )?%?(\S+) = \(?(\w+\[[\d,]*\]).* custom-call\(.*custom_call_target=\"([^\"]+)\"")


def custom_calls(program: jax.stages.Compiled) -> dict[str, str]:
    """Name of an operation -> its kernel and the shape of its result."""
    found = (_CALL.match(line) for line in program.as_text().splitlines())
    return {match[1]: f"{match[3]} {match[2]}" for match in found if match}


def operations(folder: Path) -> list[tuple[str, str, float]]:
    """(program, operation, milliseconds) of everything in a trace."""
    (file,) = folder.rglob("*.xplane.pb")
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    module = str(stats["hlo_module"]).removeprefix("jit_")
                    found.append((module, str(stats["hlo_op"]), event.duration_ns * 1e-6))
    return found


def sum_by_kind(found: list[tuple[str, str, float]], calls: dict[str, dict[str, str]]) -> dict[str, list[float]]:
    """Milliseconds of each operation by kernel and shape, or by program. calls: names of kernels' calls by program."""
    kinds: dict[str, list[float]] = collections.defaultdict(list)
    for module, operation, milliseconds in found:
        kinds[calls.get(module, {}).get(operation, f"XLA, {module}")].append(milliseconds)
    return kinds


def report(kinds: dict[str, list[float]]) -> None:
    for kind, values in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(values):8.3f} ms  {len(values):4d} operations  median {np.median(values) * 1e3:7.1f} us  {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--matmul-backend", default="auto", choices=MATMUL_BACKENDS)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a prompt, to profile instead")
    options = parser.parse_args()
    engine = build_engine(
        EngineConfig(
            model=options.model,
            matmul_backend=options.matmul_backend,
            max_num_rows=max(options.rows, 16),
            max_model_len=2048,
        )
    )
    llm = LLM.from_engine(engine)
    rng = np.random.default_rng(0)

    def prefill() -> float:
        start = time.perf_counter()
        prompt = [int(x) for x in rng.integers(100, 30000, options.prefill)]
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
        return time.perf_counter() - start

    if options.prefill:
        seconds = float(np.median([prefill() for _ in range(7)]))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                prefill()
            found = operations(Path(folder))
        print(f"a prompt of {options.prefill} tokens: {seconds * 1e3:.1f} ms (median of 7), operations of one more:")
        steps = engine._runner._steps
        calls = {"forward": custom_calls(steps.programs["forward", steps.shapes.token_buckets[-1]])}
        report(sum_by_kind(found, calls))
        return

    def decode() -> list[trace.StepRecord]:
        """The steps in which all rows decode."""
        prompts = [[int(x) for x in rng.integers(100, 30000, options.context)] for _ in range(options.rows)]
        llm.trace.clear()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=options.steps + 1, ignore_eos=True))
        return [step for step in llm.trace if step.num_tokens == step.num_decodes == options.rows]

    if not decode():
        parser.error(
            f"--steps: got {options.steps}; allowed: so many that {options.rows} prompts end before the first row"
        )
    offered, taken = helpers.count_jobs()
    figures = trace.summarize([step for _ in range(4) for step in decode()[1:]])
    offered, taken = (after - before for after, before in zip(helpers.count_jobs(), (offered, taken)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            num_steps = len(decode())
        found = operations(Path(folder))
    steps = engine._runner._steps
    sizes = {"forward": steps.shapes.token_buckets, "head": steps.shapes.sample_buckets}
    calls = {
        name: custom_calls(steps.programs[name, min(size for size in buckets if size >= options.rows)])
        for name, buckets in sizes.items()
    }
    times: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for module, operation, milliseconds in found:
        times[module, operation].append(milliseconds)
    # The median of each operation, since the same programs, for more tokens, computed the prompts.
    steady = [(*key, float(np.median(values))) for key, values in times.items() if len(values) >= num_steps // 2]
    kinds = sum_by_kind(steady, calls)
    print(
        f"{options.rows} rows behind {options.context} tokens: period {figures['period_ms_p50']:.2f} ms, "
        f"of which the host {figures['host_ms_p50']:.2f} (medians of {figures['num_steps']} steps); "
        f"helpers took {taken / max(offered, 1):.0%} of {offered:,} jobs"
    )
    report(kinds)


if __name__ == "__main__":
    main()
