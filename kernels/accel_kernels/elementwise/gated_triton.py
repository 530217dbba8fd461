"""act(gate) * up in one pass."""

import torch
import triton
import triton.language as tl

from accel_kernels.elementwise.activations_triton import activate
from accel_kernels.warmup import launch

BLOCK = 1024  # elements of one row to a program
WARPS = 4


@triton.jit
def gated_kernel(gate_ptr, up_ptr, y_ptr, stride_g, stride_u, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i_idx = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i_idx < width
    gate = tl.load(gate_ptr + row * stride_g + i_idx, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * stride_u + i_idx, mask=mask, other=0.0)
    y = activate(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
    tl.store(y_ptr + row * width + i_idx, y.to(y_ptr.dtype.element_ty), mask=mask)


def gated(gate, up, activation):
    """Same arguments and result as the reference; the activation is computed in fp32."""
    width = gate.shape[-1]
    rows = gate.numel() // width
    y = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    strides = (gate.stride(-2) if gate.dim() > 1 else width, up.stride(-2) if up.dim() > 1 else width)
    grid = (rows, triton.cdiv(width, BLOCK))
    launch(gated_kernel, grid, gate, up, y, *strides, width, activation, BLOCK, num_warps=WARPS)
    return y
