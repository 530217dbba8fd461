"""(x + bias + residual) / scale over NHWC in one pass."""

import torch
import triton
import triton.language as tl

from accel_kernels.rehearsal import launch

BLOCK, WARPS = 4096, 8


@triton.jit(do_not_specialize=("has_bias",))
def residual_add_kernel(
    x_ptr, residual_ptr, bias_ptr, y_ptr, has_bias, size, channels, inverse_scale, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    mask = place < size
    y = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if has_bias:
        c_idx = ((first % channels).to(tl.int32) + tl.arange(0, BLOCK)) % channels  # 64-bit division is slow
        y += tl.load(bias_ptr + c_idx, mask=mask, other=0.0).to(tl.float32)
    y *= inverse_scale
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def residual_add(x, residual, bias=None, scale=1.0):
    """Same arguments as the reference; x and residual channels-last."""
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    launch(
        residual_add_kernel, grid,
        x, residual, x if bias is None else bias, y, bias is not None, x.numel(), x.shape[1], 1.0 / scale,
        BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return y


# What the compile check builds without a GPU: kernel, argument types, constants, warps.
SPECIMENS = tuple(
    (
        residual_add_kernel,
        {f"{name}_ptr": f"*{dtype}" for name in ("x", "residual", "bias", "y")}
        | {"has_bias": "i1", "size": "i64", "channels": "i32", "inverse_scale": "fp32"},
        {"BLOCK": BLOCK},
        WARPS,
    )
    for dtype in ("fp16", "bf16", "fp32")
)
