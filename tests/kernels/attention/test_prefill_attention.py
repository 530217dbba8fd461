"""Which of torch's kernels reads a prompt: cuDNN's where its plan is won back, else one that needs none."""

import contextlib
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from accel_kernels.attention import prefill_attention as prompt_attention
from accel_kernels.attention.prefill_attention import LONG, MOST_SHAPES, PromptAttention
from accel_kernels.warmup import warmup
from torch.nn.attention import SDPBackend


@pytest.fixture
def orders(monkeypatch):
    """What came first in every call."""
    seen = []

    def kernel(order, set_priority):
        seen.append(order[0])
        return contextlib.nullcontext()

    monkeypatch.setattr(prompt_attention, "sdpa_kernel", kernel)
    return seen


def given(tokens: int, dim: int = 8):
    g = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, heads, tokens, dim, generator=g) for heads in (4, 2, 2)]


def test_a_plan_is_made_where_it_is_won_back(orders):
    attend, flash, cudnn = PromptAttention(), SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for first in (True, False, True, False):  # two layers of two prompts
        attend(*given(9), 0.5, first)
    attend(*given(10), 0.5, True)
    attend(*given(LONG, 1), 0.5, True)
    attend(*given(16), 0.5, True, again=True)
    assert orders == [flash, flash, cudnn, cudnn, flash, cudnn, cudnn]
    assert copy.deepcopy(attend).prompts == {}


def test_the_formula():
    q, k, v = given(13)
    wanted = F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True, scale=0.5
    )
    torch.testing.assert_close(PromptAttention()(q, k, v, 0.5, True), wanted)


def test_shapes_are_forgotten_in_the_order_in_which_they_came(orders):
    attend = PromptAttention()
    for tokens in range(1, MOST_SHAPES + 3):
        attend(*given(tokens, 1), 1.0, True)
    assert len(attend.prompts) == MOST_SHAPES and {key[0][2] for key in attend.prompts}.isdisjoint({1, 2})


def test_a_rehearsal_loads_cudnn_for_what_comes_again(orders, monkeypatch):
    """Once for multiples of 128 and once for others, in threads; nothing is computed or counted here."""
    loaded = []

    def load(q, k, v, scale):
        loaded.append(([t.shape for t in (q, k, v)], scale, threading.current_thread()))
        raise RuntimeError("no cuDNN")

    monkeypatch.setattr(prompt_attention, "_load", load)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    attend = PromptAttention()
    with warmup():
        for tokens in (16, 128, 16, 64, 256):  # one layer after the other, and longer ones
            shown = attend(*given(tokens), 0.5, True, again=True)
            assert shown.shape == given(tokens)[0].shape
        attend(*given(9), 0.5, True)
    assert sorted(shapes[0][2] for shapes, _, _ in loaded) == [16, 128]
    for shapes, scale, thread in loaded:
        assert shapes == [t.shape for t in given(shapes[0][2])] and scale == 0.5
        assert thread is not threading.current_thread()
    assert orders == [] and attend.prompts == {}
