"""Integer matrix product of many rows with everything that follows it.

Tiles come through the tensor memory accelerator where there is one; both factors lie along K, the one way in which
tensor cores multiply bytes. Programs are persistent, and rows of tiles are grouped so that neighbors share their
weights in the L2 cache. Outlier columns are added by a product in 16 bits, with the weight's bytes gathered by column.
Where all columns are outliers, nothing is multiplied as integers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from accel_kernels.device import Feature, card, has, interpreted, multiprocessors, programmatic
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.epilogue_triton import epilogue, store_sum, tile_place
from accel_kernels.gemm.hopper.hopper_gemm import hopper_gemm
from accel_kernels.gemm.quantize_rows import QuantizedRows
from accel_kernels.gemm.quantized_weight import PackedWeight, Quantized
from accel_kernels.gemm.tile_model import held_stages, reads_registers, stage_bytes, tile_cost
from accel_kernels.sizes import cdiv
from accel_kernels.warmup import launch


class Shape(NamedTuple):
    """A tile's rows, columns and steps of K, and launch shape."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8  # rows of tiles that walk along the columns together


SHAPES = tuple(
    Shape(*sizes)
    for sizes in (
        (64, 64, 128, 4, 4), (128, 64, 128, 4, 3), (64, 128, 128, 4, 4), (128, 128, 128, 4, 3), (128, 128, 128, 8, 4)
    )
)  # fmt: skip
# Where operands are read from registers: two programs of four warps, and three stages of each, have room in 99 KB.
NARROW_SHAPES = tuple(Shape(rows, columns, 64, 4, 4) for rows in (64, 128) for columns in (64, 128))
MOST_SUMS = 4096  # to a warp: 128 registers of a thread
LONG = 8192  # inputs from which on loading and multiplying outweigh all that follows them
OUTLIERS = tl.constexpr(16)  # outlier columns to a step, the least that tensor cores take


class OutlierArguments(NamedTuple):
    """Outliers of rows as kernels take them, all None where there are none. found: how many columns, of `capacity`."""

    taken: torch.Tensor | None
    columns: torch.Tensor | None
    found: torch.Tensor | None


