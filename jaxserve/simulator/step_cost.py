"""How long a step takes: by the roofline of device and links, or by what was measured. No jax."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.scheduler.decision import StepDecision
from jaxserve.simulator.devices import Device
from jaxserve.simulator.model_shape import ModelShape

_BYTES_OF_ACTIVATION = 2
_RESERVED_BYTES = 2e9  # of each device, for what is neither weights nor pages


@dataclasses.dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computes.

    num_tokens      all tokens computed; num_decodes of them are one each of decoding rows
    num_samples     positions that go through the head
    context         tokens of context read, summed over rows (a prefill chunk reads its context once; decoding rows
                    that begin with the same pages read those once together)
    pairs           (query, context) pairs of attention, summed over tokens
    """

    num_tokens: int
    num_decodes: int
    num_samples: int
    context: float
    pairs: float
    num_rows: int


def load_of(decision: StepDecision, page_size: int) -> StepLoad:
    """The load of a scheduler's decision."""
    num_tokens = 0
    context = -shared_tokens([row.pages for row in decision.rows[: decision.num_decodes]], page_size)
    pairs = 0.0
    for row in decision.rows:
        size = len(row.token_ids)
        end = row.start + size
        num_tokens += size
        context += end
        pairs += size * (row.start + (size + 1) / 2)
    return StepLoad(num_tokens, decision.num_decodes, len(decision.samples), context, pairs, len(decision.rows))


def decode_load(num_rows: int, context: float, shared: int = 0) -> StepLoad:
    """A step in which `num_rows` rows with `context` tokens together, `shared` of them counted more than once, get one
    token each."""
    return StepLoad(num_rows, num_rows, num_rows, context - shared, float(context), num_rows)


def shared_tokens(tables: Sequence[np.ndarray], page_size: int) -> int:
    """Tokens on pages that a row has in common with the first one whose table begins with the same page: kernels read
    them once for all (cascade attention)."""
    leaders: dict[int, np.ndarray] = {}
    num_pages = 0
    for table in tables:
        leader = leaders.setdefault(int(table[0]), table)
        if leader is not table:
            size = min(len(table), len(leader))
            differs = table[:size] != leader[:size]
            num_pages += int(differs.argmax()) if differs.any() else size
    return num_pages * page_size


class StepCost(Protocol):
    """The time between two steps of an engine that always has work; and what an idle one needs before its first step:
    to take each request in, and to warm up after so many seconds without work."""

    @property
    def request(self) -> float: ...

    def seconds(self, load: StepLoad) -> float: ...

    def warm_up(self, idle: float) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """How one engine is laid over its devices.

    attention_ranks   groups of devices that each attend to their own requests with their own pages (DP attention);
                      inside a group attention is tensor parallel. 1: tensor parallel over all devices
    Everything else (feed-forward parts, experts, head) is split over all devices.
    """

    devices: int = 1
    attention_ranks: int = 1

    def __post_init__(self) -> None:
        if self.devices < 1 or self.attention_ranks < 1 or self.devices % self.attention_ranks:
            raise ValueError(
                f"devices, attention_ranks: got {self.devices}, {self.attention_ranks}; allowed: 1 or more, the "
                "second a divisor of the first"
            )

    @property
    def attention_shards(self) -> int:
        return self.devices // self.attention_ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCost:
    """Seconds of host work per step. With overlap it hides behind the device unless it is longer; so does taking
    requests in, but for those that come to an idle engine."""

    step: float = 1e-3
    row: float = 1.5e-5
    request: float = 0.0
    overlap: bool = True

    def combined(self, device_s: float, num_rows: int) -> float:
        host_s = self.step + self.row * num_rows
        return max(device_s, host_s) if self.overlap else device_s + host_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Rates:
    """Seconds that a part takes: the longer of what its arithmetic takes (per token, sample, pair) and what reading its
    weights (fixed) or context takes."""

    projections_per_token: float
    projections_fixed: float
    dense_per_token: float
    dense_fixed: float
    experts_per_token: float
    experts_fixed: float
    per_expert_read: float
    head_per_sample: float
    head_fixed: float
    per_pair: float
    per_context: float
    links_per_token: float
    links_fixed: float


