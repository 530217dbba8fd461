"""Which rows of a padded batch are computed: the kernels in Triton's interpreter, and what they refuse."""

import pytest
import torch
from accel_kernels import packed_rows

from support.kernels.packed_rows import same_rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("case", [one for one in packed_rows.cases if one.small], ids=lambda one: one.name)
@pytest.mark.share(2)
def test_kernels_find_what_torch_finds(case):
    pytest.importorskip("triton")
    same_rows(case, torch.device("cpu"))


def test_what_the_kernels_cannot_read_is_named():
    mask = torch.ones(2, 5, dtype=torch.bool)
    for given, reason in (
        ((mask.int(),), "int32"),
        ((mask.t(),), "contiguous"),
        ((mask[:0],), "empty"),
        ((mask, torch.zeros(2, 4, 3)), "beside a mask"),
        ((mask, torch.zeros(2, 5, 3, dtype=torch.float64)), "float64"),
    ):
        assert reason in (packed_rows.supports(*given, size=10) or ""), reason
