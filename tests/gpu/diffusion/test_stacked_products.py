"""Products of one input as one, in graphs: weights lie side by side, and whatever becomes of them is seen."""

import copy

import pytest
import torch
from torch import nn

import accel
from accel.diffusion.dit.block import BlockForward
from accel.diffusion.dit.recorder import tensors_in
from accel.diffusion.dit.units import StackedProduct
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build
from support.diffusion.gpu import on_gpu
from support.patched import fast_forwards

CLASSES = ["FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel", "ZImageTransformer2DModel"]


def call(model, given):
    with torch.no_grad():
        return next(tensors_in(model(**given, return_dict=False))).float()


def stacked(model):
    """The weights that are multiplied together, of each block."""
    forwards = [vars(module)["forward"] for module in fast_forwards(model)]
    for block in (forward for forward in forwards if isinstance(forward, BlockForward)):
        plans = [plan.executable for plan in (block.known or {}).values() if plan.executable is not None]
        for unit in (unit for plan in plans for unit in plan.units if isinstance(unit, StackedProduct)):
            paths = [plans[0].values[step.args[1].number].root[1] for step in unit.steps]
            yield [block.module.get_parameter(path) for path in paths]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("images", [1, 2])
def test_changes_of_stacked_weights_are_seen(name, images):
    exact = build(name).cuda()
    given = on_gpu(inputs(build(name)), torch.bfloat16)
    if name != "ZImageTransformer2DModel":
        pairs = {
            key: one[:images] if isinstance(one, torch.Tensor) and one.shape[:1] == (2,) else one
            for key, one in given.items()
        }
        given = pairs
    stock = exact.to(torch.bfloat16)
    ours = accel.optimize(copy.deepcopy(stock), graphs=True)

    def agree():
        for _ in range(4):
            got, wanted = call(ours, given), call(stock, given)
            assert float((got - wanted).norm() / wanted.norm()) < 0.05
        assert accel.report(ours).fallbacks == []
        return got

    before = agree()
    groups = list(stacked(ours))
    assert groups
    for group in groups:
        ends = [part.data_ptr() + part.nbytes for part in group]
        assert ends[:-1] == [part.data_ptr() for part in group[1:]]
    names = {id(part): path for path, part in ours.named_parameters()}
    first = [names[id(group[0])] for group in groups]
    for change in (
        lambda weight: weight.data.mul_(-1),
        lambda weight: setattr(weight, "data", 2 * weight.data),
        None,
    ):
        for model in (ours, stock):
            for path in first:
                owner, _, attribute = path.rpartition(".")
                if change is None:
                    other = nn.Parameter(-model.get_parameter(path).detach())
                    setattr(model.get_submodule(owner), attribute, other)
                else:
                    change(model.get_parameter(path))
        after = agree()
        assert float((after - before).norm() / before.norm()) > 1e-3
        before = after
    accel.restore(ours)
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in ours.parameters())
    assert torch.equal(call(ours, given), call(stock, given))
