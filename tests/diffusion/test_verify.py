"""The quality gate: it passes what only rounds otherwise, fails what is wrong, and leaves no trace."""

import copy
from operator import attrgetter

import pytest
import torch

import accel
from accel.options import Options
from accel.patching.fast_forward import FastForward
from accel.verification.precision import upcast
from support.everything import EVERYTHING

CALL = {"num_inference_steps": 2}
PROMPT = "a handwritten seven"


def resnet_forward(model):
    """The fast forward of one block of a model."""
    return next(f for m in model.modules() if "Resnet" in type(f := vars(m).get("forward")).__name__)


def spoil(monkeypatch, model, change, wrong=lambda number: True):
    """One block of the model gives change(result) in the calls whose number, from 1, is wrong; returns the calls."""
    spoiled, calls = resnet_forward(model), []
    fast = type(spoiled).fast

    def spoiled_fast(self, *args, **kwargs):
        result = fast(self, *args, **kwargs)
        if self is spoiled:
            calls.append(1)
            return change(result) if wrong(len(calls)) else result
        return result

    monkeypatch.setattr(type(spoiled), "fast", spoiled_fast)
    return calls


def test_each_model_and_the_whole_image_pass(pipe, monkeypatch):
    accel.optimize(pipe)
    spoil(monkeypatch, pipe.unet, lambda image: (1 + 1e-6) * image)  # else a CPU may give stock's bits
    quality = accel.verify(pipe, PROMPT, **CALL)
    assert quality.passed and quality.verdict.startswith("passed: no further apart")
    assert set(quality.parts) == {"unet", "vae.decoder", "text_encoder"}
    for name, part in quality.parts.items():
        assert part.passed and part.finite and 0 < part.error <= part.allowed < 1e-4, name
        assert part.measure == "relative RMS from full precision" and part.ssim is None and not part.note
    assert quality.ssim > 0.99999 and quality.psnr_db > 80
    text = str(quality)
    assert "unet" in text and "vae.decoder" in text and "passed" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16][: 1 + EVERYTHING], ids=str)
@pytest.mark.turns(2)
def test_half_precision_is_measured_by_its_own_rounding(pipe, dtype):
    accel.optimize(pipe.to(dtype))
    quality = accel.verify(pipe, PROMPT, **CALL)
    assert quality.passed, str(quality)
    unit = torch.finfo(dtype).eps / 2
    assert all(unit < part.allowed < 32 * unit for part in quality.parts.values())


BY_ERROR = "relative RMS from full precision"
WRONG = [  # a model, what one of its blocks gives, and what is said
    ("unet", 1.01, f"unet: {BY_ERROR}"),
    ("unet", 1.001, f"unet: {BY_ERROR}"),  # which cannot be seen in the image
    ("vae.decoder", 1.01, f"vae.decoder: {BY_ERROR}"),
    ("vae.decoder", float("nan"), "the output: NaN or Inf where stock has none"),
]


@pytest.mark.parametrize(("part", "factor", "said"), WRONG)
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_a_wrong_block_fails_and_is_named(pipe, monkeypatch, part, factor, said):
    accel.optimize(pipe)
    spoil(monkeypatch, attrgetter(part)(pipe), lambda result: factor * result)
    quality = accel.verify(pipe, PROMPT, **CALL)
    assert not quality.passed and quality.verdict.startswith(f"FAILED: {said}")
    assert [name for name, q in quality.parts.items() if not q.passed] == [part]  # the others got stock's inputs
    assert quality.parts[part].finite == (factor == factor)
    assert factor != 1.001 or (quality.error <= quality.allowed and quality.ssim > 0.9999)


def test_nan_in_the_first_call_of_a_model_fails(tiny, monkeypatch):
    model = accel.optimize(tiny.unet())
    spoil(monkeypatch, model, lambda result: result * float("nan"), wrong=lambda number: number == 1)
    assert not accel.verify(model).passed


