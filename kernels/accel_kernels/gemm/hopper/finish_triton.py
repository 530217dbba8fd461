"""What follows the sums of a warpgroup's tile, a piece of its columns at a time, in fp32 before it is rounded."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.elementwise.activations_triton import activate_fast
from accel_kernels.gemm.epilogue import Epilogue


class FinishArguments(NamedTuple):
    """An `Epilogue` and scales of 8-bit operands as the kernel takes them; what is absent is None."""

    bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    row_scales: torch.Tensor | None
    scales: torch.Tensor | None
    up_scales: torch.Tensor | None
    modulation: torch.Tensor | None
    residual: torch.Tensor | None
    scale: float


def finish_arguments(epilogue: Epilogue, scales: Sequence[torch.Tensor | None] = (None,)) -> FinishArguments:
    """scales: of rows of x and of each weight, where operands have 8 bits."""
    shifts, of_weights = epilogue.arguments, scales[1:] or [None]
    return FinishArguments(
        shifts.bias, shifts.up_bias, scales[0], of_weights[0], of_weights[-1], epilogue.modulation, epilogue.residual,
        shifts.scale,
    )  # fmt: skip


@gluon.jit
def placed(y):
    """A piece in the layout in which an instruction of its width leaves it."""
    PLACED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, y.shape[1], 16])
    return gl.convert_layout(y, PLACED, assert_trivial=True)


@gluon.jit
def _by_column(ptr, n_idx, n):
    return gl.expand_dims(gl.load(ptr + n_idx, mask=n_idx < n, other=0.0).to(gl.float32), 0)


@gluon.jit
def _rounded(y, DTYPE: gl.constexpr, ROUNDED: gl.constexpr):
    """y, to the nearest of this dtype where every step is rounded."""
    if ROUNDED:
        y = y.to(DTYPE).to(gl.float32)
    return y


@gluon.jit
def finished(y, other, row, column, after, places, DTYPE: gl.constexpr, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
             ROUNDED: gl.constexpr):  # fmt: skip
    """A piece of the result, of `placed` sums y and, with a gate, of the other weight's.

    row, column: of its first element. places: rows; outputs, and numbers from row to row of modulation and of
    residual, over 8; rows to one of modulation.
    """
    rows, eighths, modulation_rise, residual_rise, share = places
    n = eighths * 8
    PLACED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, y.shape[1], 16])
    m_idx = row + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, PLACED))
    n_idx = column + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, PLACED))
    y = y.to(gl.float32)
    if GATE:
        other = other.to(gl.float32)
    if after.row_scales is not None:
        of_row = gl.expand_dims(gl.load(after.row_scales + m_idx, mask=m_idx < rows, other=0.0), 1)
        y *= of_row * _by_column(after.scales, n_idx, n)
        if GATE:
            other *= of_row * _by_column(after.up_scales, n_idx, n)
    if after.bias is not None:
        y += _by_column(after.bias, n_idx, n)
        if GATE:
            other += _by_column(after.up_bias, n_idx, n)
    y = _rounded(y, DTYPE, ROUNDED)
    if ACTIVATION is not None:
        y = _rounded(activate_fast(y, ACTIVATION), DTYPE, ROUNDED)
    if GATE:
        y = _rounded(y * _rounded(other, DTYPE, ROUNDED), DTYPE, ROUNDED)
    y = _rounded(y * after.scale, DTYPE, ROUNDED)
    seen = gl.expand_dims(m_idx < rows, 1) & gl.expand_dims(n_idx < n, 0)
    if after.modulation is not None:
        place = gl.expand_dims((m_idx // share).to(gl.int64) * (modulation_rise * 8), 1)
        factor = gl.load(after.modulation + place + gl.expand_dims(n_idx, 0), mask=seen, other=0.0)
        y = _rounded(y * factor.to(gl.float32), DTYPE, ROUNDED)
    if after.residual is not None:
        place = gl.expand_dims(m_idx.to(gl.int64) * (residual_rise * 8), 1)
        y += gl.load(after.residual + place + gl.expand_dims(n_idx, 0), mask=seen, other=0.0).to(gl.float32)
    return y.to(DTYPE)
