"""Autoencoders over video against an untouched copy: outputs, chunks, layouts, undo, and what runs stock."""

import copy
from dataclasses import replace

import pytest
import torch
from accel_kernels import op as kernels_op
from accel_kernels.gemm.linear import torch_linear
from diffusers.models.autoencoders.autoencoder_kl_wan import WanUpsample
from torch import nn

import accel
from accel.diffusion.blocks import video_convolution
from accel.diffusion.blocks.video_convolution_kind import VideoConvolution
from accel.diffusion.blocks.video_resnet import VideoResnetForward
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import Kernels
from support.kernels import interpreter
from support.noted import noted
from support.patched import sites
from support.state import assert_same_state, snapshot
from support.video.tiny_videos import VIDEOS, latents, make_video

BLOCK, CONVOLUTION, NORM = "video resnet block", "video convolution", "video norm"
CLOSE = 1e-5  # root mean square in float32, by the root mean square: sums in another order


@pytest.fixture(params=VIDEOS)
def family(request):
    return request.param


@pytest.fixture
def pair(family):
    model = make_video(family)
    return model, copy.deepcopy(model)


def decode(model, z):
    with torch.no_grad():
        return model.decode(z).sample


def off(got, wanted):
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def blocks(model):
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), VideoResnetForward)]


def test_decoded_and_encoded_as_stock_does(pair, family):
    model, stock = pair
    before = snapshot(model.decoder)  # the root keeps frames of its own between calls
    accel.optimize(model)
    resnets = [name for name, part in model.named_modules() if hasattr(part, "conv1") and hasattr(part, "norm1")]
    assert {path for path, (status, _) in sites(model, BLOCK).items() if status == "patched"} == set(resnets) != set()
    for frames, height, width, batch in ((3, 3, 2, 1), (1, 2, 3, 2), (4, 1, 3, 1)):
        batch = 1 if family == "hunyuan1.5" else batch  # whose stock attention takes no more
        z = latents(model, frames, height, width, batch)
        assert off(decode(model, z), decode(stock, z)) < CLOSE
    video = torch.randn(1, 3, 9, 32, 32)
    with torch.no_grad():
        ours, theirs = (one.encode(video).latent_dist.mean for one in (model, stock))
    assert off(ours, theirs) < CLOSE
    assert not accel.report(model).fallbacks
    accel.restore(model)
    assert_same_state(before, snapshot(model.decoder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.share(5)
@pytest.mark.turns(2)
def test_in_16_bits_the_error_is_at_most_twice_stocks(family, dtype):
    exact = make_video(family)
    z = latents(exact).to(dtype)
    stock = copy.deepcopy(exact).to(dtype)
    model = accel.optimize(copy.deepcopy(stock))
    truth = decode(stock.double(), z.double())
    stock = stock.to(dtype)
    assert blocks(model) and sites(model, CONVOLUTION)
    assert off(decode(model, z).double(), truth) <= 2 * off(decode(stock, z).double(), truth)
    assert not accel.report(model).fallbacks


def test_in_channels_last_weights(pair):
    """No stock code between the fused forwards minds their layout, or that of the convolutions."""
    model, stock = pair
    accel.optimize(model, layout="channels_last")
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv3d)]
    assert all(m.weight.is_contiguous(memory_format=torch.channels_last_3d) for m in convolutions)
    z = latents(model)
    assert off(decode(model, z), decode(stock, z)) < CLOSE
    assert not accel.report(model).fallbacks
    accel.restore(model)
    assert [m.weight.stride() for m in convolutions] == [
        m.weight.stride() for m in stock.modules() if isinstance(m, nn.Conv3d)
    ]


