"""accelerate's hooks and patches in any order."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import accel
from accel.cuda_graphs.rule import IN_PARTS


class Counting(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


@pytest.fixture
def pair(tiny):
    model = tiny.unet()
    inputs = tiny.inputs(model)
    return model, run(copy.deepcopy(model), inputs), inputs


def stock(model):
    return not any(type(vars(m).get("forward")).__module__.startswith("accel.") for m in model.modules())


@pytest.mark.parametrize("order", ["hook first", "patch first"])
@pytest.mark.parametrize("leaving", ["hook first", "patch first"])
def test_hooks_and_patches_come_and_go_in_any_order(pair, order, leaving):
    model, wanted, inputs = pair
    hook = Counting()
    steps = [lambda: add_hook_to_module(model, hook), lambda: accel.optimize(model)]
    for step in steps if order == "hook first" else reversed(steps):
        step()
    torch.testing.assert_close(run(model, inputs), wanted)
    assert hook.calls == 1
    steps = [lambda: remove_hook_from_module(model), lambda: accel.restore(model)]
    for step in steps if leaving == "hook first" else reversed(steps):
        step()
    assert torch.equal(run(model, inputs), wanted)
    assert hook.calls == 1 and stock(model)


@pytest.mark.parametrize("graphs", ["auto", False])
@pytest.mark.share(1)
def test_sequential_offload_runs_the_blocks_stock(pair, graphs):
    model, wanted, inputs = pair
    accel.optimize(model, graphs=graphs)
    cpu_offload(model, execution_device=torch.device("cpu"))
    torch.testing.assert_close(run(model, inputs), wanted)
    found = accel.report(model).fallbacks
    assert any("accelerate hook" in reason for _, reason, _ in found) is (graphs is False)
    assert graphs is False or found == [("", IN_PARTS, 1)]


def test_optimize_after_sequential_offload_says_why_it_skips(pair):
    model, wanted, inputs = pair
    cpu_offload(model, execution_device=torch.device("cpu"))
    accel.optimize(model)
    assert any("meta device" in reason for _, _, status, reason in accel.report(model).sites if status == "skipped")
    torch.testing.assert_close(run(model, inputs), wanted)
    accel.restore(model)
    torch.testing.assert_close(run(model, inputs), wanted)
