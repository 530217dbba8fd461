"""Norms inside of blocks: fused by themselves where the block runs stock, done by its plan where it does not."""

import copy
import pickle

import pytest
import torch
from torch import nn

import accel
from accel.fusion.norms import LayerNormForward
from accel.options import Options
from accel.planning.plan import create_context
from support.compatibility.comparison import apart
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build
from support.compatibility.transformer_pair import FLUX
from support.patched import fast_forwards, sites

HIDREAM = "HiDreamImageTransformer2DModel"  # its blocks go by numbers


class Norms:
    """A model that counts its fused norms, beside a copy that is stock. inside: how many norms its blocks have."""

    def __init__(self, name, monkeypatch):
        self.model, self.ran = build(name), 0
        self.stock, self.inputs = copy.deepcopy(self.model), inputs(self.model)
        accel.optimize(self.model, cpu="fuse")
        self.blocks = sites(self.model, "diffusion transformer block")
        run = LayerNormForward.fast

        def counted(forward, input):
            self.ran += forward.beneath
            return run(forward, input)

        monkeypatch.setattr(LayerNormForward, "fast", counted)

    @property
    def inside(self):
        return [one for one in map(lambda m: vars(m)["forward"], fast_forwards(self.model)) if one.beneath]

    def agree(self):
        """How many norms inside of blocks ran fused."""
        self.ran = 0
        assert apart(self.model(**self.inputs), self.stock(**self.inputs)) < 1e-6
        return self.ran


@pytest.fixture
def norms(request, monkeypatch):
    return Norms(request.param, monkeypatch)


@torch.no_grad()
@pytest.mark.parametrize("norms", [HIDREAM], indirect=True)
def test_norms_of_blocks_that_cannot_be_recorded(norms):
    report = accel.report(norms.model)
    told = {path for path, rule, status, _ in report.sites if (rule, status) == ("layer norm", "patched")}
    assert norms.inside and {one.path for one in norms.inside} < told and norms.blocks
    assert norms.agree() == 0  # each block is recorded as it is written
    for _ in range(2):
        assert norms.agree() == len(norms.inside)
    assert {path for path, *_ in accel.report(norms.model).fallbacks} == set(norms.blocks)
    for copied in (copy.deepcopy(norms.model), pickle.loads(pickle.dumps(norms.model))):
        assert apart(copied(**norms.inputs), norms.stock(**norms.inputs)) < 1e-6
    accel.restore(norms.model)
    assert norms.agree() == 0 and not fast_forwards(norms.model)


@torch.no_grad()
@pytest.mark.parametrize("norms", [FLUX], indirect=True)
def test_norms_of_blocks_that_are_recorded(norms):
    norms.agree()
    assert norms.inside and norms.agree() == 0
    norms.model.train()
    norms.stock.train()
    assert norms.agree() == 0
    norms.model.eval()
    norms.stock.eval()
    fallbacks = accel.report(norms.model).fallbacks
    assert {path for path, *_ in fallbacks} == {*norms.blocks, "norm_out.norm"}  # a block tells for its norms
    assert norms.agree() == 0
    hooks = [norms.inside[0].module.register_forward_hook(lambda module, args, output: 2 * output)]
    hooks.append(norms.stock.get_submodule(norms.inside[0].path).register_forward_hook(lambda m, a, output: 2 * output))
    assert norms.agree() > 0
    for one in hooks:
        one.remove()
    assert norms.agree() == 0


def test_a_norm_without_weights_refuses_other_widths_as_stock_does():
    norm = nn.LayerNorm(16, elementwise_affine=False).eval()
    context = create_context(Options())
    forward = LayerNormForward(norm, "norm", context.kernels, context.ledger)
    with torch.no_grad():
        assert forward(torch.ones(2, 16)).shape == (2, 16)
        with pytest.raises(RuntimeError, match="normalized_shape"):
            forward(torch.ones(2, 32))
