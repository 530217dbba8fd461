"""Nearest-neighbor upsampling by two and the 3x3 convolution after it, without the upsampled image.

Each output pixel of one of four phases (even or odd row and column) sees only 2x2 pixels of the small image. So four
2x2 convolutions, run as one with four times the channels, do 4/9 of the arithmetic (Shi et al., 2016). The sums of
weights are made in fp32 at every call and rounded once, so no copy can go stale.
"""

import torch
import torch.nn.functional as F

from accel_kernels.image.upsample import channels_last, upsample
from accel_kernels.op import dtype_reason, make_op, random_cases

LEAST_PIXELS = 2048  # of the small images; below, summing the weights costs more than the arithmetic saved


def reference(x, weight, bias=None, half=False):
    """x: (N, C, H, W); weight: (C', C, 3, 3); bias: (C',) or None. Returns (N, C', 2 H, 2 W).

    half: float32 may be multiplied in float16, as it may be in TF32; see `half_operands`.
    """
    return F.conv2d(upsample.reference(x), weight, bias, padding=1)


def instead(x, weight, bias=None, half=False):
    """The same by a copy of the larger image, and torch's convolution."""
    return F.conv2d(upsample(x), weight, bias, padding=1)


def supports(x, weight, bias=None, half=False) -> str | None:
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1:] != (x.shape[1], 3, 3):
        return f"image {tuple(x.shape)} and weight {tuple(weight.shape)}: not a 3x3 convolution of it"
    if x.numel() == 0:
        return "empty"
    for name, tensor in (("image", x), ("weight", weight)):
        if not tensor.is_contiguous(memory_format=torch.channels_last):
            return f"{name} not channels-last"
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        return "image, weight and bias of several dtypes"
    return dtype_reason(x, weight, bias)


def pays(x, weight, bias=None, half=False) -> bool:
    """Whether the image is large enough for the kernel to be the faster way."""
    return x.shape[0] * x.shape[2] * x.shape[3] >= LEAST_PIXELS


@random_cases
def _case(rand, n, c, out, h, w, bias=True):
    x, weight = rand(n, c, h, w), rand(out, c, 3, 3, spread=(9 * c) ** -0.5)
    return (channels_last(x), channels_last(weight), rand(out) if bias else None), {}


CASES = (
    _case("odd", 1, 6, 10, 5, 7, small=True),
    _case("batch", 2, 8, 3, 4, 3, bias=False, small=True),
    _case("sd15-32", 2, 640, 640, 32, 32),
    _case("sdxl-64", 2, 640, 640, 64, 64),
    _case("vae-128", 1, 512, 512, 128, 128),
    _case("vae-512", 1, 256, 256, 512, 512),
)

upsample_convolve = make_op("upsample_convolve", reference, supports, CASES, pays=pays, instead=instead)
