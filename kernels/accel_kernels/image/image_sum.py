"""Passes that write an image and, while they hold it, the channel stats for which the group norm after it would read
it again.

`image_sum` ends a block: (gain * x + bias[c] + residual) / scale. `image_concat` joins two images along their channels.
"""

import torch

from accel_kernels.op import Case, Op, dtype_reason


def reference(x, residual=None, bias=None, scale=1.0, channel_stats=True, gain=1.0):
    """x, residual: (N, C, H, W); bias: (C,); scale divides. Returns a tensor like x, and no channel stats.

    channel_stats: whether a norm comes after; the kernel then returns what `group_norm` takes under this name.
    gain: multiplies x, which may be narrower than the residual; the result is then as wide as that.
    """
    x = x if gain == 1.0 else x.to(sum_dtype(x, residual)) * gain
    y = x if bias is None else x + bias.to(x.dtype)[:, None, None]
    y = y if residual is None else y + residual
    return (y if scale == 1.0 else y / scale), None


def sum_dtype(x, residual) -> torch.dtype:
    """Of the sum."""
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def supports(x, residual=None, bias=None, scale=1.0, channel_stats=True, gain=1.0) -> str | None:
    if residual is not None and residual.shape != x.shape:
        return "residual of another shape"
    return _images(x, residual) or dtype_reason(x, residual, bias)


def reference_concat(x, other):
    """x: (N, C, H, W); other: (N, C', H, W). Returns (N, C + C', H, W), and no channel stats."""
    return torch.cat([x, other], dim=1), None


def supports_concat(x, other) -> str | None:
    if other.dim() != 4 or (x.shape[0], *x.shape[2:]) != (other.shape[0], *other.shape[2:]) or x.dtype != other.dtype:
        return "images of several sizes or dtypes"
    return _images(x, other) or dtype_reason(x, other)


def _images(*images) -> str | None:
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


def _case(name, n, c, h, w, residual=True, bias=True, scale=1.0, small=False):
    def make(device, dtype):
        x, other = (_image(seed, n, c, h, w).to(device, dtype) for seed in (0, 1))
        shift = torch.randn(c, generator=torch.Generator("cpu").manual_seed(2)).to(device, dtype)
        return (x, other if residual else None, shift if bias else None, scale), {}

    return Case(name, make, small)


def _concat(name, n, c, other, h, w, small=False):
    def make(device, dtype):
        return tuple(_image(seed, n, k, h, w).to(device, dtype) for seed, k in ((0, c), (1, other))), {}

    return Case(name, make, small)


def _image(seed, *shape):
    x = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


CASES = (
    _case("tiny", 2, 32, 4, 4, small=True),
    _case("odd", 3, 30, 5, 7, small=True),
    _case("scaled", 1, 17, 3, 3, bias=False, scale=1.414, small=True),
    _case("bias", 2, 70, 9, 5, residual=False, small=True),
    _case("sd15-64", 2, 320, 64, 64),
    _case("sd15-8", 2, 1280, 8, 8),
    _case("vae-1024", 1, 128, 1024, 1024),
)
CONCAT_CASES = (
    _concat("tiny", 2, 32, 32, 4, 4, small=True),
    _concat("odd", 3, 30, 17, 5, 7, small=True),
    _concat("sd15-64", 2, 640, 320, 64, 64),
    _concat("sdxl-128", 2, 320, 320, 128, 128),
)

image_sum = Op("image_sum", reference, "accel_kernels.image.image_sum_triton:image_sum", supports, CASES)
image_concat = Op(
    "image_concat",
    reference_concat,
    "accel_kernels.image.image_sum_triton:image_concat",
    supports_concat,
    CONCAT_CASES,
)
