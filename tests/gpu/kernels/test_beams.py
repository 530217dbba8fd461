"""Compiled kernels of beam search against torch's own operations on the same GPU."""

import pytest
import torch
from accel_kernels import BeamTexts, beam_step, reorder_beams

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", beam_step.cases, ids=lambda one: one.name)
def test_a_step(case, dtype):
    """Of equals both take the first; rows whose logits are equal differ by what rounding makes of their sums."""
    args, given = case.make(CUDA, dtype)
    assert beam_step.supports(*args, **given) is None
    found, wanted = (
        BeamTexts.unpacked(given["rules"], run(*args, **given)) for run in (beam_step, beam_step.reference)
    )
    near = bool((wanted.running_scores.diff(dim=1).abs() < 1e-4).any())
    for name, mine, other in zip(BeamTexts._fields, found, wanted, strict=True):
        if mine.dtype == torch.float32 or not near:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", reorder_beams.cases, ids=lambda one: one.name)
def test_rows_of_a_cache(case, dtype):
    (kept, order, length), given = case.make(CUDA, dtype)
    assert reorder_beams.supports(kept, order, length, **given) is None
    for _ in range(20):  # a row that is written before another program's part of it is read would show in some
        for used in (length, length - 1):
            found, wanted = (
                run(kept.clone(), order, used, **given) for run in (reorder_beams, reorder_beams.reference)
            )
            assert torch.equal(found, wanted)
