"""What devices can do, from their makers' data sheets. No jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, and the link between those of one machine.

    flops             dense multiply-adds in bfloat16, counted as two operations, per second
    memory_bandwidth  bytes per second
    memory_bytes      of the device
    link_bandwidth    bytes per second and direction to the others of its machine
    link_latency_s    of one collective operation, however small
    compute_share, memory_share, link_share   how much of these peaks real programs reach
    price_per_hour    in any currency, to compare configurations; not a quotation
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float
    link_latency_s: float = 1e-5
    compute_share: float = 0.6
    memory_share: float = 0.8
    link_share: float = 0.75
    price_per_hour: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"{field.name}: got {value!r}; allowed: a number above 0")


# Data sheets: NVIDIA H100 SXM, H200 SXM, A100 80 GB SXM, L4, B200 (dense figures, without sparsity). The H100 PCIe and
# others can be given as a JSON file. Prices are relative: H100 = 1.
DEVICES = {
    device.name: device
    for device in (
        Device(
            name="h100", flops=989e12, memory_bandwidth=3.35e12, memory_bytes=80e9, link_bandwidth=450e9,
            price_per_hour=1.0,
        ),
        Device(
            name="h200", flops=989e12, memory_bandwidth=4.8e12, memory_bytes=141e9, link_bandwidth=450e9,
            price_per_hour=1.25,
        ),
        Device(
            name="b200", flops=2250e12, memory_bandwidth=8.0e12, memory_bytes=180e9, link_bandwidth=900e9,
            price_per_hour=2.0,
        ),
        Device(
            name="a100", flops=312e12, memory_bandwidth=2.039e12, memory_bytes=80e9, link_bandwidth=300e9,
            price_per_hour=0.6,
        ),
        Device(
            name="l4", flops=121e12, memory_bandwidth=300e9, memory_bytes=24e9, link_bandwidth=32e9,
            link_latency_s=3e-5, price_per_hour=0.25,
        ),
    )
}  # fmt: skip


def device_named(name: str) -> Device:
    """Raises ValueError for an unknown name."""
    if name not in DEVICES:
        raise ValueError(f"device: got {name!r}; allowed: {', '.join(DEVICES)}, or the path of a JSON file")
    return DEVICES[name]
