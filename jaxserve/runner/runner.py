"""ModelRunner: from a configuration to a device that runs steps."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.models.contract import Model, RuntimeOptions
from jaxserve.models.tensor_parallel import local_vocab_size
from jaxserve.pallas_kernels.backend import (
    check_attention_shape,
    deterministic_matmul_backend,
    has_tile_registers,
    mosaic_latent_reason,
    mosaic_reason,
    resolve_attention_backend,
    resolve_matmul_backend,
)
from jaxserve.pallas_kernels.paged_attention.quantized_pages import CODES
from jaxserve.pallas_kernels.pages import abstract_pages, page_bytes, writes_in_place
from jaxserve.runner import memory
from jaxserve.runner.buckets import StepShapes, sample_ladder, token_ladder
from jaxserve.runner.deterministic import keep_equal_buckets
from jaxserve.runner.device import DeviceState, StepHandle, StepRunner
from jaxserve.runner.host_link import HostLink, address_of
from jaxserve.runner.huge_pages import start_on_huge_pages
from jaxserve.runner.placement import place_on_mesh, write_expert_load
from jaxserve.runner.planned_step import PlannedSamples, PlannedStep
from jaxserve.runner.sharded_device import ShardedHandle, ShardedState, ShardedStepRunner
from jaxserve.runner.sharded_step import ShardedPrograms
from jaxserve.runner.sharded_warmup import SameOnAllRanks, ShardedFirstCall
from jaxserve.runner.step import StepPrograms, split_model
from jaxserve.runner.step_message import decode_step, encode_step
from jaxserve.runner.warmup import CompileGuard, FirstCall, Progress, compile_programs, enable_compile_cache
from jaxserve.scheduler.decision import (
    CacheGeometry,
    RankedDecision,
    RankedResult,
    StepConstraints,
    StepDecision,
    StepResult,
)
from jaxserve.sharding.mesh import join_hosts

if TYPE_CHECKING:
    from jaxserve.hub import ModelSource
    from jaxserve.models.config import ModelConfig
    from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DEFAULT_MAX_MODEL_LEN = 8192
_DEFAULT_PAGE_SIZE = {"cpu": 16}
_OTHER_PAGE_SIZE = 64
_EXPANDED_PER_FILE = 5
_MAX_WEIGHT_SHARE = 0.5  # of free memory, for weights that could do with less


class ModelRunner:
    """The device side of one engine, one device or a mesh; implements scheduler.decision.Runner. One thread may use
    it.

    geometry                what the scheduler must know
    model_config, source    the model's configuration and where it came from (None from from_model)
    dtype                   "float32" or "bfloat16": type of the weights
    options                 how the model's blocks compute
    compiles_after_warmup   programs compiled during dispatch or collect; 0 in a healthy engine

    progress is called as progress(what, done, total) while weights are read and programs are compiled.
    """

    geometry: CacheGeometry
    model_config: ModelConfig
    source: ModelSource | None
    tokenizer: Tokenizer | None
    dtype: str
    options: RuntimeOptions

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, *, source: ModelSource | None = None
    ) -> None:
        # Only here: reading files needs packages that a caller with a built model does without.
        from jaxserve.hub import resolve_model
        from jaxserve.models.loading import load_config, load_model
        from jaxserve.tokenizer import load_tokenizer

        source = source or resolve_model(config.model)
        model_config = load_config(source)
        self._link = _join_hosts(config)
        options = resolve_options(config, jax.devices()[0].platform, model_config)
        options, mesh = place_on_mesh(config, model_config, options)
        weights = resolve_weights(config, options, source, memory.free_bytes(jax.local_devices()[0]))
        model = load_model(
            source,
            model_config,
            options,
            progress=progress,
            check_weights=config.check_weights,
            weights=weights,
            quantization="" if config.quantization == "none" else config.quantization,
            mesh=mesh,
        )
        self.source = source
        self.tokenizer = load_tokenizer(source.path)
        self._start(config, model, model_config, options, progress, self.tokenizer.eos_token_ids, mesh)

    @classmethod
    def from_model(
        cls,
        config: EngineConfig,
        model: Model,
        options: RuntimeOptions,
        *,
        progress: Progress | None = None,
        mesh: Mesh | None = None,
        model_config: ModelConfig | None = None,
    ) -> ModelRunner:
        """A runner for a model that is built already. options: those it was built with; mesh, and the configuration
        of the whole model: for one that is split."""
        runner = cls.__new__(cls)
        runner._link = None
        runner.source = None
        runner.tokenizer = None
        whole = model_config or model.config
        runner._start(config, model, whole, options, progress, whole.eos_token_ids, mesh)
        return runner

    def _start(
        self,
        config: EngineConfig,
        model: Model,
        model_config: ModelConfig,
        options: RuntimeOptions,
        progress: Progress | None,
        eos_token_ids: Iterable[int],
        mesh: Mesh | None,
    ) -> None:
        """model: under a mesh that of one device; model_config: of the whole model."""
        self.model_config = model_config
        self.options = options
        self.dtype = options.dtype
        self._compares_hosts = config.compare_hosts
        self._load_file = config.expert_load
        is_ready = config.warmup or options.deterministic
        self._guard = CompileGuard(is_warm=is_ready)
        enable_compile_cache(config.compile_cache_dir)
        requested = config.max_model_len or options.max_model_len
        max_model_len = resolve_max_model_len(requested, model_config.max_position_embeddings)
        shapes = _resolve_shapes(config, model, model_config.vocab_size, options, max_model_len)
        if self._link is not None:
            shapes = dataclasses.replace(
                shapes,
                num_pages=self._link.agree(shapes.num_pages),
                pages_per_row=self._link.agree(shapes.pages_per_row),
            )
        max_model_len = min(max_model_len, shapes.pages_per_row * shapes.page_size)
        programs = make_programs(model, shapes, options, mesh, hidden_size=model_config.hidden_size)
        state = DeviceState(programs.pages, shapes) if mesh is None else ShardedState(programs)
        start_on_huge_pages(programs.model.leaves, jax.tree.leaves(state.pages))
        eos = frozenset(int(token) for token in eos_token_ids)
        compiled: dict[Any, Any] = {} if is_ready else _CompileOnUse(programs)

        on_plan = None if self._link is None else self._send_plan

        def make_steps() -> Any:
            leaves = programs.model.leaves
            if mesh is None:
                return StepRunner(compiled, leaves, state, shapes, eos, hidden_size=model_config.hidden_size)
            return ShardedStepRunner(compiled, leaves, state, shapes, eos, programs, on_plan)

        if is_ready:
            wanted = {key: programs.program(key) for key in programs.all_keys()}
            first_call = FirstCall(make_steps()) if mesh is None else ShardedFirstCall(make_steps(), programs)
            if self._link is None:
                compile_programs(wanted, compiled, first_call=first_call, progress=progress)
            else:
                compile_programs(wanted, compiled, progress=progress)
                self._link.agree(0)  # a call waits for all hosts: nobody shall wait for a compiler there
                for key in wanted:
                    first_call(key)
        if options.deterministic:
            steps = make_steps() if mesh is None else SameOnAllRanks(make_steps())
            shapes = keep_equal_buckets(steps, parts_decodes=mesh is None)
            kept = set(dataclasses.replace(programs, shapes=shapes).all_keys())
            compiled = {key: program for key, program in compiled.items() if key in kept}
        # New: requests and rows of the calls above are forgotten.
        self._steps: StepRunner | ShardedStepRunner = make_steps()
        self.shapes = shapes
        self.geometry = CacheGeometry(
            num_pages=shapes.num_pages,
            page_size=shapes.page_size,
            max_num_rows=shapes.max_num_rows,
            max_num_samples=shapes.max_num_samples,
            max_step_tokens=shapes.max_step_tokens,
            max_model_len=max_model_len,
            num_ranks=options.mesh.num_ranks,
        )
        self._load_before = self._steps.expert_load() if isinstance(self._steps, ShardedStepRunner) else None
        if self._link is not None:
            self._link.agree(0)
            self._link.start_serving()

    @property
    def compiles_after_warmup(self) -> int:
        return self._guard.count

    def dispatch(self, decision: StepDecision | RankedDecision) -> StepHandle | ShardedHandle:
        """Start the step and return at once. Raises ValueError, with nothing changed on the device, for a decision
        that does not fit the geometry."""
        with self._guard.watch():
            return self._steps.dispatch(decision)

    def sample(self, handle: StepHandle | ShardedHandle, constraints: StepConstraints) -> StepHandle | ShardedHandle:
        """Start the sampling of a constrained step, before anything else is dispatched."""
        with self._guard.watch():
            return self._steps.constrain(handle, constraints)

    def collect(self, handle: StepHandle | ShardedHandle) -> StepResult | RankedResult:
        """Wait for a dispatched step and read its tokens. Once per handle, in order."""
        with self._guard.watch():
            return self._steps.collect(handle)

    def check(self) -> None:
        """Raise HostLost if another host of this engine is gone."""
        if self._link is not None:
            self._link.check()

    def expert_load(self) -> np.ndarray | None:
        """[layers with experts, E] int64: how many tokens have chosen each expert since the start, for
        sharding/replication.py. On a mesh only (else None), over the ranks of this host; waits for the devices."""
        if self._load_before is None or self.model_config.moe is None:
            return None
        return self._steps.expert_load() - self._load_before

    def follow(self) -> None:
        """On hosts other than the first: run what host 0 dispatches, until it closes the engine."""
        link, steps = self._link, self._steps
        assert link is not None and isinstance(steps, ShardedStepRunner)
        outputs = None
        num_steps = 0
        while (body := link.receive_step()) is not None:
            planned = decode_step(body)
            num_steps += 1
            if self._compares_hosts:
                link.report_digest(num_steps, hashlib.sha256(encode_step(planned)).hexdigest())
            if isinstance(planned, PlannedStep):
                outputs = steps.run(planned)
            else:
                assert outputs is not None
                outputs = steps.run_samples(outputs, planned)

    def _send_plan(self, planned: PlannedStep | PlannedSamples) -> None:
        assert self._link is not None
        self._link.send_step(encode_step(planned))

    def close(self) -> None:
        """Wait for the device and release its memory. The runner is of no use afterwards."""
        if self._link is not None:
            self._link.close()
        jax.block_until_ready(self._steps.state.last_token)
        if self._load_file and (load := self.expert_load()) is not None:
            write_expert_load(Path(self._load_file), self.model_config, load)
        del self._steps


def _join_hosts(config: EngineConfig) -> HostLink | None:
    if config.num_hosts == 1:
        return None
    link = HostLink.join(config)
    host, port = address_of(config.coordinator)
    join_hosts(f"{host}:{port + 1}", config.num_hosts, config.host_id)
    return link


def resolve_options(config: EngineConfig, platform: str, model_config: ModelConfig | None = None) -> RuntimeOptions:
    """How a model is computed on `platform` ("cpu", "gpu", ...) under this configuration."""
    attention = resolve_attention_backend(config.attention_backend, platform)
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    if config.deterministic:  # the kernels for few rows sum in another order than XLA's products
        matmul = deterministic_matmul_backend(platform, dtype)
        if config.matmul_backend not in ("auto", matmul):
            raise ValueError(
                f"matmul_backend: got {config.matmul_backend!r} with deterministic; allowed: auto, {matmul}"
            )
    else:
        matmul = resolve_matmul_backend(config.matmul_backend, platform)
    page_dtype = config.page_dtype
    if page_dtype == "auto":
        is_latent = model_config is not None and model_config.mla is not None
        in_place = platform != "cpu" or attention == "interpret" or (attention == "cpu_ffi" and not is_latent)
        page_dtype = "bfloat16" if dtype == "bfloat16" and in_place else "float32"
    dispatch = config.expert_dispatch
    if dispatch == "auto" and (platform == "cpu" or config.deterministic):
        # XLA:CPU's form of the exchange saves no bytes; one scheme for all steps adds in one order.
        dispatch = "gather"
    page_size = config.page_size or _DEFAULT_PAGE_SIZE.get(platform, _OTHER_PAGE_SIZE)
    if model_config is not None:
        if (mla := model_config.mla) is not None:
            if page_dtype in CODES:
                raise ValueError(f"page_dtype: got {page_dtype!r} with latent attention; allowed: float32, bfloat16")
            reason = mosaic_latent_reason(mla.kv_lora_rank, mla.rope_head_dim, page_size, page_dtype)
        else:
            reason = mosaic_reason(model_config.head_dim, page_size, page_dtype)
        attention = check_attention_shape(config.attention_backend, attention, reason)
    return RuntimeOptions(
        dtype=dtype,
        page_size=page_size,
        page_dtype=page_dtype,
        attention=attention,
        matmul=matmul,
        cascade=config.cascade,
        expert_dispatch=dispatch,
        deterministic=config.deterministic,
        max_model_len=None if model_config is None else _served_length(config.max_model_len, model_config),
    )


def _served_length(requested: int | None, model: ModelConfig) -> int:
    if requested is None and model.trained_length is not None:
        # Beyond it other frequencies apply, to short requests too: only where someone asks for it.
        requested = min(model.trained_length, model.max_position_embeddings)
    return resolve_max_model_len(requested, model.max_position_embeddings)


def resolve_weights(config: EngineConfig, options: RuntimeOptions, source: ModelSource, free_bytes: int) -> str:
    """EngineConfig.weights, "auto" resolved for this model, these backends and this much free memory."""
    if config.weights != "auto":
        return config.weights
    is_bf16_alone = options.dtype == "bfloat16" and options.mesh.num_devices == 1
    if is_bf16_alone and options.matmul in ("cpu_ffi", "cpu_tiles", "cpu_int8") and has_tile_registers():
        return "stored"  # expanding in the cache costs less than reading a copy, for any number of rows
    if is_bf16_alone and options.matmul in ("mosaic", "interpret"):
        return "stored"  # its kernel reads blocks; no copy is needed for few rows
    if is_bf16_alone and options.matmul in ("cpu_ffi", "cpu_int8"):
        # Blocks of four bits and a copy of sixteen are at most five times what the file has.
        return "both" if _EXPANDED_PER_FILE * _file_bytes(source) < free_bytes * _MAX_WEIGHT_SHARE else "stored"
    if options.dtype == "float32" and config.quantization == "none":
        return "dense"
    return "dense" if source.kind == "gguf" and config.quantization == "none" else "stored"


def _file_bytes(source: ModelSource) -> int:
    if source.path.is_file():
        return source.path.stat().st_size
    return sum(path.stat().st_size for path in source.path.glob("*.safetensors"))


def resolve_max_model_len(requested: int | None, of_model: int) -> int:
    """Longest prompt + output. Raises ValueError when more is asked for than the model can do."""
    if requested is None:
        return min(of_model, _DEFAULT_MAX_MODEL_LEN)
    if requested > of_model:
        raise ValueError(f"max_model_len: got {requested}; allowed: up to {of_model} with this model")
    return requested


def page_arrays(model: Model, options: RuntimeOptions, num_pages: int) -> tuple[Any, ...]:
    """Shape and dtype of each layer's pages."""
    return tuple(
        abstract_pages(spec, num_pages, options.page_size, options.page_dtype, options.attention)
        for spec in model.attention_specs
    )


