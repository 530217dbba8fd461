"""act(gate) * up in one pass, with the activation in fp32; GEGLU is that of the halves of a row."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.elementwise.activations_triton import activate
from accel_kernels.sizes import cdiv
from accel_kernels.warmup import launch

WARPS = 4
FEW = 64  # rows, whose next product may load its weights meanwhile


@triton.jit(do_not_specialize=("rows",))
def gated_kernel(
    gate_ptr, up_ptr, y_ptr, stride_g, stride_u, rows, width,
    ACTIVATION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    r_idx = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    i_idx = (tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I))[None, :]
    mask = (r_idx < rows)[:, None] & (i_idx < width)
    row = r_idx.to(tl.int64)[:, None]
    gate = tl.load(gate_ptr + row * stride_g + i_idx, mask=mask, other=0.0)
    y = activate(gate.to(tl.float32), ACTIVATION)
    if up_ptr is not None:
        y *= tl.load(up_ptr + row * stride_u + i_idx, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + i_idx, y.to(y_ptr.dtype.element_ty), mask=mask)


def gated(gate, up, activation):
    """Same arguments and result as the reference."""
    return _gated(gate, up, activation, 1, 1024)


def geglu(x):
    """Same argument and result as the reference."""
    value, gate = x.view(-1, x.shape[-1]).chunk(2, dim=-1)  # a dimension of one row may have any stride
    return _gated(gate, value, "gelu", 4, 512).view(*x.shape[:-1], -1)


def _gated(gate, up, activation, block_r, block_i):
    width = gate.shape[-1]
    rows = gate.numel() // width
    y = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    strides = (width if one is None or one.dim() == 1 else one.stride(-2) for one in (gate, up))
    grid = (cdiv(rows, block_r), cdiv(width, block_i))
    pdl = programmatic(gate.device, rows <= FEW)
    launch(gated_kernel, grid, gate, up, y, *strides, rows, width, activation, block_r, block_i, num_warps=WARPS, **pdl)
    return y
