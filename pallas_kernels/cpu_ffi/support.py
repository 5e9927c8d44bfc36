"""Whether the numba kernels can run in this process, and which vector instructions they may use."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import sys
from pathlib import Path

import jax
import numba
from numba.core.registry import cpu_target

# The byte offsets of call_frame.py hold for the headers of these versions (JAX 0.10.2 to 0.12).
_CHECKED_MAJOR = 0
_CHECKED_MINORS = range(3, 6)
_MIN_NUMBA = (0, 63)
# Linux, x86-64: asm/prctl.h and Documentation/arch/x86/xstate.rst
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@functools.cache
def ffi_version() -> tuple[int, int]:
    """(major, minor) of the FFI that the installed jaxlib speaks, from its own header.

    Raises RuntimeError when the header is missing or does not state it.
    """
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise RuntimeError(f"cannot read jaxlib's FFI header {header}: {error}") from error
    found = [re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    if not all(found):
        raise RuntimeError(f"jaxlib's FFI header {header} states no version")
    return int(found[0].group(1)), int(found[1].group(1))


@functools.cache
def cpu_features() -> frozenset[str]:
    """Instruction-set extensions that numba compiles for ("avx2", "avx512f", ...), its overrides included."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


def has_wide_vectors() -> bool:
    """32 registers of 16 float32 lanes."""
    return "avx512f" in cpu_features()


def has_bf16_dot() -> bool:
    """vdpbf16ps: pairs of bfloat16 multiplied and summed in float32."""
    return has_wide_vectors() and "avx512bf16" in cpu_features()


def has_byte_dot() -> bool:
    """vpdpbusd: four unsigned bytes times four signed ones summed in int32."""
    return has_wide_vectors() and {"avx512bw", "avx512vl", "avx512vnni"} <= cpu_features()


@functools.cache
def has_bf16_tiles() -> bool:
    """Registers of 16 x 32 bfloat16 and their products (AMX), which Linux lends to a process that asks."""
    if not (has_bf16_dot() and {"amx-tile", "amx-bf16"} <= cpu_features()) or sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def check_support() -> str:
    """Why the kernels cannot run here; empty if they can."""
    if sys.maxsize < 2**32 or sys.byteorder != "little":
        return "a 64-bit little-endian CPU is needed"
    version = tuple(int(part) for part in re.findall(r"\d+", numba.__version__)[:2])
    if version < _MIN_NUMBA:
        return f"numba {numba.__version__} is older than {'.'.join(map(str, _MIN_NUMBA))}"
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        missing = sorted({"avx2", "fma"} - cpu_features())
        if missing:
            return f"the CPU lacks {' and '.join(missing)}"
    elif machine not in ("aarch64", "arm64"):
        return f"no kernels for CPU architecture {machine!r}"
    if sys.platform == "win32":
        return "no kernels for Windows"
    try:
        major, minor = ffi_version()
    except RuntimeError as error:
        return str(error)
    if major != _CHECKED_MAJOR or minor not in _CHECKED_MINORS:
        return (
            f"jaxlib speaks FFI {major}.{minor}; known: {_CHECKED_MAJOR}.{_CHECKED_MINORS.start} "
            f"to {_CHECKED_MAJOR}.{_CHECKED_MINORS.stop - 1}"
        )
    return ""
