"""OpenVINO GenAI's ContinuousBatchingPipeline in this process, stepped by hand. Runs in OpenVINO's environment.

python run_openvino.py --model model.gguf | OPENVINO_FOLDER [--precision bf16]
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from typing import Any

import protocol

channel = protocol.take_stdout()

import numpy as np  # noqa: E402  (standard output must be ours before libraries write to it)
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402


class OpenVinoEngine:
    def __init__(self, model: str, properties: dict[str, Any], *, use_prefix_cache: bool) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_seqs = 32
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = use_prefix_cache
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._live: dict[int, tuple[str, Any]] = {}
        self._numbers = itertools.count()

    def add(self, key: str, ids: list[int], max_tokens: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        number = next(self._numbers)
        tensor = openvino.Tensor(np.array([ids], np.int64))
        self._live[number] = key, self._pipeline.add_request(number, tensor, config)

    def step(self) -> Iterator[protocol.Progress]:
        self._pipeline.step()
        for number, (key, handle) in list(self._live.items()):
            new = 0
            if handle.can_read():
                new = sum(len(output.generated_ids) for output in handle.read().values())
            is_finished = handle.get_status() != genai.GenerationStatus.RUNNING
            if is_finished:
                del self._live[number]
            if new or is_finished:
                yield protocol.Progress(key, new, is_finished)


class Engines:
    """With the prefix cache on, OpenVINO is slower on prompts that share nothing: it is measured with the setting
    that suits it in each case. Both engines stay loaded."""

    def __init__(self, model: str, properties: dict[str, Any]) -> None:
        self._model, self._properties = model, properties
        self._engines: dict[bool, OpenVinoEngine] = {}

    def run(self, requests: list[dict], concurrency: int, use_prefix_cache: bool) -> list[dict[str, float]]:
        if use_prefix_cache not in self._engines:
            self._engines[use_prefix_cache] = OpenVinoEngine(
                self._model, self._properties, use_prefix_cache=use_prefix_cache
            )
        return protocol.drive(self._engines[use_prefix_cache], requests, concurrency)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", default="", help="INFERENCE_PRECISION_HINT: f32, bf16")
    parser.add_argument("--kv-precision", default="", help="KV_CACHE_PRECISION: u8, bf16, f32")
    arguments = parser.parse_args()
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(os.environ.get("BENCH_THREADS", os.cpu_count() or 1))}
    if arguments.precision:
        properties["INFERENCE_PRECISION_HINT"] = arguments.precision
    if arguments.kv_precision:
        properties["KV_CACHE_PRECISION"] = arguments.kv_precision
    engines = Engines(arguments.model, properties)
    warm = [{"ids": list(range(1000, 1008)), "max_tokens": 2}]
    for use_prefix_cache in (False, True):  # load both before the first measurement
        engines.run(warm, 1, use_prefix_cache)
    protocol.serve(channel, {"version": f"openvino-genai {genai.__version__}", **properties}, engines.run)


if __name__ == "__main__":
    main()
