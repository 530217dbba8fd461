"""Experts for few tokens, in Triton's interpreter: the second product in several walks, choices of no expert."""

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.moe import experts_triton
from accel_kernels.moe.experts import CASES, experts
from accel_kernels.moe.gemv_triton import expert_rows_down_kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


@pytest.mark.parametrize(("name", "steps"), [("all", 2), ("all", 1), ("interleaved", 3)])
def test_any_number_of_steps_gives_the_same(name, steps, monkeypatch, poisoned):
    (x, index, shares, weights), _ = next(case for case in CASES if case.name == name).make(
        torch.device("cpu"), torch.float32
    )
    index[0, 0] = weights.experts  # there is none of that number
    launched, launch = [], experts_triton.launch

    def seen(kernel, grid, *args, **meta):
        launched.append((kernel, meta))
        launch(kernel, grid, *args, **meta)

    monkeypatch.setattr(experts_triton, "launch", seen)
    monkeypatch.setattr(experts_triton, "ALONG", 16)
    monkeypatch.setattr(experts_triton, "STEPS", steps)
    found = experts_triton.experts(x, index, shares, weights)
    kernel, meta = launched[-1]
    assert kernel is expert_rows_down_kernel and (meta["BLOCK_K"], meta["STEPS"]) == (16, steps)
    torch.testing.assert_close(found, experts.reference(x, index, shares, weights), rtol=1e-5, atol=1e-5)
