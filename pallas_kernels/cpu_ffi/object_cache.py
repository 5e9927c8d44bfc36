"""numba functions compiled to C functions, the machine code kept on disk between processes.

numba's own cache never hits for functions made in closures (its key holds a random id), hence this one. The
stored files are executable code: they are read only from a folder that belongs to this user and that nobody
else can write to.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from jaxserve.pallas_kernels.cpu_ffi.support import ffi_version
from numba import types
from numba.core.registry import cpu_target

logger = logging.getLogger(__name__)

_MAGIC = b"jsobj1"


@functools.cache
def cache_folder() -> Path | None:
    """Folder for compiled code (mode 0700), or None when there is no safe one."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "jaxserve" / "cpu_kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        status = folder.lstat()
    except OSError as error:
        logger.warning("compiled kernels are not kept: %s", error)
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        logger.warning("compiled kernels are not kept: %s is not private to this user", folder)
        return None
    return folder


@functools.cache
def _environment_key() -> str:
    """Changes with this package's sources, the compiler, the CPU, and the FFI version compiled into handlers."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parent.parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    codegen = cpu_target.target_context.codegen()
    digest.update(repr((numba.__version__, llvm.llvm_version_info, codegen.magic_tuple(), ffi_version())).encode())
    return digest.hexdigest()


def compile_function(function: Callable[..., Any], result: Any, key: tuple[object, ...]) -> tuple[int, object]:
    """Compile `result function(void*)`. Returns (address, the object that keeps the code alive).

    key: everything that the source does not say, that is the compile-time parameters and the name.
    """
    folder = cache_folder()
    name = hashlib.sha256(repr((_environment_key(), function.__qualname__, key)).encode()).hexdigest()
    path = None if folder is None else folder / f"{name}.obj"
    if path is not None:
        loaded = _load(path)
        if loaded is not None:
            return loaded
    compiled = numba.cfunc(result(types.voidptr), error_model="numpy")(function)
    if path is not None:
        _store(path, compiled._wrapper_name, compiled._library.serialize_using_object_code())
    return compiled.address, compiled


def _load(path: Path) -> tuple[int, object] | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body = content[len(_MAGIC) + 32 :]
    if content[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != content[len(_MAGIC) :][:32]:
        logger.warning("ignoring the damaged file %s", path)
        return None
    parts = []
    while body:
        (size,) = struct.unpack_from("<Q", body)
        parts.append(body[8 : 8 + size])
        body = body[8 + size :]
    symbol, library_name, *payload = parts
    context = cpu_target.target_context
    context.refresh()
    state = (library_name.decode(), "object", tuple(payload))
    try:
        library = context.codegen().unserialize_library(state)
        return library.get_pointer_to_function(symbol.decode()), library
    except Exception as error:  # a library of another numba: its loader raises what it likes
        logger.warning("ignoring %s, which does not load: %s", path, error)
        return None


def _store(path: Path, symbol: str, state: tuple[str, str, tuple[bytes, ...]]) -> None:
    library_name, kind, payload = state
    if kind != "object" or not all(isinstance(part, bytes) for part in payload):
        logger.debug("this numba stores compiled code in another form; %s is not kept", path.name)
        return
    parts = [symbol.encode(), library_name.encode(), *payload]
    body = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_bytes(_MAGIC + hashlib.sha256(body).digest() + body)
        temporary.chmod(0o600)
        os.replace(temporary, path)  # at once: another process never sees half a file
    except OSError as error:
        logger.warning("cannot keep compiled code in %s: %s", path.parent, error)
