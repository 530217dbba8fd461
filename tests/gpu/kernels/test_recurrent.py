"""Compiled kernels of linear attention over every case: results, states and windows against float64."""

import pytest
import torch
from accel_kernels import causal_convolution, linear_attention_prompt, linear_attention_step, selective_scan

from support.kernels.numbers import poisoned
from support.kernels.recurrent import assert_states_as_good_as_torch

OPS = (causal_convolution, linear_attention_step, linear_attention_prompt, selective_scan)
LEFT = ("shared memory", "float32", "16 keys or fewer in 16 bits")
ROWS = [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in op.cases]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op, case", ROWS)
def test_results_and_states(op, case, dtype, monkeypatch):
    device = torch.device("cuda")
    args, more = case.make(device, dtype)
    if (reason := op.supports(*args, **more)) is not None:
        assert op is linear_attention_prompt and any(one in reason for one in LEFT)
        pytest.skip(reason)
    poisoned(monkeypatch)
    assert_states_as_good_as_torch(op, case, device, dtype)
