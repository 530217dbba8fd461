"""LayerNorm over the last dimension, optionally of a sum that is also returned; Ba, Kiros and Hinton, 2016.

h = x + shift[c] + residual; y = layer_norm(h). `shift` is the bias of the linear layer before, whose
product cuBLAS computes faster without it.
"""

import torch.nn.functional as F

from accel_kernels.op import dtype_reason, make_op, random_cases, rows_reason


def reference(x, weight, bias, eps, *, residual=None, shift=None, keep=True):
    """x, residual: (..., C); weight, bias, shift: (C,) or None. Returns y, or (y, h) with a residual or shift.

    keep: whether h is stored; (y, None) comes back otherwise.
    """
    h = x if shift is None else x + shift
    h = h if residual is None else h + residual
    y = F.layer_norm(h, h.shape[-1:], weight, bias, eps)
    return y if h is x else (y, h if keep else None)


def supports(x, weight, bias, eps, *, residual=None, shift=None, keep=True) -> str | None:
    return rows_reason(x, residual) or dtype_reason(x, weight, bias, residual, shift)


@random_cases
def _case(rand, *shape, residual=True, shift=True, affine=True, mean=0.0, **more):
    x = rand(*shape, mean=mean)
    weight, bias = (rand(shape[-1]), rand(shape[-1])) if affine else (None, None)
    addends = {"residual": rand(*shape) if residual else None, "shift": rand(shape[-1]) if shift else None}
    return (x, weight, bias, 1e-5), addends | more


CASES = (
    _case("tiny", 2, 5, 64, small=True),
    _case("odd", 3, 7, 77, small=True),
    _case("one", 1, 1, 1, small=True),
    _case("plain", 9, 320, residual=False, shift=False, small=True),
    _case("shift", 7, 96, residual=False, small=True),
    _case("residual", 6, 80, shift=False, small=True),
    _case("post-norm", 6, 80, shift=False, keep=False, small=True),
    _case("no-affine", 4, 33, affine=False, small=True),
    _case("far-mean", 6, 96, mean=30.0, small=True),
    _case("sd15-64", 2, 4096, 320),
    _case("sd15-16", 2, 256, 1280),
    _case("sdxl-32", 2, 1024, 1280),
    _case("clip", 2, 77, 768, residual=False, shift=False),
)

layer_norm = make_op("layer_norm", reference, supports, CASES)
