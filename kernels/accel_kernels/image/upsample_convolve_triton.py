"""What surrounds the four 2x2 convolutions: the sums of weights before, the phases woven into one image after."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from accel_kernels.image.half_operands import GAIN, halved
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

TILE, WARPS = 4096, 4
PAD_ELEMENTS = 2**22  # up to here cuDNN is faster on an image padded before, by more than the padding costs


@triton.jit
def phase_weights_kernel(weight_ptr, y_ptr, channels, BLOCK_C: tl.constexpr):
    """(C', 3, 3, C) -> (2, 2, C', 2, 2, C) by row phase, column phase, output channel, row, column, channel."""
    out, outs = tl.program_id(0), tl.num_programs(0)
    c_idx = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c_idx < channels
    weight_ptr += out.to(tl.int64) * 9 * channels
    for phase_row in tl.static_range(2):
        for phase_column in tl.static_range(2):
            phase = phase_row * 2 + phase_column
            y_row = y_ptr + (phase * outs + out).to(tl.int64) * 4 * channels
            for a in tl.static_range(2):
                for b in tl.static_range(2):
                    total = tl.zeros((BLOCK_C,), tl.float32)
                    for i in tl.static_range(3):
                        for j in tl.static_range(3):
                            # An even row sees row 0 of the weights above it, rows 1 and 2 on itself; an odd one 0 and 1
                            # on itself, 2 below.
                            if (i + phase_row + 1) // 2 - phase_row == a and (
                                j + phase_column + 1
                            ) // 2 - phase_column == b:
                                place = weight_ptr + (i * 3 + j) * channels + c_idx
                                total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
                    tl.store(y_row + (a * 2 + b) * channels + c_idx, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("has_bias", "height", "width"))
def weave_kernel(
    x_ptr, bias_ptr, y_ptr, gain, has_bias, height, width, channels, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr
):
    """(N, H + 1, W + 1, 4 C) -> (N, 2 H, 2 W, C), a program a few pixels of one output row, both column phases."""
    row = tl.program_id(0)  # of all output rows of all images
    n, y_row = row // (2 * height), row % (2 * height)
    phase = y_row % 2
    w_idx = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    c_idx = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (w_idx < width)[:, None] & (c_idx < channels)[None, :]
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if has_bias:
        bias += tl.load(bias_ptr + c_idx, mask=c_idx < channels, other=0.0).to(tl.float32)
    x_row = x_ptr + (n * (height + 1) + y_row // 2 + phase).to(tl.int64) * (width + 1) * 4 * channels
    y_ptr += row.to(tl.int64) * 2 * width * channels
    for column in tl.static_range(2):
        place = (w_idx[:, None] + column) * 4 * channels + (phase * 2 + column) * channels + c_idx[None, :]
        value = tl.load(x_row + place, mask=mask, other=0.0).to(tl.float32) * gain + bias[None, :]
        place = (2 * w_idx[:, None] + column) * channels + c_idx[None, :]
        tl.store(y_ptr + place, value.to(y_ptr.dtype.element_ty), mask=mask)


def upsample_convolve(x, weight, bias=None, half=False):
    """Same arguments and result as the reference; x and weight channels-last."""
    n, channels, height, width = x.shape
    out, dtype = weight.shape[0], x.dtype
    half = half and dtype == torch.float32
    x = halved(x) if half else x
    phases = torch.empty((4 * out, channels, 2, 2), device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    block_c = min(512, power_of_two(channels))
    launch(phase_weights_kernel, (out, cdiv(channels, block_c)), weight, phases, channels, block_c, num_warps=WARPS)
    if x.numel() <= PAD_ELEMENTS:
        small = F.conv2d(F.pad(x, (1, 1, 1, 1)), phases)
    else:
        small = F.conv2d(x, phases, padding=1)
    small = small.contiguous(memory_format=torch.channels_last)
    y = torch.empty((n, out, 2 * height, 2 * width), device=x.device, dtype=dtype, memory_format=torch.channels_last)
    block_c = min(512, power_of_two(out))
    block_w = TILE // block_c  # of narrow images too: one kernel for all sizes
    grid = (n * 2 * height, cdiv(width, block_w), cdiv(out, block_c))
    launch(
        weave_kernel, grid,
        small, small if bias is None else bias, y, GAIN if half else 1.0, bias is not None, height, width, out,
        block_w, block_c, num_warps=WARPS,
    )  # fmt: skip
    return y