@triton.jit
def _multiplied(taken, numbers, y, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(taken.to(tl.float32), numbers.to(tl.float32), y, input_precision="ieee")
    else:
        return tl.dot(taken, numbers.to(taken.dtype), y)


@triton.jit
def _add_outliers(y, outliers, count, w_ptr, m_idx, n_idx, rows, n, depth, capacity, UPCAST: tl.constexpr):
    """y plus the product of outliers and the weight's whole numbers in their columns, which 16 bits hold exactly."""
    BLOCK_K: tl.constexpr = 64
    every = count == depth
    for start in range(0, tl.where(every, depth, 0), BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inside = at < depth
        place = m_idx.to(tl.int64)[:, None] * depth + at[None, :]
        taken = tl.load(outliers.taken + place, mask=(m_idx < rows)[:, None] & inside[None, :], other=0.0)
        place = n_idx.to(tl.int64)[None, :] * depth + at[:, None]
        numbers = tl.load(w_ptr + place, mask=(n_idx < n)[None, :] & inside[:, None], other=0)
        y = _multiplied(taken, numbers, y, UPCAST)
    for start in range(0, tl.where(every, 0, count), OUTLIERS):
        at = start + tl.arange(0, OUTLIERS)
        meant = at < count
        column = tl.load(outliers.columns + at, mask=meant, other=0)
        place = m_idx.to(tl.int64)[:, None] * capacity + at[None, :]
        taken = tl.load(outliers.taken + place, mask=(m_idx < rows)[:, None] & meant[None, :], other=0.0)
        place = n_idx.to(tl.int64)[None, :] * depth + column[:, None]
        numbers = tl.load(w_ptr + place, mask=(n_idx < n)[None, :] & meant[:, None], other=0)
        y = _multiplied(taken, numbers, y, UPCAST)
    return y


@triton.jit
def _finish(y, other, weight, up, outliers, count, after, y_ptr, m_idx, n_idx, rows, n, depth, capacity,
            GATE: tl.constexpr, ACTIVATION: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Outliers and all that follows the sums of a block, and its store."""
    if outliers.taken is not None:
        y = _add_outliers(y, outliers, count, weight.words, m_idx, n_idx, rows, n, depth, capacity, UPCAST)
        if GATE:
            other = _add_outliers(other, outliers, count, up.words, m_idx, n_idx, rows, n, depth, capacity, UPCAST)
    n_row, n_mask = n_idx[None, :], (n_idx < n)[None, :]
    y = epilogue(y, other, n_row, n_mask, weight.scales, up.scales, after, GATE, ACTIVATION)
    place, mask = m_idx.to(tl.int64)[:, None] * n + n_row, (m_idx < rows)[:, None] & n_mask
    store_sum(y, place, mask, after, y_ptr)


@triton.jit
def _tile(source, row, k, rows, depth, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """Some rows and columns of numbers that lie by row: source is their descriptor, or without TMA a pointer."""
    if TMA:
        return source.load([row, k])
    else:
        at = k + tl.arange(0, BLOCK_K)
        place = tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)[:, None] * depth + at[None, :]
        return tl.load(source + place, mask=(at < depth)[None, :], other=0)


@triton.jit(do_not_specialize=("rows", "capacity"))
def int8_linear_kernel(
    x_source, w_source, u_source, row_scales_ptr, weight, up, outliers, after, y_ptr, rows, n, depth, capacity,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    count = 0
    if outliers.taken is not None:
        count = tl.load(outliers.found)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = tile_place(tile, tiles_m, tiles_n, GROUP)
        m, n_first = row * BLOCK_M, column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        if GATE:
            acc_u = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        steps = depth
        if outliers.taken is not None:
            steps = tl.where(count == depth, 0, depth)
        for k in range(0, steps, BLOCK_K):
            x = _tile(x_source, m, k, rows, depth, BLOCK_M, BLOCK_K, TMA)
            acc = tl.dot(x, _tile(w_source, n_first, k, n, depth, BLOCK_N, BLOCK_K, TMA).T, acc, out_dtype=tl.int32)
            if GATE:
                u = _tile(u_source, n_first, k, n, depth, BLOCK_N, BLOCK_K, TMA)
                acc_u = tl.dot(x, u.T, acc_u, out_dtype=tl.int32)
        m_idx, n_idx = m + tl.arange(0, BLOCK_M), n_first + tl.arange(0, BLOCK_N)
        row_scale = tl.load(row_scales_ptr + m_idx, mask=m_idx < rows, other=0.0)[:, None]
        y = acc.to(tl.float32) * row_scale
        other = y
        if GATE:
            other = acc_u.to(tl.float32) * row_scale
        _finish(y, other, weight, up, outliers, count, after, y_ptr, m_idx, n_idx, rows, n, depth, capacity, GATE,
                ACTIVATION, UPCAST)  # fmt: skip


@triton.jit(do_not_specialize=("rows", "capacity"))
def after_product_kernel(
    acc_ptr, acc_u_ptr, row_scales_ptr, weight, up, outliers, after, y_ptr, rows, n, depth, capacity, stride,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    m_idx = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_idx = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m_idx < rows)[:, None] & (n_idx < n)[None, :]
    place = m_idx.to(tl.int64)[:, None] * stride + n_idx[None, :]
    row_scale = tl.load(row_scales_ptr + m_idx, mask=m_idx < rows, other=0.0)[:, None]
    y = tl.load(acc_ptr + place, mask=mask, other=0).to(tl.float32) * row_scale
    other = y
    if GATE:
        other = tl.load(acc_u_ptr + place, mask=mask, other=0).to(tl.float32) * row_scale
    count = 0
    if outliers.taken is not None:
        count = tl.load(outliers.found)
    _finish(y, other, weight, up, outliers, count, after, y_ptr, m_idx, n_idx, rows, n, depth, capacity, GATE,
            ACTIVATION, UPCAST)  # fmt: skip


def int8_linear(x, weight, bias=None, *, shape=None, **after):
    """Same arguments and result as the reference; K a multiple of 16. shape: a Shape for the tiles of this file, else
    tile and kernel are chosen by size.
    """
    n, depth = weight.data.shape
    epilogue = Epilogue(bias, **after)
    if shape is None:
        gate, device = epilogue.up is not None, x.data.device
        sizes = x.data.numel() // depth, n, depth, gate
        if specialized(*sizes, multiprocessors(device)) and hopper_gemm.supports(x, weight, bias, **after) is None:
            return hopper_gemm.triton(x, weight, bias, **after)
        shape = chosen(*sizes, device)
    return by_tiles(x, weight, epilogue, shape)


def by_tiles(x, weight, epilogue, shape):
    """The product in Triton's own tensor core instructions; outlier columns too."""
    n, depth = weight.data.shape
    up = epilogue.up
    rows, gate = x.data.numel() // depth, up is not None
    y = torch.empty((*x.data.shape[:-1], n), device=x.data.device, dtype=x.dtype)
    tiles = cdiv(rows, shape.rows) * cdiv(n, shape.columns)
    known = card(y.device)
    held = stage_bytes(shape, 1, 1, gate) * held_stages(shape.stages, known)
    programs = known.processors * max(1, known.shared_memory // held)
    tma, numbers = has(y.device, Feature.TMA), (x.data.view(rows, depth), weight.data, (up or weight).data)
    sources = [
        TensorDescriptor.from_tensor(data.detach(), [height, shape.depth]) if tma else data
        for data, height in zip(numbers, (shape.rows, shape.columns, shape.columns), strict=True)
    ]
    outliers, capacity = _outliers(x)
    launch(
        int8_linear_kernel, (min(tiles, programs),),
        *sources, x.scales, *_packed(weight, up), outliers, epilogue.arguments, y, rows, n, depth, capacity,
        **epilogue.flags, BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_K=shape.depth, GROUP=shape.group,
        TMA=tma, UPCAST=interpreted(), num_warps=shape.warps, num_stages=shape.stages, **programmatic(y.device),
    )  # fmt: skip
    return y


def after_product(x, weight, epilogue, sums):
    """What follows the integer sums (M, N), one or with a gate two; outliers included."""
    n, depth = weight.data.shape
    up = epilogue.up
    rows = x.data.numel() // depth
    y = torch.empty((*x.data.shape[:-1], n), device=x.data.device, dtype=x.dtype)
    (outliers, capacity), height, width = _outliers(x), 32, 128
    launch(
        after_product_kernel, (cdiv(rows, height), cdiv(n, width)),
        sums[0], sums[-1], x.scales, *_packed(weight, up), outliers, epilogue.arguments, y, rows, n, depth, capacity,
        sums[0].stride(0), **epilogue.flags, BLOCK_M=height, BLOCK_N=width, UPCAST=interpreted(),
    )  # fmt: skip
    return y


def _packed(weight: Quantized, up: Quantized | None) -> list[PackedWeight]:
    """The weight and the gate's, or the weight again where there is no gate; by number, not by word."""
    return [PackedWeight(one.data, one.scales) for one in (weight, up or weight)]


def _outliers(x: QuantizedRows) -> tuple[OutlierArguments, int]:
    """With how many columns there is room for."""
    return OutlierArguments(x.outliers, x.columns, x.count), 0 if x.columns is None else x.columns.numel()


def specialized(rows: int, n: int, depth: int, gate: bool, processors: int) -> bool:
    """Whether `hopper_gemm` is the faster one, where it can run: its tiles are large (nvidia-h200-hopper-gemm.json)."""
    tiles = -(-rows // 128) * -(-n * (2 if gate else 1) // 128)
    return tiles > processors or (depth >= LONG and 2 * tiles > processors)


def chosen(rows: int, n: int, depth: int, gate: bool, device: torch.device) -> Shape:
    """The tile for a product of these sizes, by counting, which finds what was measured on an H200 with the shapes of
    Llama-3.1-8B, 128 to 8192 rows (`python -m benchmarks products --study eight-bits`).
    """
    if interpreted():
        return Shape(32, 32, 128, 4, 2)
    known = card(device)
    room, beside = known.shared_memory - 32 * 1024, reads_registers(known)
    fitting = [
        shape._replace(stages=max(2, min(shape.stages, beside + room // stage_bytes(shape, 1, 1, gate))))
        for shape in (NARROW_SHAPES if reads_registers(known) else SHAPES)
        if shape.rows * shape.columns * (1 + gate) <= MOST_SUMS * shape.warps
    ]
    return min(fitting, key=lambda shape: tile_cost(shape, rows, n, gate, 1, 1, known))
