"""The step cache in pipelines as users call them: what it loses, where it starts anew, and the interval it finds."""

import copy
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

import accel
from accel.diffusion.step_cache import budget as step_cache_budget
from support.diffusion.step_oracle import Oracle, reasons

EVERYTHING = bool(os.environ.get("ACCEL_TEST_EVERYTHING"))

SEVEN = "a handwritten seven"


def draw(pipe, prompts=SEVEN, steps=6, seed=0, **kwargs):
    prompts = [prompts] if isinstance(prompts, str) else prompts
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    call = {"num_inference_steps": steps, "output_type": "np", "generator": generators} | kwargs
    return pipe(prompts, **call).images


def psnr(ours, stock):
    return -10 * np.log10(((ours.astype(np.float64) - stock) ** 2).mean())


def same(ours, wanted):
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=2e-3)


def scheduled(pipe, name):
    import diffusers

    pipe.scheduler = getattr(diffusers, f"{name}Scheduler").from_config(pipe.scheduler.config)
    return pipe


def row(obj):
    return next(row for row in accel.report(obj).sites if row[1] == "step cache" and row[0] in ("unet", ""))


def test_the_loss_grows_with_the_interval_and_digits_stay_readable(pipe, digits):
    stock = draw(pipe, digits.PROMPTS, steps=20)
    found = {}
    for interval in (2, 3, 5):
        images = draw(accel.optimize(pipe, step_cache=interval), digits.PROMPTS, steps=20)
        found[interval] = psnr(images, stock)
        pages = [Image.fromarray((image * 255).round().astype(np.uint8)) for image in images]
        assert sum(np.equal(digits.read_digits(pages), range(10))) >= 9
    assert found[2] > found[3] > found[5]
    assert found[2] > 33 and found[3] > 25 and found[5] > 18
    assert np.array_equal(draw(accel.restore(pipe), digits.PROMPTS, steps=20), stock)


@pytest.mark.parametrize("optimized", ["one", "both"])
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

        given = {"steps": 7, "callback_on_step_end": step_ended} | calls.embeddings(7, seed=number)(pair[number])
        return live.draw(pair[number], **given)

    alone = [work(number) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda number: work(number, barrier.wait), range(2)))
    for image, wanted in zip(together, alone, strict=True):
        same(image, wanted)
    assert accel.report(pair[0]).fallbacks == []
    uncached = [live.draw(accel.restore(p), steps=7, **calls.embeddings(7, seed=i)(p)) for i, p in enumerate(pair)]
    assert all(np.abs(image - wanted).max() > 0.01 for image, wanted in zip(together, uncached, strict=True))


@pytest.mark.parametrize("scheduler", ["DDIM", "PNDM", "HeunDiscrete", "DPMSolverMultistep", "EulerAncestralDiscrete"])
@pytest.mark.share(2)
def test_equals_the_oracle_under_every_scheduler(pipe, scheduler):
    scheduled(pipe, scheduler)
    oracle = Oracle(copy.deepcopy(pipe.unet), 3)
    twin = type(pipe)(**pipe.components | {"unet": oracle.unet, "scheduler": copy.deepcopy(pipe.scheduler)})
    twin.set_progress_bar_config(disable=True)
    accel.optimize(pipe, step_cache=3)
    for prompt in (SEVEN, "two"):
        oracle.restart()
        same(draw(pipe, prompt, steps=8), draw(twin, prompt, steps=8))
    assert reasons(pipe) == []


def test_sdxl_equals_the_oracle(sdxl_pipe):
    twin = copy.deepcopy(sdxl_pipe)
    oracle = Oracle(twin.unet, 2)
    accel.optimize(sdxl_pipe, step_cache=2)
    for _ in range(2):
        oracle.restart()
        same(draw(sdxl_pipe, height=32, width=48), draw(twin, height=32, width=48))
    assert reasons(sdxl_pipe) == []


def test_a_controlnet_pipeline_equals_the_oracle(pipe):
    from diffusers import ControlNetModel, StableDiffusionControlNetPipeline

    torch.manual_seed(4)
    control = ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8, 8, 16, 16))
    for parameter in control.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    hint = Image.effect_noise((64, 64), 90).convert("RGB")
    steered = StableDiffusionControlNetPipeline(**pipe.components, controlnet=control)
    steered.set_progress_bar_config(disable=True)
    twin = copy.deepcopy(steered)
    oracle = Oracle(twin.unet, 3)
    accel.optimize(steered, step_cache=3)
    for _ in range(2):
        oracle.restart()
        same(draw(steered, image=hint), draw(twin, image=hint))


def test_equals_the_oracle_after_every_change(pipe, change, live, tmp_path):
    if change.cpu or change.name == "model-offload":
        pytest.skip(change.cpu or "from CPU to CPU, accelerate copies prompt and timestep at every step: all are whole")
    if live.CHANGES.index(change) % 5 and not os.environ.get("ACCEL_TEST_EVERYTHING"):
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


@pytest.mark.parametrize("what", ["the unet alone", "a pipeline made from it"])
def test_loops_that_nobody_announces(pipe, what):
    from diffusers import StableDiffusionImg2ImgPipeline

    twin = copy.deepcopy(pipe)
    oracle = Oracle(twin.unet, 3)
    if what == "the unet alone":
        accel.optimize(pipe.unet, step_cache=3)
        pages = [{"steps": 7}, {"steps": 4}]
    else:
        accel.optimize(pipe, step_cache=3)
        pipe, twin = (StableDiffusionImg2ImgPipeline.from_pipe(p) for p in (pipe, twin))
        pages = [{"image": Image.new("RGB", (64, 64), shade), "strength": 0.8} for shade in ("white", "gray")]
        for p in (pipe, twin):
            p.to(torch.float64)  # what rounding grows to in a loop over an image of one color hangs on the processor
            p.set_progress_bar_config(disable=True)
    for call in (*pages, pages[0]):
        oracle.restart()
        same(draw(pipe, **call), draw(twin, **call))


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


