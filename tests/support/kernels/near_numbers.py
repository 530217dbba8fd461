"""Activations that are rounded to 8 bits in the pass that computes them."""

import torch
from accel_kernels import RowOp, RowProgram, rowwise
from accel_kernels.row_numbers import row_numbers, row_peak, row_scale
from accel_kernels.rowwise.program import FULL
from accel_kernels.rowwise.rowwise import TORCH

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def assert_near(name: str, kind: str, device: torch.device) -> None:
    """The numbers and scales of an activation are those of float64, but for a few where rounding is undecided."""
    x = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)).to(device) * 4
    x[0, :9] = torch.tensor([-88.0, 88.0, -200.0, 0.0, -0.0, -12.0, 1e-20, -1e-5, 30.0], device=device)
    ops = (
        RowOp(name, (0,), 0.0, torch.bfloat16),  # which nobody sees, so it is not rounded
        RowOp("peak", (1,)),
        RowOp(f"scale_{kind}", (2,)),
        RowOp(f"numbers_{kind}", (1, 2)),
    )
    program = RowProgram(1, 3000, (FULL,), ops, (4, 3), (KINDS[kind], torch.float32))
    assert rowwise.supports(x, program=program, shape=(5,)) is None
    numbers, scales = rowwise.triton(x, program=program, shape=(5,))
    exact = TORCH[name](x.double())
    peak = row_peak(exact)
    wanted = row_numbers(exact, peak, KINDS[kind]).to(KINDS[kind])
    torch.testing.assert_close(scales.double(), row_scale(peak, KINDS[kind]), rtol=2e-6, atol=0)
    off = numbers.float() != wanted.float()
    assert off.float().mean() < 2e-3
    steps = (numbers.float() - wanted.float()).abs()
    assert float(steps.max()) <= (1 if kind == "int8" else 32)
