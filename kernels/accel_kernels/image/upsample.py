"""Nearest-neighbor upsampling by two over channels-last images: every pixel read once, written four times."""

import torch
import torch.nn.functional as F

from accel_kernels.op import dtype_reason, make_op, random_cases


def reference(x):
    """x: (N, C, H, W). Returns (N, C, 2 H, 2 W)."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def supports(x) -> str | None:
    return images_reason(x) or dtype_reason(x)


def images_reason(*images) -> str | None:
    """Why these, that are there, are no channels-last images (N, C, H, W)."""
    for image in images:
        if image is None:
            continue
        if image.dim() != 4:
            return f"{image.dim()} dimensions, not 4"
        if image.numel() == 0:
            return "empty"
        if not image.is_contiguous(memory_format=torch.channels_last):
            return "not channels-last"
    return None


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """x in this layout; itself where it has it."""
    return x.contiguous(memory_format=torch.channels_last)


@random_cases
def _case(rand, *shape):
    return ((channels_last(rand(*shape)),), {})


CASES = (
    _case("tiny", 2, 32, 3, 4, small=True),
    _case("odd", 3, 17, 5, 7, small=True),
    _case("one", 1, 1, 1, 1, small=True),
    _case("sd15-32", 2, 640, 32, 32),
    _case("vae-512", 1, 256, 512, 512),
)

upsample = make_op("upsample", reference, supports, CASES)
