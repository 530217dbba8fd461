"""Layers put together in ways of their own: code around an attention, another layer's keys and values, factors."""

import functools
import inspect

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import accel
from accel.libraries.cache import NAMES
from accel.llm.generation.layer_forward import InnerAttention
from support.llm.families import layers, make, padded, prompt
from support.llm.outputs import generate, same, write_alike
from support.noted import code_runs


def attention_calls(ours, call) -> int:
    """How often the stock code of attentions runs that layers of `ours` run their own code around."""
    inner = [one for one in ours.modules() if isinstance(vars(one).get("forward"), InnerAttention)]
    codes = {inspect.unwrap(type(one).forward).__code__ for one in inner}
    return code_runs(codes, call)


@pytest.mark.parametrize("name", ["gemma3n", "zamba2"])
@pytest.mark.turns(2)
def test_a_layers_own_code_runs_around_its_attention(name, pair_of):
    ours, stock = pair_of(name)
    ids, mask = padded()
    reasons = {reason for path, _, status, reason in accel.report(ours).sites if path in layers(ours)}
    assert reasons - {""} == {"its own code runs around its attention"}
    wanted = generate(stock, ids, mask)
    assert attention_calls(ours, lambda: generate(stock, ids, mask)) > 0
    assert attention_calls(ours, lambda: same(generate(ours, ids, mask), wanted)) == 0


@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_another_attention_in_such_a_layer_runs_stock(pair):
    ours, stock = pair("gemma3n")
    for model in (ours, stock):
        attention = layers(model)["model.layers.1"].self_attn
        forward = type(attention).forward
        vars(attention)["forward"] = lambda *args, one=attention, forward=forward, **kwargs: (
            0.5 * forward(one, *args, **kwargs)[0], None)  # fmt: skip
    write_alike(ours, stock)
    assert any("has a replaced forward" in reason for _, reason, _ in accel.report(ours).fallbacks)


def counting(given: dict) -> float:
    cache = next((given[name] for name in NAMES if name in given), None)
    return 0.0 if cache is None else cache.get_seq_length()


def masking(given: dict) -> float:
    return sum(one.numel() for name, one in given.items() if "mask" in name and one is not None)


@pytest.mark.parametrize(("name", "look"), [("gemma3n", counting), ("gemma3n", masking), ("zamba2", counting)])
@pytest.mark.share(1)
@pytest.mark.turns(2)
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
    write_alike(ours, stock)
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
@pytest.mark.turns(2)
def test_the_factor_of_a_layer_is_read_as_it_is(pair, name):
    ours, stock = pair(name)
    assert [status for _, rule, status, _ in accel.report(ours).sites if rule == "language model"] == ["patched"]
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


@pytest.mark.share(1)
def test_gates_below_a_cut_do_not_count(pair):
    """Stock makes the cut on the host in every call, which no CUDA graph can hold."""
    ours, stock = pair("gemma3n")
    found = {
        path for path, rule, status, _ in accel.report(ours).sites if (rule, status) == ("thresholded MLP", "patched")
    }
    assert len(found) == 2
    mlp = layers(ours)["model.layers.0"].mlp
    x = 3 * torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), layers(stock)["model.layers.0"].mlp(x))
        for model in (ours, stock):
            layers(model)["model.layers.0"].mlp.activation_sparsity = 0.9
        torch.testing.assert_close(mlp(x), layers(stock)["model.layers.0"].mlp(x))
    same(generate(ours, prompt(), None), generate(stock, prompt(), None))


@pytest.mark.parametrize("name", ["gemma4-shared", "gemma3n"])
def test_requests_of_such_layers_are_batched(pair, name):
    ours, stock = pair(name)
    prompts = [prompt(1, length, seed=length)[0].tolist() for length in (5, 13, 30)]
    config = GenerationConfig(max_new_tokens=8, eos_token_id=-1, pad_token_id=0)
    blocks = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    found = ours.generate_batch(prompts, generation_config=config, continuous_batching_config=blocks)
    for number, ids in enumerate(prompts):
        wanted = stock.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=-1)
        assert found[f"req_{number}"].generated_tokens == wanted[0, len(ids) :].tolist()
    assert len(accel.report(ours).batching) == 1 and accel.report(ours).fallbacks == []


def test_a_linear_that_chooses_experts_is_not_rounded():
    ours = accel.optimize(make("gemma4-experts", num_experts=32), weights="int8")
    left = {
        path: reason
        for path, rule, status, reason in accel.report(ours).sites
        if (rule, status) == ("weights", "skipped")
    }
    assert len(left) == 2 and set(left.values()) == {"it chooses experts"}
    assert all(type(layer.router.proj) is torch.nn.Linear for layer in layers(ours).values())
