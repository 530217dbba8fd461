"""Matrix product with two accumulators, value and gate, and GEGLU on them before anything is written.

Tiles come through the tensor memory accelerator (Hopper and later). Each program computes tiles until none is left, so
that the first loads of a tile overlap the end of the one before. Rows of tiles are grouped so that neighbors share
their weights in the L2 cache.

Serves rows in 16 bits, features in multiples of 8, compute capability 9.0 and later; on 9.0 `hopper_gemm` is faster and
takes its place.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from accel_kernels.device import multiprocessors, upcast
from accel_kernels.elementwise.activations_triton import gelu
from accel_kernels.gemm.epilogue_triton import tile_place
from accel_kernels.gemm.hopper.hopper_gemm import hopper_gemm
from accel_kernels.gemm.linear_geglu import BLOCK_M, BLOCK_N
from accel_kernels.warmup import launch

BLOCK_K, GROUP, WARPS, STAGES = 64, 8, 8, 3


@triton.jit(do_not_specialize=("has_bias", "rows"))
def linear_geglu_kernel(
    x_desc, w_desc, b_ptr, y_desc, has_bias, rows, inner, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(inner, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = tile_place(tile, tiles_m, tiles_n, GROUP)
        m, n = row * BLOCK_M, column * BLOCK_N
        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, depth, BLOCK_K):
            x = x_desc.load([m, k])
            w_value = w_desc.load([n, k])
            w_gate = w_desc.load([inner + n, k])
            if UPCAST:
                x, w_value, w_gate = x.to(tl.float32), w_value.to(tl.float32), w_gate.to(tl.float32)
            value = tl.dot(x, w_value.T, value)
            gate = tl.dot(x, w_gate.T, gate)
        if has_bias:
            n_idx = n + tl.arange(0, BLOCK_N)
            value += tl.load(b_ptr + n_idx, mask=n_idx < inner, other=0.0).to(tl.float32)[None, :]
            gate += tl.load(b_ptr + inner + n_idx, mask=n_idx < inner, other=0.0).to(tl.float32)[None, :]
        y_desc.store([m, n], (value * gelu(gate)).to(y_desc.dtype))


def linear_geglu(x, weight, bias=None):
    """Same arguments and result as the reference; x and weight contiguous, features in multiples of 8."""
    depth, inner = x.shape[-1], weight.shape[0] // 2
    (value, gate), (shift, gate_shift) = weight.split(inner), (None, None) if bias is None else bias.split(inner)
    more = {"up": value, "up_bias": shift, "activation": "gelu"}
    if hopper_gemm.supports(x, gate, gate_shift, **more) is None:
        return hopper_gemm.triton(x, gate, gate_shift, **more)
    rows = x.numel() // depth
    y = torch.empty((*x.shape[:-1], inner), device=x.device, dtype=x.dtype)
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(inner, BLOCK_N)
    launch(
        linear_geglu_kernel, (min(tiles, multiprocessors(x.device)),),
        TensorDescriptor.from_tensor(x.view(rows, depth), [BLOCK_M, BLOCK_K]),
        TensorDescriptor.from_tensor(weight.detach(), [BLOCK_N, BLOCK_K]),
        x if bias is None else bias,
        TensorDescriptor.from_tensor(y.view(rows, inner), [BLOCK_M, BLOCK_N]),
        bias is not None, rows, inner, depth, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, upcast(x.dtype),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return y
