"""Rows times a weight in blocks: which kernel serves which, and those of any format, which unpack blocks.

Of these one row is multiplied on the CUDA cores, up to 16 on the tensor cores, in any dtype.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import Feature, has, multiprocessors, on_tensor_cores, programmatic, upcast
from accel_kernels.gemm.blocks.block_gemm_triton import BlockGemmTile, block_gemm, by_specialized_warps
from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.fragments.block_gemv_mma_triton import block_gemv_mma, block_gemv_tile
from accel_kernels.gemm.blocks.fragments.block_skinny_mma_triton import block_skinny_mma, block_skinny_tile
from accel_kernels.gemm.blocks.unpacking_triton import UNPACKING, format_flags, unpack_blocks
from accel_kernels.gemm.epilogue_triton import epilogue, store_sum
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile
from accel_kernels.gemm.quantized.many_rows_triton import ManyRowsTile
from accel_kernels.gemm.quantized_weight import MOST_FRAGMENT_ROWS
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.warmup import launch


@triton.jit
def block_gemv_kernel(
    x_ptr, weight, up, norm, after, y_ptr, n, K: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr,
    COMPUTE: tl.constexpr, PLAIN: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NORM: "none", or "rms", whose factor of the whole row comes last. Values are not rounded to the dtype of x."""
    BLOCKS: tl.constexpr = K // COLUMNS
    BLOCK_K: tl.constexpr = BLOCK_B * COLUMNS
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_u = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, BLOCKS, BLOCK_B, num_stages=STAGES):
        at = tl.program_id(0) * BLOCK_N, n - 1, start, BLOCKS
        values = unpack_blocks(weight, at, BLOCK_N, BLOCK_B, FORMAT, COMPUTE, PLAIN)
        k_idx = start * COLUMNS + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k_idx, mask=k_idx < K, other=0.0).to(tl.float32)
        if NORM == "rms":
            squares += x * x
            if norm.weight is not None:
                x *= tl.load(norm.weight + k_idx, mask=k_idx < K, other=0.0).to(tl.float32) + norm.offset
        wide = tl.broadcast_to(x[None, :], (BLOCK_N, BLOCK_K))
        acc = tl.fma(values, wide, acc)
        if GATE:
            values = unpack_blocks(up, at, BLOCK_N, BLOCK_B, FORMAT, COMPUTE, PLAIN)
            acc_u = tl.fma(values, wide, acc_u)
    y, other = tl.sum(acc, axis=1), tl.sum(acc_u, axis=1)
    if NORM == "rms":
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + norm.eps)
        y, other = y * factor, other * factor
    y = epilogue(y, other, n_idx, n_idx < n, None, None, after, GATE, ACTIVATION)
    store_sum(y, n_idx, n_idx < n, after, y_ptr)


@triton.jit(do_not_specialize=("m",))
def block_rows_kernel(
    x_ptr, weight, up, after, y_ptr, m, n, K: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr,
    COMPUTE: tl.constexpr, PLAIN: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = K // COLUMNS
    BLOCK_K: tl.constexpr = BLOCK_B * COLUMNS
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_idx = tl.arange(0, BLOCK_M)
    x_row = x_ptr + tl.minimum(m_idx, m - 1).to(tl.int64)[None, :] * K
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_u = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, BLOCKS, BLOCK_B):
        at = tl.program_id(0) * BLOCK_N, n - 1, start, BLOCKS
        k_idx = start * COLUMNS + tl.arange(0, BLOCK_K)
        x = tl.load(x_row + k_idx[:, None], mask=(k_idx < K)[:, None], other=0.0)
        left = unpack_blocks(weight, at, BLOCK_N, BLOCK_B, FORMAT, COMPUTE, PLAIN).to(DTYPE)
        if UPCAST:
            x, left = x.to(tl.float32), left.to(tl.float32)
        acc = tl.dot(left, x, acc, input_precision="ieee")
        if GATE:
            left = unpack_blocks(up, at, BLOCK_N, BLOCK_B, FORMAT, COMPUTE, PLAIN).to(DTYPE)
            if UPCAST:
                left = left.to(tl.float32)
            acc_u = tl.dot(left, x, acc_u, input_precision="ieee")
    n_col, n_mask = n_idx[:, None], (n_idx < n)[:, None]
    y = epilogue(acc, acc_u, n_col, n_mask, None, None, after, GATE, ACTIVATION)
    store_sum(y, m_idx[None, :].to(tl.int64) * n + n_col, (m_idx < m)[None, :] & n_mask, after, y_ptr)


