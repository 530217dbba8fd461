"""Where sums of `wgmma_triton` go: inner channels in the order in which its second product reads them, and pairs."""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.quantized.operands.mma_operands_triton import steps
from accel_kernels.gemm.quantized.operands.wgmma_operands_triton import blocks
from accel_kernels.moe.gating_triton import apply_gating


@constexpr_function
def channels_layout(warps, h, m):
    """(inner channels, rows of x): a thread has channels that are neighbors where `column_of` has them."""
    registers = [[4, 0], [32, 0]] + ([[64, 0]] if h > 64 else []) + steps(2, 1, 2 * warps, m)
    lanes = [[1, 0], [2, 0], [8, 0], [16, 0], [0, 1]]
    return gl.DistributedLinearLayout(registers, lanes, steps(2, 1, 2, 2 * warps), [], [h, m])


@gluon.jit
def store_inner(acc, bias_ptr, h_ptr, expert, n_first, first, end, inner, padded, GATING: gl.constexpr,
                INTERLEAVED: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Of gates and ups, in the order of columns of the second product; zeros beyond the inner channels."""
    H: gl.constexpr = acc.shape[0] // 2
    M: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = channels_layout(num_warps, H, M)
    STORE: gl.constexpr = gl.BlockedLayout([H // 16, 1], [16, 2], [1, num_warps], [0, 1])
    gate, up = blocks(acc)
    gate, up = gl.convert_layout(gate, OUT), gl.convert_layout(up, OUT)
    n = n_first + gl.arange(0, H, layout=gl.SliceLayout(1, OUT))
    if bias_ptr is not None:
        at, other = n, inner + n
        if INTERLEAVED:
            at, other = 2 * n, 2 * n + 1
        bias_ptr += expert * 2 * inner
        gate += gl.expand_dims(gl.load(bias_ptr + at, mask=n < inner, other=0.0).to(gl.float32), 1)
        up += gl.expand_dims(gl.load(bias_ptr + other, mask=n < inner, other=0.0).to(gl.float32), 1)
    y = gl.where(gl.expand_dims(n < inner, 1), apply_gating(gate, up, GATING), 0.0).to(h_ptr.dtype.element_ty)
    # Thread, word, number of a register, instruction of the word, half of its columns.
    y = y.reshape([H // 32, 4, 2, 2, 2, M]).permute((1, 3, 4, 0, 2, 5)).reshape([H, M])
    y = gl.convert_layout(y, STORE)
    i = gl.arange(0, H, layout=gl.SliceLayout(1, STORE))
    place = n_first + i
    if H == 64:  # half of the threads' columns of a piece
        place = n_first // 128 * 128 + n_first // 64 % 2 * 4 + i // 4 * 8 + i % 4
    row = gl.expand_dims(first + gl.arange(0, M, layout=gl.SliceLayout(0, STORE)), 0)
    place = gl.expand_dims(place, 1)
    gl.store(h_ptr + row.to(gl.int64) * padded + place, y, mask=(row < end) & (place < padded))


@gluon.jit
def store_pairs(acc, bias_ptr, order_ptr, y_ptr, expert, n_first, first, end, hidden, num_warps: gl.constexpr):
    H: gl.constexpr = acc.shape[0] // 2
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, num_warps], [0, 1])
    row = first + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, OUT))
    pair = gl.load(order_ptr + row, mask=row < end, other=0, cache_modifier=".cg").to(gl.int64)
    row, pair, parts = gl.expand_dims(row, 0), gl.expand_dims(pair, 0), blocks(acc)
    for half in gl.static_range(2):
        y = gl.convert_layout(parts[half], OUT)
        n = n_first + half * H + gl.arange(0, H, layout=gl.SliceLayout(1, OUT))
        if bias_ptr is not None:
            y += gl.expand_dims(gl.load(bias_ptr + expert * hidden + n, mask=n < hidden, other=0.0).to(gl.float32), 1)
        n = gl.expand_dims(n, 1)
        gl.store(y_ptr + pair * hidden + n, y.to(y_ptr.dtype.element_ty), mask=(row < end) & (n < hidden))
