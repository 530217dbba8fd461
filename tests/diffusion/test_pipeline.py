"""A real pipeline, called as users call it: stock and optimized from the same seeds."""

import copy

import numpy as np
import pytest
import torch

import accel


def draw(pipe, prompts, seed=0, **kwargs):
    """Images as an array in 0..1, and as PIL."""
    prompts = [prompts] if isinstance(prompts, str) else prompts
    seeds = range(seed, seed + len(prompts) * kwargs.get("num_images_per_prompt", 1))
    generators = [torch.Generator().manual_seed(s) for s in seeds]
    images = pipe(prompts, generator=generators, **({"num_inference_steps": 4} | kwargs)).images
    return np.stack([np.asarray(image) for image in images]) / 255, images


def same(ours, stock):
    """Within one step of the eight bits an image has."""
    assert ours.shape == stock.shape
    assert np.abs(ours - stock).max() <= 1.01 / 255


def test_digits_can_be_read_from_both(pipe, digits):
    stock, images = draw(pipe, digits.PROMPTS, num_inference_steps=20)
    assert sum(np.equal(digits.read_digits(images), range(10))) >= 9
    few_stock, _ = draw(pipe, digits.PROMPTS[:1], num_inference_steps=2)
    accel.optimize(pipe)
    ours, images = draw(pipe, digits.PROMPTS, num_inference_steps=20)
    assert sum(np.equal(digits.read_digits(images), range(10))) >= 9
    same(ours, stock)
    assert accel.report(pipe).fallbacks == []
    few = draw(pipe, digits.PROMPTS[:1], num_inference_steps=2)[0]
    same(few, few_stock)
    accel.restore(pipe)
    assert np.array_equal(draw(pipe, digits.PROMPTS[:1], num_inference_steps=2)[0], few_stock)


def test_the_reader_reads_real_digits(digits):
    _, held_out, _, labels = digits.real_digits()
    read = digits.classifier().predict([digits.scan(digits.page(image)) for image in held_out])
    assert (read == labels).mean() > 0.97


@pytest.mark.parametrize(
    "call",
    [
        {"guidance_scale": 1.0},
        {"guidance_scale": 3.0, "negative_prompt": ["a handwritten one"]},
        {"num_images_per_prompt": 3},
        {"height": 48, "width": 80},
        {"prompts": ["seven", "a photo of the digit 2"]},
        {"guidance_rescale": 0.7},
        {"eta": 1.0},
    ],
    ids=lambda call: ",".join(call),
)
@pytest.mark.share(2)
def test_every_way_of_calling(pipe, call):
    call = dict(call)
    prompts = call.pop("prompts", "a handwritten seven")
    stock, _ = draw(pipe, prompts, **call)
    accel.optimize(pipe)
    same(draw(pipe, prompts, **call)[0], stock)


@pytest.mark.parametrize(
    "name", ["PNDMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "LCMScheduler"]
)
def test_another_scheduler(pipe, name):
    import diffusers

    accel.optimize(pipe)
    pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)
    ours, _ = draw(pipe, "a handwritten three")
    same(ours, draw(accel.restore(pipe), "a handwritten three")[0])


def test_callbacks_and_interrupt(pipe):
    steps = []

    def stop_at_two(pipeline, step, timestep, tensors):
        steps.append(step)
        pipeline._interrupt = step == 2
        return tensors

    stock, _ = draw(pipe, "a handwritten nine", num_inference_steps=6, callback_on_step_end=stop_at_two)
    accel.optimize(pipe)
    same(draw(pipe, "a handwritten nine", num_inference_steps=6, callback_on_step_end=stop_at_two)[0], stock)
    assert len(steps) == 6


def test_a_pipeline_made_from_an_optimized_one_shares_its_models(pipe):
    from diffusers import StableDiffusionImg2ImgPipeline
    from PIL import Image

    accel.optimize(pipe)
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    page = Image.new("RGB", (64, 64), "white")

    def redraw(pipeline):
        generator = torch.Generator().manual_seed(1)
        call = {"image": page, "strength": 0.8, "num_inference_steps": 5, "generator": generator}
        return np.asarray(pipeline("a handwritten two", **call).images[0]) / 255

    ours = redraw(other)
    assert accel.report(other).sites == accel.report(pipe).sites
    accel.restore(other)
    assert accel.report(pipe).sites == []
    same(ours, redraw(other))


def test_deepcopy_of_a_pipeline(pipe):
    accel.optimize(pipe)
    twin = copy.deepcopy(pipe)
    accel.restore(pipe)
    ours, _ = draw(twin, "a handwritten four")
    assert accel.report(twin).summary().startswith(accel.report(accel.optimize(pipe)).summary().split(",")[0])
    same(ours, draw(accel.restore(pipe), "a handwritten four")[0])


def test_save_and_load_an_optimized_pipeline(pipe, tmp_path):
    stock, _ = draw(pipe, "a handwritten eight")
    accel.optimize(pipe)
    pipe.save_pretrained(tmp_path)
    assert accel.report(pipe).sites
    loaded = type(pipe).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(loaded, "a handwritten eight")[0], stock)


def test_verify_takes_the_call(pipe):
    accel.optimize(pipe)
    quality = accel.verify(pipe, "a handwritten seven", num_inference_steps=3)
    assert quality.finite and quality.psnr_db > 45
    assert accel.report(pipe).sites


def test_lora_on_the_pipeline(pipe):
    peft = pytest.importorskip("peft")
    twin = copy.deepcopy(pipe)
    accel.optimize(pipe)
    for pipeline in (pipe, twin):
        torch.manual_seed(0)
        pipeline.unet.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    same(draw(pipe, "a handwritten one")[0], draw(twin, "a handwritten one")[0])
    for pipeline in (pipe, twin):
        pipeline.unet.fuse_lora(lora_scale=0.5)
    same(draw(pipe, "a handwritten one")[0], draw(twin, "a handwritten one")[0])


def test_text_encoder_is_part_of_it(pipe):
    accel.optimize(pipe)
    rules = {rule for path, rule, status, _ in accel.report(pipe).sites if path.startswith("text_encoder")}
    assert rules == {"CUDA graph", "layer norm"}


def test_a_transformers_pipeline_and_a_language_model(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[1, 2, 3]])
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False)
    accel.optimize(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
    assert not any(rule == "CUDA graph" for _, rule, _, _ in accel.report(model).sites)
