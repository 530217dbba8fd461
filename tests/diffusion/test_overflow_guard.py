"""Products of 16-bit operands, and what guards them against overflow."""

import copy
import pickle

import pytest
import torch
from accel_kernels import op as kernels_op
from torch import nn

import accel
from accel.diffusion.blocks import resnet
from accel.diffusion.blocks.resnet import ResnetForward
from accel.diffusion.overflow_guard import OverflowGuard
from accel.fusion.float32_precision import full_precision
from accel.fusion.half_operands import HalfOperands
from accel.patching.ledger import Ledger
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


def test_with_the_kernels_as_on_a_gpu(vae, latents, monkeypatch):
    """Tensors that claim to be on a GPU, and kernels in Triton's interpreter."""
    pytest.importorskip("triton")
    interpreter.prepare()
    exact, stock = decode(copy.deepcopy(vae).double(), latents), decode(rounded(vae), latents)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(kernels_op, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    accel.optimize(vae)
    ours = decode(vae, latents)
    monkeypatch.undo()
    assert not accel.report(vae).fallbacks
    assert 1e-6 < off(ours, exact) <= 2 * off(stock, exact)


REDONE = "overflowed in float16; decoded in float32"


def guarded_decode(guarded_vae, guarded_latents):
    with torch.no_grad():
        return guarded_vae.decode(guarded_latents.to(guarded_vae.dtype)).sample


def amplified(guarded_vae):
    """The activations of the first convolution go beyond what float16 holds; the norms after it bring them back."""
    with torch.no_grad():
        guarded_vae.decoder.conv_in.weight *= 1.5e5
    return guarded_vae


@pytest.fixture
def guarded_vae(tiny):
    """An autoencoder in float16 whose decoder overflows."""
    return amplified(tiny.vae()).half()


@pytest.fixture
def guarded_latents():
    return torch.randn(1, 4, 8, 6)


def fallbacks(model):
    return {(path, reason): calls for path, reason, calls in accel.report(model).fallbacks}


def close(got, wanted):
    assert got.dtype == torch.float16 and torch.isfinite(got).all()
    torch.testing.assert_close(got.float(), wanted, rtol=0, atol=2e-3 * float(wanted.abs().max()))


def test_a_decode_that_overflows_is_done_again(guarded_vae, guarded_latents, tiny):
    exact = guarded_decode(copy.deepcopy(guarded_vae).float(), guarded_latents)
    assert torch.isfinite(exact).all() and torch.isnan(guarded_decode(guarded_vae, guarded_latents)).any()
    before = tiny.snapshot(guarded_vae)
    accel.optimize(guarded_vae)
    optimized = tiny.snapshot(guarded_vae)
    for calls in (1, 2):
        close(guarded_decode(guarded_vae, guarded_latents), exact)
        assert fallbacks(guarded_vae) == {("decoder", REDONE): calls}
    tiny.assert_same_state(optimized, tiny.snapshot(guarded_vae))
    accel.restore(guarded_vae)
    tiny.assert_same_state(before, tiny.snapshot(guarded_vae))
    assert torch.isnan(guarded_decode(guarded_vae, guarded_latents)).any()


@pytest.mark.parametrize("options", [{}, {"graphs": False}, {"layout": "keep"}], ids=str)
def test_the_report_has_the_guard(guarded_vae, options, guarded_latents):
    accel.optimize(guarded_vae, **options)
    (row,) = [row for row in accel.report(guarded_vae).sites if row[1] == "overflow guard"]
    path, _, status, note = row
    assert path == "decoder" and status == "patched" and "float16" in note
    assert ("no CUDA graph (graphs=False)" in note) == ("graphs" in options)
    assert torch.isfinite(guarded_decode(guarded_vae, guarded_latents)).all()


def test_where_nothing_overflows_nothing_is_done_again(tiny, guarded_latents):
    guarded_vae = tiny.vae().half()
    stock = guarded_decode(guarded_vae, guarded_latents)
    accel.optimize(guarded_vae)
    torch.testing.assert_close(
        guarded_decode(guarded_vae, guarded_latents), stock, rtol=0, atol=5e-3 * float(stock.abs().max())
    )
    assert fallbacks(guarded_vae) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_dtypes_are_left_alone(tiny, guarded_latents, dtype):
    guarded_vae = tiny.vae().to(dtype)
    with torch.no_grad():
        guarded_vae.decoder.conv_in.bias.fill_(float("nan"))
    accel.optimize(guarded_vae)
    assert torch.isnan(guarded_decode(guarded_vae, guarded_latents)).all()
    assert fallbacks(guarded_vae) == {}


def test_a_pipeline_that_upcasts_its_decoder_itself(guarded_vae, guarded_latents):
    """SDXL's does for the VAE it was published with."""
    exact = guarded_decode(copy.deepcopy(guarded_vae).float(), guarded_latents)
    accel.optimize(guarded_vae)
    guarded_vae.to(torch.float32)
    torch.testing.assert_close(
        guarded_decode(guarded_vae, guarded_latents), exact, rtol=0, atol=1e-5 * float(exact.abs().max())
    )
    assert fallbacks(guarded_vae) == {}
    guarded_vae.to(torch.float16)
    close(guarded_decode(guarded_vae, guarded_latents), exact)


def test_moved_to_float16_afterwards(tiny, guarded_latents):
    guarded_vae = accel.optimize(amplified(tiny.vae()))
    guarded_vae.half()
    exact = guarded_decode(copy.deepcopy(accel.restore(copy.deepcopy(guarded_vae))).float(), guarded_latents)
    close(guarded_decode(guarded_vae, guarded_latents), exact)
    assert fallbacks(guarded_vae) == {("decoder", REDONE): 1}


def test_weights_that_are_not_finite_are_told_as_such(guarded_vae, guarded_latents):
    with torch.no_grad():
        guarded_vae.decoder.conv_out.bias[0] = float("nan")
        guarded_vae.decoder.conv_in.weight /= 1.5e5
    stock = guarded_decode(guarded_vae, guarded_latents)
    accel.optimize(guarded_vae)
    ours = guarded_decode(guarded_vae, guarded_latents)
    assert torch.isnan(ours[:, 0]).all() and torch.equal(ours.isnan(), stock.isnan())
    ((path, reason),) = fallbacks(guarded_vae)
    assert path == "decoder" and reason == "not finite in float16, nor when decoded in float32"


def test_tiles_and_slices_are_looked_at_one_by_one(guarded_vae, guarded_latents):
    guarded_latents = torch.cat([guarded_latents.new_zeros(1, 4, 16, 8), torch.randn(1, 4, 16, 8)])
    twin = copy.deepcopy(guarded_vae).float()
    with torch.no_grad():
        guarded_vae.decoder.conv_in.bias.zero_(), twin.decoder.conv_in.bias.zero_()
        guarded_vae.post_quant_conv.bias.zero_(), twin.post_quant_conv.bias.zero_()
    for each in (guarded_vae, twin):
        each.enable_tiling()
        each.enable_slicing()
        each.tile_latent_min_size = 8
    accel.optimize(guarded_vae)
    close(guarded_decode(guarded_vae, guarded_latents), guarded_decode(twin, guarded_latents))
    ((_, calls),) = fallbacks(guarded_vae).items()
    assert calls == 6  # three rows of two tiles in the second image; the first, all zeros, stays in float16


def test_gradients_and_training_run_stock(guarded_vae, guarded_latents):
    accel.optimize(guarded_vae)
    assert torch.isnan(guarded_vae.decode(guarded_latents.half()).sample).any()
    guarded_vae.train()
    assert torch.isnan(guarded_decode(guarded_vae, guarded_latents)).any()
    assert not any(reason == REDONE for _, reason in fallbacks(guarded_vae))


def test_a_part_replaced_by_the_user_is_not_run_in_float32(guarded_vae, guarded_latents):
    conv = guarded_vae.decoder.conv_out
    conv.forward = type(conv).forward.__get__(conv)
    accel.optimize(guarded_vae)
    assert torch.isnan(guarded_decode(guarded_vae, guarded_latents)).any()
    assert fallbacks(guarded_vae) == {
        ("decoder", "overflowed in float16; not decoded again: conv_out has a replaced forward"): 1
    }


def test_out_of_memory_leaves_what_stock_gives(guarded_vae, guarded_latents, monkeypatch):
    accel.optimize(guarded_vae)

    def full(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("accel.diffusion.overflow_guard.upcast", full)
    assert torch.isnan(guarded_decode(guarded_vae, guarded_latents)).any()
    assert fallbacks(guarded_vae) == {("decoder", "overflowed in float16; not enough memory to decode in float32"): 1}


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_guard_themselves(guarded_vae, guarded_latents, way):
    exact = guarded_decode(copy.deepcopy(guarded_vae).float(), guarded_latents)
    accel.optimize(guarded_vae)
    twin = way(guarded_vae)
    with torch.no_grad():
        guarded_vae.decoder.conv_in.weight.zero_()
    close(guarded_decode(twin, guarded_latents), exact)
    assert fallbacks(twin) == {("decoder", REDONE): 1} and fallbacks(guarded_vae) == {}


def test_verify_says_that_stock_is_not_finite_and_ours_is(guarded_vae, guarded_latents):
    accel.optimize(guarded_vae)
    quality = accel.verify(guarded_vae, torch.rand(1, 3, 16, 12).half())
    assert quality.passed and quality.finite and not quality.stock_finite
    assert quality.verdict == "passed: stock itself gives NaN or Inf, accel's output is finite"
    assert quality.error < quality.allowed  # against full precision, which the guarded decode is near to


class Caching(torch.nn.Module):
    """A decoder of video that hands its state from frame to frame in a list."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 6e4))

    def forward(self, x, cache=None):
        if cache is not None:
            cache.append(x)
        return 10 * self.weight * x


def test_a_call_that_changes_its_arguments_is_not_made_twice():
    decoder, ledger = Caching().half().eval(), Ledger()
    decoder.forward = OverflowGuard(decoder, "decoder", None, ledger, None, HalfOperands())
    cache, x = [], torch.ones(1).half()
    with torch.no_grad():
        assert torch.isinf(decoder(x, cache)) and len(cache) == 1
        assert ledger.rows() == []
        assert torch.isinf(decoder(0 * x + 1))  # beyond float16 in the result itself
    assert ledger.rows() == [("decoder", "not finite in float16, nor when decoded in float32", 1)]


def test_torch_compile_on_top_sees_no_guard(tiny, guarded_latents):
    guarded_vae = tiny.vae().half()
    stock = guarded_decode(guarded_vae, guarded_latents)
    accel.optimize(guarded_vae)
    with torch.no_grad():
        compiled = torch.compile(guarded_vae.decoder, backend="eager", fullgraph=True)
        got = compiled(guarded_vae.post_quant_conv(guarded_latents.half()))
    torch.testing.assert_close(got, stock, rtol=0, atol=5e-3 * float(stock.abs().max()))
    torch.compiler.reset()
