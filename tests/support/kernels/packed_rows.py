"""The kernels of packed rows against their reference, on a device."""

import torch
from accel_kernels import Case, packed_rows
from accel_kernels.attention.packed.packed_rows import ALL, NONE, ONE

COMPUTED = {"all": ALL, "hidden": NONE, "alike": ONE, "alike-placed": ALL, "unlike": ALL, "left": ONE, "turned": ONE}


def _equal(mask, got, wanted):
    """To the bit; of rows of padding that share a place any one may stand there."""
    for name, mine, theirs in zip(got._fields, got, wanted, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
        same = (mine == theirs) | (~mask.flatten()[theirs] & (name == "rows")) if name == "rows" else mine == theirs
        assert bool(same.all()), name


def same_rows(case: Case, device: torch.device) -> None:
    (mask, x), more = case.make(device, torch.float16)
    assert packed_rows.supports(mask, x, **more) is None
    wanted = packed_rows.reference(mask, x, **more)
    _equal(mask, packed_rows.triton(mask, x, **more), wanted)
    assert int(wanted.facts[-1]) == COMPUTED.get(case.name, int(wanted.facts[-1]))
    if more.get("hidden"):
        plain = torch.zeros((), dtype=torch.bool, device=device)
        wanted = packed_rows.reference(mask, x, plain, **more)
        assert int(wanted.facts[-1]) != NONE
        _equal(mask, packed_rows.triton(mask, x, plain, **more), wanted)
