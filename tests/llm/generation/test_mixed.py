"""Models of which some layers are understood: those run fused, with stock code between them, over one cache."""

import copy
import pickle

import pytest
import torch
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import accel
from accel.llm.generation.mixed import MixedForward
from accel.llm.kv_cache.cache import OURS
from support.llm.families import BY_NAME, available, layers, make, padded, prompt
from support.llm.outputs import generate, same

MIXED = [family.name for family in BY_NAME.values() if family.expected == "some"]


@pytest.fixture(params=MIXED)
def both(request, pair):
    """(optimized, stock)."""
    if not available(BY_NAME[request.param].kind):
        pytest.skip(f"this transformers has no {BY_NAME[request.param].kind}")
    return pair(request.param)


def logits(model, cache=None, steps=((0, 7), (7, 8), (8, 11)), mask=None, **more):
    """Of one text in pieces."""
    ids, cache = prompt(2, 11), DynamicCache(config=model.config) if cache is None else cache
    found = []
    for start, end in steps:
        shown = None if mask is None else mask[:, :end]
        found.append(model(ids[:, start:end], attention_mask=shown, past_key_values=cache, **more).logits)
    return torch.cat(found, dim=1)


def near(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_it_is_the_same_text_in_pieces_with_padding_and_without(both):
    ours, stock = both
    assert type(vars(ours)["forward"]) is MixedForward
    near(logits(ours), logits(stock))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    got, wanted = (logits(model, mask=mask) for model in both)
    near(got[0], wanted[0])
    near(got[1, 3:], wanted[1, 3:])
    assert not accel.report(ours).fallbacks


def test_the_cache_has_layers_of_ours_where_layers_are_fused(both):
    ours, _ = both
    cache = DynamicCache(config=ours.config)
    logits(ours, cache)
    mine = [type(layer) in OURS for layer in cache.layers]
    fused = ["forward" in vars(layer) for layer in layers(ours).values()]
    assert mine == fused and any(mine) and not all(mine) and cache.get_seq_length() == 11


def test_a_call_that_runs_stock_goes_on_over_the_same_cache_and_back(both):
    ours, _stock = both
    caches = [DynamicCache(config=model.config) for model in both]
    for more in ({}, {"output_hidden_states": True}, {}):
        got, wanted = (logits(model, cache, **more) for model, cache in zip(both, caches, strict=True))
        near(got, wanted)
    assert {"called with output_hidden_states"} == {reason for _, reason, _ in accel.report(ours).fallbacks}


def test_copies_and_pickles_are_fused_too(both):
    ours, stock = both
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        near(logits(copied), logits(stock))
        assert vars(copied)["forward"].module is copied and not accel.report(copied).fallbacks


def test_changed_weights_count_and_a_changed_layer_runs_stock(both):
    ours, stock = both
    logits(ours)
    for model in both:
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.1
    near(logits(ours), logits(stock))
    assert not accel.report(ours).fallbacks
    place = next(path for path, layer in layers(ours).items() if "forward" in vars(layer))
    stack, _, number = place.rpartition(".")
    for model in both:
        model.get_submodule(stack)[int(number)] = copy.deepcopy(stock.get_submodule(place))
    near(logits(ours), logits(stock))
    assert accel.report(ours).fallbacks


def test_code_that_fused_layers_stand_in_for_is_looked_at(both, monkeypatch):
    ours, stock = both
    fused = next(layer for layer in layers(ours).values() if "forward" in vars(layer))
    kind = next(type(m) for m in fused.modules() if type(m).__name__.endswith("Attention"))
    forward, before = kind.forward, logits(stock)

    def halved(*args, **kwargs):
        first, *others = forward(*args, **kwargs)
        return first / 2, *others

    with monkeypatch.context() as patched:
        patched.setattr(kind, "forward", halved)
        wanted = logits(stock)
        assert (wanted - before).abs().max() > 1e-2
        near(logits(ours), wanted)
    found = accel.report(ours).fallbacks
    assert {reason for _, reason, _ in found} == {f"{kind.__name__}.forward was changed after accel.optimize"}
    near(logits(ours), before)
    assert accel.report(ours).fallbacks == found  # fast again


def test_another_attention_implementation_runs_stock(pair):
    ours, stock = pair("lfm2")
    before = logits(stock)
    AttentionInterface.register("halved", lambda *given, **more: (sdpa_attention_forward(*given, **more)[0] / 2, None))
    for model in (ours, stock):
        model.set_attn_implementation("halved")
    wanted = logits(stock)
    assert (wanted - before).abs().max() > 1e-2
    near(logits(ours), wanted)


def test_restored_it_is_stock(both):
    ours, stock = both
    cache = DynamicCache(config=ours.config)
    logits(ours, cache)
    accel.restore(ours)
    assert torch.equal(logits(ours), logits(stock))
    more = logits(ours, cache)  # a cache of ours goes on
    theirs = DynamicCache(config=stock.config)
    logits(stock, theirs)
    near(more, logits(stock, theirs))


def test_beams_and_padded_rows(both):
    ids, mask = padded()
    mine, theirs = (generate(model, ids, mask, num_beams=3) for model in both)
    same(mine, theirs)
    assert not accel.report(both[0]).fallbacks


def test_options_for_whole_models_leave_it_stock():
    model = accel.optimize(make("lfm2"), weights="int8")
    assert "forward" not in vars(model) and accel.report(model).weights


def test_verify_passes():
    model = accel.optimize(make("lfm2"))
    ids, mask = padded()
    assert accel.verify(model, input_ids=ids, attention_mask=mask).passed


def test_a_crop_takes_from_all_layers(pair):
    caches = []
    for model in pair("gpt-neo"):
        cache = DynamicCache(config=model.config)
        logits(model, cache)
        cache.crop(-3)
        caches.append((logits(model, cache, steps=((8, 11),)), cache.get_seq_length()))
    near(caches[0][0], caches[1][0])
    assert caches[0][1] == caches[1][1] == 11
