"""What an encoder gave, kept in 8 bits because somebody asked for it."""

import pytest
import torch
import transformers as t

import accel
from accel.libraries.cache import cache_argument, encoded
from accel.seq2seq.fixed_memory import CROSS, OWN
from accel.seq2seq.memory_attention import MemoryStep
from support.objects.seq2seq import (
    MAKES,
    STEPS,
    Rounded,
    fallbacks,
    gemmas,
    generated,
    made,
    optimized,
    options,
    source,
)


@torch.no_grad()
@pytest.mark.parametrize("paged", [False, True])
def test_what_the_encoder_gave_in_8_bits(family, paged, steps, monkeypatch):
    """As stock over numbers that were rounded so: greedy, by beams, in a cache that goes on in stock, in another order.

    paged: read as on a GPU.
    """
    model, stock = optimized(family, kv_cache="int8")
    monkeypatch.setattr(MemoryStep, "pages", lambda *_: paged)
    ran, forward, name = steps(), vars(model)["forward"], cache_argument(type(stock).forward)
    for call, chosen in (
        (source(family), options()),
        (source(family, length=70), options(num_beams=3)),
        (source(family, rows=3, masked=False), options(4)),
    ):
        beside = {name: t.EncoderDecoderCache(t.DynamicCache(), Rounded())}
        assert torch.equal(generated(model, call, chosen), generated(stock, call, chosen | beside))
        assert forward.memory.flat[CROSS].dtype == torch.int8 != forward.memory.flat[OWN].dtype
    assert len(ran) >= 2 * STEPS + 4 and not fallbacks(model) and "in int8" in str(accel.report(model))
    ids, order = torch.tensor([[2], [5], [6]]), torch.tensor([2, 0, 1])
    hidden = torch.randn(3, 16 if family == "Whisper" else 7, 32, generator=torch.Generator().manual_seed(0))
    own = {"config": stock.get_decoder().config}
    caches = [t.EncoderDecoderCache(t.DynamicCache(**own), kind(**own)) for kind in (t.DynamicCache, Rounded)]
    for at in range(3):
        call, both = {"encoder_outputs": encoded(hidden)}, zip((model, stock), caches, strict=True)
        ours, theirs = (one(decoder_input_ids=ids + at, **{name: held}, **call) for one, held in both)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=2e-3, atol=2e-3)
        layers = [held.cross_attention_cache.layers[1] for held in caches]
        torch.testing.assert_close(layers[0].keys, layers[1].keys, rtol=1e-4, atol=0.02)
        for held in caches:
            held.reorder_cache(order)
        hidden = hidden[order]


@pytest.mark.parametrize(("name", "chosen", "reason"), [("T5Gemma", {}, "own code"), ("Bart", {"graphs": False}, "")])
def test_steps_that_cannot_keep_8_bits_are_refused(name, chosen, reason, monkeypatch):
    monkeypatch.setitem(MAKES, "T5Gemma", gemmas)
    model, stock = made(name)
    with pytest.raises(ValueError, match=f"kv_cache='int8': .*{reason}"):
        accel.optimize(model, kv_cache="int8", **chosen)
    assert vars(model).keys() == vars(stock).keys()
