"""What kernel tests compare with: the reference in float64, and what torch's own rounding costs in the same dtype."""

import pytest
import torch

# Triton's interpreter truncates to bfloat16 where the GPU rounds: one more unit in the last place.
TRUNCATION = {torch.bfloat16: 2**-8}
FLOOR = {torch.float32: 4e-6, torch.float16: 0.0, torch.bfloat16: 0.0}


def assert_as_good_as_torch(op, args, kwargs, dtype, interpreted: bool):
    """The kernel's largest error against float64 is at most twice the reference's own in this dtype."""
    exact = _many(op.reference(*map(_double, args), **{name: _double(value) for name, value in kwargs.items()}))
    torchs = _many(op.reference(*args, **kwargs))
    ours = _many(op.triton(*args, **kwargs))
    assert len(ours) == len(exact)
    for mine, theirs, truth in zip(ours, torchs, exact, strict=True):
        assert mine.dtype == dtype and mine.shape == truth.shape
        assert torch.isfinite(mine).all()
        peak = truth.abs().max().clamp_min(1e-3)
        error, allowed = (_error(t, truth) / peak for t in (mine, theirs))
        slack = FLOOR[dtype] + (TRUNCATION.get(dtype, 0.0) if interpreted else 0.0)
        assert error <= 2 * allowed + slack, f"error {error:.2e}, torch's own {allowed:.2e}"


def _error(tensor, truth):
    return float((tensor.double() - truth).abs().max())


def _double(value):
    return value.double() if isinstance(value, torch.Tensor) else value


def _many(output):
    return output if isinstance(output, tuple) else (output,)


@pytest.fixture
def as_good_as_torch():
    return assert_as_good_as_torch
