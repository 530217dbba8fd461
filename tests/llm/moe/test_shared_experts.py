"""An expert that all tokens share: understood beside the mixture, or the whole module is called as it is."""

import copy
from importlib import import_module

import pytest
import torch
from accel_kernels import SharedExpert
from torch import nn

import accel
from accel.llm.moe.experts import ExpertsForward
from accel.llm.runtime.analyze import formulas
from support.llm.families import make, padded, prompt
from support.llm.outputs import generate, same, write_alike
from support.llm.quantized import rounded
from support.noted import noted

mixture = import_module("accel_kernels.moe.mixture")  # the package has an operation of that name
GATED = {"deepseek-v3": False, "deepseek-v2": False, "qwen2-moe": True, "qwen3.5-moe-attention": True}


def mixtures(model) -> list:
    return [spec.mlp for _, spec in formulas(model, {}) if not spec.mlp.first]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GATED)
def test_it_is_understood(name, dtype):
    found = mixtures(make(name, dtype=dtype))
    assert found and all(one.around and bool(one.beside[0].gate) == GATED[name] for one in found)
    assert {one.router for one in found} == {"mlp.gate"} and {one.chosen for one in found} == {(2, 1)}


def doubled(before):
    return lambda self, x: 2 * before(self, x)


def scaled(before):
    """By how long the text is: a token alone as before."""
    return lambda self, x: before(self, x) + 0.1 * x.mean(-2, keepdim=True)


@pytest.mark.parametrize("change", [doubled, scaled])
@pytest.mark.parametrize("name", ["deepseek-v2", "qwen2-moe"])
def test_a_module_that_does_more_is_called_as_a_whole(name, change, monkeypatch):
    stock = make(name)
    kind = type(stock.model.layers[1].mlp)
    monkeypatch.setattr(kind, "forward", change(kind.forward))
    assert not any(one.beside for one in mixtures(stock))
    ours = accel.optimize(copy.deepcopy(stock))
    write_alike(ours, stock)
    assert not accel.report(ours).fallbacks


def another(module, attribute, kind):
    held = getattr(module, attribute)
    held.__class__ = type("Another", (type(held),), {"forward": kind(type(held).forward)})


CHANGES = {
    "its weights": lambda mlp: mlp.shared_experts.down_proj.weight.data.mul_(1.5),
    "the shared expert": lambda mlp: another(mlp, "shared_experts", doubled),
    "its activation": lambda mlp: setattr(mlp.shared_experts, "act_fn", nn.GELU()),
    "all of it": lambda mlp: setattr(mlp, "forward", lambda x: x.clone()),
    "hooks": lambda mlp: mlp.shared_experts.up_proj.register_forward_hook(lambda module, args, y: 2 * y),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_what_changes_after_counts(change):
    stock = make("deepseek-v2")
    ours = accel.optimize(copy.deepcopy(stock))
    write_alike(ours, stock)
    for model in (ours, stock):
        CHANGES[change](model.model.layers[1].mlp)
    write_alike(ours, stock)


@pytest.mark.parametrize("name", ["deepseek-v2", "qwen2-moe"])
def test_a_step_of_one_row_adds_everything_at_once(name, monkeypatch):
    stock = make(name, **{"qwen2-moe": {"shared_expert_intermediate_size": 96}}.get(name, {}))
    ours = accel.optimize(copy.deepcopy(stock))
    found = noted(monkeypatch, mixture, "_added", lambda x, y, weights, shared, *_: shared.share is not None)
    call = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(prompt(1, 7), **call), stock.generate(prompt(1, 7), **call))
    assert found == 5 * len(mixtures(stock)) * [GATED[name]] and not accel.report(ours).fallbacks


def test_experts_that_give_what_they_are_given_are_added_by_themselves():
    """LongCat's: they have no weights that the one operation could read."""
    x, index, ones = torch.ones(1, 64), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    for name in ("longcat", "qwen3-moe"):
        fused = (vars(one).get("forward") for one in accel.optimize(make(name)).modules())
        forward = next(one for one in fused if isinstance(one, ExpertsForward))
        weights = forward.formula.weights(forward.module)
        gate, up = weights.gate_up[0].chunk(2)
        shared = SharedExpert(gate, up, weights.down[0])
        assert (forward.with_shared((x, index, ones), shared, "silu", x, 1.0) is None) == (name == "longcat")


@pytest.mark.parametrize("weights", [None, "int8"])
def test_its_products_are_fused(weights):
    stock = make("deepseek-v2", moe_intermediate_size=64)
    ours = accel.optimize(copy.deepcopy(stock), weights=weights)
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(rounded(stock, ours), ids, mask))
    bound = vars(ours.model.layers[1])["forward"].bound.mlp
    shared = bound.blocks[1][0]
    assert shared.gate is not None and shared.gate.quantized == bool(weights) and bound.gates == [None, None]
