"""What attention gives times sigmoid(gate): where it is written, or in a pass of its own; rounded as by torch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

MOST_NUMBERS = 4096  # to a program


class OutputGate(NamedTuple):
    """A gate of each number, (rows, new, heads, D), and the steps from token to token and from head to head."""

    data: torch.Tensor
    token: int
    head: int


def gate_of(gate: torch.Tensor | None) -> OutputGate | None:
    """As kernels take it."""
    return None if gate is None else OutputGate(gate, gate.stride(1 if gate.shape[1] > 1 else 0), gate.stride(2))


@triton.jit
def times_sigmoid(y, gate, token, head, d_idx, mask, element: tl.constexpr):
    """y in fp32, (M, D): of these heads of these tokens, (M,). Without a gate y itself."""
    if gate is not None:
        place = token[:, None] * gate.token + head[:, None] * gate.head + d_idx[None, :]
        x = tl.load(gate.data + place, mask=mask, other=0.0).to(tl.float32)
        y = y.to(element).to(tl.float32) * (1.0 / (1.0 + tl.exp(-x))).to(element).to(tl.float32)
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
    y = times_sigmoid(y, gate, m_idx // heads, m_idx % heads, d_idx, mask, o_ptr.dtype.element_ty)
    tl.store(o_ptr + place, y.to(o_ptr.dtype.element_ty), mask=mask)


def apply_gate(out: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """out, (rows, new, heads * D) contiguous, multiplied in place."""
    if gate is None:
        return out
    rows, new, heads, dim = gate.shape
    channels = power_of_two(dim)
    block = max(1, MOST_NUMBERS // channels)
    count = rows * new * heads
    launch(
        gate_kernel, (cdiv(count, block),), out, gate_of(gate), count, heads,
        DIM=dim, BLOCK_M=block, BLOCK_D=channels, num_warps=8, **programmatic(out.device),
    )  # fmt: skip
    return out
