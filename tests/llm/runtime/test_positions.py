"""What hangs on positions beyond those of the run that is looked at: windows in tables, growing queries, chunks."""

import copy

import pytest
import torch
from torch import nn

import accel
from accel.llm.attention.position_terms import GivenScale
from support.compatibility.tiny_language_models import build
from support.llm.families import layers, make, padded
from support.llm.miniatures.family import Family
from support.llm.outputs import write_alike

GROWING = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
LONG = (60, 45)
MINISTRAL = Family("ministral3", "ministral3", {
    "head_dim": 16, "sliding_window": None,
    "rope_parameters": GROWING | {"original_max_position_embeddings": 32}})  # fmt: skip


def reasons(model: nn.Module, rule: str = "language model") -> list[str]:
    """Why sites of the optimized model are not patched; "" for one that is."""
    sites = accel.report(model).sites
    stock = (status != "patched" or "attention runs stock" in reason for _, _, status, reason in sites)
    return [site[3] if left else "" for left, site in zip(stock, sites, strict=True) if site[1] == rule]


def fused(stock: nn.Module) -> nn.Module:
    """The model optimized, which writes long texts as stock does, by fused steps alone."""
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    assert reasons(ours) == [""]
    write_alike(ours, stock, LONG)
    assert not accel.report(ours).fallbacks
    return ours


def test_a_window_in_a_table_of_the_layer_s_own():
    """It hides no key of a short run."""
    stock = make("gpt-neo", window_size=32)
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    assert reasons(ours, "decoder layer") == ["", ""]
    assert [bool(layer.attn.attention.bias.all(-1).any()) for layer in layers(ours).values()] == [True, False]
    write_alike(ours, stock, LONG)
    assert not accel.report(ours).fallbacks


def test_a_table_that_nobody_reads_is_no_window():
    class Unread:
        def _attn(self, query, key, value, attention_mask=None):
            table = self.bias
            self.bias = torch.ones_like(table).tril()
            try:
                return super()._attn(query, key, value, attention_mask)
            finally:
                self.bias = table

    stock = make("gpt-neo", window_size=32)
    attention = stock.transformer.h[1].attn.attention
    attention.__class__ = type("Unread", (Unread, type(attention)), {})
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    assert "" in reasons(ours, "decoder layer") and any(reasons(ours, "decoder layer"))
    write_alike(ours, stock, LONG)


def test_queries_that_grow_with_their_position():
    fused(make(MINISTRAL))


@pytest.mark.parametrize("growth", [lambda steps: steps.sqrt(), lambda steps: torch.log(1 + steps).clamp(max=1)])
def test_queries_that_grow_in_another_way(monkeypatch, growth):
    from transformers.models.ministral3 import modeling_ministral3

    def scale(positions, beta, most):
        return (1 + beta * growth(torch.floor(positions / most)))[:, None, :, None]

    monkeypatch.setattr(modeling_ministral3, "get_llama_4_attn_scale", scale)
    stock = make(MINISTRAL)
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    assert "something else where numbers are large" in reasons(ours)[0]
    write_alike(ours, stock, LONG)


@pytest.mark.parametrize("every", [32, 40])
def test_queries_that_grow_with_what_the_cache_holds(every):
    """And chunks, which begin behind the padding. A scale that grows every 40 tokens does not at the last position."""
    fused(make("llama4", floor_scale=every, attention_chunk_size=24))


@pytest.mark.parametrize("on_host", [False, True])
def test_positions_that_are_counted_by_what_the_cache_holds(on_host):
    """A number that the model's code reads would stay in a CUDA graph."""
    stock = make("bart")
    if on_host:

        class Reads:
            def forward(self, input_ids, *lengths, position_ids=None, **more):
                first = int(position_ids.flatten()[0])
                return super().forward(input_ids, position_ids=torch.arange(first, first + input_ids.shape[1]))

        table = stock.model.decoder.embed_positions
        table.__class__ = type("Reads", (Reads, type(table)), {})
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    (reason,) = reasons(ours)
    assert "positions are read on the host" in reason if on_host else not reason, reason
    write_alike(ours, stock, LONG)


@pytest.mark.turns(2)
def test_factors_that_layers_are_given_and_a_gate_with_a_bias(monkeypatch):
    """As Beam, but for its residuals, which have factors of their own."""
    beam = pytest.importorskip("transformers.models.beam.modeling_beam")
    monkeypatch.setattr(beam, "depth_scaled_residual_add", lambda branch, residual, _: residual + branch)
    stock = build("beam", "language")
    for layer in layers(stock).values():
        layer.self_attn.gate_bias.data += torch.linspace(-2, 2, len(layer.self_attn.gate_bias))
    specs = [vars(layer)["forward"].spec.attention for layer in layers(fused(stock)).values()]
    assert {spec.bias for spec in specs} == {"gate_bias"} and any(isinstance(s.q_scale, GivenScale) for s in specs)


@pytest.mark.parametrize(
    ("name", "section", "every", "why"),
    [("whisper", "language", 1, None), ("paligemma", "image-text", 2, "several texts in a row")],
)
def test_positions_without_a_mask(name, section, every, why):
    """Own code reads those that a forward only hands on, around fused layers; by others masks may keep texts apart."""
    stock = build(name, section)
    ours, (ids, _) = accel.optimize(copy.deepcopy(stock)), padded()
    given = {"position_ids": every * torch.arange(2, 2 + ids.shape[1])[None]}
    with torch.no_grad():
        torch.testing.assert_close(
            ours(input_ids=ids, **given).logits, stock(input_ids=ids, **given).logits, rtol=0, atol=1e-4
        )
    found = [reason for _, reason, _ in accel.report(ours).fallbacks]
    assert reasons(ours) == [""] and len(found) == bool(why) and all(why in reason for reason in found), found
