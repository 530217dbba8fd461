"""Adapters of language models within the products of queries, keys and values, of gates, and of all others."""

import copy
from functools import partial

import pytest
import torch

import accel
from accel.cuda_graphs.adapter_buffers import AdapterBuffers
from accel.quantization.adapters import _adds
from benchmarks.models.buffered_calls import buffered
from support.llm.edits.places import lora, put, switch
from support.llm.families import make, padded
from support.objects.encoders import made, random_pair
from support.objects.speech import whisper

pytest.importorskip("peft")
from peft import LoraConfig
from peft.tuners.lora.model import _adapter_names_pre_forward_hook

JOINT = {"llama": {1, 2, 3}, "gemma2": {1, 2, 3}, "phi3": {1}, "minicpm3": {1, 2}}  # linears to a product


@pytest.mark.parametrize("family", JOINT)
def test_prompts_and_steps_take_adapters_with_their_products(family):
    stock = make(family).requires_grad_(False)
    ours, buffers, ids = copy.deepcopy(stock), AdapterBuffers(), torch.arange(3, 12)[None]
    linears = [name for name, one in stock.named_modules() if type(one) is torch.nn.Linear and ".layers." in name]

    def talk(model):
        with torch.no_grad():
            prompt = model(ids, use_cache=True)
            return prompt.logits, model(ids[:, :1], past_key_values=prompt.past_key_values).logits

    def chosen(names):
        def change(model):
            for layer in model.modules():
                if "lora_A" in layer._modules:
                    layer.set_adapter(names)

        return change

    def agree(change):
        for model in (ours, stock):
            change(model)
            model.requires_grad_(False).eval()
        state = torch.get_rng_state()
        for mine, theirs in zip(buffered(buffers, lambda: talk(ours)), talk(stock), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
        assert torch.equal(torch.get_rng_state(), state)  # what a sampled call draws is the user's

    _adds.cache_clear()
    agree(lora("style", r=4, target_modules=linears))
    accel.optimize(ours, cpu="fuse")
    agree(lambda model: None)
    assert {len(key) for key in buffers.groups} == JOINT[family] and buffers.complete()
    agree(lora("tone", 1, r=8, target_modules=linears))
    for names in (["tone"], ["style", "tone"], [], ["style"]):
        agree(chosen(names))
    assert not buffers.form and not accel.report(ours).fallbacks


def test_adapters_of_experts_leave_all_else_fused():
    stock = make("qwen3-moe", num_hidden_layers=1).requires_grad_(False)
    ours, ids = accel.optimize(copy.deepcopy(stock), cpu="fuse"), torch.arange(3, 12)[None]
    for model in (ours, stock):
        lora("style", target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])(model)
        model.requires_grad_(False).eval()
    for on in (True, False):
        for model in (ours, stock):
            switch(on)(model)
        with torch.no_grad():
            mine, theirs = (model(ids, use_cache=True).logits for model in (ours, stock))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    [(path, reason, _)] = accel.report(ours).fallbacks
    assert path == "model.layers.0.mlp.experts" and reason.startswith("adapters on its weights")


def test_adapters_that_experts_in_fewer_bits_cannot_have_are_missed_aloud():
    model = accel.optimize(make("qwen3-moe", num_hidden_layers=1), cpu="fuse", weights="int8")
    put_on = lora("style", target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        put_on(model)
    model.requires_grad_(False).eval()
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match=r"0\.mlp\.experts\.gate_up_proj is held in fewer bits"):
            model(torch.arange(3, 12)[None])
    accel.restore(model)
    model(torch.arange(3, 12)[None])


@pytest.mark.parametrize(
    ("make_pair", "targets"), [(partial(made, "Bert"), ["dense"]), (partial(random_pair, whisper), ["fc1", "fc2"])]
)
def test_layers_of_encoders_are_understood_with_adapters_on_what_they_add(make_pair, targets):
    model, _ = make_pair()
    put(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    encoders = [row for row in accel.report(accel.optimize(model)).sites if row[1].startswith("encoder")]
    assert encoders and all(row[2] == "patched" and "own code" not in row[3] for row in encoders), encoders


def test_padding_that_goes_through_the_bias_of_an_adapter_before_a_state_runs_stock():
    stock = make("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]).requires_grad_(False)
    ours, (ids, mask) = accel.optimize(copy.deepcopy(stock), cpu="fuse"), padded()
    for model in (ours, stock):
        lora("style", target_modules=["in_proj"], lora_bias=True)(model)
        model.requires_grad_(False).eval()
    for shown in (mask, torch.ones_like(mask)):
        with torch.no_grad():
            mine, theirs = (model(ids, attention_mask=shown).logits * mask[..., None] for model in (ours, stock))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    [(_, reason, calls)] = accel.report(ours).fallbacks
    assert "the bias of an adapter" in reason and calls == 1


def test_rows_have_adapters_of_their_own_in_the_buffers():
    stock = make("llama").requires_grad_(False)
    linears = [name for name, one in stock.named_modules() if type(one) is torch.nn.Linear and ".layers." in name]
    for number, name in enumerate(("style", "tone")):
        lora(name, number, r=4, target_modules=linears)(stock)
    stock.requires_grad_(False).eval()
    ours, buffers = copy.deepcopy(stock), AdapterBuffers()
    accel.optimize(ours, cpu="fuse")
    ids = torch.arange(3, 21).view(2, 9)

    def agree(names):
        hooks = []
        for model in (ours, stock):
            for layer in (one for one in model.modules() if "lora_A" in one._modules and names):
                hook = partial(_adapter_names_pre_forward_hook, adapter_names=names)
                hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        with torch.no_grad():
            mine = buffered(buffers, lambda: ours(ids, use_cache=True).logits)
            theirs = stock(ids, use_cache=True).logits
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
        for hook in hooks:
            hook.remove()
        return len(buffers.groups)

    assert agree(None) and not buffers.whole
    for names in (["style", "tone"], ["tone", "__base__"], None, ["__base__", "style"]):
        assert agree(names) and buffers.whole and buffers.form == 1 and buffers.complete()
