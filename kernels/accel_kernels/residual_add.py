"""(x + bias[c] + residual) / scale over channels-last images: the end of a resnet or transformer block in one pass."""

import torch

from accel_kernels.op import Case, Op, dtype_reason


def reference(x, residual, bias=None, scale=1.0):
    """x, residual: (N, C, H, W); bias: (C,) or None; scale divides. Returns a tensor like x."""
    if bias is not None:
        x = x + bias.to(x.dtype)[:, None, None]
    y = x + residual
    return y if scale == 1.0 else y / scale


def supports(x, residual, bias=None, scale=1.0) -> str | None:
    if x.dim() != 4:
        return f"{x.dim()} dimensions, not 4"
    if x.numel() == 0:
        return "empty"
    if residual.shape != x.shape or residual.dtype != x.dtype:
        return "residual of another shape or dtype"
    for name, tensor in (("x", x), ("residual", residual)):
        if not tensor.is_contiguous(memory_format=torch.channels_last):
            return f"{name} not channels-last"
    return dtype_reason(x, residual, bias)


def _case(name, n, c, h, w, bias=True, scale=1.0, small=False):
    def make(device, dtype):
        g = torch.Generator("cpu").manual_seed(0)

        def rand(*shape):
            return torch.randn(*shape, generator=g).to(device, dtype)

        x, residual = (rand(n, c, h, w).contiguous(memory_format=torch.channels_last) for _ in range(2))
        return (x, residual, rand(c) if bias else None, scale), {}

    return Case(name, make, small)


CASES = (
    _case("tiny", 2, 32, 4, 4, small=True),
    _case("odd", 3, 30, 5, 7, small=True),
    _case("scaled", 1, 17, 3, 3, bias=False, scale=1.414, small=True),
    _case("sd15-64", 2, 320, 64, 64),
    _case("sd15-8", 2, 1280, 8, 8),
    _case("vae-1024", 1, 128, 1024, 1024),
)

residual_add = Op("residual_add", reference, "accel_kernels.triton_kernels.residual_add:residual_add", supports, CASES)
