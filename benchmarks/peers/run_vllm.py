"""vLLM in this process, stepped by hand. Runs in vLLM's environment.

python run_vllm.py --model HF_FOLDER [--dtype bfloat16] [--no-eager]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import protocol

channel = protocol.take_stdout()
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "auto")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # or an idle peer would spin while another is measured


class VllmEngine:
    def __init__(self, model: str, dtype: str, *, is_eager: bool) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._params = lambda n: SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=n, output_kind=RequestOutputKind.DELTA
        )
        self.llm = LLM(
            model, dtype=dtype, max_num_seqs=32, max_model_len=2048, max_num_batched_tokens=2048,
            enforce_eager=is_eager, enable_prefix_caching=True, seed=0, disable_log_stats=True,
        )  # fmt: skip

    def add(self, key: str, ids: list[int], max_tokens: int) -> None:
        self.llm.llm_engine.add_request(key, {"prompt_token_ids": ids}, self._params(max_tokens))

    def step(self) -> Iterator[protocol.Progress]:
        for output in self.llm.llm_engine.step():
            new = len(output.outputs[0].token_ids)
            yield protocol.Progress(output.request_id, new, output.finished, output.num_cached_tokens or 0)

    def run(self, requests: list[dict], concurrency: int, use_prefix_cache: bool) -> list[dict[str, float]]:
        # Prefix caching stays on, as by default: prompts that share nothing cost it little.
        return protocol.drive(self, requests, concurrency)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-eager", action="store_true", help="torch.compile (minutes of warm-up)")
    arguments = parser.parse_args()
    engine = VllmEngine(arguments.model, arguments.dtype, is_eager=not arguments.no_eager)
    import vllm

    protocol.serve(channel, {"version": f"vllm {vllm.__version__}", "dtype": arguments.dtype}, engine.run)


if __name__ == "__main__":
    main()