def make_programs(
    model: Model, shapes: StepShapes, options: RuntimeOptions, mesh: Mesh | None, *, hidden_size: int
) -> StepPrograms:
    """The programs of a model (its arrays may be abstract); shapes.vocab_size is that of the whole model."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    common = {
        "model": split_model(model),
        "shapes": shapes,
        "pages": page_arrays(model, options, shapes.num_pages),
        "hidden_size": hidden_size,
        "attention": options.attention,
        "branch": device.platform == "cpu",
    }
    if mesh is None:
        return StepPrograms(**common)
    local_vocab = local_vocab_size(shapes.vocab_size, options.mesh.tensor)
    num_moe_layers = sum(layer.uses_moe for layer in model.config.layers)
    load_shape = (num_moe_layers, model.config.moe.num_experts) if num_moe_layers else (1, 1)
    return ShardedPrograms(
        **common,
        mesh=mesh,
        shape=options.mesh,
        load_shape=load_shape,
        local_vocab=local_vocab,
        publishes=mesh.is_multi_process,
    )


def _resolve_shapes(
    config: EngineConfig, model: Model, vocab_size: int, options: RuntimeOptions, max_model_len: int
) -> StepShapes:
    device = jax.local_devices()[0]
    # Virtual devices of one CPU share its memory.
    sharers = min(options.mesh.num_devices, jax.local_device_count()) if device.platform == "cpu" else 1
    for spec in model.attention_specs:
        if not writes_in_place(spec, options.page_size, options.page_dtype, options.attention, device.platform):
            logger.warning(
                "page_dtype %s with attention backend %s copies the whole cache in every step; use float32",
                options.page_dtype, options.attention,
            )  # fmt: skip
            break
    plan = memory.plan_pages(
        bytes_per_page=sum(
            page_bytes(spec, options.page_size, options.page_dtype, options.attention) for spec in model.attention_specs
        ),
        pages_per_request=-(-max_model_len // options.page_size),
        max_num_rows=config.max_num_rows,
        num_pages=config.num_pages,
        kv_cache_bytes=config.kv_cache_bytes,
        memory_fraction=config.memory_fraction,
        free_bytes=memory.free_bytes(device) // sharers,
        platform=device.platform,
        may_shorten=config.max_model_len is None,
    )
    logger.info("cache: %d pages of %d tokens, %.1f MiB", plan.num_pages, options.page_size, plan.total_bytes / 2**20)
    return StepShapes(
        max_num_rows=config.max_num_rows,
        pages_per_row=plan.pages_per_request,
        page_size=options.page_size,
        num_pages=plan.num_pages,
        vocab_size=vocab_size,
        token_buckets=token_ladder(config.max_step_tokens),
        sample_buckets=sample_ladder(config.max_num_rows, config.max_step_tokens),
    )


class _CompileOnUse(dict[tuple[Any, ...], Any]):
    """Without warm-up: each program is compiled by the first step that needs it."""

    def __init__(self, programs: StepPrograms) -> None:
        super().__init__()
        self._programs = programs

    def __missing__(self, key: tuple[Any, ...]) -> Any:
        self[key] = self._programs.program(key).lower().compile()
        return self[key]
