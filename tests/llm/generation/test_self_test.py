"""The self-test of a whole model: what it runs before kernels are compiled, and what is near enough to stock."""

import pytest
import torch
from accel_kernels.attention.paged.paged_attention_triton import SHORT

from accel.llm.generation import trial_warmup as check
from accel.llm.generation.prefill import bucket_for
from accel.llm.generation.routing import Choices
from accel.llm.generation.trial import Expected, fused_logits
from support.llm.families import prompt


@pytest.mark.parametrize(
    ("name", "kinds"), [("llama", 1), ("gemma2", 2), ("smollm3", 2), ("qwen2-moe-some-dense", 2), ("bloom", 1)]
)
def test_one_layer_of_a_kind_runs(pair_of, name, kinds):
    """Sliding and full attention, rotated or not, dense and sparse are kinds; the place in the stack is none."""
    ours, stock = pair_of(name)
    forward = vars(ours)["forward"]
    call = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with check._one_of_a_kind(forward):
        passing = [layer.bound is check._passed_on for layer in forward.layers]
        warmed_up = fused_logits(forward, (9, 1))
    assert len(passing) - sum(passing) == kinds and passing[0] is False
    assert sum(passing) == 0 or not torch.equal(warmed_up, fused_logits(forward, (9, 1)))
    assert torch.equal(ours.generate(prompt(1, 5), **call), stock.generate(prompt(1, 5), **call))


def test_prompts_of_both_kinds_are_read_by_torch():
    """Else the user's first such prompt would wait for cuDNN's kernels, which takes up to a second."""
    read = [bucket_for(1, length) for length in check.PADDED if bucket_for(1, length) > SHORT]
    assert {length % 128 == 0 for length in read} == {True, False}


@pytest.mark.parametrize("median", [False, True], ids=["every token", "the median token"])
@pytest.mark.parametrize("token", [0, 1, 2])
def test_logits_that_are_no_numbers_are_never_near_enough(token, median):
    wanted = Expected(torch.randn(2, 3, 8), Choices(2), median)
    got = wanted.logits.clone()
    got[1, token] = torch.nan
    if median:
        got[1, (token + 1) % 3] = torch.nan
    assert wanted.off(wanted.logits) == 0 and wanted.off(got) == float("inf") and not wanted.agrees(got)