@pytest.mark.turns(2)
def test_nan_in_black_pictures_is_found_in_the_decoder(pipe, monkeypatch):
    accel.optimize(pipe)
    spoil(monkeypatch, pipe.vae.decoder, lambda result: result * float("nan"))
    with pytest.warns(RuntimeWarning, match="invalid value"):
        quality = accel.verify(pipe, PROMPT, output_type="pil", **CALL)
    assert quality.finite and quality.verdict == "FAILED: vae.decoder: NaN or Inf where stock has none"


@pytest.mark.turns(2)
def test_nan_in_both_is_told(pipe):
    with torch.no_grad():
        pipe.vae.decoder.conv_in.bias.fill_(float("nan"))
    accel.optimize(pipe)
    quality = accel.verify(pipe, PROMPT, **CALL)
    assert quality.passed and quality.verdict == "passed: stock itself gives NaN or Inf, so does accel"
    assert not quality.parts["vae.decoder"].stock_finite


@pytest.mark.turns(2)
def test_an_error_in_the_middle_of_the_loop_alone_fails_the_whole_image(pipe, monkeypatch):
    """Models are compared in their first and last call; something stale in between shows in the image."""
    accel.optimize(pipe)
    spoil(monkeypatch, pipe.unet, lambda result: 3 * result, wrong=lambda number: number in (2, 3))
    quality = accel.verify(pipe, PROMPT, num_inference_steps=5)
    assert all(part.passed for part in quality.parts.values())
    assert not quality.passed and quality.verdict.startswith("FAILED: relative RMS from stock")


@pytest.mark.turns(4)
def test_drift_is_measured_where_it_can_be_seen(pipe):
    accel.optimize(pipe.to(torch.bfloat16))
    quality = accel.verify(pipe, PROMPT, num_inference_steps=12, guidance_scale=15.0)
    assert quality.passed, str(quality)
    assert 1 / 256 < quality.error <= quality.allowed


