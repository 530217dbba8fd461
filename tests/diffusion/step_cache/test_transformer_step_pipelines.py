"""The step cache in pipelines with transformers: as the oracle draws, with timesteps that only a GPU could read."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import accel
from accel.diffusion.step_cache.moment import Moment
from accel.fusion.loop import Loop
from accel.verification.metrics import compare
from support.compatibility.stack_oracle import StackOracle, deep
from support.diffusion.drawing import draw
from support.diffusion.step_oracle import reasons


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def flux(pipelines, scheduler, model):
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = pipelines.FluxPipeline(scheduler(), transformer=model, **parts)
    pooled = model.config.pooled_projection_dim
    width = model.config.joint_attention_dim
    return pipe, {"prompt_embeds": rand(1, 7, width), "pooled_prompt_embeds": rand(1, pooled)}


def qwen(pipelines, scheduler, model):
    pipe = pipelines.QwenImagePipeline(scheduler(), None, None, None, model)
    width = model.config.joint_attention_dim
    masks = {f"{kind}prompt_embeds_mask": torch.ones(1, 7) for kind in ("", "negative_")}
    embeds = {"prompt_embeds": rand(1, 7, width), "negative_prompt_embeds": rand(1, 7, width).flip(1)}
    return pipe, embeds | masks | {"true_cfg_scale": 3.0}


def wan(pipelines, scheduler, model):
    pipe = pipelines.WanPipeline(None, None, None, scheduler(), model)
    width = model.config.text_dim
    embeds = {"prompt_embeds": rand(1, 7, width), "negative_prompt_embeds": rand(1, 7, width).flip(1)}
    return pipe, embeds | {"guidance_scale": 3.0, "num_frames": 1}


def z_image(pipelines, scheduler, model):
    pipe = pipelines.ZImagePipeline(scheduler(), None, None, None, model)
    width = model.config.cap_feat_dim
    return pipe, {"prompt_embeds": [rand(7, width)], "negative_prompt_embeds": [rand(5, width)], "guidance_scale": 3.0}


# By class: how its pipeline is made and called, and how many calls of the transformer a step makes.
PIPELINES = {
    "FluxTransformer2DModel": (flux, 1),
    "QwenImageTransformer2DModel": (qwen, 2),
    "WanTransformer3DModel": (wan, 2),
    "ZImageTransformer2DModel": (z_image, 1),
}

CONFIG = {"QwenImageTransformer2DModel": {"out_channels": 4}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("read", [True, False], ids=["read", "not read"])
@pytest.mark.parametrize("name", PIPELINES)
def test_equals_the_oracle(name, read, monkeypatch):
    """Of a timestep on a GPU nothing is known but where it lies; the schedulers tell then how far the loop is."""
    import diffusers

    if not read:
        of = Moment.of
        unknown = staticmethod(lambda *args: replace(of(*args), value=None, unread=None))
        monkeypatch.setattr(Moment, "of", unknown)
    make, calls = PIPELINES[name]
    model, _ = deep(name, **CONFIG.get(name, {}))
    twin = copy.deepcopy(model)
    oracle = StackOracle(twin, 3, calls)
    ours, stock = (make(diffusers, diffusers.FlowMatchEulerDiscreteScheduler, one) for one in (model, twin))
    for pipe, _ in (ours, stock):
        pipe.set_progress_bar_config(disable=True)
    accel.optimize(ours[0], step_cache=3)
    for seed in (0, 1):
        oracle.restart()
        drawn = []
        for pipe, call in (ours, stock):
            size = {"height": 64, "width": 64, "num_inference_steps": 7, "output_type": "latent"}
            output = pipe(**call, **size, generator=torch.Generator().manual_seed(seed))
            drawn.append(output[0] if isinstance(output, tuple) else next(iter(output.values())))
        torch.testing.assert_close(*drawn, rtol=0, atol=1e-3 * float(drawn[1].abs().max()))
    assert reasons(ours[0]) == [] and len(model.forward.state.features) == calls


def test_nobody_announces_a_loop_of_timesteps_that_nobody_reads():
    """Not a step is taken for another: such calls are whole."""
    first, second = (Moment(storage=(place, 0)) for place in (1, 2))
    assert second.follows(first) is None and first.follows(first) is False
    for now, before, later in (((2,), (1,), True), ((1,), (1,), False), ((0,), (1,), None), (None, (1,), None)):
        assert replace(second, clock=now).follows(replace(first, clock=before)) is later


def test_the_clock_of_a_loop():
    class Scheduler:
        step_index = None

    loop, counting, silent = Loop(), Scheduler(), object.__new__(type("Silent", (), {}))
    assert loop.clock is None
    loop.begin([counting, silent])
    assert loop.clock == (-1,)
    counting.step_index = 4
    assert loop.clock == (4,)
    loop.begin([silent])
    assert loop.clock is None
    loop.begin([counting])
    del counting
    assert loop.clock is None


def test_timesteps_of_tokens():
    """A frame that is given has 0 in every step; the others tell."""
    early, late = (Moment.of(torch.tensor([[0.0, step, step]])) for step in (900.0, 800.0))
    assert late.follows(early) is True and early.follows(late) is None


def test_image_to_image_and_skipped_layers_share_the_cache(dit):
    from diffusers import StableDiffusion3Img2ImgPipeline

    accel.optimize(dit, step_cache=3)
    draw(dit, skip_guidance_layers=[1], skip_layer_guidance_stop=0.6, guidance_scale=3.0)
    assert any("is called where" in reason for reason in reasons(dit))
    other = StableDiffusion3Img2ImgPipeline.from_pipe(dit)
    other.set_progress_bar_config(disable=True)
    call = {"image": Image.new("RGB", (64, 64), "white"), "strength": 0.8, "steps": 6}
    counted = len(accel.report(dit).fallbacks)
    first = draw(other, "two", **call)
    assert np.array_equal(draw(other, "two", **call), first) and len(accel.report(dit).fallbacks) == counted
    accel.restore(other)
    assert 10 < compare(first, draw(other, "two", **call)).psnr_db < 40


def test_frames_of_a_video_are_compared_as_images():
    from accel.diffusion.step_cache.budget import _images

    video = np.random.default_rng(0).random((1, 3, 8, 8, 3))
    stock, ours = (_images(type("Output", (), {"frames": frames})) for frames in (video, 0.9 * video))
    assert stock.images.shape == (3, 8, 8, 3)
    quality = compare(stock, ours)
    assert quality.ssim is not None and abs(quality.psnr_db + 10 * np.log10((0.01 * video**2).mean())) < 1e-6
    with pytest.raises(ValueError, match="neither images nor frames"):
        _images(type("AudioOutput", (), {"audios": video}))
