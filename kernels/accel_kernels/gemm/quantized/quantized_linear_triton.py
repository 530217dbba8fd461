"""Launches the kernels of `quantized_linear`: which one, and in what shape."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import AMPERE, HOPPER, is_hopper, multiprocessors, programmatic, reaches, upcast
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.fused_linear import MOST_ROWS, apply_norm
from accel_kernels.gemm.fused_linear_triton import Shape
from accel_kernels.gemm.quantized.gemv_mma_triton import (
    GemvTile,
    gemv_mma,
    gemv_tile,
    takes,
)
from accel_kernels.gemm.quantized.gemv_mma_triton import refusal as gemv_refusal
from accel_kernels.gemm.quantized.gemv_triton import quantized_gemv_kernel
from accel_kernels.gemm.quantized.many_rows_triton import ManyRowsTile, many_rows, many_rows_tile
from accel_kernels.gemm.quantized.operands.packed_weight import PackedWeight
from accel_kernels.gemm.quantized.operands.unpacking_triton import unpack_mode
from accel_kernels.gemm.quantized.skinny_mma_triton import Tile, columns, skinny_mma
from accel_kernels.gemm.quantized.skinny_triton import quantized_skinny_kernel
from accel_kernels.gemm.quantized.skinny_wgmma_triton import refusal, skinny_wgmma
from accel_kernels.gemm.quantized.tile_triton import BROAD_TILES, WgmmaTile, wgmma_tile
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch

NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FEW_WEIGHTS = 1 << 24  # of a product that is over before a second pass pays
SMALL = 5_000_000  # numbers of one weight; measured at one to four million (`benchmarks products --study one-row`)
SHORT = 1024  # columns of a gated product, up to which 8 rows were faster by warpgroups (896 and 1024; 2048 were not)
FORMATS = {torch.int8: "int8", torch.int32: "int4", torch.float8_e4m3fn: "fp8"}


def quantized_linear(x, weight, bias=None, *, norm=None, shape=None, **after):
    """Same arguments and result as the reference; up to MOST_QUANTIZED_ROWS rows. shape: a Shape, a Tile, a WgmmaTile,
    a GemvTile or a ManyRowsTile, else chosen.

    One row: `stages` of the shape is the number of programs that a multiprocessor is expected to run at once.
    """
    n, k = weight.shape
    rows = x.numel() // k
    y = torch.empty((*x.shape[:-1], n), device=x.device, dtype=x.dtype)
    epilogue = Epilogue(bias, **after)
    up, gate = epilogue.up, epilogue.up is not None
    format = FORMATS[weight.data.dtype]
    diagonal = shape if isinstance(shape, GemvTile) else by_gemv_mma(x, weight, norm, up) if shape is None else None
    if diagonal is not None:
        gemv_mma(x, weight, norm, epilogue, diagonal, y)
        return y
    if isinstance(shape, WgmmaTile) or (shape is None and by_warpgroups(x, weight, up, format)):
        shape = shape or (BROAD_TILES[format] if rows > MOST_ROWS else wgmma_tile(rows, format, gate))
        skinny_wgmma(x, weight, norm, epilogue, format, shape, y)
        return y
    if isinstance(shape, ManyRowsTile) or (shape is None and rows > MOST_ROWS):
        tile = shape or many_rows_tile(rows, n, gate, multiprocessors(x.device))
        many_rows(x, weight, norm, epilogue, format, tile, y)
        return y
    if isinstance(shape, Tile) or (shape is None and in_registers(x, weight, up, format)):
        tile = shape or mma_tile(rows, n, format, gate, x.device)
        skinny_mma(x, weight, norm, epilogue, format, tile, y)
        return y
    weights = PackedWeight.of(weight), PackedWeight.of(up)
    flags = {
        "K": k, "GROUPS": weight.scales.shape[1], "FORMAT": format, "UNPACK_MODE": unpack_mode(x.dtype),
        **epilogue.flags,
    }  # fmt: skip
    if rows == 1:
        shape = shape or quantized_gemv_shape(n, k, format, gate)
        before, kind = kernel_arguments(norm)
        nw, nb, *_ = before
        packed = all(t is None or (t.dtype == x.dtype and t.data_ptr() % 8 == 0) for t in (nw, nb))
        if packed:
            nw, nb = (None if t is None else t.view(torch.int64) for t in (nw, nb))
            before = before._replace(weight=nw, bias=nb)
        dtype = NAMES[x.dtype]
        block_q = power_of_two(shape.columns * weight.bits // 128)
        launch(
            quantized_gemv_kernel, (programs(n, k, shape, x.device),),
            x.view(-1).view(torch.int64), *weights, before, epilogue.arguments, y, n, 1 << 16,
            **flags, DTYPE=dtype, NORM_DTYPE=dtype if packed else None, NORM=kind, BLOCK_N=shape.rows, BLOCK_Q=block_q,
            num_warps=shape.warps, **programmatic(x.device),
        )  # fmt: skip
        return y
    if norm is not None:  # a pass of its own: inside, it would stand between the weights and the tensor cores
        x = apply_norm(x, norm)
    shape = shape or quantized_skinny_shape(rows, n, format, gate)
    columns = min(shape.columns, weight.group & -weight.group) if weight.scales.shape[1] > 1 else shape.columns
    pdl = programmatic(x.device, rows > 16)  # as measured
    launch(
        quantized_skinny_kernel, (triton.cdiv(n, shape.rows),),
        x, *weights, epilogue.arguments, y, rows, n,
        **flags, SHARES=shape.warps, BLOCK_M=max(16, power_of_two(rows)), BLOCK_N=shape.rows, BLOCK_K=columns,
        UPCAST=upcast(x.dtype), num_warps=shape.warps,
        num_stages=shape.stages, **pdl,
    )  # fmt: skip
    return y


def by_warpgroups(x, weight, up, format: str) -> bool:
    """Whether `skinny_wgmma` takes these, and is faster for all its pass before the product; as measured, H200."""
    n, k = weight.shape
    rows = x.numel() // k
    if not is_hopper(x.device) or rows == 1 or refusal(x, weight, up) is not None:
        return False
    return rows > 8 or format == "int4" or n * k > FEW_WEIGHTS or (up is not None and k <= SHORT)


def by_gemv_mma(x, weight, norm, up) -> GemvTile | None:
    """The tile for `gemv_mma`, or None where it cannot take these or is slower; as measured, H200."""
    n, k = weight.shape
    if not reaches(x.device, HOPPER) or n * k <= SMALL or weight.group < 64:
        return None
    if gemv_refusal(x, weight, up) is not None or not (norm is None or takes(norm, x.dtype)):
        return None
    return gemv_tile(n, k, weight.group, up is not None, multiprocessors(x.device))


def in_registers(x, weight, up, format: str) -> bool:
    """Whether `skinny_mma` takes these, and is faster."""
    n, k = weight.shape
    rows = x.numel() // k
    if not reaches(x.device, AMPERE) or rows == 1:
        return False
    if weight.scales.dtype != x.dtype:  # it multiplies by their bits
        return False
    aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (x, weight.data, up and up.data))
    return k % columns(format, rows) == 0 and aligned


def mma_tile(rows: int, n: int, format: str, gate: bool, device: torch.device) -> Tile:
    """As measured on an H200. Narrow weights have many warps to a program, since they have few programs."""
    narrow, int4 = n < 40 * multiprocessors(device), format == "int4"
    if rows > 32:
        return Tile(16 if gate and int4 else 32, 8 if narrow else 4, 1)
    if rows > 16:
        if narrow:
            return Tile(16, 8, 1 if int4 else 2)
        return Tile(32 if gate and int4 else 16, 4, 1 if gate else 2)
    if narrow:
        return Tile(32 if int4 else 16, 8, 2)
    if gate:
        return Tile(32, 4, 1 if int4 else 2)
    return Tile(16, 4, 4) if int4 else Tile(32, 8, 1)


def quantized_gemv_shape(n: int, k: int, format: str, gate: bool) -> Shape:
    """Whole rows where x fits the registers, else columns that divide them.

    By counting instructions: a thread with fewer weights of a row spends more of them on adding up and writing it.
    """
    columns = power_of_two(k) if k <= 4096 else 1024 if k % 1024 == 0 and k % 2048 else 2048
    rows = 2 if gate and format != "int4" else 4
    while rows > 1 and n // rows < 256:
        rows //= 2
    quads = columns // (32 if format == "int4" else 16)
    if n * k <= SMALL and columns >= k:  # many short programs, as measured
        return Shape(min(rows, 2), columns, max(1, min(4, quads // 32)), 16)
    if format == "int4":
        return Shape(rows if columns >= k else min(rows, 2), columns, max(1, min(4, quads // 32)), 4)
    return Shape(rows, columns, max(1, min(4, quads // 32)), 5 if gate else 4)


def programs(n: int, k: int, shape: Shape, device: torch.device) -> int:
    """One for each block of rows; where blocks have whole rows, as many as run at once, with equal work."""
    blocks = triton.cdiv(n, shape.rows)
    if shape.columns < k:
        return blocks
    room = shape.stages * multiprocessors(device)
    return triton.cdiv(blocks, triton.cdiv(blocks, room))


def quantized_skinny_shape(rows: int, n: int, format: str, gate: bool) -> Shape:
    """A program of 32 rows reads x as often as 64 do, twice in all; worth it only while x is small."""
    wide = max(16, power_of_two(rows))
    block = 64 if wide > 16 and not gate and n // 64 >= 60 else 32 if n // 32 >= 60 else 16
    return Shape(block, 64 if wide > 32 else 128, 4, 3)
