"""Layers that are fused beside layers that run stock, and experts chosen as stock chooses them."""

import copy
import pickle

import pytest
import torch
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import accel
from accel.llm.attention.softmax_attention import BoundSoftmaxAttention
from accel.llm.generation import routing, self_test
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.mixed import MixedForward
from accel.llm.generation.routing import noting, repeating, routing_modules
from accel.llm.generation.trial import fused_layers, fused_logits, stock_logits
from accel.llm.kv_cache.cache import OURS
from accel.llm.moe.experts import ExpertsForward
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.resting import resting
from support.llm.families import layers, make, padded, prompt
from support.llm.near_ties import deep_gpt_oss
from support.llm.optimized_models import shared

MIXED = ["gpt-neo-louder", "gpt-neo-holes", "lfm2-biases", "deepseek-v32"]


@pytest.fixture(params=MIXED)
def both(request, pair):
    """(optimized, stock)."""
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
    fused = (vars(layer).get("forward") for layer in layers(ours).values())
    assert mine == [layer is not None and layer.spec.place is not None for layer in fused]
    assert cache.get_seq_length() == 11


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
    fused = (layer for layer in layers(ours).values() if "forward" in vars(layer))
    kind = next(type(m) for layer in fused for m in layer.modules() if type(m).__name__.endswith("Attention"))
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
    ours, stock = pair("lfm2-biases")
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


def test_options_for_whole_models_leave_it_stock():
    model = accel.optimize(make("lfm2-biases"), weights="int8")
    assert "forward" not in vars(model) and accel.report(model).weights


def test_verify_passes():
    ids, mask = padded()
    assert accel.verify(shared("lfm2-biases").ours, input_ids=ids, attention_mask=mask).passed


def test_a_crop_takes_from_all_layers(pair):
    caches = []
    for model in pair("gpt-neo-holes"):
        cache = DynamicCache(config=model.config)
        logits(model, cache)
        cache.crop(-3)
        caches.append((logits(model, cache, steps=((8, 11),)), cache.get_seq_length()))
    near(caches[0][0], caches[1][0])
    assert caches[0][1] == caches[1][1] == 11


def forward_of(model) -> DecoderForward | None:
    return vars(model).get("forward")


@pytest.mark.turns(4)
def test_near_ties_of_routers_are_no_error():
    model = deep_gpt_oss()
    accel.optimize(model)
    forward = forward_of(model)
    assert type(forward) is DecoderForward, accel.report(model)
    assert len(forward.experts) == 12 and forward.convention.pads_prompts
    lengths = (10, 1)
    with resting(model):
        wanted, _ = stock_logits(forward, lengths)
        with fused_layers(forward):
            with noting(2, wanted.choices.notes) as ours:
                free = fused_logits(forward, lengths)
            with wanted.routed():
                fixed = fused_logits(forward, lengths)
    pairs = [zip(notes, wanted.choices.notes[module], strict=True) for module, notes in ours.notes.items()]
    astray = [not torch.equal(*(note[0].sort().values for note in pair)) for of_one in pairs for pair in of_one]
    assert any(astray)
    assert wanted.agrees(fixed) and wanted.off(fixed) < 0.5 * wanted.off(free)
    assert wanted.moves() < 0.5 * wanted.row_off(free)  # by rounding alone


def scaled(factor):
    def wrong(self, fast, *given):
        return factor * fast(self, *given)

    return wrong


def swapped(self, fast, x, index, shares):
    return fast(self, x, index ^ 1, shares)


def equal_shares(self, fast, x, index, shares):
    return fast(self, x, index, shares.mean(-1, keepdim=True).expand_as(shares))


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (torch.bfloat16, scaled(1.5)),
        (torch.bfloat16, swapped),
        (torch.bfloat16, equal_shares),
        (torch.float32, scaled(1.01)),
        (torch.float32, equal_shares),
    ],
    ids=["bf16-scaled", "bf16-swapped", "bf16-shares", "fp32-scaled", "fp32-shares"],
)
def test_wrong_experts_are_refused(dtype, wrong, monkeypatch):
    fast = ExpertsForward.fast
    model = deep_gpt_oss(dtype, layers=4)
    analyzed = self_test.find_convention

    def trying(forward):  # what is recognized part by part is right: only the whole is wrong
        with monkeypatch.context() as patch:
            patch.setattr(ExpertsForward, "fast", lambda self, *given: wrong(self, fast, *given))
            return analyzed(forward)

    monkeypatch.setattr("accel.llm.family.find_convention", trying)
    accel.optimize(model)
    refused(model)


def refused(model) -> None:
    assert type(forward_of(model)) is not DecoderForward
    reason = next(reason for _, rule, _, reason in accel.report(model).sites if rule == "language model")
    assert "the whole model computes something else than its parts: logits are off" in reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_wrong_sinks_are_refused(dtype, monkeypatch):
    model, make_bound = deep_gpt_oss(dtype, layers=4), BoundSoftmaxAttention.__init__

    def wrong(self, *given):
        make_bound(self, *given)
        self.sinks = self.sinks + 3

    monkeypatch.setattr(BoundSoftmaxAttention, "__init__", wrong)
    accel.optimize(model)
    refused(model)


def test_prompts_are_not_filled_up_where_stock_code_computes_experts(monkeypatch):
    monkeypatch.setattr("accel.llm.family._inside", lambda layers, context: ([], []))
    model = accel.optimize(make("mixtral"))
    assert type(forward_of(model)) is DecoderForward and not forward_of(model).convention.pads_prompts


def test_choices_that_cannot_be_noted_are_judged_by_the_median(monkeypatch):
    monkeypatch.setattr(routing, "_chosen", lambda args, kwargs: None)
    forward = forward_of(accel.optimize(make("mixtral")))
    assert type(forward) is DecoderForward and not forward.convention.pads_prompts
    assert stock_logits(forward, (5, 1))[0].median
    assert not stock_logits(forward_of(accel.optimize(make("llama"))), (5, 1))[0].median


def test_choices_are_repeated_call_by_call():
    model = make("mixtral")
    forward = forward_of(accel.optimize(copy.deepcopy(model)))
    modules = routing_modules(forward)
    experts = forward.experts[0].module
    assert experts in modules and not any(layer.module in modules for layer in forward.layers)
    x, index, shares = torch.randn(4, 64), torch.tensor([[0, 1], [2, 3], [3, 1], [1, 0]]), torch.rand(4, 2)
    with noting(2, modules) as choices:
        wanted = experts(x, index, shares)
    assert list(choices.notes) == [experts]
    with repeating(choices):
        assert torch.equal(experts(x, index.flip(0), top_k_weights=shares.flip(0)), wanted)
        with pytest.raises(NotUnderstood, match="otherwise"):
            experts(x, index, shares)
    assert torch.equal(experts(x, index, shares), wanted) and not experts._forward_pre_hooks
    longer = torch.stack([x[:2], x[2:]]).repeat(1, 2, 1).view(8, 64)  # each row goes on
    with repeating(choices):
        found = experts(longer, index.repeat(2, 1) * 0, shares.repeat(2, 1)).view(2, 4, 64)
    torch.testing.assert_close(found[:, :2].reshape(4, 64), wanted)
    for tokens in (3, 9):
        with repeating(choices), pytest.raises(NotUnderstood, match="other tokens"):
            experts(torch.randn(tokens, 64), torch.zeros(tokens, 2, dtype=torch.int64), torch.rand(tokens, 2))
