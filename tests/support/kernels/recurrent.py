"""How near operations that write states have to be: results, states and windows, against a reference in float64."""

import torch
from accel_kernels.accuracy import in_float64
from accel_kernels.tolerances import FLOOR, SMALLEST_PEAK, TIMES_TORCH
from torch.utils._pytree import tree_leaves, tree_map

from support.kernels.numbers import TRUNCATION

PARTS = 2**-14  # of states in float32: products of 16-bit operands are made of parts with 16 bits


def assert_states_as_good_as_torch(op, case, device, dtype):
    """Largest errors of what is returned and of what is written, at most twice those of the reference in this dtype."""
    made = [case.make(device, dtype) for _ in range(3)]
    (args, kwargs), theirs, exact = made[0], made[1], tree_map(in_float64, made[2])
    assert op.supports(*args, **kwargs) is None
    found = op.triton(*args, **kwargs)
    written = [(found, args, kwargs), *((op.reference(*a, **more), a, more) for a, more in (theirs, exact))]
    numbers = [[t for t in tree_leaves(one) if torch.is_tensor(t) and t.is_floating_point()] for one in written]
    slack = FLOOR[dtype] + (TRUNCATION.get(dtype, 0.0) * 4 if device.type == "cpu" else 0.0)
    for mine, torchs, truth in zip(*numbers, strict=True):
        assert mine.dtype == torchs.dtype and mine.shape == truth.shape
        assert torch.equal(torch.isfinite(mine), torch.isfinite(truth))
        finite = torch.isfinite(truth)  # what nobody may read is NaN
        if not finite.any():
            continue
        mine, torchs, truth = mine[finite], torchs[finite], truth[finite]
        peak = truth.double().abs().max().clamp_min(SMALLEST_PEAK)
        error, allowed = (float((t.double() - truth.double()).abs().max() / peak) for t in (mine, torchs))
        more = PARTS if mine.dtype == torch.float32 and dtype != torch.float32 else 0.0
        assert error <= TIMES_TORCH * allowed + slack + more, f"error {error:.2e}, torch's own {allowed:.2e}"
