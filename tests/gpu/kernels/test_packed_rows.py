"""The compiled kernels of packed rows: those that torch finds."""

import pytest
import torch
from accel_kernels import packed_rows

from support.kernels.packed_rows import same_rows


@pytest.mark.parametrize("case", packed_rows.cases, ids=lambda one: one.name)
def test_rows_are_those_of_torch(case):
    args, more = case.make(torch.device("cuda"), torch.float16)
    assert packed_rows.supports(*args, **more) is None
    same_rows(case, torch.device("cuda"))
