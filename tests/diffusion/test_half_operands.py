"""Decoders in float32 whose convolutions run in float16, as exact as stock's in TF32; and what happens on overflow."""

import copy

import pytest
import torch
from torch import nn

import accel
from accel.diffusion.blocks import resnet
from accel.diffusion.blocks.resnet import ResnetForward
from accel.fusion.float32_precision import full_precision
from accel.fusion.half_operands import HalfOperands
from support.kernels import interpreter
from support.precision import in_tf32, off

OVERFLOWED = "overflowed with convolutions in float16; they are in TF32 from now on"


@pytest.fixture
def vae(tiny):
    return tiny.vae()


@pytest.fixture
def latents():
    return torch.randn(2, 4, 8, 6)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Decoders take float16 as they would on a GPU; the blocks that did are listed."""
    seen, usual = [], resnet.convolve_half

    def spied(kernels, x, norm, conv, **before):
        y = usual(kernels, x, norm, conv, **before)
        seen.append((x.dtype, y.dtype))
        return y

    monkeypatch.setattr(resnet, "convolve_half", spied)
    monkeypatch.setattr(HalfOperands, "takes", lambda self, x: self.on and x.dtype is torch.float32)
    return seen


def decode(vae, latents):
    with torch.no_grad():
        return vae.decode(latents.to(vae.dtype)).sample


def rounded(vae):
    """A copy whose convolutions round to TF32."""
    model = copy.deepcopy(vae)
    for conv in model.modules():
        if isinstance(conv, nn.Conv2d):
            conv._conv_forward = in_tf32(conv._conv_forward)
    return model


def larger(vae, factor):
    """The activations between the convolutions of a block are larger by as much; the norms after bring them back."""
    for block in vae.decoder.modules():
        if hasattr(block, "conv1"):
            block.conv1.weight.data *= factor
    return vae


@pytest.mark.parametrize("factor", [1.0, 2e4])
def test_as_exact_as_in_tf32(vae, latents, as_on_a_gpu, factor):
    vae = larger(vae, factor)
    exact = decode(copy.deepcopy(vae).double(), latents)
    stock = decode(rounded(vae), latents)
    accel.optimize(vae)
    blocks = [m for m in vae.decoder.modules() if isinstance(vars(m).get("forward"), ResnetForward)]
    ours = decode(vae, latents)
    assert as_on_a_gpu == [(torch.float32, torch.float16), (torch.float16, torch.float16)] * len(blocks) != []
    assert ours.dtype is torch.float32 and not accel.report(vae).fallbacks
    assert 1e-6 < off(ours, exact) <= 2 * off(stock, exact)


def test_the_encoder_stays(vae, as_on_a_gpu):
    video, stock = torch.randn(1, 3, 16, 16), copy.deepcopy(vae)
    accel.optimize(vae)
    with torch.no_grad():
        torch.testing.assert_close(vae.encode(video).latent_dist.mean, stock.encode(video).latent_dist.mean)
    assert not as_on_a_gpu


def test_an_overflow_switches_it_off(vae, latents, as_on_a_gpu):
    stock = copy.deepcopy(larger(vae, 1e9))
    accel.optimize(vae)
    other = copy.deepcopy(vae)
    assert torch.equal(decode(vae, latents), decode(stock, latents))  # decoded again, by stock
    assert [(reason, calls) for _, reason, calls in accel.report(vae).fallbacks] == [(OVERFLOWED, 1)]
    as_on_a_gpu.clear()
    assert off(decode(vae, latents), decode(stock, latents)) < 1e-5
    assert not as_on_a_gpu and len(accel.report(vae).fallbacks) == 1
    decode(other, latents)
    assert as_on_a_gpu  # a copy has a switch of its own


def test_what_is_not_finite_in_stock_is_left(vae, latents, as_on_a_gpu):
    accel.optimize(vae)
    assert decode(vae, latents * float("inf")).isnan().any()
    assert not accel.report(vae).fallbacks
    as_on_a_gpu.clear()
    decode(vae, latents)
    assert as_on_a_gpu


def test_when(monkeypatch):
    """On a GPU alone, and where torch would round to TF32."""
    half, x = HalfOperands(), torch.randn(1)
    half.on = True
    assert not half.takes(x)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    assert half.takes(x) and not half.takes(x.half()) and not HalfOperands().takes(x)
    with full_precision():
        assert not half.takes(x)


@pytest.mark.turns(2)
def test_with_the_kernels_as_on_a_gpu(vae, latents, monkeypatch):
    """Tensors that claim to be on a GPU, and kernels in Triton's interpreter."""
    pytest.importorskip("triton")
    interpreter.prepare()
    exact, stock = decode(copy.deepcopy(vae).double(), latents), decode(rounded(vae), latents)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    accel.optimize(vae)
    ours = decode(vae, latents)
    monkeypatch.undo()
    assert not accel.report(vae).fallbacks
    assert 1e-6 < off(ours, exact) <= 2 * off(stock, exact)
