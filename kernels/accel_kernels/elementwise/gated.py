"""act(gate) * up, elementwise: the middle of a gated MLP (Shazeer, "GLU variants improve transformer", 2020)."""

import torch

from accel_kernels.norm.norm import ACTIVATIONS
from accel_kernels.op import dtype_reason, make_op, random_case


def reference(gate, up, activation):
    """gate, up: (..., I), of the same shape, rows contiguous; activation: a name of ACTIVATIONS. Returns (..., I)."""
    return ACTIVATIONS[activation](gate) * up


def supports(gate, up, activation) -> str | None:
    if gate.numel() == 0:
        return "empty"
    if activation not in ACTIVATIONS:
        return f"activation {activation!r}"
    if gate.shape != up.shape or gate.dtype != up.dtype:
        return "gate and up of different shapes or dtypes"
    for name, tensor in (("gate", gate), ("up", up)):
        if tensor.stride(-1) != 1 or not _rows_regular(tensor):
            return f"{name}: rows not evenly spaced"
    return dtype_reason(gate, up)


def _rows_regular(t: torch.Tensor) -> bool:
    """Whether all but the last dimension can be walked with one stride."""
    return all(t.stride(i) == t.stride(i + 1) * t.shape[i + 1] or t.shape[i] == 1 for i in range(t.dim() - 2))


def _case(name, rows, width, activation="silu", halves=False, small=False):
    def make(rand):
        gate, up = rand(rows, 2 * width).chunk(2, dim=-1)
        return (gate, up, activation) if halves else (gate.contiguous(), up.contiguous(), activation), {}

    return random_case(name, make, small)


CASES = (
    _case("tiny", 3, 64, small=True),
    _case("odd-halves", 5, 77, "gelu_tanh", halves=True, small=True),
    _case("gelu", 2, 100, "gelu", small=True),
    _case("relu2", 2, 33, "relu2", small=True),
    _case("llama-prefill", 2048, 14336),
    _case("phi3-halves", 512, 8192, halves=True),
)

gated = make_op("gated", reference, supports, CASES)
