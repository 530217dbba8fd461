"""Layers put together in ways of their own: code around an attention, another layer's keys and values, factors."""

import functools
import inspect
import sys

import pytest
import torch

import accel
from accel.libraries.cache import NAMES
from accel.llm.generation.layer_forward import InnerAttention
from support.llm.families import layers, make, padded, prompt
from support.llm.outputs import generate, same


def attention_calls(ours, call) -> int:
    """How often the stock code of attentions runs that layers of `ours` run their own code around."""
    inner = [one for one in ours.modules() if isinstance(vars(one).get("forward"), InnerAttention)]
    codes = {inspect.unwrap(type(one).forward).__code__ for one in inner}
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code in codes

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", ["gemma3n", "zamba2"])
def test_a_layers_own_code_runs_around_its_attention(name, pair_of):
    ours, stock = pair_of(name)
    ids, mask = padded()
    reasons = {reason for path, _, status, reason in accel.report(ours).sites if path in layers(ours)}
    assert reasons - {""} == {"its own code runs around its attention"}
    wanted = generate(stock, ids, mask)
    assert attention_calls(ours, lambda: generate(stock, ids, mask)) > 0
    assert attention_calls(ours, lambda: same(generate(ours, ids, mask), wanted)) == 0


@pytest.mark.share(1)
def test_another_attention_in_such_a_layer_runs_stock(pair):
    ours, stock = pair("gemma3n")
    for model in (ours, stock):
        attention = layers(model)["model.layers.1"].self_attn
        forward = type(attention).forward
        vars(attention)["forward"] = lambda *args, one=attention, forward=forward, **kwargs: (
            0.5 * forward(one, *args, **kwargs)[0], None)  # fmt: skip
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(stock, ids, mask))
    assert any("has a replaced forward" in reason for _, reason, _ in accel.report(ours).fallbacks)


def counting(given: dict) -> float:
    cache = next((given[name] for name in NAMES if name in given), None)
    return 0.0 if cache is None else cache.get_seq_length()


def masking(given: dict) -> float:
    return sum(one.numel() for name, one in given.items() if "mask" in name and one is not None)


@pytest.mark.parametrize(("name", "look"), [("gemma3n", counting), ("gemma3n", masking), ("zamba2", counting)])
@pytest.mark.share(1)
def test_their_own_code_may_not_look_at_the_cache_or_a_mask(name, look):
    ours, stock = make(name), make(name)
    for model in (ours, stock):
        layer = list(layers(model).values())[1]

        @functools.wraps(own := type(layer).forward)
        def forward(self, *args, own=own, **kwargs):
            found = own(self, *args, **kwargs)
            return (1.0 + 0.01 * look(kwargs)) * found

        layer.__class__ = type("Looking", (type(layer),), {"forward": forward})
    accel.optimize(ours)
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(stock, ids, mask))
    told = next(reason for path, _, _, reason in accel.report(ours).sites if not path)
    assert "look at the cache or a mask" in told


def test_such_layers_are_restored(pair):
    ours, stock = pair("gemma3n")
    assert any(isinstance(vars(one).get("forward"), InnerAttention) for one in ours.modules())
    accel.restore(ours)
    assert not any("forward" in vars(one) for one in ours.modules())
    same(generate(ours, prompt(), None), generate(stock, prompt(), None))


@pytest.mark.parametrize("name", ["gemma4-shared", "gemma4-experts"])
@pytest.mark.share(1)
def test_the_factor_of_a_layer_is_read_as_it_is(pair, name):
    ours, stock = pair(name)
    before = generate(ours, prompt(), None)["sequences"]
    for model in (ours, stock):
        for number, layer in enumerate(layers(model).values()):
            layer.layer_scalar.fill_(0.2 + 0.5 * number)
    found = generate(ours, prompt(), None)
    same(found, generate(stock, prompt(), None))
    assert accel.report(ours).fallbacks == [] and not torch.equal(found["sequences"], before)


@pytest.mark.parametrize("keep", [0, 1, 3])
@pytest.mark.share(1)
def test_layers_that_read_another_layers_keys_may_be_given_the_last_tokens_alone(pair_of, keep):
    ours, stock = pair_of("gemma4-shared")
    (ids, mask), before = padded(), accel.report(ours).fallbacks
    with torch.no_grad():
        wanted = stock(ids, attention_mask=mask, logits_to_keep=keep).logits
        found = ours(ids, attention_mask=mask, logits_to_keep=keep).logits
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-4, atol=1e-4)
    assert accel.report(ours).fallbacks == before


def test_keys_that_a_caller_asks_for_are_stocks(pair):
    """The store shows none: a draft model reads them."""
    ours, stock = pair("gemma4-shared")
    with torch.no_grad():
        found, wanted = (model(prompt(), return_shared_kv_states=True).shared_kv_states for model in (ours, stock))
    assert found.keys() == wanted.keys()
    for name, kept in wanted.items():
        for one, other in zip(found[name], kept, strict=True):
            torch.testing.assert_close(one, other)
