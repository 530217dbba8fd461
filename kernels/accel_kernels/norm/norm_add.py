"""A residual plus the norm of what a layer's part gives, as Gemma 2 and kin add it."""

import torch

from accel_kernels.norm import norm as norms
from accel_kernels.norm.norm import Norm
from accel_kernels.op import dtype_reason, make_op, random_cases, rows_reason


def reference(x, norm, residual, *, scale=1.0, factor=None):
    """(residual + scale * norm(x)) * factor. x, residual: (..., C); factor: (1,), or None for none."""
    y = torch.add(residual, norms.reference(x, norm), alpha=scale)
    return y if factor is None else y * factor.to(y.dtype)


def supports(x, norm, residual, *, scale=1.0, factor=None) -> str | None:
    if norm.centered or norm.bias is not None:
        return "a norm with a mean or a bias"
    return rows_reason(x, residual) or dtype_reason(x, norm.weight, factor)


@random_cases
def _case(rand, *shape, affine=True, offset=0.0, scale=1.0, factor=False, spread=1.0):
    norm = Norm(rand(shape[-1]) if affine else None, None, 1e-5, False, offset)
    return (rand(*shape, spread=spread), norm, rand(*shape)), {"scale": scale, "factor": rand(1) if factor else None}


CASES = (
    _case("tiny", 2, 5, 64, small=True),
    _case("odd", 3, 7, 77, offset=1.0, factor=True, small=True),
    _case("no-affine", 4, 33, affine=False, scale=0.4, small=True),
    _case("loud", 4, 80, factor=True, scale=-2.0, spread=100.0, small=True),
    _case("gemma4-decode", 8, 1, 2560, factor=True),
    _case("gemma4-prefill", 1, 2048, 2560),
    _case("wide", 3, 16384, offset=1.0),
)

norm_add = make_op("norm_add", reference, supports, CASES)
