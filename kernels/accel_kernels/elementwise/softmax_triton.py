"""Softmax over rows of fp32 scores: a program a row, held in registers, or read twice where it is too long for them."""

import torch
import triton
import triton.language as tl

from accel_kernels.warmup import launch, warming_up

LOG2E = 1.4426950408889634
SMALL, TILE = 4096, 16384  # scores a program holds at once


@triton.jit
def softmax_kernel(x_ptr, y_ptr, columns, scale, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    c_idx = tl.arange(0, BLOCK)
    if WHOLE:
        mask = c_idx < columns
        x = tl.load(x_ptr + row + c_idx, mask=mask, other=-float("inf")) * scale
        p = tl.exp2(x - tl.max(x, axis=0))
        tl.store(y_ptr + row + c_idx, (p / tl.sum(p, axis=0)).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        most = tl.full((BLOCK,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, columns, BLOCK):
            mask = first + c_idx < columns
            x = tl.load(x_ptr + row + first + c_idx, mask=mask, other=-float("inf")) * scale
            larger = tl.maximum(most, x)
            seen = larger > -float("inf")
            total = tl.where(seen, total * tl.exp2(most - larger) + tl.exp2(x - larger), 0.0)
            most = larger
        peak = tl.max(most, axis=0)
        total = tl.sum(tl.where(most > -float("inf"), total * tl.exp2(most - peak), 0.0), axis=0)
        for first in range(0, columns, BLOCK):
            mask = first + c_idx < columns
            x = tl.load(x_ptr + row + first + c_idx, mask=mask, other=-float("inf")) * scale
            y = tl.exp2(x - peak) / total
            tl.store(y_ptr + row + first + c_idx, y.to(y_ptr.dtype.element_ty), mask=mask)


def softmax(x, scale, dtype):
    """Same arguments and result as the reference; any number of columns. A warmup compiles for all."""
    rows, columns = x.shape
    y = torch.empty((rows, columns), device=x.device, dtype=dtype)
    of_all = ((True, SMALL), (True, TILE), (False, TILE))  # whether a row is held at once, and in what
    for whole, block in of_all if warming_up() else ((columns <= TILE, SMALL if columns <= SMALL else TILE),):
        launch(softmax_kernel, (rows,), x, y, columns, scale * LOG2E, whole, block, num_warps=block // 1024)
    return y
