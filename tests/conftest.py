"""Shared by all tests. Runs before jax is imported anywhere."""

from __future__ import annotations

import os

# Tests compare with oracles on the CPU, also on machines that have an accelerator; GPU tests ask for theirs.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Sharded programs run over eight virtual devices; single-device programs are not affected.
_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
