"""A fingerprint sees every change that a forward could read, and none where there is none."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PretrainedConfig

from accel.cuda_graphs import entry
from accel.cuda_graphs.entry import key_of
from accel.cuda_graphs.fingerprint import Fingerprint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale, self.names, self.options = 0.5, ["a", "b"], {"kind": 1}
        self.table, self.array = torch.ones(1), np.ones(3)
        self.config = PretrainedConfig(is_causal=False)


class OtherBlock(Block):
    pass


CHANGES = {
    "a weight": lambda b: setattr(b.linear, "weight", nn.Parameter(b.linear.weight.detach().clone())),
    "a weight of one number, equal": lambda b: setattr(b, "table", torch.ones(1)),
    "a buffer": lambda b: b.norm.register_buffer("running_mean", b.norm.running_mean.clone()),
    "a module": lambda b: setattr(b, "linear", nn.Linear(4, 4)),
    "a plain value": lambda b: setattr(b, "scale", 0.25),
    "an array": lambda b: setattr(b, "array", np.ones(3)),
    "an attribute more": lambda b: setattr(b, "more", 1),
    "an attribute less": lambda b: delattr(b, "scale"),
    "in a list": lambda b: b.names.__setitem__(0, "c"),
    "in a dict": lambda b: b.options.update(kind=2),
    "a hook": lambda b: b.linear.register_forward_hook(lambda *args: None),
    "a forward": lambda b: setattr(b.linear, "forward", b.linear.forward),
    "training": lambda b: b.train(),
    "a bias taken away": lambda b: setattr(b.linear, "bias", None),
    "a value that becomes a tensor": lambda b: setattr(b, "options", torch.ones(2)),
    "its class": lambda b: setattr(b, "__class__", OtherBlock),
    "the class of a module inside": lambda b: setattr(b.norm, "__class__", nn.BatchNorm2d),
    "a field of the configuration": lambda b: setattr(b.config, "is_causal", True),
}


@pytest.mark.parametrize(
    "brief", [(), {"names", "options", "_modules", "_parameters", "_buffers"}], ids=["whole", "brief"]
)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.share(1)
def test_a_change_is_seen(change, brief):
    block = Block().eval()
    before = Fingerprint(block, brief=brief)
    assert before.holds() and before.reachable()
    CHANGES[change](block)
    assert not before.holds()
    assert Fingerprint(block).holds()


@pytest.mark.parametrize("kind", [Block, nn.Linear, PretrainedConfig])
def test_another_method_of_a_class_is_seen(kind, monkeypatch):
    before = Fingerprint(Block().eval())
    monkeypatch.setattr(kind, "forward", lambda self, x: x, raising=False)
    assert not before.holds()
    monkeypatch.undo()
    assert before.holds()


def test_plain_values_may_be_new_objects():
    block = Block()
    block.scale = float("0.1")
    before = Fingerprint(block)
    block.scale = float("0.1")
    assert before.holds()


def test_weights_written_in_place():
    block = Block()
    before = Fingerprint(block)
    versions = before.versions()
    with torch.no_grad():
        block.linear.weight.mul_(2)
    assert before.holds() and before.reachable() and before.versions() > versions
    for tensor in (block.linear.weight, block.norm.running_mean):
        before = Fingerprint(block)
        tensor.data = tensor.data.clone()
        assert not before.reachable()


def test_calls_that_differ_have_graphs_of_their_own(monkeypatch):
    def key(*args, variant=(), **kwargs):
        return key_of(*pytree.tree_flatten((args, kwargs)), variant)

    x = torch.zeros(2, 4)
    others = (x[:1], x.half(), x.t().contiguous().t(), x.to("meta"), [x])
    keys = [key(x, variant=("mask",)), *map(key, others), key(scale=x)]
    keys += [key(x, value) for value in (None, 1, 2, 1.0, True, "1", torch.float16)]
    assert len({key(x), *keys}) == 1 + len(keys) and key(torch.ones(2, 4)) == key(x)
    assert key(x, object()) is None
    for switch in ("products_in_tf32", "convolutions_in_tf32"):
        before, now = key(x), getattr(entry, switch)()
        monkeypatch.setattr(entry, switch, lambda now=now: not now)
        assert key(x) != before


def test_nobody_counts_in_inference_mode():
    with torch.inference_mode():
        before = Fingerprint(Block())
    assert before.versions() is None and before.holds()


def test_a_part_that_is_left_out_is_not_looked_at_but_for_what_is_also_elsewhere():
    root = nn.ModuleDict({"read": nn.ModuleList([nn.Linear(2, 2)]), "other": nn.ModuleList([nn.Linear(2, 2)])})
    root["other"].append(root["read"][0])
    fingerprint = Fingerprint(root, [("other", "")])
    root["other"][0].weight = nn.Parameter(torch.ones(2, 2))
    assert fingerprint.holds() and fingerprint.reachable()
    root["other"][1].extra = 1
    assert not fingerprint.holds()
    del root["other"]  # a model may have given it up
    assert Fingerprint(root, [("other", "")]).holds()
