"""Decoders that overflow in float16: stock gives NaN, the optimized one the image that float32 gives."""

import copy
import pickle
from unittest.mock import Mock

import pytest
import torch

import accel
from accel.diffusion.overflow_guard import OverflowGuard
from accel.fusion.half_operands import HalfOperands
from accel.patching.fallback_log import FallbackLog

REDONE = "overflowed in float16; decoded in float32"


def decode(vae, latents):
    with torch.no_grad():
        return vae.decode(latents.to(vae.dtype)).sample


def amplified(vae):
    """The activations of the first convolution go beyond what float16 holds; the norms after it bring them back."""
    with torch.no_grad():
        vae.decoder.conv_in.weight *= 1.5e5
    return vae


@pytest.fixture
def vae(tiny):
    """An autoencoder in float16 whose decoder overflows."""
    return amplified(tiny.vae()).half()


@pytest.fixture
def latents():
    return torch.randn(1, 4, 8, 6)


def fallbacks(model):
    return {(path, reason): calls for path, reason, calls in accel.report(model).fallbacks}


def close(got, wanted):
    assert got.dtype == torch.float16 and torch.isfinite(got).all()
    torch.testing.assert_close(got.float(), wanted, rtol=0, atol=2e-3 * float(wanted.abs().max()))


def test_a_decode_that_overflows_is_done_again(vae, latents, tiny):
    exact = decode(copy.deepcopy(vae).float(), latents)
    assert torch.isfinite(exact).all() and torch.isnan(decode(vae, latents)).any()
    before = tiny.snapshot(vae)
    accel.optimize(vae)
    optimized = tiny.snapshot(vae)
    for calls in (1, 2):
        close(decode(vae, latents), exact)
        assert fallbacks(vae) == {("decoder", REDONE): calls}
    tiny.assert_same_state(optimized, tiny.snapshot(vae))
    accel.restore(vae)
    tiny.assert_same_state(before, tiny.snapshot(vae))
    assert torch.isnan(decode(vae, latents)).any()


@pytest.mark.parametrize("options", [{}, {"graphs": False}, {"layout": "keep"}], ids=str)
def test_the_report_has_the_guard(vae, options, latents):
    accel.optimize(vae, **options)
    (row,) = [row for row in accel.report(vae).sites if row[1] == "overflow guard"]
    path, _, status, note = row
    assert path == "decoder" and status == "patched" and "float16" in note
    assert ("no CUDA graph (graphs=False)" in note) == ("graphs" in options)
    assert torch.isfinite(decode(vae, latents)).all()


def test_where_nothing_overflows_nothing_is_done_again(tiny, latents):
    vae = tiny.vae().half()
    stock = decode(vae, latents)
    accel.optimize(vae)
    torch.testing.assert_close(decode(vae, latents), stock, rtol=0, atol=5e-3 * float(stock.abs().max()))
    assert fallbacks(vae) == {}


