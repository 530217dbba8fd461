"""Autoencoders over video on a GPU: as near to the truth as stock, channels-last, in chunks and several sizes."""

import copy

import pytest
import torch

import accel
from accel.diffusion.blocks.video_resnet import VideoResnetForward
from support.precision import off
from support.video.tiny_videos import VIDEOS, latents, make_video


@pytest.fixture(params=VIDEOS)
def family(request):
    return request.param


def decode(model, z):
    return model.decode(z.to(model.dtype)).sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_at_most_twice_stocks(family, dtype, exact):
    stock = make_video(family).cuda().to(dtype)
    model, truth = copy.deepcopy(stock), copy.deepcopy(stock).double()
    accel.optimize(model)
    assert any(isinstance(vars(m).get("forward"), VideoResnetForward) for m in model.modules())
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv3d) and m.kernel_size != m.stride]
    assert all(m.weight.is_contiguous(memory_format=torch.channels_last_3d) for m in convolutions)
    for frames, height, width in ((3, 4, 5), (1, 8, 6), (5, 3, 3)):
        z = latents(model, frames, height, width).cuda().to(dtype)
        wanted = decode(truth, z)
        ours, theirs = off(decode(model, z), wanted), off(decode(stock, z), wanted)
        assert ours <= 2 * theirs + 1e-6
        video = torch.randn(1, 3, 9, 32, 32, device="cuda", dtype=dtype)
        encoded = [one.encode(video.to(one.dtype)).latent_dist.mean for one in (model, stock, truth)]
        assert off(encoded[0], encoded[2]) <= 2 * off(encoded[1], encoded[2]) + 1e-6
    assert not accel.report(model).fallbacks
