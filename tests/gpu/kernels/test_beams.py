"""Compiled kernels of beam search against torch's own operations on the same GPU."""

import pytest
import torch
from accel_kernels import BeamTexts, beam_step, reorder_beams
from accel_kernels.beams.beam_step import NEVER

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", beam_step.cases, ids=lambda one: one.name)
def test_a_step(case, dtype):
    args, given = case.make(CUDA, dtype)
    assert beam_step.supports(*args, **given) is None
    # in 16 bits many words are equally likely, and which of them torch takes is its own affair
    words = args[0].shape[1]
    fine = torch.linspace(0, 1e-2, words, device=CUDA)[torch.randperm(words, device=CUDA)]
    logits = args[0] if dtype == torch.float32 else (args[0].float() + fine).to(dtype).float()
    exact = (logits + (0 if dtype == torch.float32 else fine * 1e-2), *args[1:])
    found, wanted = (run(*exact, **given) for run in (beam_step, beam_step.reference))
    ours, theirs = (BeamTexts.unpacked(given["rules"], *one[:2]) for one in (found, wanted))
    running = theirs.running_scores > NEVER / 2
    for name, mine, other in zip(BeamTexts._fields, ours, theirs, strict=True):
        rows = running if name.startswith("running") else theirs.ended
        if mine.shape[:2] == rows.shape:
            mine, other = mine[rows], other[rows]
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[2][running.flatten()], wanted[2][running.flatten()]) and bool(found[4]) == bool(wanted[4])
    scores = (BeamTexts.unpacked(given["rules"], *run(*args, **given)[:2]) for run in (beam_step, beam_step.reference))
    scores = [one.running_scores[running] for one in scores]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


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
