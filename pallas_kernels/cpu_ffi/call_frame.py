"""Reading XLA's call frame from numba code.

A handler is a C function `XLA_FFI_Error* handler(XLA_FFI_CallFrame*)`. Fields are read by byte offset (64-bit
layout of jaxlib/include/xla/ffi/api/c_api.h), so that a handler needs neither the GIL nor a Python object.
Addresses are plain intp throughout. Nothing here keeps state: handlers run at once in several threads.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
from jaxserve.pallas_kernels.cpu_ffi.support import ffi_version
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# XLA_FFI_CallFrame
_EXTENSION, _API, _CONTEXT, _STAGE = 8, 16, 24, 32
_ARGS, _RETS, _ATTRS = 72, 112, 160
STAGE_EXECUTE = 3
# XLA_FFI_Buffer
_BUFFER_DTYPE, _BUFFER_DATA, _BUFFER_RANK, _BUFFER_DIMS = 16, 24, 32, 40
# XLA_FFI_Api: function pointers
_ERROR_CREATE, _ERROR_DESTROY, _SCHEDULE, _NUM_THREADS = 48, 64, 136, 144
# XLA_FFI_DataType
S8, S32, U8, F32, BF16, F8E4M3FN = 2, 4, 6, 11, 16, 20
# XLA_FFI_Error_Code
INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
BYTE_POINTER = I8.as_pointer()

# No fastmath: numba would spread its flags over the vector code too, and the same product compiled twice
# could then be summed in two orders.
# No wrappers: only compiled code calls these functions, and wrappers double the compile time.
jit = numba.njit(
    inline="never",
    nogil=True,
    error_model="numpy",
    boundscheck=False,
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
)


def _loader(llvm_type: ir.Type, numba_type: Any) -> Any:
    @intrinsic
    def load(typing_context, address, offset):
        def codegen(context, b, signature, args):
            return b.load(b.inttoptr(b.add(args[0], args[1]), llvm_type.as_pointer()), align=1)

        return numba_type(types.intp, types.intp), codegen

    return load


def _storer(llvm_type: ir.Type, numba_type: Any) -> Any:
    @intrinsic
    def store(typing_context, address, offset, value):
        def codegen(context, b, signature, args):
            b.store(args[2], b.inttoptr(b.add(args[0], args[1]), llvm_type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, numba_type), codegen

    return store


load_i64, load_i32 = _loader(I64, types.int64), _loader(I32, types.int32)
load_f32 = _loader(FLOAT, types.float32)
store_i64, store_i32 = _storer(I64, types.int64), _storer(I32, types.int32)
store_f32 = _storer(FLOAT, types.float32)


@intrinsic
def address_of(typing_context, pointer):
    """void* -> intp"""

    def codegen(context, b, signature, args):
        return b.ptrtoint(args[0], I64)

    return types.intp(types.voidptr), codegen


@intrinsic
def atomic_add(typing_context, address, value):
    """Add to the int64 at `address`; returns what was there. Orders all memory accesses around it."""

    def codegen(context, b, signature, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def atomic_load(typing_context, address):
    def codegen(context, b, signature, args):
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.intp), codegen


@intrinsic
def atomic_swap(typing_context, address, value):
    """Store an int64; returns what was there."""

    def codegen(context, b, signature, args):
        return b.atomic_rmw("xchg", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def atomic_replace(typing_context, address, expected, value):
    """Store an int64 if `expected` is there; returns whether it was."""

    def codegen(context, b, signature, args):
        found = b.cmpxchg(b.inttoptr(args[0], I64.as_pointer()), args[1], args[2], "seq_cst", "seq_cst")
        return b.extract_value(found, 1)

    return types.boolean(types.intp, types.int64, types.int64), codegen


@intrinsic
def pause(typing_context):
    """Tell the CPU that this is a loop that waits."""

    def codegen(context, b, signature, args):
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


_FLUSH_SUBNORMALS = 0x8040  # of MXCSR: results and operands


@intrinsic
def flush_subnormals(typing_context):
    """From now on this thread takes subnormal numbers for 0, as XLA's threads do. Returns what to restore. Does
    nothing where the CPU is not x86."""

    def codegen(context, b, signature, args):
        if not _IS_X86:
            return ir.Constant(I32, 0)
        slot = cgutils.alloca_once(b, I32)
        _call_with_mode(b, "stmxcsr", slot)
        mode = b.load(slot)
        b.store(b.or_(mode, ir.Constant(I32, _FLUSH_SUBNORMALS)), slot)
        _call_with_mode(b, "ldmxcsr", slot)
        return mode

    return types.int32(), codegen


@intrinsic
def restore_subnormals(typing_context, mode):
    def codegen(context, b, signature, args):
        if _IS_X86:
            _call_with_mode(b, "ldmxcsr", cgutils.alloca_once_value(b, args[0]))
        return context.get_dummy_value()

    return types.void(types.int32), codegen


def _call_with_mode(b: ir.IRBuilder, name: str, slot: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [BYTE_POINTER])
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.sse.{name}")
    b.call(function, [b.bitcast(slot, BYTE_POINTER)])


@intrinsic
def _call_pointer(typing_context, function, argument):
    """Call a C function pointer `void* f(void*)`."""

    def codegen(context, b, signature, args):
        return b.call(b.inttoptr(args[0], ir.FunctionType(I64, [I64]).as_pointer()), [args[1]])

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def call_task(typing_context, function, argument):
    """Call a C function pointer `void f(void*)`."""

    def codegen(context, b, signature, args):
        b.call(b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [I64]).as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def stack(typing_context, num_bytes):
    """Address of `num_bytes` (a literal) of 64-byte aligned stack, one block per call site."""
    if not isinstance(num_bytes, types.IntegerLiteral):
        raise numba.errors.RequireLiteralValue("stack() needs a literal size")
    size = num_bytes.literal_value

    def codegen(context, b, signature, args):
        with b.goto_entry_block():
            block = b.alloca(ir.ArrayType(I8, size))
            block.align = 64
        return b.ptrtoint(block, I64)

    return types.intp(num_bytes), codegen


@intrinsic
def copy_bytes(typing_context, target, source, num_bytes):
    def codegen(context, b, signature, args):
        target, source = (b.inttoptr(a, BYTE_POINTER) for a in args[:2])
        cgutils.raw_memcpy(b, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def zero_bytes(typing_context, target, num_bytes):
    def codegen(context, b, signature, args):
        cgutils.memset(b, b.inttoptr(args[0], BYTE_POINTER), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


def _extern(name: str, num_args: int) -> types.ExternalFunction:
    """A C function of intp, resolved when the code is linked (so compiled code can be kept on disk)."""
    return types.ExternalFunction(name, types.intp(*([types.intp] * num_args)))


malloc, free, sched_yield = _extern("malloc", 1), _extern("free", 1), _extern("sched_yield", 0)
# Only where sys.platform is "linux":
sched_getcpu = _extern("sched_getcpu", 0)
sched_getaffinity, sched_setaffinity = _extern("sched_getaffinity", 3), _extern("sched_setaffinity", 3)
clock_gettime, sem_wait, sem_post = _extern("clock_gettime", 2), _extern("sem_wait", 1), _extern("sem_post", 1)


def symbol_address(name: str) -> Any:
    """A function that returns the address of a symbol, as a relocation and not as a number in the code."""

    @intrinsic
    def address(typing_context):
        def codegen(context, b, signature, args):
            function = cgutils.get_or_insert_function(b.module, ir.FunctionType(I64, [I64]), name)
            return b.ptrtoint(function, I64)

        return types.intp(), codegen

    return address


def const_string(text: str) -> Any:
    """A function that returns the address of a zero-terminated constant."""

    @intrinsic
    def address(typing_context):
        def codegen(context, b, signature, args):
            return b.ptrtoint(context.insert_const_string(b.module, text), I64)

        return types.intp(), codegen

    return address


@jit
def arg(frame, i):
    """Argument i: address of its XLA_FFI_Buffer."""
    return load_i64(load_i64(frame, _ARGS), 8 * i)


@jit
def ret(frame, i):
    """Result i: address of its XLA_FFI_Buffer."""
    return load_i64(load_i64(frame, _RETS), 8 * i)


@jit
def data(buffer):
    return load_i64(buffer, _BUFFER_DATA)


@jit
def dim(buffer, i):
    return load_i64(load_i64(buffer, _BUFFER_DIMS), 8 * i)


@jit
def rank(buffer):
    return load_i64(buffer, _BUFFER_RANK)


@jit
def dtype(buffer):
    return load_i32(buffer, _BUFFER_DTYPE)


@jit
def attr(frame, i):
    """Address of the value of scalar attribute i; XLA sorts attributes by name."""
    return load_i64(load_i64(load_i64(frame, _ATTRS), 8 * i), 8)


@jit
def stage(frame):
    return load_i32(frame, _STAGE)


_MAJOR, _MINOR = ffi_version()


@jit
def answer_metadata(frame):
    """XLA asks every handler once, at registration, for its API version. True: this call was that."""
    extension = load_i64(frame, _EXTENSION)
    while extension != 0:
        if load_i32(extension, 8) == 1:  # XLA_FFI_Extension_Metadata
            metadata = load_i64(extension, 24)
            store_i32(metadata, 24, _MAJOR)
            store_i32(metadata, 28, _MINOR)
            store_i32(metadata, 32, 0)  # traits
            return True
        extension = load_i64(extension, 16)
    return False


@jit
def make_error(frame, code, message):
    """A new XLA_FFI_Error with the zero-terminated `message`."""
    call = stack(32)
    store_i64(call, 0, 28)
    store_i64(call, 8, 0)
    store_i64(call, 16, message)
    store_i32(call, 24, code)
    return _call_pointer(load_i64(load_i64(frame, _API), _ERROR_CREATE), call)


@jit
def _drop_error(frame, error):
    call = stack(32)
    store_i64(call, 0, 24)
    store_i64(call, 8, 0)
    store_i64(call, 16, error)
    _call_pointer(load_i64(load_i64(frame, _API), _ERROR_DESTROY), call)


@jit
def num_threads(frame):
    """Threads of XLA's pool; 1 when there is none."""
    count, call = stack(8), stack(32)
    store_i64(count, 0, 1)
    store_i64(call, 0, 32)
    store_i64(call, 8, 0)
    store_i64(call, 16, load_i64(frame, _CONTEXT))
    store_i64(call, 24, count)
    error = _call_pointer(load_i64(load_i64(frame, _API), _NUM_THREADS), call)
    if error != 0:
        _drop_error(frame, error)
        return 1
    return load_i64(count, 0)


@jit
def schedule(frame, task, argument):
    """Put `void task(void* argument)` on XLA's pool. False: refused, it will not run."""
    call = stack(40)
    store_i64(call, 0, 40)
    store_i64(call, 8, 0)
    store_i64(call, 16, load_i64(frame, _CONTEXT))
    store_i64(call, 24, task)
    store_i64(call, 32, argument)
    error = _call_pointer(load_i64(load_i64(frame, _API), _SCHEDULE), call)
    if error != 0:
        _drop_error(frame, error)
        return False
    return True