def test_the_report_and_verify_call_it_lossy(pipe):
    accel.optimize(pipe, step_cache=2)
    assert row(pipe)[2] == "patched" and row(pipe)[3].startswith("lossy: deep layers run in one call of 2")
    rules = {path: rule for path, rule, status, _ in accel.report(pipe).sites if status == "patched"}
    assert rules["unet.mid_block"] == rules["unet.down_blocks.0"] == rules["unet.up_blocks.2"] == "step cache"
    quality = accel.verify(pipe, SEVEN, num_inference_steps=20)
    assert quality.lossy == "step_cache=2" and quality.passed and 25 < quality.psnr_db < 60
    assert "lossy, as asked for (step_cache=2)" in str(quality)


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_a_quality_finds_the_longest_interval_that_keeps_it(pipe):
    accel.optimize(pipe, step_cache="36dB")
    status, reason = row(pipe)[2:]
    assert status == "patched" and "measured PSNR" in reason and "SSIM" in reason
    interval = int(reason.partition("in one call of ")[2].partition(",")[0])
    assert 2 <= interval < 10
    kept = [draw(pipe, steps=50, prompts=_prompt(), seed=seed) for seed in (0, 1)]
    pipe_without = accel.optimize(pipe)
    whole = [draw(pipe_without, steps=50, prompts=_prompt(), seed=seed) for seed in (0, 1)]

    def worst(images):
        return min(map(psnr, images, whole))

    assert worst(kept) >= 36
    assert f"{worst(kept):.1f} dB" in reason
    accel.optimize(pipe, step_cache=interval + 1)
    assert worst([draw(pipe, steps=50, prompts=_prompt(), seed=seed) for seed in (0, 1)]) < 36


def _prompt():
    from accel.diffusion.inputs import PROMPT

    return PROMPT


def test_a_quality_that_no_interval_keeps(pipe, monkeypatch):
    monkeypatch.setattr(step_cache_budget, "SEEDS", (0,))  # either image is worse than that
    without = draw(accel.optimize(pipe))
    accel.optimize(pipe, step_cache="90 dB")
    assert row(pipe)[2] == "skipped" and "no interval keeps 90 dB: 2 gives PSNR" in row(pipe)[3]
    assert np.array_equal(draw(pipe), without)
    report = accel.report(pipe)
    assert len([rule for _, rule, _, _ in report.sites if rule == "step cache"]) == 1  # and no block of it
    assert any(rule == "upward block" and status == "patched" for _, rule, status, _ in report.sites)
    with pytest.raises(ValueError, match="strict=True: .*no interval keeps 90 dB"):
        accel.optimize(pipe, step_cache="90 dB", strict=True, graphs="auto")


@pytest.mark.parametrize(
    "value, error",
    [
        (1, ValueError),
        (0, ValueError),
        (-3, ValueError),
        (True, TypeError),
        (2.5, TypeError),
        ("fast", ValueError),
        ("35", ValueError),
        ("0dB", ValueError),
        ("-4 dB", ValueError),
        ("100.5dB", ValueError),
        ("200dB", ValueError),
        ((3, 0), TypeError),
    ],
)
def test_wrong_values_say_what_is_valid(tiny, value, error):
    model = tiny.unet()
    before = tiny.snapshot(model)
    with pytest.raises(error) as caught:
        accel.optimize(model, step_cache=value)
    assert f"step_cache={value!r}: give None, an interval of 2 calls or more, or a quality" in str(caught.value)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_quality_needs_a_pipeline_that_draws_from_a_text(pipe, tiny):
    from diffusers import StableDiffusionImg2ImgPipeline

    for obj in (tiny.unet(), StableDiffusionImg2ImgPipeline.from_pipe(pipe)):
        model = getattr(obj, "unet", obj)
        before = tiny.snapshot(model)
        with pytest.raises(ValueError, match=f"for a {type(obj).__name__} give an interval"):
            accel.optimize(obj, step_cache="35dB")
        tiny.assert_same_state(before, tiny.snapshot(model))
    torch.nn.init.zeros_(pipe.vae.decoder.conv_out.weight)
    with pytest.raises(ValueError, match="blank image"):
        accel.optimize(pipe, step_cache="35dB")
    assert accel.report(pipe).sites == []


def test_models_that_are_no_unet(tiny):
    with pytest.raises(ValueError, match="step_cache=3: there is no UNet in this AutoencoderKL"):
        accel.optimize(tiny.vae(), step_cache=3)


@pytest.mark.parametrize(
    "change, reason", [("k", "skip connections for"), ("one layer", "single layer"), ("hook", "hooks")]
)
def test_unets_of_another_kind_stay_whole(tiny, change, reason):
    if change == "k":
        model = tiny.unet(
            down_block_types=("KDownBlock2D", "KCrossAttnDownBlock2D"),
            up_block_types=("KCrossAttnUpBlock2D", "KUpBlock2D"),
            mid_block_type=None,
            resnet_time_scale_shift="scale_shift",
            act_fn="gelu",
        )
    else:
        model = tiny.unet()
    if change == "one layer":
        first, last = model.up_blocks[0].resnets, model.up_blocks[-1].resnets
        first.append(last.pop(1))
    if change == "hook":
        model.mid_block.register_forward_hook(lambda *args: None)
    accel.optimize(model, step_cache=3)
    assert row(model)[2] == "skipped" and reason in row(model)[3], row(model)
