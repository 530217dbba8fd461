"""What a fast forward notes of its parts, looked at by itself; whole models are in tests/diffusion and tests/llm."""

import copy
import pickle

import pytest
import torch
from torch import nn

from accel.patching.relied import Parts, Relied


class Scaled(nn.Module):
    """Reads settings of several kinds."""

    def __init__(self):
        super().__init__()
        self.scales, self.named, self.limit, self.note = [1.0, 2.0], {"low": 0.5}, torch.tensor([1.0, 2.0]), "mine"
        self.inner = nn.Tanh()
        self.eval()

    def forward(self, x):
        low = self.named["low"]
        return self.inner(x * self.scales[0] * low).clamp(max=self.limit)


def relied_on(module):
    """The function that asks what changed, and the list itself."""

    def parts():
        return Parts((module, module.inner))

    relied = Relied(module, parts())
    return lambda: relied.changed(module, parts), relied


def put(module, name, value):
    setattr(module, name, value)


CHANGES = {
    "in a list": (lambda m: m.scales.append(3.0), lambda m: m.scales.pop(), "scales"),
    "in a dictionary": (lambda m: m.named.update(low=0.25), lambda m: m.named.update(low=0.5), "named"),
    "another list": (lambda m: put(m, "scales", [1.0]), lambda m: put(m, "scales", [1.0, 2.0]), "scales"),
    "another tensor": (lambda m: put(m, "limit", m.limit.clone()), None, "limit"),
    "a value in a list's place": (lambda m: put(m, "scales", 1.0), lambda m: put(m, "scales", [1.0, 2.0]), "scales"),
    "no list": (lambda m: delattr(m, "scales"), lambda m: put(m, "scales", [1.0, 2.0]), "scales"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_changes_is_named_and_its_taking_back_is_fast_again(name):
    change, back, setting = CHANGES[name]
    module = Scaled()
    changed, _ = relied_on(module)
    assert changed() is None and changed() is None
    change(module)
    assert changed() == f"Scaled.{setting} was changed after accel.optimize"
    if back is not None:
        back(module)
        assert changed() is None


def test_what_the_code_does_not_read_is_of_no_matter():
    module = Scaled()
    changed, _ = relied_on(module)
    module.note, module.other = "yours", 3
    assert changed() is None


def test_none_is_as_good_as_nothing():
    module = Scaled()
    del module.note
    changed, _ = relied_on(module)
    module.low = module.inner.low = None  # a name that the code mentions
    assert changed() is None
    module.low = 3
    assert changed() == "Scaled.low was changed after accel.optimize"


def test_parts_of_another_class_with_hooks_or_in_training_are_told():
    module = Scaled()
    changed, _ = relied_on(module)
    inner, module.inner = module.inner, nn.ReLU().eval()
    assert changed() == "ReLU where Tanh is expected: the class was changed after accel.optimize"
    module.inner = inner
    assert changed() is None
    handle = inner.register_forward_hook(lambda *_: None)
    assert changed() == "forward hooks"
    handle.remove()
    inner.train()
    assert changed() is None, "its code does not ask for it"
    module.inner = nn.Sequential(nn.Dropout()).eval()
    changed, _ = relied_on(module)
    assert changed() is None
    module.inner.train()
    assert changed() == "training mode inside"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_notes_code_when_it_is_made(copied, monkeypatch):
    module = Scaled()
    _, relied = relied_on(module)
    other, module = copied((relied, module))
    assert other.changed(module, lambda: Parts((module, module.inner))) is None
    with monkeypatch.context() as patch:
        patch.setattr(Scaled, "forward", lambda self, x: x)
        reason = "Scaled.forward was changed after accel.optimize"
        assert other.changed(module, lambda: Parts((module, module.inner))) == reason
        later, its = copied((relied, module))
    assert later.changed(its, lambda: Parts((its, its.inner))) == reason, "it cannot tell what had been there before"
