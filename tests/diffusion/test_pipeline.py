"""Whole pipelines, and the stages of optimizing one."""

import numpy as np
import pytest
import torch
from PIL import Image

import accel
from accel.diffusion.family import RULES, graph_paths
from accel.diffusion.pipeline import pipeline_plan
from accel.diffusion.stages import denoiser_plan
from accel.offload.hooks import SWITCH
from accel.options import Options
from accel.patching.owner import OWNER
from accel.planning.plan import Plan, create_context
from support.diffusion.drawing import DIGITS, draw, same_image
from support.everything import EVERYTHING
from support.llm.quantized import held_by


def read(digits, images):
    return digits.read_digits([Image.fromarray((image * 255).round().astype(np.uint8)) for image in images])


def test_the_model_is_small_and_whole():
    files = [file for file in DIGITS.with_name("tiny-dit-digits").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 3e6
    assert not [file for file in files if file.suffix in (".bin", ".py", ".pt")]


def test_the_reader_reads_real_digits(digits):
    _, held_out, _, labels = digits.real_digits()
    read = digits.classifier().predict([digits.scan(digits.page(image)) for image in held_out])
    assert (read == labels).mean() > 0.97


@pytest.mark.turns(4)
def test_digits_can_be_read_from_both(pipeline, digits):
    steps = 20 if hasattr(pipeline, "unet") else 4
    stock = draw(pipeline, digits.PROMPTS, steps=steps)
    assert sum(np.equal(read(digits, stock), range(10))) >= 9
    few_stock = draw(pipeline, steps=2)
    accel.optimize(pipeline)
    patched = {path.split(".")[0] for path, _, status, _ in accel.report(pipeline).sites if status == "patched"}
    parts = {name for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    assert patched >= parts | {"scheduler"}
    ours = draw(pipeline, digits.PROMPTS, steps=steps)
    assert sum(np.equal(read(digits, ours), range(10))) >= 9
    same_image(ours, stock)
    assert accel.report(pipeline).fallbacks == []
    same_image(draw(pipeline, steps=2), few_stock)
    accel.restore(pipeline)
    assert np.array_equal(draw(pipeline, steps=2), few_stock)


# Of a pipeline with a transformer; test_live_calls.py has those of UNets.
CALLS = {
    "without-guidance": {"guidance_scale": 1.0},
    "negative-prompt": {"guidance_scale": 3.0, "negative_prompt": "a handwritten one"},
    "three-images": {"num_images_per_prompt": 3},
    "wide": {"height": 48, "width": 80},
    "two-prompts": {"prompts": ["seven", "a photo of the digit 2"]},
    "prompts-apart": {"prompt_2": "a handwritten two", "prompt_3": "eight"},
    "short-text": {"max_sequence_length": 32},
    "layers-left-out": {"skip_guidance_layers": [1], "skip_layer_guidance_stop": 0.6},
    "shifted": {"mu": 1.2},
}


@pytest.mark.share(6)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.turns(2)
def test_every_way_of_calling(dit, name):
    call = {"steps": 2} | CALLS[name]
    if "mu" in call:
        dit.scheduler.register_to_config(use_dynamic_shifting=True)

    def drawn():
        return draw(dit, **call, generator=torch.Generator().manual_seed(0))

    stock = drawn()
    accel.optimize(dit)
    same_image(drawn(), stock)


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
# docs/measurements/quantization.md says so.
@pytest.mark.parametrize(
    ("weights", "activations", "told"), [("int8", "int8", 40.6), ("int8", None, 47.6), ("fp8", "fp8", 31.6)]
)
def test_digits_drawn_in_8_bits(dit, digits, weights, activations, told):
    stock, few = draw(dit, digits.PROMPTS, steps=20), draw(dit, steps=2)
    accel.optimize(dit, weights=weights, activations=activations)
    ours = draw(dit, digits.PROMPTS, steps=20)
    assert -10 * np.log10(np.square(ours - stock).mean()) == pytest.approx(told, abs=1.5)
    assert sum(np.equal(read(digits, ours), range(10))) >= 9
    assert {row["path"].partition(".")[0] for row in accel.report(dit).weights} == {"transformer"}
    accel.restore(dit)
    assert np.array_equal(draw(dit, steps=2), few)


def test_a_pipeline_made_from_an_optimized_one_shares_its_models(pipeline):
    import diffusers

    kind = "StableDiffusion" if hasattr(pipeline, "unet") else "StableDiffusion3"
    accel.optimize(pipeline)
    other = getattr(diffusers, f"{kind}Img2ImgPipeline").from_pipe(pipeline)
    other.set_progress_bar_config(disable=True)
    call = {"image": Image.new("RGB", (64, 64), "white"), "strength": 0.8, "steps": 4}
    ours = draw(other, "a handwritten two", **call)
    assert accel.report(other).sites == accel.report(pipeline).sites
    accel.restore(other)
    assert accel.report(pipeline).sites == []
    same_image(ours, draw(other, "a handwritten two", **call))


def test_save_and_load_an_optimized_pipeline(pipeline, tmp_path):
    stock = draw(pipeline, steps=2)
    accel.optimize(pipeline)
    pipeline.save_pretrained(tmp_path)
    assert accel.report(pipeline).sites
    loaded = type(pipeline).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(loaded, steps=2), stock)


OPTIONS = (
    {},
    {"weights": "int8", "activations": "int8"},
    {"weights": "fp8", "step_cache": 2},
    {"layout": "channels_last"},
)


def plan_of(model, given):
    context = create_context(Options(**given)).for_model()
    context.graph_paths = graph_paths(model)
    return denoiser_plan(model, context) if "weights" in given else Plan(model, RULES, context)


@pytest.mark.parametrize("given", OPTIONS, ids=", ".join)
def test_every_stage_looks_only_and_undoing_all_is_exact(given, tiny):
    model = tiny.unet(cross_attention_dim=16)
    first = before = tiny.snapshot(model)
    names = {name: value.clone() for name, value in model.state_dict().items()}
    plan, done = plan_of(model, given), []
    stages, context = plan.pending
    for stage in stages:
        staged = stage(model, context)
        tiny.assert_same_state(before, tiny.snapshot(model))
        for patch in staged.patches:
            patch.apply()
        before, done = tiny.snapshot(model), [*done, *staged.patches]
    assert bool(held_by(model)) is ("weights" in given) and len(done) > 10
    for patch in reversed(done):
        patch.undo()
    tiny.assert_same_state(first, tiny.snapshot(model))
    assert names.keys() == model.state_dict().keys()
    assert all(torch.equal(value, names[name]) for name, value in model.state_dict().items())


def test_a_pipelines_plan_changes_it_when_it_is_applied(pipe):
    before = dict(vars(pipe))
    plan = pipeline_plan(pipe, create_context(Options()))
    assert vars(pipe) == before
    plan.apply()
    assert vars(pipe).keys() - before.keys() == {"progress_bar", SWITCH, OWNER}
    plan.undo()
    assert vars(pipe) == before
    assert accel.report(pipe).sites == []
