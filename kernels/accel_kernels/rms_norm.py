"""RMSNorm over the last dimension, optionally of a sum that is also returned; Zhang and Sennrich 2019."""

import torch

from accel_kernels import norm as norms
from accel_kernels.norm import Norm
from accel_kernels.op import Case, Op, dtype_reason, rows_reason


def reference(x, weight, eps, *, offset=0.0, residual=None):
    """x, residual: (..., C); weight: (C,) or None; multiplied as weight + offset. Returns y, or (y, x + residual)."""
    h = x if residual is None else x + residual
    y = norms.reference(h, Norm(weight, None, eps, False, offset))
    return y if residual is None else (y, h)


def supports(x, weight, eps, *, offset=0.0, residual=None) -> str | None:
    return rows_reason(x, residual) or dtype_reason(x, weight, residual)


def _case(name, *shape, residual=True, affine=True, offset=0.0, scale=1.0, small=False):
    def make(device, dtype):
        g = torch.Generator("cpu").manual_seed(0)

        def rand(*size):
            return torch.randn(*size, generator=g).to(device, dtype)

        x = (torch.randn(*shape, generator=g) * scale).to(device, dtype)
        weight = rand(shape[-1]) if affine else None
        return (x, weight, 1e-5), {"offset": offset, "residual": rand(*shape) if residual else None}

    return Case(name, make, small)


CASES = (
    _case("tiny", 2, 5, 64, small=True),
    _case("odd", 3, 7, 77, small=True),
    _case("one", 1, 1, 1, affine=False, residual=False, small=True),
    _case("plain", 9, 320, residual=False, small=True),
    _case("offset", 4, 96, offset=1.0, small=True),
    _case("no-affine", 4, 33, affine=False, residual=False, small=True),
    _case("loud", 4, 80, scale=100.0, small=True),
    _case("llama-decode", 8, 1, 4096, residual=False),
    _case("llama-prefill", 1, 2048, 4096),
    _case("gemma", 1, 512, 2304, offset=1.0),
)

rms_norm = Op("rms_norm", reference, "accel_kernels.triton_kernels.rms_norm:rms_norm", supports, CASES)
