"""Attention to the tokens that an indexer chooses, and attention that runs stock inside a fused layer."""

import copy

import pytest
import torch

import accel
from accel.libraries.cache import DynamicIndexedLayer
from accel.llm.attention.stock import indexed_attention
from accel.llm.attention.stock.indexed_attention import BoundIndexedAttention, IndexedSpec
from accel.llm.attention.stock.stock_attention import StockSpec
from accel.llm.runtime.analyze import analyze
from support.llm.families import ALIKE, layers, make, padded
from support.llm.outputs import generate, same, write_alike

SHARED = next(family for family in ALIKE if family.name == "glm-moe-dsa")
latents = pytest.mark.skipif(
    not hasattr(DynamicIndexedLayer(), "indexer_position_ids"),
    reason="before 5.24 models with an index keep no latents",
)


def told(model) -> set[str]:
    return {reason for _, rule, _, reason in accel.report(model).sites if rule == "decoder layer"}


@latents
def test_the_choice_is_of_an_indexer_or_of_the_layer_before():
    model = make("deepseek-v32")
    first, second = (layer.attention for layer in analyze(model).layers.values())
    assert isinstance(first, IndexedSpec) and first.indexer == second.indexer == "self_attn.indexer"
    assert first.behind == () and first.chosen == ""
    assert told(accel.optimize(model)) == {"it chooses tokens by an index, which runs stock"}
    first, second = (layer.attention for layer in analyze(make(SHARED)).layers.values())
    assert first.indexer == "self_attn.indexer" and (second.indexer, second.chosen) == ("", "prev_topk_indices")
    assert first.behind == second.behind == (True,)


@latents
@pytest.mark.parametrize("blind", ["steps", "prompts"])
def test_a_choice_that_is_not_followed_shows(blind, monkeypatch):
    """Though all texts that it is tried with are shorter than what the indexers choose of."""
    if blind == "steps":
        monkeypatch.setattr(indexed_attention, "_hidden", lambda kv, shown: kv)
    else:
        by_mask = BoundIndexedAttention._by_mask

        def unmasked(self, q, compressed, kv, seen, angles):
            causal = torch.ones_like(seen).tril(seen.shape[-1] - seen.shape[-2])
            return by_mask(self, q, compressed, kv, causal, angles)

        monkeypatch.setattr(BoundIndexedAttention, "_by_mask", unmasked)
    ours = accel.optimize(make("deepseek-v32", index_topk=64))
    assert "forward" not in vars(ours)


class Squared:
    """Attention that nobody knows."""

    def forward(self, *args, **kwargs):
        y, weights = super().forward(*args, **kwargs)
        return y * y.abs(), weights


def llama(**parts):
    model = make("llama")
    for layer in layers(model).values():
        for name, kind in parts.items():
            module = layer if name == "layer" else layer.get_submodule(name)
            module.__class__ = type(kind.__name__, (kind, type(module)), {})
    return model


def test_around_an_attention_that_nobody_knows_a_layer_is_fused():
    stock = llama(self_attn=Squared)
    found = [layer.attention for layer in analyze(stock).layers.values()]
    assert all(isinstance(one, StockSpec) and one.name == "self_attn" for one in found)
    ours = accel.optimize(copy.deepcopy(stock))
    assert len(told(ours)) == 1 and next(iter(told(ours))).startswith("attention runs stock: ")
    ids, mask = padded()
    for call in ({}, {"num_beams": 3}):
        same(generate(ours, ids, mask, **call), generate(stock, ids, mask, **call))
    assert not accel.report(ours).fallbacks
    for call in ({"output_hidden_states": True}, {"output_attentions": True}):
        given = {"input_ids": ids, "attention_mask": mask, **call}
        assert torch.equal(ours(**given).logits, stock(**given).logits)


def test_strict_allows_no_stock_attention():
    with pytest.raises(ValueError, match="strict=True: .*attention runs stock"):
        accel.optimize(llama(self_attn=Squared), strict=True)


class Fickle:
    """A layer that hands its attention something of its own, in steps alone."""

    def forward(self, hidden_states, **kwargs):
        if hidden_states.shape[1] == 1:
            kwargs["position_embeddings"] = tuple(2 * one for one in kwargs["position_embeddings"])
        return super().forward(hidden_states, **kwargs)


def test_where_that_does_not_agree_the_other_layers_are_fused():
    stock = llama(self_attn=Squared)
    first, second = layers(stock).values()
    first.self_attn.__class__ = type(second.self_attn).__bases__[1]
    second.__class__ = type("Layer", (Fickle, type(second)), {})
    ours = accel.optimize(copy.deepcopy(stock))
    sites = {path: status for path, rule, status, _ in accel.report(ours).sites if rule == "decoder layer"}
    assert list(sites.values()) == ["patched", "skipped"]
    write_alike(ours, stock)