def test_a_pipeline_that_upcasts_its_decoder_itself(vae, latents):
    """SDXL's does for the VAE it was published with."""
    exact = decode(copy.deepcopy(vae).float(), latents)
    accel.optimize(vae)
    vae.to(torch.float32)
    torch.testing.assert_close(decode(vae, latents), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
    assert fallbacks(vae) == {}
    vae.to(torch.float16)
    close(decode(vae, latents), exact)
    assert fallbacks(vae) == {("decoder", REDONE): 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_dtypes_are_left_alone(tiny, latents, dtype):
    vae = tiny.vae().to(dtype)
    with torch.no_grad():
        vae.decoder.conv_in.bias.fill_(float("nan"))
    accel.optimize(vae)
    assert torch.isnan(decode(vae, latents)).all()
    assert fallbacks(vae) == {}


def not_finite(vae, monkeypatch):
    with torch.no_grad():
        vae.decoder.conv_out.bias[0] = float("nan")
        vae.decoder.conv_in.weight /= 1.5e5


def replaced(vae, monkeypatch):
    conv = vae.decoder.conv_out
    conv.forward = type(conv).forward.__get__(conv)


def out_of_memory(vae, monkeypatch):
    monkeypatch.setattr("accel.diffusion.overflow_guard.upcast", Mock(side_effect=torch.OutOfMemoryError))


LEFT = {
    not_finite: "not finite in float16, nor when decoded in float32",
    replaced: "overflowed in float16; not decoded again: conv_out has a replaced forward",
    out_of_memory: "overflowed in float16; not enough memory to decode in float32",
}


@pytest.mark.parametrize("change", LEFT)
@pytest.mark.share(1)
def test_what_stock_gives_is_left_and_told(vae, latents, monkeypatch, change):
    change(vae, monkeypatch)
    stock = decode(vae, latents)
    accel.optimize(vae)
    ours = decode(vae, latents)
    assert stock.isnan().any() and torch.equal(ours.isnan(), stock.isnan())
    assert fallbacks(vae) == {("decoder", LEFT[change]): 1}


def test_tiles_and_slices_are_looked_at_one_by_one(vae, latents):
    latents = torch.cat([latents.new_zeros(1, 4, 16, 8), torch.randn(1, 4, 16, 8)])
    twin = copy.deepcopy(vae).float()
    with torch.no_grad():
        vae.decoder.conv_in.bias.zero_(), twin.decoder.conv_in.bias.zero_()
        vae.post_quant_conv.bias.zero_(), twin.post_quant_conv.bias.zero_()
    for each in (vae, twin):
        each.enable_tiling()
        each.enable_slicing()
        each.tile_latent_min_size = 8
    accel.optimize(vae)
    close(decode(vae, latents), decode(twin, latents))
    ((_, calls),) = fallbacks(vae).items()
    assert calls == 6  # three rows of two tiles in the second image; the first, all zeros, stays in float16


def test_gradients_and_training_run_stock(vae, latents):
    accel.optimize(vae)
    assert torch.isnan(vae.decode(latents.half()).sample).any()
    vae.train()
    assert torch.isnan(decode(vae, latents)).any()
    assert not any(reason == REDONE for _, reason in fallbacks(vae))


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_guard_themselves(vae, latents, way):
    exact = decode(copy.deepcopy(vae).float(), latents)
    accel.optimize(vae)
    twin = way(vae)
    with torch.no_grad():
        vae.decoder.conv_in.weight.zero_()
    close(decode(twin, latents), exact)
    assert fallbacks(twin) == {("decoder", REDONE): 1} and fallbacks(vae) == {}


def test_verify_says_that_stock_is_not_finite_and_ours_is(vae, latents):
    accel.optimize(vae)
    quality = accel.verify(vae, torch.rand(1, 3, 16, 12).half())
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
    decoder, log = Caching().half().eval(), FallbackLog()
    decoder.forward = OverflowGuard(decoder, "decoder", None, log, inner=None, half=HalfOperands())
    cache, x = [], torch.ones(1).half()
    with torch.no_grad():
        assert torch.isinf(decoder(x, cache)) and len(cache) == 1
        assert log.rows() == []
        assert torch.isinf(decoder(0 * x + 1))  # beyond float16 in the result itself
    assert log.rows() == [("decoder", "not finite in float16, nor when decoded in float32", 1)]


@pytest.mark.turns(4)
def test_torch_compile_on_top_sees_no_guard(tiny, latents):
    vae = tiny.vae().half()
    stock = decode(vae, latents)
    accel.optimize(vae)
    with torch.no_grad():
        compiled = torch.compile(vae.decoder, backend="eager", fullgraph=True)
        got = compiled(vae.post_quant_conv(latents.half()))
    torch.testing.assert_close(got, stock, rtol=0, atol=5e-3 * float(stock.abs().max()))
    torch.compiler.reset()
