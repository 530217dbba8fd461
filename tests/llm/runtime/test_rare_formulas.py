"""Formulas that one or two families have: what is recognized, what looks alike and is refused, what the cache shows."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import accel
from accel.llm.attention.borrowed_attention import NarrowValuesSpec
from accel.llm.recording.record import NotUnderstood
from accel.llm.runtime.analyze import formulas
from accel.llm.runtime.scaled_inputs import ScaledInputsForward
from support.llm.families import make, prompt
from support.llm.outputs import write_alike


def specs(model) -> list:
    return [spec for _, spec in formulas(model, {})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_of_fewer_channels(dtype):
    full, sliding = (spec.attention for spec in specs(make("mimo", dtype=dtype)))
    assert type(full) is type(sliding) is NarrowValuesSpec
    assert (full.dim, full.values, full.value_scale, full.sinks, full.window) == (16, 12, 0.7, None, None)
    assert (sliding.kv_heads, sliding.values, sliding.sinks, sliding.window) == (4, 12, "sinks", 5)


def test_a_cache_shows_values_as_stock_keeps_them():
    stock = make("mimo")
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    ids, caches = prompt(2, 9), [DynamicCache(config=stock.config) for _ in range(2)]
    with torch.no_grad():
        for model, cache in zip((ours, stock), caches, strict=True):
            model(ids, past_key_values=cache, use_cache=True)
    assert not accel.report(ours).fallbacks
    for mine, theirs in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-5, rtol=1e-5)


def test_norms_before_the_last_projections():
    found = specs(make("bitnet"))
    assert all(spec.attention.out_norm.name == "self_attn.attn_sub_norm" for spec in found)
    assert all(spec.mlp.inner.name == "mlp.ffn_sub_norm" and spec.mlp.first for spec in found)
    stock = make("bitnet")
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    for model in (ours, stock):  # what hangs on a norm runs
        model.model.layers[1].self_attn.attn_sub_norm = nn.LayerNorm(64)
        model.model.layers[0].mlp.ffn_sub_norm.weight.data.mul_(1.5)
    write_alike(ours, stock)


def test_two_attentions_in_a_layer():
    stock = make("longcat")
    layers = specs(stock)
    assert [spec.places for spec in layers] == [(0, 1), (2, 3)] and all(len(spec.around) == 2 for spec in layers)
    held = stock.model.layers[0].self_attn[0]
    for part in (part for spec in layers for part in spec.attention.mixers):
        assert part.norm_scale == held.mla_scale_kv_lora and part.activation is None
        assert part.scale == pytest.approx(held.mla_scale_q_lora * held.scaling)


def test_a_gate_of_what_latents_give(monkeypatch):
    stock = make("bailing-hybrid")
    attention = specs(stock)[1].attention
    assert attention.activation == "sigmoid" and attention.projections[-1] == "self_attn.g_proj"
    monkeypatch.setattr(torch, "sigmoid", torch.tanh)
    with pytest.raises(NotUnderstood):
        formulas(stock, {})


def mixture(model) -> nn.Module:
    return model.model.layers[0].feed_forward


def test_experts_of_scaled_inputs_compute_what_they_are_chosen_for():
    stock = make("llama4", num_local_experts=6, num_experts_per_tok=2)
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    forward = vars(mixture(ours))["forward"]
    assert type(forward) is ScaledInputsForward and forward.chosen == 2 and forward.mlp is not None
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for change in (lambda m: None, lambda m: m.router.weight.mul_(1.5), lambda m: m.experts.down_proj.mul_(1.5)):
            for model in (ours, stock):
                change(mixture(model))
            for got, wanted in zip(mixture(ours)(x), mixture(stock)(x), strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        assert not accel.report(ours).fallbacks
        for model in (ours, stock):
            mixture(model).router.top_k = 1
        torch.testing.assert_close(mixture(ours)(x)[0], mixture(stock)(x)[0])
        assert "its router was changed" in accel.report(ours).fallbacks[0][1]


@pytest.mark.parametrize("part", ["router", "shared_expert"])
@pytest.mark.share(1)
def test_what_hangs_on_parts_of_a_mixture_of_scaled_inputs_runs_by_stock(part):
    stock = make("llama4")
    ours, calls = accel.optimize(copy.deepcopy(stock), cpu="fuse"), []

    def louder(module, args, result):
        calls.append(module)
        return tuple(2 * one for one in result) if isinstance(result, tuple) else 2 * result

    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    for model in (ours, stock):
        getattr(mixture(model), part).register_forward_hook(louder)
    with torch.no_grad():
        got, wanted = (mixture(model)(x) for model in (ours, stock))
    torch.testing.assert_close(got, wanted)
    assert len(calls) == 2 and "forward hooks" in accel.report(ours).fallbacks[0][1]
