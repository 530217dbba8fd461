"""Nearest-neighbor upsampling by two over channels-last images: every pixel read once, written four times."""

import torch
import torch.nn.functional as F

from accel_kernels.op import Case, Op, dtype_reason


def reference(x):
    """x: (N, C, H, W). Returns (N, C, 2 H, 2 W)."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def supports(x) -> str | None:
    if x.dim() != 4:
        return f"{x.dim()} dimensions, not 4"
    if x.numel() == 0:
        return "empty"
    if not x.is_contiguous(memory_format=torch.channels_last):
        return "not channels-last"
    return dtype_reason(x)


def _case(name, n, c, h, w, small=False):
    def make(device, dtype):
        x = torch.randn(n, c, h, w, generator=torch.Generator("cpu").manual_seed(0)).to(device, dtype)
        return (x.contiguous(memory_format=torch.channels_last),), {}

    return Case(name, make, small)


CASES = (
    _case("tiny", 2, 32, 3, 4, small=True),
    _case("odd", 3, 17, 5, 7, small=True),
    _case("one", 1, 1, 1, 1, small=True),
    _case("sd15-32", 2, 640, 32, 32),
    _case("vae-512", 1, 256, 512, 512),
)

upsample = Op("upsample", reference, "accel_kernels.image.upsample_triton:upsample", supports, CASES)
