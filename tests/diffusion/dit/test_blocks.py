"""Blocks of every transformer class of diffusers: recorded once, then fast, with stock's results.

`make test` runs every eighth class, `make test-all` all of them.
"""

import copy
from collections import Counter

import pytest
import torch

import accel
from accel.diffusion.dit.block import BlockForward
from accel.diffusion.dit.executable import Executable
from support.compatibility import diffusers_calls, tiny_diffusers_models
from support.compatibility.comparison import same, seeded, tensors
from support.compatibility.compatibility_table import diffusion_classes
from support.patched import fast_forwards, sites

CLASSES = sorted(name for name in diffusion_classes() if "Transformer" in name)
FAR = 3e-5  # of the largest number in a result: sums in another order, over a few layers
# What the report says of blocks that run stock.
REASONS = {
    "AnyFlowFARTransformer3DModel": "an argument that is neither a tensor nor a plain value",
    "HiDreamImageTransformer2DModel": "bincount: goes by what a tensor holds",
    "Kandinsky6SRTransformer3DModel": "new_zeros: takes a tensor that is neither an argument nor a weight",
    "MochiTransformer3DModel": "nonzero: goes by what a tensor holds",
}
WITHOUT = {"DreamLiteTransformer2DModel", "Transformer2DModel", "TransformerTemporalModel"}  # their blocks are UNets'
IN_16_BITS = (
    "ChromaTransformer2DModel",
    "CogVideoXTransformer3DModel",
    "FluxTransformer2DModel",
    "LTXVideoTransformer3DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
)


@pytest.fixture
def runs(monkeypatch):
    """How often blocks ran: by "fast" and "stock"."""
    counted = Counter()
    for kind, name, owner in (("fast", "__call__", Executable), ("stock", "stock", BlockForward)):
        monkeypatch.setattr(owner, name, counting(getattr(owner, name), counted, kind))
    return counted


def counting(run, counted, kind):
    def counted_run(*args, **kwargs):
        counted[kind] += 1
        return run(*args, **kwargs)

    return counted_run


def made(name):
    """A tiny model and what it is called with; skips where there is none in these versions or on this machine."""
    try:
        model = tiny_diffusers_models.build(name)
        return model, diffusers_calls.inputs(model)
    except Exception as error:
        pytest.skip(f"not built: {error}")


def converted(tree, dtype):
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    return type(tree)(converted(one, dtype) for one in tree) if isinstance(tree, list | tuple) else tree


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.share(8)
@pytest.mark.parametrize("name", CLASSES)
def test_blocks_of_a_class(name, runs, tiny):
    model, given = made(name)
    stock = copy.deepcopy(model)

    def call(model):
        return model(**given)

    wanted = seeded(call, stock)
    accel.optimize(model, cpu="fuse")
    forwards = [vars(module)["forward"] for module in fast_forwards(model)]
    blocks = [forward for forward in forwards if isinstance(forward, BlockForward)]
    assert bool(blocks) == (name not in WITHOUT)
    for _ in range(3):  # the first call is recorded; in the second a tensor may have other strides, recorded once more
        runs.clear()
        got = seeded(call, model)
        for ours, theirs in zip(tensors(got), tensors(wanted), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=FAR * float(theirs.abs().max()))
    plans = [plan for block in blocks for plan in (block.known or {}).values()]
    reasons = {plan.reason for plan in plans if plan.reason}
    told = {reason for _, reason, _ in accel.report(model).fallbacks}
    assert all(plan.executable is not None and plan.compared for plan in plans if not plan.reason)
    if name in REASONS:
        assert told and reasons <= told and all(REASONS[name] in reason for reason in told), told
    else:
        assert not told and not reasons, told | reasons
        assert not runs["stock"] and bool(runs["fast"]) == bool(blocks)
    accel.restore(model)
    assert same(seeded(call, model), wanted) and not tiny.differences(model, stock)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        (
            "Flux2Transformer2DModel",
            {"transformer_blocks.0", "single_transformer_blocks.0"},
        ),  # of two linears, that one
        (
            "UNetSpatioTemporalConditionModel",
            {"temporal_transformer_blocks.0"},
        ),  # not its levels, whose parts have rules
    ],
)
def test_which_modules_are_blocks(name, blocks):
    model = accel.optimize(tiny_diffusers_models.build(name), cpu="fuse")
    paths = sites(model, "diffusion transformer block")
    assert {path.rpartition("attentions.0.")[2].rpartition("attentions.1.")[2] for path in paths} == blocks


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.share(4)
@pytest.mark.parametrize("name", IN_16_BITS)
def test_rounding_is_stocks_in_16_bits(name, runs):
    """Bit for bit, or at most twice as far from fp32 as stock is."""
    model, given = made(name)
    model.to(torch.bfloat16)
    exact = copy.deepcopy(model).to(torch.float32)
    given = {key: converted(value, torch.bfloat16) for key, value in given.items()}
    wanted = tensors(model(**given))
    accel.optimize(model, cpu="fuse")
    model(**given)
    runs.clear()
    got = tensors(model(**given))
    assert runs["fast"] and not runs["stock"]
    precise = tensors(exact(**{key: converted(value, torch.float32) for key, value in given.items()}))
    for ours, theirs, true in zip(got, wanted, precise, strict=True):
        if not torch.equal(ours, theirs):
            assert (ours.float() - true).norm() <= 2 * (theirs.float() - true).norm()
