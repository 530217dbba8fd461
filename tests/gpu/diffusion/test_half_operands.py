"""Convolutions of a float32 decoder in float16: taken, as exact as stock's in TF32, switched off by an overflow."""

import copy

import pytest
import torch

import accel
from support.precision import off

OVERFLOWED = "overflowed with convolutions in float16; they are in TF32 from now on"


@pytest.fixture(autouse=True)
def tf32():
    """As torch has it by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    with torch.no_grad():
        yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def vae(tiny):
    """Of so many channels that cuDNN takes TF32 for all convolutions of stock's."""
    return tiny.vae(block_out_channels=(64, 128), norm_num_groups=32).cuda()


def decode(vae, latents):
    return vae.decode(latents.to(vae.dtype)).sample.clone()


@pytest.mark.parametrize("graphs", [True, False])
def test_as_exact_as_in_tf32(vae, graphs):
    stock, exact = copy.deepcopy(vae), copy.deepcopy(vae).double()
    accel.optimize(vae, graphs=graphs)
    for height, width in ((32, 24), (33, 17)):
        for call in range(3):  # eager, capture, replay
            latents = torch.randn(2, 4, height, width, device="cuda")
            truth = decode(exact, latents)
            theirs, ours = off(decode(stock, latents), truth), off(decode(vae, latents), truth)
            assert 1e-6 < ours <= 2 * theirs, (call, ours, theirs)
            assert ours > 5e-5  # float16 was there
    assert not accel.report(vae).fallbacks


def test_without_tf32_nothing_is_in_float16(vae):
    torch.backends.cudnn.allow_tf32 = False
    stock = copy.deepcopy(vae)
    accel.optimize(vae)
    latents = torch.randn(1, 4, 32, 24, device="cuda")
    for _ in range(3):
        assert off(decode(vae, latents), decode(stock, latents)) < 1e-5


def test_an_overflow_switches_it_off(vae):
    for block in vae.decoder.modules():
        if hasattr(block, "conv1"):
            block.conv1.weight.data *= 1e9
    stock = copy.deepcopy(vae)
    accel.optimize(vae, graphs=True)
    for _ in range(4):
        latents = torch.randn(1, 4, 32, 24, device="cuda")
        assert off(decode(vae, latents), decode(stock, latents)) < 5e-3
    assert [(reason, calls) for _, reason, calls in accel.report(vae).fallbacks] == [(OVERFLOWED, 1)]
