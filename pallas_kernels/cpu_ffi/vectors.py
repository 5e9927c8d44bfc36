"""A small emitter of vector code: 16 float32 lanes as LLVM IR, lowered by LLVM to what the CPU has.

numba's own vectoriser does not keep the accumulators of attention and product loops in registers. Every
operation here has one fixed order and no fast-math flag, so that a value does not depend on how many
neighbours are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import BYTE_POINTER, FLOAT, I8, I16, I32, I64
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BFLOAT = _BFloat()
LANES = 16
VECTOR = ir.VectorType(FLOAT, LANES)
INT_VECTOR = ir.VectorType(I32, LANES)
BF16_PAIRS = ir.VectorType(BFLOAT, 2 * LANES)
LOCALITY_SECOND_CACHE = 2  # of what is fetched ahead: the first cache is full with what is computed now
MASKED = -1e30  # score of a token that is not visible; finite, so that differences stay finite

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}


class Emitter:
    """Vector operations at the position of an llvmlite builder. Addresses are i64 values."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def function(self, name: str, result: ir.Type, args: list[ir.Type]) -> ir.Function:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, args), name)

    def const(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def splat_const(self, value: float) -> ir.Constant:
        return ir.Constant(VECTOR, [value] * LANES)

    def at(self, address: ir.Value, offset: int | ir.Value) -> ir.Value:
        if isinstance(offset, int):
            if offset == 0:
                return address
            offset = self.const(offset)
        return self.b.add(address, offset)

    def load(self, address: ir.Value, type_: ir.Type = VECTOR, align: int = 4) -> ir.Value:
        return self.b.load(self.b.inttoptr(address, type_.as_pointer()), align=align)

    def store(self, value: ir.Value, address: ir.Value, align: int = 4) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def load_as_float(self, address: ir.Value, kind: str) -> ir.Value:
        """16 consecutive elements of `kind` as float32; fp8: see codes_as_float."""
        b = self.b
        if kind == "float32":
            return self.load(address)
        if kind == "bfloat16":
            wide = b.zext(self.load(address, ir.VectorType(I16, LANES), 2), INT_VECTOR)
            return b.bitcast(b.shl(wide, ir.Constant(INT_VECTOR, [16] * LANES)), VECTOR)
        if ELEMENT_BYTES.get(kind) == 1:
            return self.codes_as_float(self.load(address, ir.VectorType(I8, LANES), 1), kind)
        raise ValueError(f"element kind: got {kind!r}; allowed: {', '.join(ELEMENT_BYTES)}")

    def codes_as_float(self, codes: ir.Value, kind: str) -> ir.Value:
        """16 bytes as float32: int8, or fp8 (float8_e4m3fn) times 2**-8."""
        b = self.b
        if kind == "int8":
            return b.sitofp(b.sext(codes, INT_VECTOR), VECTOR)
        shorts = ir.VectorType(I16, LANES)

        def short(value: int) -> ir.Constant:
            return ir.Constant(shorts, [value] * LANES)

        # The bits of a float16 with three bits of the exponent missing; conversion of those is exact in hardware,
        # subnormal or not, and not subject to the thread's flush-to-zero mode.
        wide = b.zext(codes, shorts)
        bits = b.or_(b.shl(b.and_(wide, short(0x80)), short(8)), b.shl(b.and_(wide, short(0x7F)), short(7)))
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VECTOR)

    def store_as(self, value: ir.Value, address: ir.Value, kind: str) -> None:
        """Store 16 float32 as `kind`, bfloat16 rounded to nearest even, NaN kept."""
        if kind == "float32":
            self.store(value, address)
            return
        b = self.b

        def ints(x: int) -> ir.Constant:
            return ir.Constant(INT_VECTOR, [x] * LANES)

        bits = b.bitcast(value, INT_VECTOR)
        odd = b.and_(b.lshr(bits, ints(16)), ints(1))
        rounded = b.lshr(b.add(bits, b.add(odd, ints(0x7FFF))), ints(16))
        nan = b.or_(b.and_(b.lshr(bits, ints(16)), ints(0x8000)), ints(0x7FC0))
        rounded = b.select(b.fcmp_unordered("uno", value, value), nan, rounded)
        self.store(b.trunc(rounded, ir.VectorType(I16, LANES)), address, 2)

    def to_bf16(self, value: ir.Value) -> ir.Value:
        """16 float32 rounded to 16 bfloat16, as int16, by the CPU's own instruction: subnormal ones become 0. Only
        where support.has_bf16_dot()."""
        narrow = self.b.fptrunc(value, ir.VectorType(BFLOAT, LANES))
        return self.b.bitcast(narrow, ir.VectorType(I16, LANES))

    def both_to_bf16(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """to_bf16 of two vectors, one behind the other, as 32 bfloat16."""
        function = self.function("llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16_PAIRS, [VECTOR, VECTOR])
        return self.b.call(function, [y, x])

    def upper_half(self, value: ir.Value) -> ir.Value:
        """16 float32 without the bits that a bfloat16 has no place for."""
        bits = self.b.and_(self.b.bitcast(value, INT_VECTOR), ir.Constant(INT_VECTOR, [-(2**16)] * LANES))
        return self.b.bitcast(bits, VECTOR)

    def hidden(self, value: ir.Value) -> ir.Value:
        """The same int64, of which the compiler knows nothing more: what it stored there, it has to load."""
        return self.b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], side_effect=True)

    def splat(self, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
        b, type_ = self.b, ir.VectorType(scalar.type, lanes)
        undefined = ir.Constant(type_, ir.Undefined)
        one = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        lanes = x.type.count
        return self.b.call(self.function(f"llvm.fma.v{lanes}f32", x.type, [x.type] * 3), [x, y, z])

    def dot_pairs(self, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """total plus, in each lane, the products of two pairs of bfloat16. Only where support.has_bf16_dot()."""
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * total.type.count}"
        return self.b.call(self.function(name, total.type, [total.type, x.type, y.type]), [total, x, y])

    def dot_bytes(self, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """total plus, in each lane, four unsigned bytes of x times four signed ones of y, all int32. Only where
        support.has_byte_dot()."""
        name = f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}"
        return self.b.call(self.function(name, total.type, [total.type] * 3), [total, x, y])

    def ints(self, value: int, lanes: int = LANES) -> ir.Constant:
        return ir.Constant(ir.VectorType(I32, lanes), [value] * lanes)

    def to_int(self, x: ir.Value) -> ir.Value:
        """16 float32 rounded to int32, as the thread is set: to nearest. Only with AVX-512."""
        mask = ir.IntType(LANES)
        function = self.function("llvm.x86.avx512.mask.cvtps2dq.512", INT_VECTOR, [VECTOR, INT_VECTOR, mask, I32])
        return self.b.call(function, [x, self.ints(0), ir.Constant(mask, -1), ir.Constant(I32, 4)])

    def size(self, x: ir.Value) -> ir.Value:
        return self.b.call(self.function("llvm.fabs.v16f32", VECTOR, [VECTOR]), [x])

    def max_or_nan(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The larger of each two of 16 float32; NaN where one of them is."""
        return self.b.call(self.function("llvm.maximum.v16f32", VECTOR, [VECTOR] * 2), [x, y])

    def max(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def _halves(self, v: ir.Value) -> tuple[ir.Value, ir.Value]:
        half = v.type.count // 2
        undefined = ir.Constant(v.type, ir.Undefined)
        index = ir.VectorType(I32, half)
        low = self.b.shuffle_vector(v, undefined, ir.Constant(index, list(range(half))))
        return low, self.b.shuffle_vector(v, undefined, ir.Constant(index, list(range(half, 2 * half))))

    def lane(self, v: ir.Value, i: int) -> ir.Value:
        return self.b.extract_element(v, ir.Constant(I32, i))

    def sum_lanes(self, v: ir.Value) -> ir.Value:
        while v.type.count > 2:
            v = self.b.fadd(*self._halves(v))
        return self.b.fadd(self.lane(v, 0), self.lane(v, 1))

    def sum_lanes_of(self, vectors: list[ir.Value]) -> list[ir.Value]:
        """sum_lanes of up to 16 vectors together, at a third of the cost: bit for bit the same sums."""
        # Lane l of a vector belongs to the input owner[l]; each step halves the lanes that an input has.
        work = [(v, [i] * LANES) for i, v in enumerate(vectors)]
        for step in (8, 4, 2, 1):
            if len(work) % 2:
                work.append(work[-1])
            joined = []
            for (x, x_owner), (y, y_owner) in zip(work[::2], work[1::2]):
                low = [lane for lane in range(2 * LANES) if not lane & step]
                high = ir.Constant(INT_VECTOR, [lane + step for lane in low])
                both, owner = [x, y], x_owner + y_owner
                sums = self.b.fadd(
                    self.b.shuffle_vector(*both, ir.Constant(INT_VECTOR, low)),
                    self.b.shuffle_vector(*both, high),
                )
                joined.append((sums, [owner[lane] for lane in low]))
            work = joined
        (total, owner), *_ = work
        return [self.lane(total, owner.index(i)) for i in range(len(vectors))]

    def rms_factor(self, squares: ir.Value, count: ir.Value, eps: ir.Value) -> ir.Value:
        """1 / sqrt(mean + eps) in all lanes, for a sum of `count` squares spread over the lanes; eps: an address."""
        b = self.b
        mean = b.fdiv(self.sum_lanes(squares), b.sitofp(count, FLOAT))
        root = b.call(self.function("llvm.sqrt.f32", FLOAT, [FLOAT]), [b.fadd(mean, self.load(eps, FLOAT))])
        return self.splat(b.fdiv(ir.Constant(FLOAT, 1.0), root))

    def max_lanes(self, v: ir.Value) -> ir.Value:
        while v.type.count > 2:
            v = self.max(*self._halves(v))
        return self.max(self.lane(v, 0), self.lane(v, 1))

    def exp(self, x: ir.Value) -> ir.Value:
        """e**x for x up to 87; exactly 1 at 0; anything below -87 counts as -87. The relative error is below 3e-7
        down to -5, and 1.5e-6 below."""
        b = self.b
        log2e = self.splat_const(1.4426950408889634)
        x = self.max(x, self.splat_const(-87.0))
        # So large that the last bit is worth 1: the sum is rounded to whole numbers, which are then its lowest bits.
        shift = self.splat_const(1.5 * 2**23)
        shifted = self.fma(x, log2e, shift)
        rest = self.fma(x, log2e, b.fsub(shift, shifted))
        power = self.splat_const(1.326472721982417e-3)  # 2**rest, |rest| <= 1/2: minimax with the last term 1
        for coefficient in (
            9.671512709414999e-3, 5.5507337438315464e-2, 2.4022242084310574e-1, 6.93146977598474e-1, 1.0,
        ):  # fmt: skip
            power = self.fma(power, rest, self.splat_const(coefficient))
        exponent = b.shl(b.bitcast(shifted, INT_VECTOR), ir.Constant(INT_VECTOR, [23] * LANES))
        return b.bitcast(b.add(b.bitcast(power, INT_VECTOR), exponent), VECTOR)

    def exp_scalar(self, x: ir.Value) -> ir.Value:
        return self.lane(self.exp(self.splat(x)), 0)

    def tanh(self, x: ir.Value) -> ir.Value:
        b, zero, one = self.b, self.splat_const(0.0), self.splat_const(1.0)
        is_negative = b.fcmp_ordered("<", x, zero)
        decay = self.exp(b.fmul(b.select(is_negative, b.fsub(zero, x), x), self.splat_const(-2.0)))
        y = b.fdiv(b.fsub(one, decay), b.fadd(one, decay))
        return b.select(is_negative, b.fsub(zero, y), y)

    def prefetch(self, address: ir.Value, *, to_write: bool = False, locality: int = 3) -> None:
        """locality: 3 all caches, 2 all but the first."""
        function = self.function("llvm.prefetch.p0", ir.VoidType(), [BYTE_POINTER, I32, I32, I32])
        args = [self.b.inttoptr(address, BYTE_POINTER), *(ir.Constant(I32, x) for x in (int(to_write), locality, 1))]
        self.b.call(function, args)

    def transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """16 vectors of 16 lanes of 32 bits, rows and lanes exchanged."""
        rows = list(rows)
        for step in (8, 4, 2, 1):
            low = [j if not j & step else LANES + j - step for j in range(LANES)]
            high = [j + step if not j & step else LANES + j for j in range(LANES)]
            for i in range(LANES):
                if not i & step:
                    x, y = rows[i], rows[i + step]
                    rows[i] = self.b.shuffle_vector(x, y, ir.Constant(INT_VECTOR, low))
                    rows[i + step] = self.b.shuffle_vector(x, y, ir.Constant(INT_VECTOR, high))
        return rows

    def columns_of_shorts(self, addresses: list[ir.Value]) -> list[ir.Value]:
        """Of 32 rows of 8 int16 in memory the 8 columns. Quarters of registers are put together on the way from memory,
        so that what is left to exchange lies within them."""
        b, quarter = self.b, ir.VectorType(I16, LANES // 2)

        def joined(x: ir.Value, y: ir.Value) -> ir.Value:
            count = x.type.count + y.type.count
            return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, count), list(range(count))))

        vectors = []
        for first in (0, 4, 2, 6, 1, 5, 3, 7):  # each step takes from both halves: three of them leave 0 to 7
            parts = [self.load(address, quarter, 2) for address in addresses[first :: LANES // 2]]
            vectors.append(joined(joined(*parts[:2]), joined(*parts[2:])))
        for step in (1, 2, 4):  # elements of a quarter that stay together
            vectors = [b.bitcast(v, ir.VectorType(ir.IntType(16 * step), 2 * LANES // step)) for v in vectors]
            vectors = self._interleaved(vectors, LANES // 2 // step)
        return [b.bitcast(v, ir.VectorType(I16, 2 * LANES)) for v in vectors]

    def _interleaved(self, vectors: list[ir.Value], per_quarter: int) -> list[ir.Value]:
        """Of each vector of the first half and its like of the second the elements in turn, quarter by quarter: first
        those of the lower halves of their quarters, then those of the upper."""
        count, found = vectors[0].type.count, []
        for x, y in zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :]):
            for half in (0, per_quarter // 2):
                order = [
                    first + half + i + side * count
                    for first in range(0, count, per_quarter)
                    for i in range(per_quarter // 2)
                    for side in (0, 1)
                ]
                found.append(self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, count), order)))
        return found


def void_intrinsic(argument_types: tuple[Any, ...], emit: Callable[..., None]) -> Any:
    """A numba function without result from emit(emitter, *values)."""
    names = [f"a{i}" for i in range(len(argument_types))]

    def codegen(context, builder, signature, args):
        emit(Emitter(builder), *args)
        return context.get_dummy_value()

    def typing(typing_context, *arguments):
        return types.void(*argument_types), codegen

    # numba reads the number of arguments from the signature, so it has to be spelled out.
    scope: dict[str, Any] = {"typing": typing}
    exec(
        f"def function(typing_context, {', '.join(names)}): return typing(typing_context, {', '.join(names)})",
        scope,
    )
    return intrinsic(scope["function"])


def emit_loop(emitter: Emitter, start: ir.Value | int, stop: ir.Value | int, step: int) -> Any:
    """`with emit_loop(...) as (index, count)`: code for index = start, start + step, ... below stop."""
    start, stop = (emitter.const(x) if isinstance(x, int) else x for x in (start, stop))
    return cgutils.for_range_slice(emitter.b, start, stop, emitter.const(step))


def emit_by_count(e: Emitter, count: ir.Value, most: int, emit: Callable[[int], None]) -> None:
    """emit(n) for the case that `count` is n: code for each number from 1 to `most`."""
    b = e.b
    done = b.append_basic_block("count.done")
    blocks = [b.append_basic_block(f"count.{n}") for n in range(1, most + 1)]
    switch = b.switch(count, blocks[-1])
    for n, block in enumerate(blocks[:-1], 1):
        switch.add_case(e.const(n), block)
    for n, block in enumerate(blocks, 1):
        b.position_at_end(block)
        emit(n)
        b.branch(done)
    b.position_at_end(done)


# exp_in_place(address): Emitter.exp of 16 float32.
exp_in_place = void_intrinsic((types.intp,), lambda e, address: e.store(e.exp(e.load(address)), address))
