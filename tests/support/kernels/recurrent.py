"""How near operations that write states have to be: results, states and windows, against a reference in float64."""

import torch
from accel_kernels.accuracy import _double, _numbers

from support.kernels.numbers import FLOOR, TRUNCATION

PARTS = 2**-14  # of states in float32: products of 16-bit operands are made of parts with 16 bits


def assert_states_as_good_as_torch(op, case, device, dtype):
    """Largest errors of what is returned and of what is written, at most twice those of the reference in this dtype."""
    made = [case.make(device, dtype) for _ in range(3)]
    (args, kwargs), theirs, exact = made[0], made[1], tuple(map(_double, made[2]))
    assert op.supports(*args, **kwargs) is None
    found = op.triton(*args, **kwargs)
    numbers = [_numbers((found, args, kwargs))]
    numbers += [_numbers((op.reference(*a, **more), a, more)) for a, more in (theirs, exact)]
    slack = FLOOR[dtype] + (TRUNCATION.get(dtype, 0.0) * 2 if device.type == "cpu" else 0.0)
    for mine, torchs, truth in zip(*numbers, strict=True):
        assert mine.dtype == torchs.dtype and mine.shape == truth.shape
        assert torch.equal(torch.isfinite(mine), torch.isfinite(truth))
        if not truth.numel():
            continue
        peak = truth.double().abs().max().clamp_min(1e-3)
        error, allowed = (float((t.double() - truth.double()).abs().max() / peak) for t in (mine, torchs))
        more = PARTS if mine.dtype == torch.float32 and dtype != torch.float32 else 0.0
        assert error <= 2 * allowed + slack + more, f"error {error:.2e}, torch's own {allowed:.2e}"
