"""Other tiles than those that kernels of products choose: few enough to compile within a minute."""

from itertools import starmap
from typing import NamedTuple

from accel_kernels.gemm.fused_linear_triton import Shape
from accel_kernels.gemm.int8_linear_triton import Shape as RowsShape
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile, parts_of, steps_of
from accel_kernels.gemm.quantized.many_rows_triton import ManyRowsTile
from accel_kernels.gemm.quantized.quantized_linear_triton import quantized_gemv_shape
from accel_kernels.gemm.quantized.skinny_mma_triton import Tile
from accel_kernels.gemm.quantized.tile_triton import WgmmaTile

from benchmarks.study import TOY

# Rows and columns of the weight, warps, stages.
FULL = ((64, 128, 4, 5), (64, 128, 4, 3), (64, 64, 4, 8), (64, 256, 4, 2), (32, 128, 4, 8), (32, 256, 4, 4),
        (32, 256, 8, 4), (16, 256, 4, 6), (16, 512, 4, 3))  # fmt: skip
FULL_GATED = ((64, 128, 4, 4), (64, 128, 4, 3), (64, 64, 4, 5), (128, 64, 8, 4), (32, 128, 4, 4), (32, 256, 4, 2),
              (16, 256, 4, 3))  # fmt: skip
# Of one row in fewer bits: rows of the weight to a program, and programs to a multiprocessor at once.
GEMV = ((1, 8), (1, 16), (2, 4), (2, 6), (2, 8), (2, 16), (4, 4), (4, 8))
SPANS = ((4, 4, 4), (4, 3, 4), (8, 4, 2), (8, 3, 2), (16, 4, 1), (16, 6, 1))
# From 65 rows on. Of others the compiler runs out of registers, and makes every product wait for the one before.
MANY = ((256, 8, 3, 2, 1, 128), (128, 8, 4, 3, 1, 128), (128, 8, 6, 2, 1, 128), (128, 8, 4, 2, 1, 256),
        (64, 4, 4, 2, 2, 128), (256, 8, 4, 3, 1, 64), (128, 8, 6, 4, 1, 64), (64, 4, 6, 3, 2, 64))  # fmt: skip
MANY_INT4 = ((128, 8, 4, 2, 1, 128), (256, 8, 3, 2, 1, 64), (128, 8, 5, 3, 1, 64), (64, 4, 4, 2, 2, 64))
ANYWHERE = ((128, 128, 64, 8, 4), (128, 64, 64, 8, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 128, 128, 8, 3))
EIGHT = ((128, 256, 128, 8, 3), (128, 256, 128, 8, 4), (128, 256, 128, 8, 4, 16), (128, 256, 64, 8, 6),
         (256, 128, 128, 8, 4), (128, 128, 128, 8, 4), (128, 128, 128, 8, 3), (128, 128, 128, 4, 3),
         (64, 256, 128, 4, 4), (64, 128, 128, 4, 4), (64, 64, 128, 4, 4))  # fmt: skip
EIGHT_GATED = ((128, 128, 128, 8, 3), (128, 128, 128, 8, 4), (128, 128, 128, 8, 4, 16), (256, 64, 128, 8, 4),
               (128, 64, 128, 8, 3), (128, 64, 128, 4, 3), (64, 64, 128, 4, 4))  # fmt: skip
TOYS = {"bf16": [Shape(16, 32, 4, 2)], "int8 x int8": [RowsShape(32, 32, 64, 4, 2)]}
GROUP = 128  # columns to a scale of 4 bits


def named(tile: NamedTuple) -> str:
    return f"{type(tile).__name__} {' '.join(map(str, tile))}"


def tiles_of(format: str, rows: int, gate: bool, n: int, k: int) -> list[NamedTuple]:
    """format: of the weight, or "int8 x int8"."""
    if TOY:
        return TOYS.get(format, [ManyRowsTile(64, 32, 64, 4, 2)] if rows > 64 else [])
    if format == "bf16":
        return list(starmap(Shape, (FULL_GATED if gate else FULL) if 1 < rows <= 64 else ()))
    if format == "int8 x int8":
        return list(starmap(RowsShape, EIGHT_GATED if gate else EIGHT))
    int4 = format.startswith("int4")
    if rows > 64:
        return [*starmap(WgmmaTile, MANY_INT4 if int4 else MANY), *starmap(ManyRowsTile, ANYWHERE)]
    kind = "int4" if int4 else format
    if rows > 1:
        return [*_registers(int4, rows, gate), *_warpgroups(int4, rows)]
    usual = quantized_gemv_shape(n, k, kind, gate)
    found = [usual._replace(rows=count, warps=warps, stages=programs)
             for count, programs in GEMV for warps in {usual.warps, max(1, usual.warps // 2)}]  # fmt: skip
    spans = [GemvTile(*one) for one in SPANS] if int4 else []
    return [*found, *(one for one in spans if steps_of(k, one.warps) * parts_of(k, k // GROUP) <= 8)]


def _registers(int4: bool, rows: int, gate: bool) -> list[Tile]:
    if rows > 16:
        found = [(32, 4, 1), (32, 8, 1), (16, 8, 2), (16, 4, 2), (64, 4, 1), (16, 8, 1)]
    elif gate:
        found = [(16, 4, 1), (16, 4, 2), (16, 4, 3), (16, 8, 1), (16, 8, 2), (32, 4, 1), (32, 4, 2)]
    else:
        found = [(16, 8, 2), (16, 8, 4), (16, 4, 4), (32, 4, 1), (32, 4, 2), (32, 8, 1), (32, 8, 2), (16, 16, 1)]
    return list(starmap(Tile, found))


def _warpgroups(int4: bool, rows: int) -> list[WgmmaTile]:
    """One or two programs to a multiprocessor; x in shared memory takes 4 bits twice what it takes 8."""
    if int4:
        found = [(128, 8, 3, 2, 1), (64, 4, 4, 2, 2)] if rows > 32 else [(128, 8, 4, 2, 2), (64, 4, 5, 2, 4)]
    elif rows > 16:
        found = [(128, 8, 8, 4, 1), (64, 4, 6, 3, 2) if rows > 32 else (64, 4, 5, 3, 2)]
    else:
        found = [(128, 8, 3, 2, 3), (256, 8, 4, 4, 1)]
    return list(starmap(WgmmaTile, found))
