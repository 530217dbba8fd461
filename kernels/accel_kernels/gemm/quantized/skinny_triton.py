"""Two rows to 64 times a weight of fewer bits: its numbers are the left factor of the tensor cores.

Serves what no other kernel takes: compute capability 7.x, scales of another dtype than the rows', columns that do not
divide.
"""

import triton
import triton.language as tl

from accel_kernels.device import programmatic, upcast
from accel_kernels.gemm.epilogue_triton import loaded, store_rows
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.operands.unpacking_triton import factor, per_word, unpack_mode
from accel_kernels.gemm.quantized_weight import PackedWeight
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch


@triton.jit
def _dotted(acc, words, x, weight, group, sums, FORMAT: tl.constexpr, DTYPE: tl.constexpr, GROUPED: tl.constexpr,
            UNPACK_MODE: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """acc + weights times x, (shares, BLOCK_N, BLOCK_M), scaled where scales are by group."""
    ZEROS: tl.constexpr = weight.zeros is not None
    if GROUPED:
        s = tl.load(weight.scales + group)
    if ZEROS:
        z = tl.load(weight.zeros + group)
    w = factor(words, FORMAT, DTYPE, UNPACK_MODE)
    if UPCAST:
        w = w.to(tl.float32)
    if GROUPED or ZEROS:
        part = tl.dot(w, x, input_precision="ieee")
        if ZEROS:
            part -= z.to(tl.float32)[:, :, None] * sums[:, None, :]
        if GROUPED:
            part *= s.to(tl.float32)[:, :, None]
        return acc + part
    else:
        return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit(do_not_specialize=("m",))
def quantized_skinny_kernel(
    x_ptr, weight, up, after, y_ptr, m, n, K: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, UNPACK_MODE: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each warp sums a share of the columns, so that no warp waits for another. A step spans SHARES blocks."""
    PER: tl.constexpr = per_word(FORMAT)
    BLOCK_W: tl.constexpr = BLOCK_K // PER
    WORDS: tl.constexpr = K // PER
    GROUPED: tl.constexpr = GROUPS > 1
    EVEN: tl.constexpr = K % (SHARES * BLOCK_K) == 0
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_idx, share = tl.arange(0, BLOCK_M), tl.arange(0, SHARES)
    n_mask, m_mask = n_idx < n, m_idx < m
    n_row = tl.minimum(n_idx, n - 1).to(tl.int64)
    k_idx = share[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    w_idx = share[:, None] * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((SHARES, BLOCK_N, BLOCK_M), tl.float32)
    acc_u = tl.zeros((SHARES, BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, SHARES * BLOCK_K):
        at, w_at = start + k_idx, start // PER + w_idx
        x_place = x_ptr + m_idx[None, None, :] * K + at[:, :, None]
        w_place = n_row[None, :, None] * WORDS + w_at[:, None, :]
        inside = (w_at < WORDS)[:, None, :]
        if EVEN:
            x = tl.load(x_place, mask=m_mask[None, None, :], other=0.0)
        else:
            x = tl.load(x_place, mask=m_mask[None, None, :] & (at < K)[:, :, None], other=0.0)
        w = loaded(weight.words + w_place, inside, EVEN, "evict_first")
        group = n_row[None, :] * GROUPS + (tl.minimum(start + share * BLOCK_K, K - 1) // (K // GROUPS))[:, None]
        sums = 0.0
        if weight.zeros is not None:
            sums = tl.sum(x.to(tl.float32), axis=1)
        if UPCAST:
            x = x.to(tl.float32)
        acc = _dotted(acc, w, x, weight, group, sums, FORMAT, DTYPE, GROUPED, UNPACK_MODE, UPCAST)
        if GATE:
            u = loaded(up.words + w_place, inside, EVEN, "evict_first")
            acc_u = _dotted(acc_u, u, x, up, group, sums, FORMAT, DTYPE, GROUPED, UNPACK_MODE, UPCAST)
    if PDL:  # not before: programs that wait would take the shared memory that the pipeline needs
        tl.extra.cuda.gdc_launch_dependents()
    y, other = tl.sum(acc, axis=0), tl.sum(acc_u, axis=0)
    store_rows(y, other, n_row, n_idx, n_mask, m_idx, m_mask, n, weight, up, after, y_ptr, GROUPED, GATE, ACTIVATION)


def quantized_skinny(x, weight, norm, after, shape, y):
    """Writes what `quantized_linear` returns into y. shape: its `warps` are the shares of the columns."""
    n, k = weight.shape
    rows, groups = x.numel() // k, weight.scales.shape[1]
    if norm is not None:  # a pass of its own: inside, it would stand between the weights and the tensor cores
        x = apply_norm(x, norm)
    launch(
        quantized_skinny_kernel, (triton.cdiv(n, shape.rows),),
        x, PackedWeight.of(weight), PackedWeight.of(after.up), after.arguments, y, rows, n,
        K=k, GROUPS=groups, FORMAT=weight.format.name, UNPACK_MODE=unpack_mode(x.dtype), **after.flags,
        SHARES=shape.warps, BLOCK_M=max(16, power_of_two(rows)), BLOCK_N=shape.rows,
        BLOCK_K=min(shape.columns, weight.group & -weight.group) if groups > 1 else shape.columns,
        UPCAST=upcast(x.dtype), num_warps=shape.warps, num_stages=shape.stages,
        **programmatic(x.device, rows > 16),  # as measured
    )  # fmt: skip