@pytest.mark.parametrize("family", ["wan", "ltx", "hunyuan"], indirect=True)
@pytest.mark.turns(2)
def test_with_the_kernels_as_on_a_gpu(pair, family, monkeypatch):
    """Tensors that claim to be on a GPU, and kernels in Triton's interpreter: channels-last, biases added by passes."""
    pytest.importorskip("triton")
    interpreter.prepare()
    model, stock = pair
    z = latents(model, 2, 2, 2)
    wanted = decode(stock, z)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    launched = noted(
        monkeypatch, kernels_op.Op, "__call__", lambda op, *args, **more: (op.name, op.supports(*args, **more))
    )
    accel.optimize(model, layout="channels_last")  # it is a CPU after all
    assert blocks(model)
    launched.clear()  # of trials, with weights as they were
    got = decode(model, z)
    monkeypatch.undo()
    assert off(got, wanted) < CLOSE
    wanted = {"convolution_frames", "image_sum"} | ({"upsample_convolve"} if family == "wan" else set())
    assert {name for name, _ in launched} >= wanted
    assert {reason for _, reason in launched} == {None}
    assert not accel.report(model).fallbacks


@pytest.mark.parametrize("family", ["wan", "ltx"], indirect=True)
def test_tiles_and_slices(pair):
    model, stock = pair
    accel.optimize(model)
    for one in (model, stock):
        one.enable_slicing()
        one.enable_tiling(tile_sample_min_height=32, tile_sample_min_width=32)
    z = latents(model, 2, 6, 5, 2)
    assert off(decode(model, z), decode(stock, z)) < CLOSE
    assert not accel.report(model).fallbacks


@pytest.mark.parametrize("family", ["wan", "hunyuan"], indirect=True)
def test_what_runs_stock(pair):
    model, stock = pair
    accel.optimize(model)
    z = latents(model, 2)
    stock.train(), model.train()
    assert torch.equal(decode(model, z), decode(stock, z))
    model.eval(), stock.eval()
    assert torch.equal(model.decode(z).sample, stock.decode(z).sample)  # with gradients
    block, other = blocks(model)[-1], stock.get_submodule(path_of(model, blocks(model)[-1]))
    for one in (block, other):
        one.norm1.register_forward_hook(lambda module, args, out: out * 2)
    assert off(decode(model, z), decode(stock, z)) < CLOSE
    reasons = {reason for path, reason, _ in accel.report(model).fallbacks if path == path_of(model, block)}
    assert any("hooks" in reason for reason in reasons)


def path_of(model, module):
    return next(name for name, part in model.named_modules() if part is module)


def test_layout_keep():
    model, stock = make_video("wan"), make_video("wan")
    accel.optimize(model, layout="keep")
    assert not blocks(model)
    assert {reason for _, reason in sites(model, BLOCK).values()} == {'layout="keep"'}
    z = latents(model)
    assert off(decode(model, z), decode(stock, z)) < CLOSE


def test_an_error_leaves_the_frames_of_the_chunk_before():
    """Stock takes the call over; the cache is as the chunk before has left it."""
    model, stock = make_video("wan"), make_video("wan")
    accel.optimize(model)
    block = blocks(model)[0]
    other = stock.get_submodule(path_of(model, block))
    x = torch.randn(1, block.conv1.in_channels, 2, 3, 3)
    caches = [[None, None, "beyond"] for _ in range(2)]
    fused = vars(block)["forward"]
    usual, failing = fused.kernels, replace(fused.kernels, image_sum=Failing())
    for kernels in (usual, failing, usual):
        fused.kernels = kernels
        places = [[0], [0]]
        with torch.no_grad():
            got, wanted = (
                one(x, feat_cache=cache, feat_idx=place)
                for one, cache, place in zip((block, other), caches, places, strict=True)
            )
        assert off(got, wanted) < CLOSE and places == [[2], [2]] and caches[0][2] == "beyond"
        assert all(off(ours, theirs) < CLOSE for ours, theirs in zip(caches[0][:2], caches[1][:2], strict=True))
    assert [count for path, reason, count in accel.report(model).fallbacks if "no memory" in reason] == [1]


class Failing:
    def __call__(self, *args, **kwargs):
        raise RuntimeError("no memory")


def test_frames_kept_do_not_keep_what_lies_around_them():
    model = accel.optimize(make_video("wan"))
    block, cache = blocks(model)[0], [None, None]
    with torch.no_grad():
        block(torch.randn(1, block.conv1.in_channels, 6, 3, 3), feat_cache=cache, feat_idx=[0])
    assert [frames.untyped_storage().nbytes() for frames in cache] == [frames.nbytes for frames in cache]


