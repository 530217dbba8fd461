"""Convolutions by float16 where torch takes TF32: the kernels around them, and how far the result is off."""

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import group_norm, image_sum, upsample_convolve
from accel_kernels.image.half_operands import GAIN, SCALE, halved

from support.precision import in_tf32, off

pytest.importorskip("triton")


def image(*shape, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [(2, 24, 5, 3), (1, 32, 97, 53)], ids=str)
def test_a_norm_rounds_its_result_to_float16(size, as_good_as_torch):
    channels = size[1]
    given = (image(*size), 8, rand(channels), rand(channels, seed=1), 1e-6)
    as_good_as_torch(group_norm, given, {"silu": True, "dtype": torch.float16}, torch.float16)


@pytest.mark.parametrize("x, residual", [(torch.float16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_a_sum_is_as_wide_as_the_wider(x, residual, as_good_as_torch):
    given = (image(2, 24, 41, 47).to(x), image(2, 24, 41, 47, seed=1).to(residual), rand(24), 1.5)
    assert image_sum.supports(*given, gain=GAIN) is None
    as_good_as_torch(image_sum, given, {"gain": GAIN}, torch.float32)
    assert image_sum.triton(*given)[0].dtype is torch.float32


@pytest.mark.parametrize("size, out", [((1, 6, 5, 7), 10), ((2, 8, 3, 4), 3)], ids=str)
@pytest.mark.parametrize("large", [1.0, 1e5])
def test_upsampling_is_as_exact_as_in_tf32(size, out, large):
    """large: of images that float16 cannot hold."""
    x, weight = image(*size) * large, image(out, size[1], 3, 3, seed=1) / 8
    bias = rand(out) * large
    exact = upsample_convolve.reference(x.double(), weight.double(), bias.double())
    stock = in_tf32(F.conv2d)(F.interpolate(x, scale_factor=2.0), weight, bias, padding=1)
    ours = upsample_convolve.triton(x, weight, bias, half=True)
    assert ours.dtype is torch.float32
    assert 1e-6 < off(ours, exact) <= 2 * off(stock, exact)


def test_halved():
    x = image(2, 3, 4, 5) * 1e5
    assert halved(x).dtype is torch.float16 and halved(x).stride() == x.stride()
    assert torch.equal(halved(x), (x * SCALE).half())
