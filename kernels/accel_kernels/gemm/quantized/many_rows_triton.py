"""Many rows times a weight of fewer bits, unpacked in registers: a tile of each by the tensor cores.

Each program multiplies a block of the weight's rows with a block of rows of x. Programs that have the same rows of the
weight are neighbors: memory gives them once, the L2 cache again. Scales by row multiply the sums; scales by group the
numbers, rounded once, as a weight that is written out.

Serves 65 to 512 rows in 16 bits where `skinny_wgmma_triton` does not: GPUs without products of warpgroups,
scales of another dtype than the rows', columns that do not divide.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from accel_kernels.device import card, interpreted, upcast
from accel_kernels.gemm.epilogue_triton import loaded, store_rows
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.operands.unpacking_triton import factor, per_word, unpack_mode
from accel_kernels.gemm.quantized_weight import PackedWeight
from accel_kernels.gemm.tile_model import reads_registers, tile_cost
from accel_kernels.warmup import launch


@triton.jit
def _left(weight, row, word, inside, words, FORMAT: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr,
          WORDS: tl.constexpr, PER: tl.constexpr, UNPACK_MODE: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Words (N, W) of PER numbers each as their values (N, W * PER), without the scale of a whole row."""
    numbers = factor(words[None, :, :], FORMAT, DTYPE, UNPACK_MODE).reshape(words.shape[0], words.shape[1], PER)
    if weight.zeros is not None or GROUPS > 1:
        # One for each word, though words share them: a column of them takes the compiler a third more registers.
        group = row[:, None] * GROUPS + (word // (WORDS // GROUPS))[None, :]
        values = numbers.to(tl.float32)
        if weight.zeros is not None:
            values -= tl.load(weight.zeros + group, mask=inside[None, :], other=0).to(tl.float32)[:, :, None]
        if GROUPS > 1:
            values *= tl.load(weight.scales + group, mask=inside[None, :], other=0.0).to(tl.float32)[:, :, None]
        numbers = values.to(DTYPE)
    if UPCAST:
        numbers = numbers.to(tl.float32)
    return numbers.reshape(words.shape[0], words.shape[1] * PER)


@triton.jit(do_not_specialize=("m", "blocks_m"))
def quantized_many_rows_kernel(
    x_ptr, weight, up, after, y_ptr, m, n, blocks_m, K: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UNPACK_MODE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = per_word(FORMAT)
    BLOCK_W: tl.constexpr = BLOCK_K // PER
    WORDS: tl.constexpr = K // PER
    EVEN: tl.constexpr = K % BLOCK_K == 0
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    n_idx = tl.program_id(0) // blocks_m * BLOCK_N + tl.arange(0, BLOCK_N)
    m_idx = tl.program_id(0) % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k_idx, w_idx = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    n_mask, m_mask = n_idx < n, m_idx < m
    row = tl.minimum(n_idx, n - 1).to(tl.int64)
    x_row = tl.minimum(m_idx, m - 1).to(tl.int64)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_u = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        at, word = start + k_idx, start // PER + w_idx
        inside = word < WORDS
        x_place, w_place = x_ptr + x_row[None, :] * K + at[:, None], row[:, None] * WORDS + word[None, :]
        x = loaded(x_place, (at < K)[:, None], EVEN, "")
        w = loaded(weight.words + w_place, inside[None, :], EVEN, "")
        if UPCAST:
            x = x.to(tl.float32)
        left = _left(weight, row, word, inside, w, FORMAT, DTYPE, GROUPS, WORDS, PER, UNPACK_MODE, UPCAST)
        acc = tl.dot(left, x, acc, input_precision="ieee")
        if GATE:
            u = loaded(up.words + w_place, inside[None, :], EVEN, "")
            left = _left(up, row, word, inside, u, FORMAT, DTYPE, GROUPS, WORDS, PER, UNPACK_MODE, UPCAST)
            acc_u = tl.dot(left, x, acc_u, input_precision="ieee")
    store_rows(acc, acc_u, row, n_idx, n_mask, m_idx, m_mask, n, weight, up, after, y_ptr, GROUPS > 1, GATE, ACTIVATION)


class ManyRowsTile(NamedTuple):
    """Rows of x and of the weight, and columns, to a step of a program; warps, and stages of the pipeline."""

    x_rows: int
    rows: int
    columns: int
    warps: int
    stages: int


TILES = tuple(
    ManyRowsTile(*sizes)
    for sizes in (
        (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 128, 8, 3), (128, 64, 64, 8, 4),
        (64, 64, 64, 4, 4), (64, 64, 64, 4, 2),
    )
)  # fmt: skip


def many_rows_tile(rows: int, n: int, gate: bool, device: torch.device, itemsize: int = 2) -> ManyRowsTile:
    """The one that takes the least time by counting, of those whose sums take 64 registers of a thread at most.

    itemsize: bytes of a number of x.
    """
    if interpreted():
        return ManyRowsTile(64, 32, 64, 4, 2)
    known = card(device)
    sizes = rows, n, gate, itemsize, 1, known

    def fits(tile: ManyRowsTile) -> bool:
        few = tile.warps == 4 or not reads_registers(known)  # else numbers of 4 bits took twice as long
        return few and tile.x_rows * tile.rows * (1 + gate) <= 2048 * tile.warps

    return min(filter(fits, TILES), key=lambda tile: tile_cost(tile, *sizes))


def many_rows(x, weight, norm, epilogue, tile, y):
    """Writes what `quantized_linear` returns into y."""
    n, k = weight.shape
    if norm is not None:
        x = apply_norm(x, norm)
    rows = x.numel() // k
    blocks_m = triton.cdiv(rows, tile.x_rows)
    launch(
        quantized_many_rows_kernel, (blocks_m * triton.cdiv(n, tile.rows),),
        x, PackedWeight.of(weight), PackedWeight.of(epilogue.up), epilogue.arguments, y, rows, n, blocks_m,
        K=k, GROUPS=weight.scales.shape[1], FORMAT=weight.format.name, **epilogue.flags, BLOCK_M=tile.x_rows,
        BLOCK_N=tile.rows, BLOCK_K=tile.columns, UNPACK_MODE=unpack_mode(x.dtype), UPCAST=upcast(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
