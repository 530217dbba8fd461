"""UNets whose linears are in formats of other libraries: read as they lie, or run by their own forward."""

import copy

import pytest
import torch

import accel
from support.diffusion.library_formats import FORMATS, READ, quantized
from support.diffusion.outputs import close, in_dtype, run


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.share(4)
@pytest.mark.turns(2)
def test_unets(format, after, tiny):
    dtype = torch.bfloat16
    sizes = {"block_out_channels": (64, 128), "norm_num_groups": 8, "cross_attention_dim": 64}
    stock = tiny.unet("sdxl", **sizes)
    inputs = in_dtype(tiny.inputs(stock), dtype)
    ours = copy.deepcopy(stock).to(dtype)
    if after:
        accel.optimize(ours, cpu="fuse")
    ours, stock = quantized(ours, format, dtype), quantized(stock, format, dtype)
    if not after:
        accel.optimize(ours, cpu="fuse")
    wanted = run(stock, inputs)
    close(run(ours, inputs), wanted, 2e-2)
    report = accel.report(ours)
    assert not report.fallbacks
    for rule in ("attention", "transformer block", "transformer stack", "resnet block"):
        found = {(row[2], "own forward" in row[3]) for row in report.sites if row[1] == rule}
        convolutions = rule == "resnet block" and "quanto" in format  # of its own
        assert found == {("patched", convolutions or format not in READ)}
    before = {name: id(tensor) for name, tensor in ours.named_parameters()}
    accel.restore(ours)
    assert torch.equal(run(ours, inputs), wanted) and before == {name: id(t) for name, t in ours.named_parameters()}
