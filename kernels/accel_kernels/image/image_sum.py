"""Passes that write an image and the channel stats of it that the group norm after it needs.

`image_sum` ends a block: (gain * x + bias[c] + residual) / scale. `image_concat` joins two images along their channels.
"""

import torch

from accel_kernels.image.upsample import channels_last, images_reason
from accel_kernels.op import dtype_reason, make_op, random_cases


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
    return images_reason(x, residual) or dtype_reason(x, residual, bias)


def reference_concat(x, other):
    """x: (N, C, H, W); other: (N, C', H, W). Returns (N, C + C', H, W), and no channel stats."""
    return torch.cat([x, other], dim=1), None


def supports_concat(x, other) -> str | None:
    """As `supports`, of `image_concat`."""
    if other.dim() != 4 or (x.shape[0], *x.shape[2:]) != (other.shape[0], *other.shape[2:]) or x.dtype != other.dtype:
        return "images of several sizes or dtypes"
    return images_reason(x, other) or dtype_reason(x, other)


@random_cases
def _case(rand, n, c, h, w, residual=True, bias=True, scale=1.0):
    x, other = (channels_last(rand(n, c, h, w)) for _ in range(2))
    return (x, other if residual else None, rand(c) if bias else None, scale), {}


@random_cases
def _concat(rand, n, c, other, h, w):
    return (tuple(channels_last(rand(n, k, h, w)) for k in (c, other)), {})


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

image_sum = make_op("image_sum", reference, supports, CASES)
image_concat = make_op("image_concat", reference_concat, supports_concat, CONCAT_CASES)
