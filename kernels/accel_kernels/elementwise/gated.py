"""act(gate) * up, elementwise: the middle of a gated MLP (Shazeer, "GLU variants improve transformer", 2020)."""

import torch
import torch.nn.functional as F

from accel_kernels.norm.norm import ACTIVATIONS
from accel_kernels.op import contiguous_reason, dtype_reason, make_op, random_cases


def reference(gate, up, activation):
    """act(gate) * up, or act(gate) where up is None: (..., I), rows contiguous. activation: a name of ACTIVATIONS."""
    y = ACTIVATIONS[activation](gate)
    return y if up is None else y * up


def supports(gate, up, activation) -> str | None:
    if gate.numel() == 0:
        return "empty"
    if activation not in ACTIVATIONS:
        return f"activation {activation!r}"
    if up is not None and (gate.shape != up.shape or gate.dtype != up.dtype):
        return "gate and up of different shapes or dtypes"
    for name, tensor in (("gate", gate), ("up", up)):
        if tensor is not None and (tensor.stride(-1) != 1 or not _evenly_spaced(tensor)):
            return f"{name}: rows not evenly spaced"
    return dtype_reason(gate, up)


def _evenly_spaced(t: torch.Tensor) -> bool:
    """Whether one stride walks all dimensions but the last."""
    return all(t.stride(i) == t.stride(i + 1) * t.shape[i + 1] or t.shape[i] == 1 for i in range(t.dim() - 2))


def reference_geglu(x):
    """x: (..., 2 D). Returns (..., D): x[..., :D] * gelu(x[..., D:]), the exact GELU."""
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate)


def supports_geglu(x) -> str | None:
    """As `supports`, of `geglu`."""
    if x.numel() == 0:
        return "empty"
    if x.shape[-1] % 2:
        return f"odd number of channels {x.shape[-1]}"
    return contiguous_reason(x=x) or dtype_reason(x)


@random_cases
def _case(rand, rows, width, activation="silu", halves=False, alone=False):
    gate, up = rand(rows, 2 * width).chunk(2, dim=-1)
    if alone:
        return (gate, None, activation), {}
    return (gate, up, activation) if halves else (gate.contiguous(), up.contiguous(), activation), {}


@random_cases
def _geglu_case(rand, *shape, turned=False):
    """turned: rows first, contiguous still where there is one of what stands behind them."""
    x = rand(*shape, spread=3.0)
    return (x.transpose(0, 1) if turned else x,), {}


CASES = (
    _case("tiny", 3, 64, small=True),
    _case("odd-halves", 5, 77, "gelu_tanh", halves=True, small=True),
    _case("gelu", 2, 100, "gelu", small=True),
    _case("relu2", 2, 33, "relu2", small=True),
    _case("alone", 3, 70, "gelu_quick", alone=True, small=True),
    _case("llama-prefill", 2048, 14336),
    _case("phi3-halves", 512, 8192, halves=True),
)
GEGLU_CASES = (
    _geglu_case("tiny", 2, 5, 64, small=True),
    _geglu_case("odd", 3, 7, 154, small=True),
    _geglu_case("one", 1, 1, 2, small=True),
    _geglu_case("turned", 1, 4, 64, turned=True, small=True),
    _geglu_case("sd15-64", 2, 4096, 2560),
    _geglu_case("sd15-8", 2, 64, 10240),
    _geglu_case("sdxl-32", 2, 1024, 10240),
)

gated = make_op("gated", reference, supports, CASES)
geglu = make_op("geglu", reference_geglu, supports_geglu, GEGLU_CASES)
