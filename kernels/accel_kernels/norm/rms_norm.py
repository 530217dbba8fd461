"""RMSNorm over the last dimension, optionally of a sum that is also returned, or gated; Zhang and Sennrich 2019.

Gates are those of state space models and linear attention (Mamba-2: Dao and Gu 2024).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.norm import norm as norms
from accel_kernels.norm.norm import Norm
from accel_kernels.op import FLOATS, dtype_reason, make_op, random_cases, rows_reason

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class Gate(NamedTuple):
    """A factor: the activation, a name of GATES, of `by`. It multiplies the norm's input if `first`, else its output.

    by: the shape of what is normed.
    """

    by: torch.Tensor
    activation: str
    first: bool


def reference(x, weight, eps, *, offset=0.0, residual=None, groups=1, gate=None, dtype=None):
    """x, residual: (..., C); weight: (C,) or None; multiplied as weight + offset. Returns y, or (y, x + residual).

    groups: the mean square is taken over each of so many equal parts of C. gate: a `Gate`. dtype: of y, that of x where
    None; rounded to both.
    """
    h = x if residual is None else x + residual
    if gate is None and groups == 1:
        y = norms.reference(h, Norm(weight, None, eps, False, offset))
    else:
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        y = h.to(kind)
        factor = 1.0 if gate is None else GATES[gate.activation](gate.by.to(kind))
        if gate is not None and gate.first:
            y = y * factor
        y = norms.reference(y.unflatten(-1, (groups, -1)), Norm(None, None, eps)).flatten(-2)
        y = y if weight is None else y * (weight.to(kind) + offset)
        y = (y if gate is None or gate.first else y * factor).to(x.dtype)
    y = y.to(dtype or y.dtype)
    return y if residual is None else (y, h)


def supports(x, weight, eps, *, offset=0.0, residual=None, groups=1, gate=None, dtype=None) -> str | None:
    reason = rows_reason(x, residual) or dtype_reason(x, weight, residual)
    if reason is not None:
        return reason
    if dtype is not None and dtype not in FLOATS:
        return f"dtype {dtype} is not float16, bfloat16 or float32"
    if x.shape[-1] % groups:
        return f"{x.shape[-1]} channels in {groups} groups"
    if gate is None:
        return None
    if gate.activation not in GATES:
        return f"gate {gate.activation!r}"
    if gate.by.shape != x.shape:
        return "gate of another shape"
    return dtype_reason(x, gate.by)


@random_cases
def _case(rand, *shape, residual=True, affine=True, offset=0.0, scale=1.0, groups=1, gate=None):
    """gate: its activation and whether it comes first, its rows a part of wider ones."""
    x = rand(*shape, spread=scale)
    weight = rand(shape[-1]) if affine else None
    given = {"offset": offset, "residual": rand(*shape) if residual else None, "groups": groups}
    if gate is not None:
        given["gate"] = Gate(rand(*shape[:-1], 2 * shape[-1]).chunk(2, dim=-1)[1], *gate)
    return (x, weight, 1e-5), given


CASES = (
    _case("tiny", 2, 5, 64, small=True),
    _case("odd", 3, 7, 77, small=True),
    _case("one", 1, 1, 1, affine=False, residual=False, scale=3e-3, small=True),
    _case("plain", 9, 320, residual=False, small=True),
    _case("offset", 4, 96, offset=1.0, small=True),
    _case("no-affine", 4, 33, affine=False, residual=False, small=True),
    _case("loud", 4, 80, scale=100.0, small=True),
    _case("groups", 5, 96, groups=3, offset=1.0, small=True),
    _case("gate-first", 2, 3, 77, residual=False, gate=("silu", True), small=True),
    _case("gate-last", 4, 40, residual=False, gate=("sigmoid", False), small=True),
    _case("gate-last-groups", 3, 96, gate=("silu", False), groups=4, small=True),
    _case("gate-first-groups", 2, 2, 90, affine=False, gate=("sigmoid", True), groups=2, small=True),
    _case("llama-decode", 8, 1, 4096, residual=False),
    _case("llama-prefill", 1, 2048, 4096),
    _case("gemma", 1, 512, 2304, offset=1.0),
    _case("mamba2-decode", 8, 1, 8192, residual=False, gate=("silu", True), groups=8),
    _case("mamba2-prefill", 1, 2048, 8192, residual=False, gate=("silu", True), groups=8),
    _case("qwen3-next", 2048 * 32, 128, residual=False, gate=("silu", False)),
)

rms_norm = make_op("rms_norm", reference, supports, CASES)
