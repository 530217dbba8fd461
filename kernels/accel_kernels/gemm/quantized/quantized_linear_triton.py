"""Chooses the kernel of `quantized_linear`, and its shape: by rows, format and card."""

import torch

from accel_kernels.device import Feature, has, multiprocessors, on_tensor_cores
from accel_kernels.gemm.blocks.block_linear_triton import BLOCK_DISPATCH
from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.fused_linear import MOST_ROWS, apply_norm
from accel_kernels.gemm.fused_linear_triton import Shape
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile, gemv_mma, gemv_tile, takes
from accel_kernels.gemm.quantized.gemv_mma_triton import refusal as gemv_refusal
from accel_kernels.gemm.quantized.gemv_triton import quantized_gemv
from accel_kernels.gemm.quantized.many_rows_triton import ManyRowsTile, many_rows, many_rows_tile
from accel_kernels.gemm.quantized.quantized_linear import in_passes
from accel_kernels.gemm.quantized.skinny_mma_triton import Tile, columns, skinny_mma
from accel_kernels.gemm.quantized.skinny_triton import quantized_skinny
from accel_kernels.gemm.quantized.skinny_wgmma_triton import refusal, skinny_wgmma
from accel_kernels.gemm.quantized.tile_triton import BROAD_TILES, WgmmaTile, wgmma_tile
from accel_kernels.gemm.quantized_weight import MOST_BLOCK_ROWS, Quantized
from accel_kernels.sizes import power_of_two

FEW_WEIGHTS = 1 << 24  # of a product that is over before a second pass pays
SMALL = 5_000_000  # numbers of one weight; measured at one to four million (`benchmarks products --study one-row`)
SHORT = 1024  # columns of a gated product, up to which 8 rows were faster by warpgroups (896 and 1024; 2048 were not)


def quantized_linear(x, weight, bias=None, *, norm=None, shape=None, **after):
    """Same arguments and result as the reference; up to `most_rows` rows of the format. shape: the tile of a kernel in
    DISPATCH; without one the first that takes the call runs.
    """
    y = torch.empty((*x.shape[:-1], weight.shape[0]), device=x.device, dtype=x.dtype)
    epilogue = Epilogue(bias, **after)
    for kind, choose, run in BLOCK_DISPATCH if isinstance(weight, BlockWeight) else DISPATCH:
        tile = choose(x, weight, norm, epilogue.up) if shape is None else shape if isinstance(shape, kind) else None
        if tile is not None:
            if kind is ManyRowsTile and isinstance(weight, BlockWeight) and x.numel() > MOST_BLOCK_ROWS * x.shape[-1]:
                return in_passes(x, weight, bias, norm=norm, **after)
            if isinstance(weight, Quantized) and weight.order is not None and kind not in IN_ORDER:
                x = (x if norm is None else apply_norm(x, norm)).index_select(-1, weight.order)
                norm, weight = None, weight._replace(order=None)
            run(x, weight, norm, epilogue, tile, y)
            return y
    raise ValueError(f"{shape!r} is a tile of no kernel")


def by_gemv_mma(x, weight, norm, up) -> GemvTile | None:
    """The tile for `gemv_mma`, or None where it cannot take these or is slower; as measured, H200."""
    n, k = weight.shape
    ordered = weight.order is not None  # other kernels of one row need x put in order before
    if not has(x.device, Feature.WIDE_PRODUCTS) or weight.group < 64 or gemv_refusal(x, weight, up) is not None:
        return None
    if not ordered and (n * k <= SMALL or not (norm is None or takes(norm, x.dtype))):
        return None
    return gemv_tile(n, k, weight.group, up is not None, multiprocessors(x.device), ordered)


def by_warpgroups(x, weight, norm, up) -> WgmmaTile | None:
    """The tile for `skinny_wgmma`, or None where it cannot take these or is slower for all its pass before the product;
    as measured, H200.
    """
    n, k = weight.shape
    rows, format = x.numel() // k, weight.format.name
    if not has(x.device, Feature.WARPGROUPS) or rows == 1 or refusal(x, weight, up) is not None:
        return None
    if not (rows > 8 or format == "int4" or n * k > FEW_WEIGHTS or (up is not None and k <= SHORT)):
        return None
    return BROAD_TILES[format] if rows > MOST_ROWS else wgmma_tile(rows, format, up is not None)


def by_many_rows(x, weight, norm, up) -> ManyRowsTile | None:
    """The tile for `many_rows`; None for few rows."""
    n, k = weight.shape
    rows = x.numel() // k
    return many_rows_tile(rows, n, up is not None, x.device, x.itemsize) if rows > MOST_ROWS else None


def by_registers(x, weight, norm, up) -> Tile | None:
    """The tile for `skinny_mma`, or None where it cannot take these."""
    n, k = weight.shape
    rows, format = x.numel() // k, weight.format.name
    if not has(x.device, Feature.WIDE_PRODUCTS) or rows == 1:
        return None
    if weight.scales.dtype != x.dtype:  # it multiplies by their bits
        return None
    if k % columns(format, rows) or any(t is not None and t.data_ptr() % 16 for t in (x, weight.data, up and up.data)):
        return None
    return mma_tile(rows, n, format, up is not None, x.device)


def by_any(x, weight, norm, up) -> Shape:
    """The shape for `quantized_gemv` or `quantized_skinny`, which take all that is left."""
    n, k = weight.shape
    rows, format = x.numel() // k, weight.format.name
    if rows == 1:
        return quantized_gemv_shape(n, k, format, up is not None)
    shape = quantized_skinny_shape(rows, n, format, up is not None)
    return shape if on_tensor_cores(x) else shape._replace(rows=16, columns=32)


def one_row_or_few(x, weight, norm, epilogue, shape, y):
    """`quantized_gemv` for one row, `quantized_skinny` for 2 to 64."""
    run = quantized_gemv if x.numel() == weight.shape[1] else quantized_skinny
    run(x, weight, norm, epilogue, shape, y)


IN_ORDER = (GemvTile, WgmmaTile)  # whose kernels take `Quantized.order`

# Which kernel serves which rows: the kind of its tile, what chooses one or gives None, what launches it; the first that
# takes a call runs. Each file says what its kernel takes.
DISPATCH = (
    (GemvTile, by_gemv_mma, gemv_mma),
    (WgmmaTile, by_warpgroups, skinny_wgmma),
    (ManyRowsTile, by_many_rows, many_rows),
    (Tile, by_registers, skinny_mma),
    (Shape, by_any, one_row_or_few),
)


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


def quantized_skinny_shape(rows: int, n: int, format: str, gate: bool) -> Shape:
    """A program of 32 rows reads x as often as 64 do, twice in all; worth it only while x is small."""
    wide = max(16, power_of_two(rows))
    block = 64 if wide > 16 and not gate and n // 64 >= 60 else 32 if n // 32 >= 60 else 16
    return Shape(block, 64 if wide > 32 else 128, 4, 3)