@pytest.mark.turns(2)
def test_generators_of_the_user_draw_the_same_and_stay_as_they_were(pipe):
    accel.optimize(pipe)
    generators = [torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)]
    states = [generator.get_state() for generator in generators]
    torch.manual_seed(11)
    before = torch.get_rng_state()
    quality = accel.verify(pipe, [PROMPT] * 2, generator=generators, eta=1.0, **CALL)
    assert quality.passed and quality.psnr_db > 60
    assert all(torch.equal(g.get_state(), s) for g, s in zip(generators, states, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.turns(2)
def test_it_leaves_no_trace(pipe, tiny, fails):
    accel.optimize(pipe)
    models = (pipe.unet, pipe.vae, pipe.text_encoder)
    before = [tiny.snapshot(model) for model in models]

    def callback(pipeline, step, timestep, tensors):
        if fails and not isinstance(vars(pipeline.unet).get("forward"), FastForward):
            raise KeyError("in the stock run")
        return tensors

    if fails:
        with pytest.raises(KeyError, match="in the stock run"):
            accel.verify(pipe, PROMPT, callback_on_step_end=callback, **CALL)
    else:
        accel.verify(pipe, PROMPT, callback_on_step_end=callback, **CALL)
    for model, state in zip(models, before, strict=True):
        tiny.assert_same_state(state, tiny.snapshot(model))


def test_hooks_of_the_user_count_once(pipe):
    """A pre-hook that changes what a model gets must not change it twice when its inputs are given again."""
    pipe.unet.register_forward_pre_hook(
        lambda module, args, kwargs: ((1.1 * args[0], *args[1:]), kwargs), with_kwargs=True
    )
    accel.optimize(pipe)
    part = accel.verify(pipe, PROMPT, **CALL).parts["unet"]
    assert part.passed and part.measure == "relative RMS from full precision" and part.allowed < 1e-4


@pytest.mark.turns(2)
def test_without_arguments(pipe):
    from diffusers import StableDiffusionImg2ImgPipeline

    accel.optimize(pipe)
    assert accel.verify(pipe).passed
    for model in (pipe.unet, pipe.vae, pipe.text_encoder):
        quality = accel.verify(model)
        assert quality.passed and quality.error is not None and not quality.parts, str(quality)
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    with pytest.raises(ValueError, match="no example call .* StableDiffusionImg2ImgPipeline .it takes image.; give"):
        accel.verify(other)


@pytest.mark.turns(2)
def test_pictures_and_latents_as_asked_for(pipe):
    accel.optimize(pipe)
    pictures = accel.verify(pipe, PROMPT, output_type="pil", **CALL)
    assert pictures.passed and pictures.ssim > 0.999
    assert pictures.max_error == 0 or pictures.max_error > 1 / 256
    latents = accel.verify(pipe, PROMPT, output_type="latent", **CALL)
    assert latents.passed and latents.ssim is None and set(latents.parts) == {"unet", "text_encoder"}


def test_an_asked_for_loss_is_told(pipe, monkeypatch):
    monkeypatch.setattr(Options, "lossy", "every second step")
    accel.optimize(pipe)
    spoil(monkeypatch, pipe.unet, lambda result: 1.05 * result)
    quality = accel.verify(pipe, PROMPT, **CALL)
    assert quality.passed
    assert (
        quality.verdict.startswith("lossy, as asked for (every second step): max error") and "SSIM" in quality.verdict
    )


@pytest.mark.turns(2)
def test_without_a_reference_units_of_rounding_decide(pipe, monkeypatch):
    conv = pipe.unet.conv_in
    conv.forward = type(conv).forward.__get__(conv)  # somebody's wrapper: a twin in float64 would call this one
    accel.optimize(pipe)
    part = accel.verify(pipe, PROMPT, **CALL).parts["unet"]
    assert part.passed and part.measure == "relative RMS from stock"
    assert "conv_in has a replaced forward" in part.note
    spoil(monkeypatch, pipe.unet, lambda result: 1.01 * result)
    assert not accel.verify(pipe, PROMPT, **CALL).parts["unet"].passed


@pytest.mark.parametrize("factor, passes", [(1.0, True), (1.08, False)])
@pytest.mark.turns(2)
def test_units_of_rounding_are_few(pipe, monkeypatch, factor, passes):
    """A block that is off by a few times what they allow: ten times as many would let it pass."""
    conv = pipe.to(torch.float16).unet.conv_in
    conv.forward = type(conv).forward.__get__(conv)
    accel.optimize(pipe)
    spoil(monkeypatch, pipe.unet, lambda result: factor * result)
    part = accel.verify(pipe, PROMPT, num_inference_steps=2).parts["unet"]
    assert part.measure == "relative RMS from stock" and part.passed == passes
    assert passes or part.allowed < part.error < 5 * part.allowed


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_drift_explains_a_few_times_what_was_measured_and_no_more(pipe, monkeypatch):
    """An error in the middle of the loop alone, which ten times the drift would cover."""
    accel.optimize(pipe.to(torch.float16))
    spoil(monkeypatch, pipe.unet, lambda result: 1.7 * result, wrong=lambda number: 2 <= number <= 7)
    quality = accel.verify(pipe, PROMPT, num_inference_steps=8)
    assert not quality.passed and all(part.passed for part in quality.parts.values())
    assert 1 / 256 < quality.allowed < quality.error < 8 * quality.allowed, str(quality)


def test_a_twin_in_another_precision(tiny):
    model = tiny.unet()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in tiny.inputs(model).items()}
    wanted = copy.deepcopy(model).double()
    accel.optimize(model)
    before = tiny.snapshot(model)
    twin = upcast(model, torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(twin(**inputs).sample, wanted(**inputs).sample, rtol=1e-12, atol=1e-12)
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert not any("forward" in vars(module) for module in twin.modules())


def test_a_twin_keeps_tied_weights_tied_and_refuses_what_it_cannot_copy(tiny):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.ModuleList())
    model[1].weight = model[0].weight
    twin = upcast(model, torch.float64)
    assert twin[0].weight is twin[1].weight and twin[0].weight.dtype == torch.float64
    assert twin[2] is not model[2]
    with pytest.raises(ValueError, match="the weights of 0 are not plain tensors"):
        upcast(torch.nn.Sequential(torch.nn.Linear(3, 3, device="meta")), torch.float64)
