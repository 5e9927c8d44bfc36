"""The tile registers of newer Intel CPUs (AMX) and their instructions, as LLVM IR.

Intel Architecture Instruction Set Extensions Programming Reference, chapter on AMX. Linux gives a process the
registers' memory when it asks (support.has_bf16_tiles).
"""

from __future__ import annotations

from jaxserve.pallas_kernels.cpu_ffi.call_frame import BYTE_POINTER, I8
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE, ROWS
from jaxserve.pallas_kernels.cpu_ffi.vectors import Emitter, void_intrinsic
from llvmlite import ir
from numba.core import cgutils

W_TILES, X_TILES = (4, 5), (6, 7)  # registers; sums lie in the others


class Tiles:
    """The instructions, at the position of an emitter. Register numbers are compile-time constants."""

    def __init__(self, emitter: Emitter) -> None:
        self.e = emitter

    def _call(self, name: str, *arguments: ir.Value) -> None:
        types_ = [argument.type for argument in arguments]
        self.e.b.call(self.e.function(f"llvm.x86.{name}", ir.VoidType(), types_), arguments)

    def _pointer(self, address: ir.Value) -> ir.Value:
        return self.e.b.inttoptr(address, BYTE_POINTER)

    def configure(self, columns: int) -> None:
        """Eight tiles of ROWS rows; palette 1. Weights have lines of LINE bytes, x and sums of `columns` numbers."""
        config = bytearray(64)
        config[0] = 1
        for tile in range(8):
            config[16 + 2 * tile], config[48 + tile] = LINE if tile in W_TILES else 4 * columns, ROWS
        constant = cgutils.global_constant(
            self.e.b.module, f".tile_config_{columns}", ir.Constant(ir.ArrayType(I8, 64), config), linkage="private"
        )
        self._call("ldtilecfg", self.e.b.bitcast(constant, BYTE_POINTER))

    def release(self) -> None:
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        self._call("tilezero", ir.Constant(I8, tile))

    def load(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        self._call("tileloadd64", ir.Constant(I8, tile), self._pointer(address), stride)

    def store(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        self._call("tilestored64", ir.Constant(I8, tile), self._pointer(address), stride)

    def multiply_add(self, sums: int, w: int, x: int) -> None:
        self._call("tdpbf16ps", *(ir.Constant(I8, tile) for tile in (sums, w, x)))


configure_tiles = void_intrinsic((), lambda e: Tiles(e).configure(ROWS))  # all of ROWS rows of LINE bytes
release_tiles = void_intrinsic((), lambda e: Tiles(e).release())
