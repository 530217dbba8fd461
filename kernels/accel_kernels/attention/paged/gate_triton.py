"""What attention gives times sigmoid(gate) or softplus(gate), as it is written or in a pass; rounded as by torch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.elementwise.activations_triton import softplus
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

MOST_NUMBERS = 4096  # to a program


class OutputGate(NamedTuple):
    """A gate of each number, (rows, new, heads, D), or of each head, and the steps between tokens, heads and channels.

    sigmoid: 1, a constant to the compiler, or 0 for softplus. Triton 3.6 takes no None here.
    """

    data: torch.Tensor
    token: int
    head: int
    channel: int
    sigmoid: int


def gate_of(gate: torch.Tensor | None, activation: str) -> OutputGate | None:
    """As kernels take it."""
    if gate is None:
        return None
    steps = gate.stride(1 if gate.shape[1] > 1 else 0), gate.stride(2), int(gate.shape[3] > 1)
    return OutputGate(gate, *steps, int(activation == "sigmoid"))


@triton.jit
def times_gate(y, gate, token, head, d_idx, mask, element: tl.constexpr):
    """y in fp32, (M, D): of these heads of these tokens, (M,). Without a gate y itself."""
    if gate is not None:
        place = token[:, None] * gate.token + head[:, None] * gate.head + d_idx[None, :] * gate.channel
        x = tl.load(gate.data + place, mask=mask, other=0.0).to(tl.float32)
        if gate.sigmoid == 1:
            x = 1.0 / (1.0 + tl.exp(-x))
        else:
            x = softplus(x)
        y = y.to(element).to(tl.float32) * x.to(element).to(tl.float32)
    return y


@triton.jit(do_not_specialize=("count",))
def gate_kernel(
    o_ptr, gate, count, heads, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    m_idx = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d_idx = tl.arange(0, BLOCK_D)
    mask = (m_idx < count)[:, None] & (d_idx < DIM)[None, :]
    place = m_idx[:, None] * DIM + d_idx[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    y = tl.load(o_ptr + place, mask=mask, other=0.0).to(tl.float32)
    y = times_gate(y, gate, m_idx // heads, m_idx % heads, d_idx, mask, o_ptr.dtype.element_ty)
    tl.store(o_ptr + place, y.to(o_ptr.dtype.element_ty), mask=mask)


def apply_gate(out: torch.Tensor, gate: torch.Tensor | None, activation: str = "sigmoid") -> torch.Tensor:
    """out, (rows, new, heads * D) contiguous, multiplied in place."""
    if gate is None:
        return out
    rows, new, heads, _ = gate.shape
    dim = out.shape[2] // heads
    channels = power_of_two(dim)
    block = max(1, MOST_NUMBERS // channels)
    count = rows * new * heads
    launch(
        gate_kernel, (cdiv(count, block),), out, gate_of(gate, activation), count, heads,
        DIM=dim, BLOCK_M=block, BLOCK_D=channels, num_warps=8, **programmatic(out.device),
    )  # fmt: skip
    return out
