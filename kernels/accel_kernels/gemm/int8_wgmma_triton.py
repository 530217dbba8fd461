"""The product of `int8_linear` with its tensor core instructions laid out by hand, for Hopper; no outlier columns.

For integers Triton waits for each step's products before it loads another. Here a step is multiplied while the next is
issued, and the first loads of the next tile are under way while this one is written. A ring of buffers: step i is
loaded into buffer i mod STAGES as soon as both warpgroups are done with step i - STAGES. Instructions are 128 columns
wide: the hardware takes 256, the compiler refuses them for integers (Triton 3.6 and 3.9).

Serves many 8-bit rows without outliers on compute capability 9.0. Gate and up of Llama-3.1-8B, 2048 rows, take 319 us,
by `int8_linear_triton` 392, in bf16 653; attention's output, with a residual, is faster there (H200,
nvidia-h200-int8-linear.json).
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from accel_kernels.gemm.epilogue_triton import epilogue
from accel_kernels.op import multiprocessors
from accel_kernels.warmup import launch

# Names until Triton 3.6, and since.
all_threads = getattr(gl, "thread_barrier", None) or gl.barrier
start_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile; rows are grouped."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    return first + tile % (GROUP * tiles_n) % height, tile % (GROUP * tiles_n) // height


@gluon.jit
def _load(x_desc, w_desc, u_desc, ready, xs, ws, us, slot, tile, m, n, k, depth, tiles, tiles_m, tiles_n,
          GATE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
          GROUP: gl.constexpr):  # fmt: skip
    """Starts the loads of a step into this slot, of none beyond the last tile; returns where the next step is."""
    some = tile < tiles
    bar = ready.index(slot)
    mbarrier.expect(bar, BLOCK_K * (BLOCK_M + BLOCK_N * (2 if GATE else 1)), pred=some)
    start_load(x_desc, [m * BLOCK_M, k], bar, xs.index(slot), pred=some)
    start_load(w_desc, [n * BLOCK_N, k], bar, ws.index(slot), pred=some)
    if GATE:
        start_load(u_desc, [n * BLOCK_N, k], bar, us.index(slot), pred=some)
    k += BLOCK_K
    if k >= depth:
        k = 0
        tile += gl.num_programs(0)
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
    return tile, m, n, k


@gluon.jit
def _vector(ptr, index, mask, axis: gl.constexpr):
    return gl.expand_dims(gl.load(ptr + index, mask=mask, other=0.0).to(gl.float32), axis)


@gluon.jit(do_not_specialize=("rows",))
def int8_wgmma_kernel(
    x_desc, w_desc, u_desc, sx_ptr, sw_ptr, su_ptr, after, y_ptr, rows, n, depth, GATE: gl.constexpr,
    KIND: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, min(BLOCK_N, 128), 32])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    tiles_m, tiles_n = gl.cdiv(rows, BLOCK_M), gl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    us = ws
    if GATE:
        us = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], u_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(ready.index(early), count=1)
    all_threads()
    # Where the next step to be loaded is, and the slot and phase of the next one to be multiplied.
    far = gl.program_id(0)
    far_m, far_n = _place(far, tiles_m, tiles_n, GROUP)
    far_k, slot, phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for early in gl.static_range(STAGES - 1):
        far, far_m, far_n, far_k = _load(
            x_desc, w_desc, u_desc, ready, xs, ws, us, early, far, far_m, far_n, far_k, depth, tiles, tiles_m, tiles_n,
            GATE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
        )  # fmt: skip
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, MMA)
        acc_u = acc
        for _ in range(0, depth, BLOCK_K):
            mbarrier.wait(ready.index(slot), phase)
            acc = warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), acc, is_async=True)
            if GATE:
                acc_u = warpgroup_mma(xs.index(slot), us.index(slot).permute((1, 0)), acc_u, is_async=True)
                acc, acc_u = warpgroup_mma_wait(2, deps=(acc, acc_u))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            all_threads()  # the other warpgroup, too, is done with the step before this one
            far, far_m, far_n, far_k = _load(
                x_desc, w_desc, u_desc, ready, xs, ws, us, (slot + STAGES - 1) % STAGES, far, far_m, far_n, far_k,
                depth, tiles, tiles_m, tiles_n, GATE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
            )  # fmt: skip
            slot += 1
            if slot == STAGES:
                slot = gl.to_tensor(0)
                phase = phase ^ 1
        if GATE:
            acc, acc_u = warpgroup_mma_wait(0, deps=(acc, acc_u))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        m, n_first = _place(tile, tiles_m, tiles_n, GROUP)
        m_idx = m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, MMA))
        n_idx = n_first * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA))
        m_mask, n_mask = m_idx < rows, n_idx < n
        row_scale = _vector(sx_ptr, m_idx, m_mask, 1)
        y = acc.to(gl.float32) * row_scale
        other = y
        if GATE:
            other = acc_u.to(gl.float32) * row_scale
        n_row, n_seen = gl.expand_dims(n_idx, 0), gl.expand_dims(n_mask, 0)
        y = epilogue(y, other, n_row, n_seen, sw_ptr, su_ptr, after, GATE, KIND)
        if after.residual is not None:
            place, mask = gl.expand_dims(m_idx.to(gl.int64), 1) * n + n_row, gl.expand_dims(m_mask, 1) & n_seen
            y += gl.load(after.residual + place, mask=mask, other=0.0).to(gl.float32)
        written = gl.convert_layout(y.to(y_ptr.dtype.element_ty), ROWS)  # 16 bytes to a thread
        m_out = m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS))
        n_out = n_first * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ROWS))
        place = gl.expand_dims(m_out.to(gl.int64), 1) * n + gl.expand_dims(n_out, 0)
        gl.store(y_ptr + place, written, mask=gl.expand_dims(m_out < rows, 1) & gl.expand_dims(n_out < n, 0))


def int8_wgmma(x, weight, epilogue, shape):
    """The same result as `int8_linear`, x without outliers, on compute capability 9.0 alone.

    shape: a Shape with 4 warps to each 64 rows of the tile, at most 256 columns, 128 with a gate.
    """
    n, depth = weight.data.shape
    up = epilogue.up
    rows = x.data.numel() // depth
    y = torch.empty((*x.data.shape[:-1], n), device=x.data.device, dtype=x.dtype)
    tiles = triton.cdiv(rows, shape.rows) * triton.cdiv(n, shape.columns)
    described = [
        TensorDescriptor.from_tensor(
            data.detach(), [height, shape.depth], gl.NVMMASharedLayout.get_default_for([height, shape.depth], gl.int8)
        )
        for data, height in (
            (x.data.view(rows, depth), shape.rows),
            (weight.data, shape.columns),
            ((up or weight).data, shape.columns),
        )
    ]
    launch(
        int8_wgmma_kernel, (min(tiles, multiprocessors(y.device)),),
        *described, x.scales, weight.scales, (up or weight).scales, epilogue.arguments, y, rows, n, depth,
        **epilogue.flags, BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_K=shape.depth, GROUP=shape.group,
        STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip
    return y
