"""All that follows the choice of tokens in one launch, where torch takes a dozen."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

BLOCK = 32  # rows to a program


@triton.jit(do_not_specialize=("rows", "count"))
def ended_tokens_kernel(
    chosen_ptr, unfinished_ptr, ends_ptr, pad_ptr, y_ptr, rows, count, BLOCK: tl.constexpr, ENDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chosen = tl.load(chosen_ptr + row, mask=inside, other=0)
    unfinished = tl.load(unfinished_ptr + row, mask=inside, other=0)
    if pad_ptr is not None:
        chosen = tl.where(unfinished != 0, chosen, tl.load(pad_ptr))
    if ends_ptr is not None:
        at = tl.arange(0, ENDS)
        ends = tl.load(ends_ptr + at, mask=at < count, other=0)
        ended = (chosen[:, None] == ends[None, :]) & (at < count)[None, :]
        unfinished = tl.where(tl.max(ended.to(tl.int32), axis=1) != 0, 0, unfinished)
    tl.store(y_ptr + row, chosen, mask=inside)
    tl.store(y_ptr + rows + row, unfinished, mask=inside)


def ended_tokens(chosen, unfinished, ends=None, pad=None):
    """Same arguments and result as the reference."""
    rows, count = chosen.numel(), 1 if ends is None else ends.numel()
    y = torch.empty((2, rows), device=chosen.device, dtype=torch.int64)
    launch(
        ended_tokens_kernel, (cdiv(rows, BLOCK),), chosen, unfinished, ends, pad, y, rows, count,
        BLOCK=BLOCK, ENDS=power_of_two(count), **programmatic(chosen.device),
    )  # fmt: skip
    return y
