"""Blocks whose linears are quantized: planned like others, with rows rounded once, in the pass that makes them.

Beside the same quantized weights in stock's blocks, where every linear rounds for itself.
"""

import copy
from collections import Counter

import pytest
import torch

import accel
from accel.diffusion.dit.block import BlockForward
from accel.diffusion.dit.executable import Executable
from accel.diffusion.dit.lowering import Pass
from accel.quantization.activations import RowProducts
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build
from support.compatibility.transformer_pair import FLUX, SD3, WAN, alike, first
from support.diffusion.denoisers import DITS, given, transformer

QWEN, PIXART, Z_IMAGE = "QwenImageTransformer2DModel", "PixArtTransformer2DModel", "ZImageTransformer2DModel"
CLASSES = (FLUX, SD3, WAN, QWEN, PIXART, Z_IMAGE)
WAYS = [("int8", None), ("fp8", None), ("int8", "int8"), ("fp8", "fp8")]


def narrow(tree):
    return torch.utils._pytree.tree_map(
        lambda t: t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, tree
    )


class QuantizedPair:
    """ours: planned; unfused: of the same quantized weights. runs: how often plans ran, and linears rounded rows."""

    def __init__(self, name, weights, activations, monkeypatch):
        model = transformer(name) if name in DITS else build(name)
        self.inputs = narrow(given(name) if name in DITS else inputs(model))
        options = {"weights": weights, "activations": activations}
        self.stock = model.bfloat16()
        self.unfused = accel.optimize(copy.deepcopy(model), **options)
        for module in self.unfused.modules():
            vars(module).pop("forward", None)
        self.ours = accel.optimize(copy.deepcopy(model), **options, cpu="fuse")
        self.runs = Counter()
        for owner, method, what in ((Executable, "__call__", "plans"), (RowProducts, "rounded", "rounded")):
            monkeypatch.setattr(owner, method, self.counting(getattr(owner, method), what))

    def counting(self, run, what):
        def counted(*args, **kwargs):
            self.runs[what] += 1
            return run(*args, **kwargs)

        return counted

    @torch.no_grad()
    def call(self, model):
        self.runs.clear()
        output = first(model(**self.inputs))
        return torch.cat(output) if isinstance(output, list) else output

    @property
    def forwards(self):
        found = (vars(module).get("forward") for module in self.ours.modules())
        return [forward for forward in found if isinstance(forward, BlockForward)]

    def units(self, forward):
        return [unit for plan in forward.known.values() for unit in plan.executable.units]


def calls(units):
    return [unit.step.name for unit in units if hasattr(unit, "step")]


@pytest.fixture
def pair(monkeypatch):
    """Maker of one, in which rows of tens of tokens are many."""
    monkeypatch.setattr("accel.quantization.activations.MOST_ROWS", 4)
    return lambda name, weights, activations=None: QuantizedPair(name, weights, activations, monkeypatch)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("weights", "activations"), WAYS)
def test_quantized_blocks_run_from_plans(name, weights, activations, pair):
    both = pair(name, weights, activations)
    wanted = both.call(both.unfused)
    assert both.runs["plans"] == 0 and bool(both.runs["rounded"]) == (activations is not None)
    both.call(both.ours)  # recorded
    got = both.call(both.ours)
    blocks = both.forwards
    assert both.runs["plans"] == len(blocks) > 0 and accel.report(both.ours).fallbacks == []
    assert both.runs["rounded"] == 0  # by itself: what is in no block stays in 16 bits
    assert torch.equal(got, wanted)
    plans = [plan for block in blocks for plan in block.known.values()]
    assert all(plan.compared for plan in plans)
    accel.restore(both.ours)
    alike(both.call(both.ours), both.call(both.stock))


def test_rows_are_rounded_once_in_the_pass_that_makes_them(pair):
    """Flux: a norm's result for three products, GELU's for one, an attention's in a pass of its own."""
    both = pair(FLUX, "int8", "int8")
    both.call(both.ours)
    double, single = both.forwards
    for forward, rounded, products in ((double, 8, 12), (single, 4, 5)):
        units = both.units(forward)
        passes = [[op.name for op in unit.program.ops] for unit in units if isinstance(unit, Pass)]
        assert sum("numbers_int8" in ops for ops in passes) == rounded
        assert (
            sum(getattr(one, "step", None) is not None and one.step.name == "rounded_product" for one in units)
            == products
        )
        assert sum("gelu_tanh" in ops and "numbers_int8" in ops for ops in passes) == (2 if forward is double else 1)
    assert not {"cat", "gelu"} & set(calls(both.units(single)))  # columns for a product: piece by piece


def test_the_plan_is_compared_with_the_quantized_block(pair, monkeypatch):
    both = pair(SD3, "int8", "int8")
    wanted = both.call(both.unfused)
    from accel_kernels.rowwise import rowwise

    monkeypatch.setitem(rowwise.TORCH, "numbers_int8", lambda x, peak: (x / peak * 64).round())
    both.call(both.ours)
    assert torch.equal(both.call(both.ours), wanted) and both.runs["plans"] == 0
    reasons = {reason for _, reason, _ in accel.report(both.ours).fallbacks}
    assert len(reasons) == 1 and reasons.pop().startswith("computes something else")


def test_blocks_of_one_kind_share_a_plan_and_copies_make_their_own(pair):
    both = pair("pixart", "fp8", "fp8")
    got = both.call(both.ours)
    one, other = both.forwards
    assert one.known is other.known
    both.ours = copy.deepcopy(both.ours)
    both.call(both.ours)
    assert torch.equal(both.call(both.ours), got) and both.runs["plans"] == 2
    assert both.runs["rounded"] == 0
