"""Which hooks of accelerate are understood, what is taken off, and that all of it comes back."""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)

import accel
from accel.errors import PatchConflict
from accel.libraries.hooks import HOOK
from accel.llm.pipeline.device_hooks import brought
from accel.llm.pipeline.forward import SpreadForward
from accel.llm.pipeline.placement import Placement, layer_placement
from support.llm.families import layers, make, padded
from support.llm.outputs import generate, same
from support.patched import fast_forwards, sites
from support.spread import DEVICES, spread
from support.state import assert_same_state, snapshot


class Loud(ModelHook):
    pass


class Alike(AlignDevicesHook):
    """As its base, for all anybody knows."""


def told(model) -> str:
    return sites(model, "language model")[""][1]


def test_restore_is_exact():
    model = spread(make("llama", num_hidden_layers=4))
    before = snapshot(model)
    accel.optimize(model)
    assert fast_forwards(model)
    inside = [m for layer in layers(model).values() for m in layer.modules() if m is not layer]
    assert not any(HOOK in vars(module) for module in inside)
    assert all(HOOK in vars(layer) for layer in layers(model).values())
    generate(model, *padded((5, 3)))
    accel.restore(model)
    assert_same_state(before, snapshot(model))


def test_stretches():
    a, b = DEVICES
    found = Placement((), (a, a, b, a, a))
    assert found.stretches() == [range(2), range(2, 3), range(3, 5)]
    assert found.told() == "layers 0-1 on cpu, 2-2 on cpu:0, 3-4 on cpu"


def test_without_hooks_there_is_nothing_to_place():
    assert layer_placement(make("llama")) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: add_hook_to_module(m.model.norm, Loud()), "of another kind, Loud, on model.norm"),
        (
            lambda m: add_hook_to_module(m.model.layers[0], Alike(execution_device="cpu")),
            "of another kind, Alike, on model.layers.0",
        ),
        (
            lambda m: add_hook_to_module(m.lm_head, SequentialHook(Loud(), Loud())),
            "of another kind, SequentialHook, on lm_head",
        ),
        (lambda m: setattr(m.lm_head._hf_hook, "execution_device", None), "names no device, on lm_head"),
        (
            lambda m: setattr(m.lm_head._hf_hook, "execution_device", 0),
            "another device than its weights are on, on lm_head",
        ),
        (lambda m: setattr(m._hf_hook, "io_same_device", False), "gives its logits back"),
        (lambda m: setattr(m.model.layers[1]._hf_hook, "io_same_device", True), "model.layers.1 has no hook"),
        (
            lambda m: setattr(m.model.layers[1].mlp.up_proj._hf_hook, "execution_device", DEVICES[0]),
            "model.layers.1 is on several devices",
        ),
        (lambda m: setattr(m.lm_head, "_old_forward", torch.nn.Identity()), "around a replaced forward, on lm_head"),
    ],
)
def test_other_hooks_stay_and_the_model_is_stock(change, reason):
    model = spread(make("llama"), first=1)
    change(model)
    before = snapshot(model)
    accel.optimize(model)
    assert reason in told(model)
    assert not isinstance(vars(model)["forward"], SpreadForward)
    accel.restore(model)
    assert_same_state(before, snapshot(model))


def test_offloaded_weights_stay_stock(tmp_path):
    stock = make("llama")
    ours = copy.deepcopy(stock)
    where = {"model.layers.1": "disk"} | dict.fromkeys(
        ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    dispatch_model(ours, where, main_device="cpu", offload_dir=str(tmp_path))
    accel.optimize(ours)
    assert "loads offloaded weights, on model.layers.1" in told(ours)
    same(generate(ours, *padded((5, 3))), generate(stock, *padded((5, 3))))


def test_weights_offloaded_later():
    stock = make("llama")
    ours = accel.optimize(spread(copy.deepcopy(stock), first=1))
    remove_hook_from_submodules(ours)
    cpu_offload(ours, execution_device=torch.device("cpu"))
    same(generate(ours, *padded((5, 3))), generate(stock, *padded((5, 3))))


def test_hooks_that_are_taken_off_later_stay_off():
    stock = make("llama", num_hidden_layers=4)
    ours = accel.optimize(spread(copy.deepcopy(stock)))
    remove_hook_from_submodules(ours)
    same(generate(ours, *padded((5, 3))), generate(stock, *padded((5, 3))))
    accel.restore(ours)
    assert not any(HOOK in vars(module) for module in ours.modules())
    assert not fast_forwards(ours)


def test_a_hook_put_on_later_is_not_thrown_away():
    stock = make("llama", num_hidden_layers=4)
    ours = accel.optimize(spread(copy.deepcopy(stock)))
    norm = ours.model.layers[3].input_layernorm
    add_hook_to_module(norm, Loud())
    same(generate(ours, *padded((5, 3))), generate(stock, *padded((5, 3))))
    assert any("hook" in reason for _, reason, _ in accel.report(ours).fallbacks)
    with pytest.raises(PatchConflict, match="a hook was put on a LlamaRMSNorm"):
        accel.restore(ours)


def test_brought():
    a, b = torch.ones(2), torch.zeros(1)
    given = {"x": (a, [b, 3]), "y": None}
    assert brought(given, DEVICES[0]) is given
    moved = brought(given, DEVICES[1])
    assert moved["x"][0] is not a and torch.equal(moved["x"][0], a) and moved["x"][1][1] == 3 and moved["y"] is None
    assert type(moved["x"]) is tuple and type(moved["x"][1]) is list
