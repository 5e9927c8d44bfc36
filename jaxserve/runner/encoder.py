"""The device side of an encoder: bucketed batches of whole texts, one vector each. No pages, no state."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.encoder import POOL_CODES, Encoder
from jaxserve.runner.runner import resolve_max_model_len, resolve_options
from jaxserve.runner.step import Program, split_model
from jaxserve.runner.warmup import CompileGuard, Progress, compile_programs, enable_compile_cache

if TYPE_CHECKING:
    from jaxserve.hub import ModelSource
    from jaxserve.models.config_encoder import EncoderConfig
    from jaxserve.tokenizer import Tokenizer

_SHORTEST = 16
_BATCHES = (16, 4, 1)
_MAX_BATCH_TOKENS = 2048  # padded tokens of one program at most: a larger batch is no faster per token


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderWork:
    """One text: token ids [num_tokens] and one of messages.POOLINGS."""

    token_ids: np.ndarray
    pooling: str


class EncoderRunner:
    """Runs batches of texts of one length bucket. One thread may use it.

    lengths    ascending; the last is the longest text
    dtype      "auto" is float32 for an encoder: it is small, and its vectors are compared across years and machines

    progress is called as progress(what, done, total) while weights are read and programs are compiled.
    """

    model_config: EncoderConfig

    def __init__(self, config: EngineConfig, source: ModelSource, progress: Progress | None = None) -> None:
        from jaxserve.models.loading import load_config, load_model
        from jaxserve.tokenizer import load_tokenizer

        dtype = "float32" if config.dtype == "auto" else config.dtype
        config = dataclasses.replace(config, dtype=dtype)
        options = resolve_options(config, jax.devices()[0].platform)
        model_config = load_config(source)
        model = load_model(
            source,
            model_config,
            options,
            progress=progress,
            check_weights=config.check_weights,
            weights="stored" if config.weights == "auto" else config.weights,
            quantization="" if config.quantization == "none" else config.quantization,
        )
        self.source = source
        self.tokenizer: Tokenizer | None = load_tokenizer(source.path)
        self._start(config, model, options, progress)

    @classmethod
    def from_model(cls, config: EngineConfig, model: Encoder, options: RuntimeOptions) -> EncoderRunner:
        """A runner for a model that is built already."""
        runner = cls.__new__(cls)
        runner.tokenizer = None
        runner._start(config, model, options, None)
        return runner

    def _start(self, config: EngineConfig, model: Encoder, options: RuntimeOptions, progress: Progress | None) -> None:
        self.model_config = model.config
        self.dtype = options.dtype
        self.max_model_len = resolve_max_model_len(config.max_model_len, model.config.max_model_len)
        self.lengths = length_ladder(self.max_model_len)
        self._guard = CompileGuard(is_warm=config.warmup)
        enable_compile_cache(config.compile_cache_dir)
        self._split = split_model(model)
        keys = [(batch, length) for length in reversed(self.lengths) for batch in self.batches(length)]
        programs = {key: self._program(*key) for key in keys}
        self._programs: dict[Any, Any] = {}
        if config.warmup:
            compile_programs(programs, self._programs, first_call=self._first_call, progress=progress)
        else:
            self._programs = _CompileOnUse(programs)

    @property
    def compiles_after_warmup(self) -> int:
        return self._guard.count

    @property
    def max_batch(self) -> int:
        return _BATCHES[0]

    def length_of(self, num_tokens: int) -> int:
        """The bucket of a text. Raises ValueError for one that is too long."""
        for length in self.lengths:
            if num_tokens <= length:
                return length
        raise ValueError(f"tokens of one text: got {num_tokens}; allowed: at most {self.lengths[-1]}")

    def batches(self, length: int) -> tuple[int, ...]:
        """Batch sizes of a length, largest first. Batches are always full: rows cost what they hold."""
        return tuple(size for size in _BATCHES if size == 1 or size * length <= _MAX_BATCH_TOKENS)

    def run(self, work: list[EncoderWork]) -> np.ndarray:
        """Vectors float32 [len(work), hidden]. All texts have the same length bucket; len(work) is one of its
        batch sizes. Raises ValueError otherwise."""
        length = self.length_of(max(len(text.token_ids) for text in work))
        if len(work) not in self.batches(length) or any(self.length_of(len(t.token_ids)) != length for t in work):
            raise ValueError(f"batch: got {len(work)} texts; allowed: {self.batches(length)} of one length bucket")
        token_ids = np.zeros((len(work), length), np.int32)
        for row, text in zip(token_ids, work):
            row[: len(text.token_ids)] = text.token_ids
        lengths = np.array([len(text.token_ids) for text in work], np.int32)
        pooling = np.array([POOL_CODES[text.pooling] for text in work], np.int32)
        with self._guard.watch():
            return np.asarray(self._programs[len(work), length](self._split.leaves, token_ids, lengths, pooling))

    def close(self) -> None:
        """Release the device's memory. The runner is of no use afterwards."""
        del self._split, self._programs

    def _program(self, batch: int, length: int) -> Program:
        rebuild = self._split.rebuild

        def encode(leaves: Any, token_ids: jax.Array, lengths: jax.Array, pooling: jax.Array) -> jax.Array:
            return rebuild(leaves)(token_ids, lengths, pooling)

        leaves = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._split.leaves)
        rows = jax.ShapeDtypeStruct((batch,), np.int32)
        texts = jax.ShapeDtypeStruct((batch, length), np.int32)
        return Program(f"encode {batch}x{length}", encode, (leaves, texts, rows, rows))

    def _first_call(self, key: tuple[int, int]) -> None:
        batch, length = key
        token_ids, lengths = np.zeros((batch, length), np.int32), np.full(batch, length, np.int32)
        jax.block_until_ready(self._programs[key](self._split.leaves, token_ids, lengths, np.zeros(batch, np.int32)))


def length_ladder(longest: int) -> tuple[int, ...]:
    """16, 32, 64, ... up to `longest`, which is always the last."""
    sizes = []
    size = _SHORTEST
    while size < longest:
        sizes.append(size)
        size *= 2
    return (*sizes, longest)


class _CompileOnUse(dict[tuple[int, int], Any]):
    """Without warm-up: each program is compiled by the first batch that needs it."""

    def __init__(self, programs: dict[tuple[int, int], Program]) -> None:
        super().__init__()
        self._waiting = programs

    def __missing__(self, key: tuple[int, int]) -> Any:
        self[key] = self._waiting[key].lower().compile()
        return self[key]