@dataclasses.dataclass(frozen=True)
class RooflineCost:
    """Each part of a step takes the longer of its arithmetic and its memory traffic (Williams et al., 2009, CACM 52
    (4)); collectives add their bytes over the links. Parts follow one another: no overlap of links and arithmetic.

    Attention reads each row's context once; rows are spread evenly over attention ranks. Of the experts those are
    read that some token has chosen, choices taken as uniform and independent; they lie evenly on the devices.
    """

    shape: ModelShape
    device: Device
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    host: HostCost = dataclasses.field(default_factory=HostCost)

    @property
    def request(self) -> float:
        return self.host.request

    def seconds(self, load: StepLoad) -> float:
        return self.host.combined(sum(self.parts(load).values()), load.num_rows)

    def warm_up(self, idle: float) -> float:
        return 0.0

    def parts(self, load: StepLoad) -> dict[str, float]:
        """Device seconds of a step by part: attention, projections, feed-forward, head, links."""
        rates, tokens, samples = self._rates, load.num_tokens, load.num_samples
        experts = 0.0
        if rates.experts_per_token:
            read = rates.experts_fixed + self._experts_read(tokens) * rates.per_expert_read
            experts = max(tokens * rates.experts_per_token, read)
        return {
            "attention": self._attention(load),
            "projections": max(tokens * rates.projections_per_token, rates.projections_fixed),
            "feed-forward": max(tokens * rates.dense_per_token, rates.dense_fixed) + experts,
            "head": max(samples * rates.head_per_sample, rates.head_fixed) if samples else 0.0,
            "links": tokens * rates.links_per_token + rates.links_fixed,
        }

    @functools.cached_property
    def _rates(self) -> _Rates:
        shape, devices, shards = self.shape, self.parallel.devices, self.parallel.attention_shards
        operation = 1.0 / (self.device.flops * self.device.compute_share)
        byte = 1.0 / (self.device.memory_bandwidth * self.device.memory_share)
        weight = shape.weight_bytes * byte
        projections = shape.num_layers * shape.attention_params
        dense = shape.num_dense_layers * shape.mlp_params
        chosen = shape.num_chosen_experts * shape.expert_params + shape.always_params
        token_bytes = shape.kv_token_bytes / min(shards, shape.kv_shards)
        hidden_bytes = shape.hidden_size * _BYTES_OF_ACTIVATION
        # One sum over a group's devices after attention, one over all after the feed-forward part, per layer. With DP
        # attention the second is a gather before and a scatter after it: the same bytes.
        sums = [self._all_reduce(shards, hidden_bytes / self.parallel.attention_ranks)]
        sums.append(self._all_reduce(devices, hidden_bytes))
        return _Rates(
            projections_per_token=2.0 * projections / devices * operation,
            projections_fixed=projections * weight / shards,
            dense_per_token=2.0 * dense / devices * operation,
            dense_fixed=dense * weight / devices,
            experts_per_token=2.0 * shape.num_moe_layers * chosen / devices * operation,
            experts_fixed=shape.num_moe_layers * shape.always_params * weight / devices,
            per_expert_read=shape.num_moe_layers * shape.expert_params * weight / devices,
            head_per_sample=2.0 * shape.head_params / devices * operation,
            head_fixed=shape.head_params * weight / devices,
            per_pair=shape.pair_operations * shape.num_layers / devices * operation,
            per_context=token_bytes / self.parallel.attention_ranks * byte,
            links_per_token=shape.num_layers * sum(per_token for per_token, _ in sums),
            links_fixed=shape.num_layers * sum(latency for _, latency in sums),
        )

    @functools.cached_property
    def kv_tokens(self) -> int:
        """Tokens that the pages of one engine hold, over all its attention ranks. Raises ValueError if its weights
        leave no room."""
        return self.kv_tokens_with(0.9)

    def kv_tokens_with(self, memory_share: float) -> int:
        """The same, if `memory_share` of a device may be used for weights and pages."""
        free = self.device.memory_bytes * memory_share - _RESERVED_BYTES - self.weight_bytes_per_device
        per_token = self.shape.kv_token_bytes / min(self.parallel.attention_shards, self.shape.kv_shards)
        if free < per_token * 1024:
            raise ValueError(
                f"{self.shape.name} on {self.parallel.devices} x {self.device.name}: weights take "
                f"{self.weight_bytes_per_device / 1e9:.1f} of {self.device.memory_bytes / 1e9:.0f} GB on each device; "
                "allowed: more devices"
            )
        return int(free / per_token) * self.parallel.attention_ranks

    @property
    def weight_bytes_per_device(self) -> float:
        shape = self.shape
        attention = shape.num_layers * shape.attention_params
        rest = shape.num_params - attention
        return shape.weight_bytes * (attention / self.parallel.attention_shards + rest / self.parallel.devices)

    def _attention(self, load: StepLoad) -> float:
        shape = self.shape
        share = 1.0
        if shape.num_window_layers and load.num_rows:
            # Layers with a window see less of a long context.
            mean = load.context / load.num_rows
            seen = min(1.0, shape.window / mean) if mean else 1.0
            share = 1.0 - (1.0 - seen) * shape.num_window_layers / shape.num_layers
        return share * max(load.pairs * self._rates.per_pair, load.context * self._rates.per_context)

    def _experts_read(self, tokens: int) -> float:
        if not self.shape.num_experts:
            return 0.0
        missed = (1.0 - self.shape.num_chosen_experts / self.shape.num_experts) ** tokens
        return self.shape.num_experts * (1.0 - missed)

    def _all_reduce(self, devices: int, num_bytes: float) -> tuple[float, float]:
        """(seconds for `num_bytes` of each token, seconds whatever its size)."""
        if devices == 1:
            return 0.0, 0.0
        bandwidth = self.device.link_bandwidth * self.device.link_share
        return 2.0 * (devices - 1) / devices * num_bytes / bandwidth, self.device.link_latency_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """Fitted to the steps of a real engine (bench/calibrate.py). A step is padded to the next bucket of tokens.

    buckets, bucket_seconds   of a step of so many tokens with no context, buckets ascending
    context            seconds per token of context that rows read
    pair               seconds per (query, context) pair of attention
    sample             seconds per sampled position
    row                seconds per row
    request            seconds to take a request in
    idle, warm_ups     seconds without work, ascending, and by how much the first step after them takes longer: caches
                       and translations of addresses are lost to neighbours, clocks go down
    machine            where and when, for people
    """

    buckets: tuple[int, ...]
    bucket_seconds: tuple[float, ...]
    context: float = 0.0
    pair: float = 0.0
    sample: float = 0.0
    row: float = 0.0
    request: float = 0.0
    idle: tuple[float, ...] = ()
    warm_ups: tuple[float, ...] = ()
    machine: str = ""

    def __post_init__(self) -> None:
        if len(self.idle) != len(self.warm_ups):
            raise ValueError(f"warm_ups: got {len(self.warm_ups)} for {len(self.idle)} times of idleness")
        if len(self.buckets) != len(self.bucket_seconds) or not self.buckets:
            raise ValueError(f"bucket_seconds: got {len(self.bucket_seconds)} for {len(self.buckets)} buckets")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError("buckets: not ascending")

    def seconds(self, load: StepLoad) -> float:
        base = self.bucket_seconds[self.bucket_index(load.num_tokens)]
        linear = self.context * load.context + self.pair * load.pairs
        return base + linear + self.sample * load.num_samples + self.row * load.num_rows

    def warm_up(self, idle: float) -> float:
        """Straight lines between what was measured, from none at 0; constant beyond."""
        return float(np.interp(idle, (0.0, *self.idle), (0.0, *self.warm_ups)))

    def bucket_index(self, num_tokens: int) -> int:
        """Of the smallest bucket that holds so many tokens. Raises ValueError if none does."""
        for index, size in enumerate(self.buckets):
            if num_tokens <= size:
                return index
        raise ValueError(f"tokens of one step: got {num_tokens}; allowed: at most {self.buckets[-1]}")
