"""The engine's configuration: one frozen dataclass, resolved once. No jax."""

from __future__ import annotations

import dataclasses

from jaxserve.sharding.shape import MeshShape, parse_mesh, resolve_shape

DTYPES = ("auto", "float32", "bfloat16")
PAGE_DTYPES = (*DTYPES, "int8", "fp8")
QUANTIZATIONS = ("none", "int8", "int4", "fp8")
WEIGHTS = ("auto", "stored", "dense", "both")
POLICIES = ("fcfs", "lpm", "priority")
ATTENTION_BACKENDS = ("auto", "cpu_ffi", "xla", "reference", "mosaic", "interpret")
EXPERT_DISPATCHES = ("auto", "gather", "all_to_all")
MATMUL_BACKENDS = ("auto", "cpu_ffi", "cpu_tiles", "cpu_int8", "xla", "mosaic", "interpret")
DEFAULT_MODEL = "smollm2-135m"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may choose. Raises ValueError naming the field, the value seen and the values allowed.

    model              name known to the resolver, Hugging Face id, folder or GGUF file
    dtype              "auto": bfloat16 weights (f32 results on CPU); "float32": everything in float32
    quantization       weights that are quantised while they are read, one matrix at a time: "int8" and "fp8" with a
                       scale per output, "int4" with scale and offset per 32 values; embedding and head are int8 with
                       "int8" and "int4", of dtype with "fp8"
    weights            weights that are stored in blocks (GGUF, AWQ, GPTQ, fp8, or by `quantization`): "stored":
                       multiplied as they are at few rows, expanded for each product otherwise; "dense": expanded to
                       dtype when loaded; "both": blocks for few rows and an expanded copy for many; "auto": on CPU
                       both, or stored where memory is short; elsewhere stored for published quantised safetensors
                       and for `quantization`, dense for GGUF
    matmul_backend     how dense products are computed; "auto": the best that runs here without rounding more than
                       dtype does; "cpu_int8": on CPUs with AVX-512 and VNNI the inputs of products with quantised
                       weights are rounded to 8 bits where more than a few tokens are computed together, which is
                       faster (docs/kernels.md)
    attention_backend  how attention is computed; "auto": the best that runs here
    generation_config  requests that do not say take temperature, top_p, top_k, min_p and repetition_penalty from the
                       model's generation_config.json
    check_weights      refuse checkpoints with NaN or infinity in them
    page_dtype         type of cached K/V; "auto": bfloat16 where the attention backend writes it in place,
                       float32 with dtype float32; "int8" and "fp8" (e4m3): codes with a scale per token
                       and head, about half of bfloat16's memory; not with latent attention
    max_model_len      longest prompt + output in tokens; None: what the model allows, at most 8192
    page_size          tokens per page; None: 16 on CPU, 64 on GPU
    num_pages          pages of the pool; None: from kv_cache_bytes
    kv_cache_bytes     bytes for all pages; None: a share of free memory (memory_fraction), at most what
                       max_num_rows requests of full length can use
    max_num_rows       requests that run at once
    max_step_tokens    tokens computed in one step at most (also the largest prefill chunk); it bounds the wait
                       between two tokens of a running request
    policy             order of the waiting queue
    prefix_cache       share cached prefixes (radix tree)
    jump_forward       compute tokens that a grammar forces in one chunk instead of one by one
    overlap            dispatch a step before the last one's tokens are read
    cascade            decoding requests that share cached pages read them together
    deterministic      a request's tokens and log-probabilities are bitwise the same whatever else runs; it has its own
                       choice of matmul_backend, others are refused
    seed               for requests without a seed of their own
    max_waiting        requests in the queue before new ones are refused; 0: no limit
    kv_events          tell routers which prefixes are cached (GET /kv_events)
    warmup             compile and run every program before serving
    mesh               devices along each axis, "data=4,tensor=2"; "": one device, or what dp, tp and ep say
    dp, tp, ep         the same axes one by one: data, tensor, expert; ep 0: not named (see mesh_shape). Rows, pages
                       and tokens of a step are per rank of data and expert
    num_hosts, host_id, coordinator   processes that are one engine, this one's number, and HOST:PORT of host 0, whose
                       next port is used as well; all need the same options
    compare_hosts      for debugging: all hosts check that they compute the same steps
    expert_replicas    file that says which experts are on which devices, hot ones on several
                       (sharding/expert_slots.py); "": each on one
    expert_load        file that gets, when the engine is closed, how many tokens chose each expert; "": none
    expert_dispatch    how tokens reach experts on other devices: "gather", "all_to_all", or by tokens per step
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    quantization: str = "none"
    weights: str = "auto"
    check_weights: bool = False
    generation_config: bool = True
    page_dtype: str = "auto"
    max_model_len: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    memory_fraction: float = 0.3
    max_num_rows: int = 32
    max_step_tokens: int = 256
    policy: str = "fcfs"
    prefix_cache: bool = True
    overlap: bool = True
    jump_forward: bool = True
    cascade: bool = True
    deterministic: bool = False
    attention_backend: str = "auto"
    matmul_backend: str = "auto"
    seed: int = 0
    max_waiting: int = 0
    kv_events: bool = False
    warmup: bool = True
    compile_cache_dir: str | None = None
    mesh: str = ""
    expert_dispatch: str = "auto"
    expert_replicas: str = ""
    expert_load: str = ""
    num_hosts: int = 1
    host_id: int = 0
    coordinator: str = ""
    compare_hosts: bool = False
    dp: int = 1
    tp: int = 1
    ep: int = 0

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("page_dtype", self.page_dtype, PAGE_DTYPES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("policy", self.policy, POLICIES)
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _one_of("matmul_backend", self.matmul_backend, MATMUL_BACKENDS)
        if self.page_size is not None and (self.page_size < 1 or self.page_size & (self.page_size - 1)):
            raise ValueError(f"page_size: got {self.page_size}; allowed: a power of two")
        for name, low in (
            ("max_model_len", 2), ("num_pages", 2), ("kv_cache_bytes", 1), ("max_num_rows", 1),
            ("max_step_tokens", 1), ("max_waiting", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name}: got {value}; allowed: {low} or more")
        if self.max_step_tokens < self.max_num_rows:
            raise ValueError(
                f"max_step_tokens: got {self.max_step_tokens}; allowed: at least max_num_rows "
                f"({self.max_num_rows}), so that every running request gets a token in each step"
            )
        if not 0.0 < self.memory_fraction <= 0.95:
            raise ValueError(f"memory_fraction: got {self.memory_fraction}; allowed: above 0 up to 0.95")
        _one_of("expert_dispatch", self.expert_dispatch, EXPERT_DISPATCHES)
        self.mesh_shape()
        self._check_hosts()

    def _check_hosts(self) -> None:
        if self.num_hosts < 1 or not 0 <= self.host_id < self.num_hosts:
            raise ValueError(
                f"host_id, num_hosts: got {self.host_id}, {self.num_hosts}; allowed: 0 to num_hosts - 1 of 1 or more"
            )
        if self.num_hosts == 1:
            return
        host, colon, port = self.coordinator.rpartition(":")
        if not host or not colon or not port.isdecimal() or not 0 < int(port) < 65535:
            raise ValueError(f"coordinator: got {self.coordinator!r}; allowed: HOST:PORT of host 0, port 1 to 65534")
        if self.mesh_shape().num_devices == 1:
            raise ValueError("num_hosts: got more than one without a mesh; allowed: with mesh, dp, tp or ep")
        if self.deterministic:
            raise ValueError("deterministic: got True with several hosts; allowed: one host")

    def mesh_shape(self, num_experts: int = 0) -> MeshShape:
        """The mesh for a model with so many experts; without an `expert` axis they are split over `data`. Raises
        ValueError for an unknown axis, a bad size, or mesh given together with dp, tp or ep."""
        for name, low in (("dp", 1), ("tp", 1), ("ep", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: {low} or more")
        if self.mesh:
            if (self.dp, self.tp, self.ep) != (1, 1, 0):
                raise ValueError(f"mesh: got {self.mesh!r} beside dp, tp or ep; allowed: one way to say it")
            return resolve_shape(parse_mesh(self.mesh), num_experts)
        axes = {"data": self.dp, "tensor": self.tp}
        return resolve_shape(axes if not self.ep else axes | {"expert": self.ep}, num_experts)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}; allowed: {', '.join(allowed)}")
