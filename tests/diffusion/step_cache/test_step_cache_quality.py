"""What the step cache loses, the interval it finds for a quality, and what takes no step cache."""

import numpy as np
import pytest
import torch
from PIL import Image

import accel
from accel.diffusion.inputs import PROMPT
from accel.diffusion.step_cache import budget as step_cache_budget
from support.diffusion.drawing import SEVEN, draw
from support.everything import EVERYTHING


def psnr(ours, stock):
    return -10 * np.log10(((ours.astype(np.float64) - stock) ** 2).mean())


def row(obj):
    places = ("unet", "transformer", "")
    return next(row for row in accel.report(obj).sites if row[1] == "step cache" and row[0] in places)


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_the_loss_grows_with_the_interval_and_digits_stay_readable(pipeline, digits):
    stock, few = draw(pipeline, digits.PROMPTS, steps=20), draw(pipeline, steps=3)
    found = {}
    for interval in (2, 3, 5):
        images = draw(accel.optimize(pipeline, step_cache=interval), digits.PROMPTS, steps=20)
        found[interval] = psnr(images, stock)
        pages = [Image.fromarray((image * 255).round().astype(np.uint8)) for image in images]
        assert sum(np.equal(digits.read_digits(pages), range(10))) >= 9
    assert found[2] > found[3] > found[5]
    assert found[2] > 33 and found[3] > 25 and found[5] > 18
    assert accel.report(pipeline).fallbacks == [] and not np.array_equal(draw(pipeline, steps=3), few)
    assert np.array_equal(draw(accel.restore(pipeline), steps=3), few)


@pytest.mark.turns(2)
def test_the_report_and_verify_call_it_lossy(pipeline):
    accel.optimize(pipeline, step_cache=2)
    assert row(pipeline)[2] == "patched" and row(pipeline)[3].startswith("lossy: deep layers run in one call of 2")
    rules = {path: rule for path, rule, status, _ in accel.report(pipeline).sites if status == "patched"}
    blocks = [f"transformer.transformer_blocks.{index}" for index in range(5)]
    if hasattr(pipeline, "unet"):
        blocks = ["unet.mid_block", "unet.down_blocks.0", "unet.up_blocks.2"]
    assert {rules[block] for block in blocks} == {"step cache"}
    quality = accel.verify(pipeline, SEVEN, num_inference_steps=12)
    assert quality.lossy == "step_cache=2" and quality.passed and 20 < quality.psnr_db < 60
    assert "lossy, as asked for (step_cache=2)" in str(quality)


@pytest.mark.parametrize(("steps", "seeds"), [(10, (0,)), pytest.param(50, (0, 1), marks=pytest.mark.skipif(
    not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it"))])  # fmt: skip
@pytest.mark.turns(4)
def test_a_quality_finds_the_longest_interval_that_keeps_it(dit, pipe, monkeypatch, steps, seeds):
    """By as many images and steps as are compared here; of a UNet with all that a user gets."""
    pipe, least = (pipe, 36) if steps == 50 else (dit, 20)
    measured = step_cache_budget._draw
    monkeypatch.setattr(step_cache_budget, "SEEDS", seeds)
    monkeypatch.setattr(
        step_cache_budget, "_draw", lambda p, call, *more: measured(p, call | {"num_inference_steps": steps}, *more)
    )
    accel.optimize(pipe, step_cache=f"{least}dB")
    status, reason = row(pipe)[2:]
    assert status == "patched" and "measured PSNR" in reason and "SSIM" in reason
    interval = int(reason.partition("in one call of ")[2].partition(",")[0])
    assert 2 <= interval < 10

    def drawn():
        return [draw(pipe, steps=steps, prompts=PROMPT, seed=seed) for seed in seeds]

    kept = drawn()
    accel.optimize(pipe)
    whole = drawn()
    worst = min(map(psnr, kept, whole))
    assert worst >= least and f"{worst:.1f} dB" in reason
    accel.optimize(pipe, step_cache=interval + 1)
    assert min(map(psnr, drawn(), whole)) < least
    if pipe is dit:
        accel.optimize(dit, step_cache="90dB")
        assert row(dit)[2] == "skipped" and "no interval keeps 90dB: 2 gives PSNR" in row(dit)[3]
        block = "transformer.transformer_blocks.1", "diffusion transformer block", "patched"
        assert block in {site[:3] for site in accel.report(dit).sites}


@pytest.fixture
def few_steps(monkeypatch):
    """Qualities are measured over as many steps as pipelines take by themselves, 50, which no test here needs."""
    measured = step_cache_budget._draw
    monkeypatch.setattr(
        step_cache_budget,
        "_draw",
        lambda pipe, call, *more: measured(pipe, call | {"num_inference_steps": 8}, *more),
    )


@pytest.mark.turns(4)
def test_a_quality_that_no_interval_keeps(pipe, monkeypatch, few_steps):
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


@pytest.mark.turns(2)
def test_a_quality_needs_a_pipeline_that_draws_from_a_text(pipe, tiny, few_steps):
    from diffusers import StableDiffusionImg2ImgPipeline

    before = tiny.snapshot(pipe.unet)
    with pytest.raises(ValueError, match="for a StableDiffusionImg2ImgPipeline give an interval"):
        accel.optimize(StableDiffusionImg2ImgPipeline.from_pipe(pipe), step_cache="35dB")
    tiny.assert_same_state(before, tiny.snapshot(pipe.unet))
    torch.nn.init.zeros_(pipe.vae.decoder.conv_out.weight)
    with pytest.raises(ValueError, match="blank image"):
        accel.optimize(pipe, step_cache="35dB")
    assert accel.report(pipe).sites == []


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
