"""The compiled rule of timestamps: -inf where torch has it, for every case, launch after launch."""

import pytest
import torch
from accel_kernels import timestamp_rule


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", timestamp_rule.cases, ids=lambda one: one.name)
def test_scores_are_those_of_torch(case, dtype):
    (scores, begun), given = case.make(torch.device("cuda"), dtype)
    given["counters"] = torch.zeros(len(scores), dtype=torch.int32, device="cuda")
    for _ in range(20):
        wanted = timestamp_rule.reference(scores, begun, **given)
        assert torch.equal(timestamp_rule(scores, begun, **given), wanted)
        scores = scores.roll(1, 0) + 0.25 * torch.randn_like(scores)
    assert timestamp_rule.supports(scores, begun, **given) is None and not given["counters"].any()
