"""GEGLU activation: the first half of the channels times the exact GELU of the second (Shazeer, 2020)."""

import torch.nn.functional as F

from accel_kernels.op import dtype_reason, make_op, random_case


def reference(x):
    """x: (..., 2 D). Returns (..., D): x[..., :D] * gelu(x[..., D:])."""
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate)


def supports(x) -> str | None:
    if x.numel() == 0:
        return "empty"
    if x.shape[-1] % 2:
        return f"odd number of channels {x.shape[-1]}"
    if not x.is_contiguous():
        return "not contiguous"
    return dtype_reason(x)


def _case(name, *shape, small=False):
    return random_case(name, lambda rand: ((rand(*shape, spread=3.0),), {}), small)


CASES = (
    _case("tiny", 2, 5, 64, small=True),
    _case("odd", 3, 7, 154, small=True),
    _case("one", 1, 1, 2, small=True),
    _case("sd15-64", 2, 4096, 2560),
    _case("sd15-8", 2, 64, 10240),
    _case("sdxl-32", 2, 1024, 10240),
)

geglu = make_op("geglu", reference, supports, CASES)
