"""All copies of a table in one launch: a few programs for each."""

import torch
import triton
import triton.language as tl

from accel_kernels.gemm.adapters.copy_matrices import FIELDS
from accel_kernels.warmup import launch

BLOCK, PROGRAMS = 4096, 8  # numbers to a step; programs to a copy
KINDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _write(source, target, start, size, columns, stride, scale, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    place = start + tl.arange(0, BLOCK)
    mask = place < size if MASKED else None
    values = (tl.load(source + place, mask=mask).to(tl.float32) * scale).to(target.dtype.element_ty)
    if columns == stride:
        tl.store(target + place, values, mask=mask)
    else:
        tl.store(target + place // columns * stride + place % columns, values, mask=mask)


@triton.jit
def copy_matrices_kernel(
    table_ptr, factors_ptr, factor, WIDTH: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.program_id(1)
    row = table_ptr + number * WIDTH
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(SOURCE)), 16)
    target = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(TARGET)), 16)
    size, columns, stride = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    scale = tl.load(factors_ptr + number) * factor
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        if start + BLOCK <= size:  # without a mask numbers are read and written eight at a time
            _write(source, target, start, size, columns, stride, scale, False, BLOCK)
        else:
            _write(source, target, start, size, columns, stride, scale, True, BLOCK)


def copy_matrices(copies, factor=1.0):
    """Same arguments and result as the reference."""
    kinds = {"SOURCE": KINDS[copies.sources[0].dtype], "TARGET": KINDS[copies.targets[0].dtype]}
    launch(
        copy_matrices_kernel, (PROGRAMS, len(copies.sources)), copies.table, copies.factors, float(factor),
        WIDTH=FIELDS, **kinds, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return copies.targets
