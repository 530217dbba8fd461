"""Softmax attention whose result is multiplied by the sigmoid of a gate."""

import sys

import pytest
import torch

import accel
from accel.llm.attention.gated_attention import GatedSpec, QueryGatedSpec
from accel.llm.recording.record import NotUnderstood
from accel.llm.runtime.analyze import formulas
from support.llm.families import make, padded
from support.llm.modes import MODES
from support.llm.outputs import same

GATED = {"afmoe": GatedSpec, "qwen3-next-attention": QueryGatedSpec, "qwen3.5-attention": QueryGatedSpec}
WAYS = [mode for mode in MODES if mode.name in ("greedy", "greedy-padded", "beam", "chunked-prefill")]


@pytest.mark.parametrize("name", [*GATED, "qwen3.5-moe-attention"])
@pytest.mark.parametrize("mode", WAYS, ids=str)
def test_generate_writes_what_stock_writes(name, mode, pair_of):
    ours, stock = pair_of(name)
    inputs, before = padded(mode.lengths), accel.report(ours).fallbacks
    same(mode(ours, *inputs), mode(stock, *inputs))
    assert accel.report(ours).fallbacks == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GATED)
def test_where_a_gate_comes_from_is_recognized(name, dtype):
    found = [spec.attention for _, spec in formulas(make(name, dtype=dtype), {})]
    assert {type(one) for one in found} == {GATED[name]}
    assert {(one.heads, one.kv_heads) for one in found} == {(4, 2)}
    assert (found[0].projections[-1] == "self_attn.gate_proj") == (name == "afmoe")
    assert found[0].rotary is not None and found[0].q_norm is not None


@pytest.mark.parametrize("how", ["tanh", "twice", "other rows"])
def test_another_gate_is_not_taken_for_a_sigmoid(how, monkeypatch):
    modeling = sys.modules[type(make("afmoe").model.layers[0]).__module__]
    ways = {"tanh": torch.tanh, "twice": lambda x: 2 * x.sigmoid(), "other rows": lambda x: x.sigmoid().flip(-1)}
    monkeypatch.setattr(modeling.torch, "sigmoid", ways[how])
    with pytest.raises(NotUnderstood, match="changed before it is projected"):
        formulas(make("afmoe"), {})
