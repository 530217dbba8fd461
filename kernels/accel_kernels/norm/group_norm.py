"""GroupNorm over channels-last images, with an optional per-channel add before and SiLU after it; Wu and He, 2018.

y = silu(group_norm(x + shift[c] + add[n, c])). In a diffusion resnet `shift` is the bias of the convolution before, and
`add` the projected time embedding.
"""

import torch
import torch.nn.functional as F

from accel_kernels.op import FLOATS, dtype_reason, make_op, random_cases


def reference(x, num_groups, weight, bias, eps, *, add=None, shift=None, silu=False, channel_stats=None, dtype=None):
    """x: (N, C, H, W); weight, bias, shift: (C,) or None; add: (N, C) or None. Returns a tensor like x.

    channel_stats: what `image_sum` or `image_concat` returned beside x, which saves reading it; None where it did not.
    dtype: of the result, where it is not that of x. Weight and bias are of the wider of both.
    """
    dtype = dtype or x.dtype
    wide = torch.promote_types(x.dtype, dtype if weight is None else torch.promote_types(dtype, weight.dtype))
    if (x.dtype, dtype) != (wide, wide):
        given = {"add": add, "shift": shift, "silu": silu}
        return reference(x.to(wide), num_groups, weight, bias, eps, **given).to(dtype)
    if shift is not None:
        x = x + shift.to(x.dtype)[:, None, None]
    if add is not None:
        x = x + add.to(x.dtype)[:, :, None, None]
    y = exact(x, num_groups, weight, bias, eps)
    return F.silu(y) if silu else y


def exact(x, num_groups, weight, bias, eps):
    """Torch's group norm by the code that is right far from zero; x: (N, C, ...). The result lies as x does.

    On a CPU torch takes the variance of a channels-last tensor for E[x^2] - E[x]^2, which cancels; of a tensor of three
    dimensions, which cannot be channels-last, it does not.
    """
    if x.is_cuda or x.dim() < 4:
        return F.group_norm(x, num_groups, weight, bias, eps)
    y = F.group_norm(x.flatten(2), num_groups, weight, bias, eps).view(x.shape)
    return y if x.is_contiguous() else torch.empty_like(x).copy_(y)


def supports(
    x, num_groups, weight, bias, eps, *, add=None, shift=None, silu=False, channel_stats=None, dtype=None
) -> str | None:
    if dtype not in (None, *FLOATS):
        return f"dtype {dtype} is not float16, bfloat16 or float32"
    if x.dim() != 4:
        return f"{x.dim()} dimensions, not 4"
    if not x.is_contiguous(memory_format=torch.channels_last):
        return "not channels-last"
    if x.numel() == 0:
        return "empty"
    if x.shape[1] % num_groups:
        return f"{x.shape[1]} channels do not divide into {num_groups} groups"
    if x.shape[1] // num_groups > 2048:
        return "more than 2048 channels a group"
    if (weight is None) != (bias is None):
        return "weight without bias or bias without weight"
    if add is not None and add.stride(1) != 1:
        return "an added term whose channels are not contiguous"
    return dtype_reason(x, weight, bias, add, shift)


@random_cases
def _case(rand, n, c, h, w, groups=32, add=False, shift=False, silu=True, mean=0.0):
    x = rand(n, c, h, w, mean=mean).contiguous(memory_format=torch.channels_last)
    kwargs = {"add": rand(n, c) if add else None, "shift": rand(c) if shift else None, "silu": silu}
    return (x, groups, rand(c), rand(c), 1e-5), kwargs


CASES = (
    _case("tiny", 2, 64, 4, 4, small=True),
    _case("odd", 3, 30, 5, 7, groups=3, add=True, shift=True, small=True),
    _case("one-pixel", 1, 64, 1, 1, groups=8, small=True),
    _case("one-group", 2, 20, 9, 3, groups=1, silu=False, small=True),
    _case("uneven", 2, 30, 41, 47, groups=3, add=True, shift=True, small=True),
    _case("many-rows", 1, 32, 97, 53, groups=8, add=True, small=True),
    _case("far-mean", 1, 32, 33, 65, groups=4, mean=30.0, small=True),
    _case("sd15-64", 2, 320, 64, 64, add=True, shift=True),
    _case("sd15-64-skip", 2, 960, 64, 64),
    _case("sd15-32", 2, 640, 32, 32, add=True, shift=True),
    _case("sd15-16", 2, 1280, 16, 16, add=True, shift=True),
    _case("sd15-8-skip", 2, 2560, 8, 8),
    _case("transformer-64", 2, 320, 64, 64, silu=False),
    _case("sdxl-128", 2, 320, 128, 128, add=True, shift=True),
    _case("vae-512", 1, 512, 128, 128, shift=True),
    _case("vae-1024", 1, 128, 1024, 1024, shift=True),
)

group_norm = make_op("group_norm", reference, supports, CASES)
