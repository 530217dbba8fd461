"""Experts of a mixture: really taken for few tokens, left for many, and left where they have changed."""

import copy

import pytest
import torch
from torch import nn

import accel
from accel.llm.runtime.experts import ExpertsForward


@pytest.fixture
def pair():
    """(optimized, stock)."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=99, num_hidden_layers=2, num_local_experts=4, **sizes)
    stock = MixtralForCausalLM(config).eval()
    for parameter in stock.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return accel.optimize(copy.deepcopy(stock)), stock


def taken(monkeypatch) -> list[int]:
    """The numbers of tokens of the fused calls to come."""
    tokens, fast = [], ExpertsForward.fast
    monkeypatch.setattr(ExpertsForward, "fast", lambda self, x, *rest: tokens.append(len(x)) or fast(self, x, *rest))
    return tokens


@torch.no_grad()
@pytest.mark.parametrize(("length", "fused"), [(5, [5, 5]), (40, [])])
def test_few_tokens_are_fused(pair, monkeypatch, length, fused):
    ours, stock = pair
    tokens, ids = taken(monkeypatch), torch.arange(length)[None] % 99
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    assert tokens == fused


@torch.no_grad()
def test_another_activation_is_noticed(pair, monkeypatch):
    ours, stock = pair
    tokens, ids = taken(monkeypatch), torch.arange(5)[None]
    for model in pair:
        model.model.layers[0].mlp.experts.act_fn = nn.GELU()
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    assert tokens == [5]
