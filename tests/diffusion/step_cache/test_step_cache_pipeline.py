"""Pipelines that skip steps."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import accel
from accel.diffusion.step_cache.tracks import LoopPosition
from accel.fusion.loop import DenoisingLoop
from accel.verification.metrics import compare
from support.compatibility.stack_oracle import StackOracle, deep
from support.diffusion.drawing import SEVEN, draw
from support.diffusion.oracles import Oracle, reasons
from support.everything import EVERYTHING


def same(ours, wanted):
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=2e-3)


def scheduled(pipe, name):
    import diffusers

    pipe.scheduler = getattr(diffusers, f"{name}Scheduler").from_config(pipe.scheduler.config)
    return pipe


@pytest.mark.parametrize("optimized", ["both", "one"])
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_two_threads_on_pipelines_that_share_a_unet_draw_what_they_draw_alone(pipe, live, calls, optimized):
    """Their steps alternate; conditions are embeddings, as a tokenizer is not for two threads."""
    pair = pipe, live.second_pipeline(pipe, None)
    for one in pair[: 2 if optimized == "both" else 1]:
        accel.optimize(one, step_cache=2)
    barrier = threading.Barrier(2, timeout=60)

    def work(number, *between):
        def step_ended(*args):
            for wait in between:
                wait()
            return {}

        given = {"steps": 5, "callback_on_step_end": step_ended} | calls.embeddings(5, seed=number)(pair[number])
        return live.draw(pair[number], **given)

    alone = [work(number) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda number: work(number, barrier.wait), range(2)))
    for image, wanted in zip(together, alone, strict=True):
        same(image, wanted)
    assert accel.report(pair[0]).fallbacks == []
    uncached = [live.draw(accel.restore(p), steps=5, **calls.embeddings(5, seed=i)(p)) for i, p in enumerate(pair)]
    assert all(np.abs(image - wanted).max() > 0.01 for image, wanted in zip(together, uncached, strict=True))


def follows(pipe, interval, calls, of=lambda pipe: pipe):
    """Optimizes the pipeline, or a part of it; draws as a twin does whose UNet is an oracle."""
    twin = copy.deepcopy(pipe)
    oracle = Oracle(twin.unet, interval)
    accel.optimize(of(pipe), step_cache=interval)
    for call in calls:
        oracle.restart()
        same(draw(pipe, **call), draw(twin, **call))
    return reasons(pipe)


@pytest.mark.parametrize("scheduler", ["DDIM", "PNDM", "HeunDiscrete", "DPMSolverMultistep", "EulerAncestralDiscrete"])
@pytest.mark.share(5)
@pytest.mark.turns(2)
def test_equals_the_oracle_under_every_scheduler(pipe, scheduler):
    calls = [{"prompts": prompt, "steps": 6} for prompt in (SEVEN, "two")]
    assert follows(scheduled(pipe, scheduler), 3, calls) == []


@pytest.mark.turns(2)
def test_sdxl_equals_the_oracle(sdxl_pipe):
    assert follows(sdxl_pipe, 2, [{"height": 32, "width": 48}] * 2) == []


@pytest.mark.turns(2)
def test_a_controlnet_pipeline_equals_the_oracle(pipe, live, tmp_path):
    steered = live.derived("ControlNet", controlnet=live.controlnet)(pipe, tmp_path)
    assert follows(steered, 3, [{"image": live.page()}] * 2) == []


@pytest.mark.share(15)
@pytest.mark.turns(4)
def test_equals_the_oracle_after_every_change(pipe, change, live, tmp_path):
    if change.cpu or change.name == "model-offload":
        pytest.skip(change.cpu or "from CPU to CPU, accelerate copies prompt and timestep at every step: all are whole")
    if live.CHANGES.index(change) % 5 and not EVERYTHING:
        pytest.skip("every fifth one; ACCEL_TEST_EVERYTHING=1 runs all")
    twin = copy.deepcopy(pipe)
    oracle = Oracle(twin.unet, 2)
    accel.optimize(pipe, step_cache=2)
    live.draw(pipe, **change.arguments_before())
    ours, stock = pipe, twin
    for step in change.steps:
        ours, stock = (step(p, tmp_path) or q for p, q in ((pipe, ours), (twin, stock)))
        call = change.arguments(stock) | {"steps": 3}  # whole, cached, whole
        oracle.restart()
        assert live.rms(live.draw(ours, **call), live.draw(stock, **call)) <= 1e-3 * change.slack**2
    assert reasons(pipe) == []


@pytest.mark.turns(2)
def test_every_call_of_the_pipeline_starts_anew(pipe):
    accel.optimize(pipe, step_cache=3)
    first = draw(pipe)
    draw(pipe, "two", steps=5, seed=3)
    draw(pipe, height=48, width=80)
    assert np.array_equal(draw(pipe), first)
    embeddings = {"prompts": None, "prompt_embeds": torch.randn(1, 7, 32), "guidance_scale": 1.0, "steps": 1}
    latents = [torch.randn(1, 4, 8, 8) for _ in range(2)]

    def one_step(pipeline, latent):  # the prompt, the size and the timestep are the same in each
        embeds, steps = embeddings["prompt_embeds"], embeddings["steps"]
        call = {"latents": latent.clone(), "guidance_scale": 1.0, "num_inference_steps": steps, "output_type": "np"}
        return pipeline(prompt_embeds=embeds, **call).images

    ours = [one_step(pipe, latent) for latent in latents]
    stock = accel.restore(pipe)
    for image, latent in zip(ours, latents, strict=True):
        same(image, one_step(stock, latent))


@pytest.mark.turns(4)
def test_loops_that_nobody_announces(pipe):
    """Of the UNet alone, and of a pipeline that was made from an optimized one."""
    from diffusers import StableDiffusionImg2ImgPipeline

    follows(pipe, 3, [{"steps": 5}, {"steps": 4}, {"steps": 5}], of=lambda pipe: pipe.unet)
    other = StableDiffusionImg2ImgPipeline.from_pipe(accel.restore(pipe))
    other.set_progress_bar_config(disable=True)
    other.to(torch.float64)  # what rounding grows to in a loop over an image of one color hangs on the processor
    pages = [{"image": Image.new("RGB", (64, 64), shade), "strength": 0.8} for shade in ("white", "gray", "white")]
    follows(other, 3, pages, of=lambda other: type(pipe)(**other.components))


def test_guidance_that_ends_in_the_middle_of_a_loop(pipe):
    twin = copy.deepcopy(pipe)
    oracle = Oracle(twin.unet, 3)

    def end_guidance(pipeline, step, timestep, tensors):
        if step == 1:
            pipeline._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
            oracle.restart()
        return tensors

    call = {"callback_on_step_end": end_guidance, "callback_on_step_end_tensor_inputs": ["prompt_embeds"], "steps": 7}
    accel.optimize(pipe, step_cache=3)
    same(draw(pipe, **call), draw(twin, **call))
    assert any("other tensors than in the step before" in reason for reason in reasons(pipe))


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
        of = LoopPosition.of
        unknown = staticmethod(lambda *args: replace(of(*args), value=None, unread=None))
        monkeypatch.setattr(LoopPosition, "of", unknown)
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
    first, second = (LoopPosition(storage=(place, 0)) for place in (1, 2))
    assert second.follows(first) is None and first.follows(first) is False
    for now, before, later in (((2,), (1,), True), ((1,), (1,), False), ((0,), (1,), None), (None, (1,), None)):
        assert replace(second, clock=now).follows(replace(first, clock=before)) is later


def test_the_clock_of_a_loop():
    class Scheduler:
        step_index = None

    loop, counting, silent = DenoisingLoop(), Scheduler(), object.__new__(type("Silent", (), {}))
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
    early, late = (LoopPosition.of(torch.tensor([[0.0, step, step]])) for step in (900.0, 800.0))
    assert late.follows(early) is True and early.follows(late) is None


@pytest.mark.turns(2)
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