def test_convolutions_of_another_make_run_stock():
    """One that keeps frames between calls by itself, and one that reflects edges."""
    from diffusers.models.autoencoders.autoencoder_kl_magvit import EasyAnimateCausalConv3d

    made = nn.ModuleDict(
        {
            "keeps": EasyAnimateCausalConv3d(4, 4, 3),
            "reflects": nn.Conv3d(4, 4, 3, padding=1, padding_mode="reflect"),
            "groups": nn.Conv3d(4, 4, 3, padding=1, groups=2),
            "plain": nn.Conv3d(4, 4, 3, padding=1),
        }
    )
    found = video_convolution.VideoConvolutions()
    kinds = {name: found.of(module) for name, module in made.items()}
    assert [name for name, kind in kinds.items() if kind is not None] == ["plain"]
    assert made["keeps"].prev_features is None


@pytest.mark.parametrize("cached", [False, True])
def test_convolutions_that_return_their_last_frames(cached):
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXCausalConv3d

    module = CogVideoXCausalConv3d(4, 5, 3).eval()
    stock = copy.deepcopy(module)
    kind = video_convolution.VideoConvolutions().of(module)
    assert isinstance(kind, VideoConvolution) and kind.continues and kind.keeps
    kernels, log = Kernels(attention=None, linear=torch_linear).plain(), FallbackLog()
    fast = video_convolution.VideoConvolutionForward(module, "", kernels, log, convolution=kind)
    x, before = torch.randn(2, 4, 3, 4, 5), torch.randn(2, 4, 2, 4, 5) if cached else None
    with torch.no_grad():
        for got, wanted in zip(fast(x, before), stock(x, conv_cache=before), strict=True):
            assert off(got, wanted) < CLOSE
    assert not log.rows()


def upsampled(kind, dtype=torch.float32, **settings):
    """A Wan whose decoder's first upsampling is this one, and an untouched copy of what takes it."""
    model = make_video("wan").to(dtype)
    pair = model.decoder.up_blocks[0].upsamplers[0].resample
    pair[0] = kind(**settings)
    return model, pair, copy.deepcopy(pair)


PLACE = "decoder.up_blocks.0.upsamplers.0.resample"


@pytest.mark.parametrize("kind, mode", [(nn.Upsample, "nearest"), (WanUpsample, "nearest-exact")])
def test_upsampling_and_the_convolution_after_it_are_one(kind, mode):
    model, pair, stock = upsampled(kind, torch.bfloat16, scale_factor=(2.0, 2.0), mode=mode)
    accel.optimize(model)
    assert sites(model, "resampling")[PLACE] == ("patched", "")
    x = torch.randn(3, pair[1].in_channels, 4, 7).bfloat16()
    with torch.no_grad():
        assert torch.equal(pair(x), stock(x))
        assert not accel.report(model).fallbacks
        pair[0].mode = stock[0].mode = "bilinear"
        assert torch.equal(pair(x), stock(x))
    (fallback,) = accel.report(model).fallbacks
    assert "changed after accel.optimize" in str(fallback)


class Shifted(nn.Upsample):
    def forward(self, x):
        return super().forward(x.roll(1, -1))


@pytest.mark.parametrize(
    "kind, settings",
    [
        (Shifted, {"scale_factor": 2.0}),
        (nn.Upsample, {"scale_factor": 3.0}),
        (nn.Upsample, {"scale_factor": 2.0, "mode": "bilinear"}),
        (nn.Upsample, {"size": (8, 14)}),
    ],
)
def test_other_upsampling_runs_as_it_is(kind, settings):
    model, pair, stock = upsampled(kind, **settings)
    accel.optimize(model)
    assert sites(model, "resampling").get(PLACE, ("skipped", ""))[0] == "skipped"
    x = torch.randn(1, pair[1].in_channels, 4, 7)
    with torch.no_grad():
        assert torch.equal(pair(x), stock(x))