def by_fragments(x, weight, norm, up) -> GemvTile | None:
    """The tile of kernels that read blocks as factors of tensor cores, of up to 14,336 columns; None for others."""
    (n, k), source = weight.shape, weight.format.source
    if (
        not source
        or x.numel() > MOST_FRAGMENT_ROWS * k
        or x.dtype == torch.float32
        or not has(x.device, Feature.WIDE_PRODUCTS)
    ):
        return None
    if k % (512 if source == "sixes" else 256) or k > 1 << 14 or n * k >= 1 << 31:
        return None
    if source == "table" and weight.side.shift == 0:  # a scale to 32 columns
        return None
    if any(t is not None and t.data_ptr() % 16 for t in (x, weight.data, up and up.data)):
        return None
    return fragment_tile(x.numel() // k, n, k, up is not None, source, x.device)


def fragment_tile(rows: int, n: int, k: int, gate: bool, source: str, device: torch.device) -> GemvTile:
    """Of these kernels, for so many rows."""
    choose = block_gemv_tile if rows == 1 else block_skinny_tile
    return choose(rows, n, k, gate, source, multiprocessors(device))


def by_blocks(x, weight, norm, up) -> ManyRowsTile:
    """The tile of the kernels here, which take all that is left."""
    columns, n = weight.format.columns, weight.shape[0]
    if x.numel() == weight.columns:
        block = 4 if up is not None or n < 16 * multiprocessors(x.device) else 8  # of more rows x is read less often
        return ManyRowsTile(1, block, max(1024, columns), block, 4)
    fast = on_tensor_cores(x)
    return ManyRowsTile(16, 16, max(columns, 256 if fast else 64), 4 if fast else 8, 3)


def one_or_few(x, weight, norm, epilogue, tile, y):
    """Of fragments."""
    run = block_gemv_mma if x.numel() == weight.columns else block_skinny_mma
    run(x, weight, norm, epilogue, tile, y)


def block_linear(x, weight, norm, epilogue, tile, y):
    """Of blocks unpacked as they come: writes what `quantized_linear` returns into y."""
    n, k = weight.shape
    rows = x.numel() // k
    inside = rows == 1 and norm is not None and not norm.centered and norm.bias is None
    if norm is not None and not inside:
        x = apply_norm(x, norm)
    weights = BlockArguments.of(weight), BlockArguments.of(epilogue.up)
    sizes = {"BLOCK_N": tile.rows, "BLOCK_B": tile.columns // weight.format.columns}
    given = {**format_flags(weight), **epilogue.flags, **sizes, **UNPACKING}
    if rows == 1:
        before, kind = kernel_arguments(norm if inside else None)
        launch(
            block_gemv_kernel, (triton.cdiv(n, tile.rows),),
            x, *weights, before, epilogue.arguments, y, n, K=k, NORM=kind, **given, STAGES=tile.stages,
            num_warps=tile.warps, **programmatic(x.device),
        )  # fmt: skip
        return
    launch(
        block_rows_kernel, (triton.cdiv(n, tile.rows),),
        x, *weights, epilogue.arguments, y, rows, n, K=k, **given, BLOCK_M=tile.x_rows, UPCAST=upcast(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


BLOCK_DISPATCH = (
    (BlockGemmTile, by_specialized_warps, block_gemm),
    (GemvTile, by_fragments, one_or_few),
    (ManyRowsTile, by_blocks, block_linear),
)
