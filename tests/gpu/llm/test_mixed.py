"""Models of which some layers are understood, on a GPU: their texts are those of stock."""

import copy

import pytest
import torch

import accel
from support.llm.families import BY_NAME, available, make, padded
from support.llm.outputs import generate, same

pytestmark = pytest.mark.usefixtures("exact")
MIXED = [family.name for family in BY_NAME.values() if family.expected == "some"]


@pytest.mark.parametrize("more", [{}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_texts_are_those_of_stock(name, more):
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    stock = make(name).cuda()
    ours = accel.optimize(copy.deepcopy(stock))
    assert any(rule == "decoder layer" and status == "patched" for _, rule, status, _ in accel.report(ours).sites)
    inputs = [tensor.cuda() for tensor in padded()]
    torch.cuda.synchronize()
    same(generate(ours, *inputs, **more), generate(stock, *inputs, **more))
    assert not accel.report(ours).fallbacks
