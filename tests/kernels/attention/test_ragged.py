"""Attention over sequences of different lengths: where tiles of prompts begin behind many decodes."""

import pytest
import torch
from accel_kernels import paged_attention

pytest.importorskip("triton")
CASES = {case.name: case for case in paged_attention.cases if case.name.startswith("ragged")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("name", ["ragged-many-decodes", "ragged-mixed-idle", "ragged-none"])
def test_each_sequence_as_by_itself(name):
    (*qkv, theirs, scale), kwargs = CASES[name].make(torch.device("cpu"), torch.float32)
    (*_, ours, _), _ = CASES[name].make(torch.device("cpu"), torch.float32)
    wanted = paged_attention.reference(*qkv, theirs, scale, **kwargs)
    found = paged_attention.triton(*qkv, ours, scale, **kwargs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-6)
