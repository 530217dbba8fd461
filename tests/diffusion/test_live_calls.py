"""One optimized pipeline called in every way, changed between two steps, shared, and called for long."""

import copy
import gc
import tracemalloc

import numpy as np
import pytest
import torch

import accel
from support.diffusion.drawing import same_image
from support.everything import EVERYTHING
from support.together import together

SDXL = {
    "bucket": {"original_size": (512, 384), "crops_coords_top_left": (8, 0), "target_size": (64, 64)},
    "negative-sizes": {"negative_original_size": (32, 32), "negative_target_size": (64, 64)},
    "second-prompt": {"prompt_2": "three", "negative_prompt_2": "four"},
    "base-of-a-refiner": {"denoising_end": 0.6, "output_type": "latent", "steps": 5},
}


@pytest.fixture(params=["pipe", "sdxl_pipe"])
def pipeline(request):
    return request.getfixturevalue(request.param)


@pytest.mark.share(2)
@pytest.mark.turns(4)
def test_every_kind_of_call_after_every_other(pipeline, live, calls):
    """Without ACCEL_TEST_EVERYTHING=1 every third kind, of one pipeline."""
    kinds = calls.CALLS | (SDXL if hasattr(pipeline, "text_encoder_2") else {})
    kinds = kinds if EVERYTHING else {name: kinds[name] for name in [*kinds][::3]}
    twin = copy.deepcopy(pipeline)
    stock = {name: live.draw(twin, **calls.arguments(call, twin)) for name, call in kinds.items()}
    accel.optimize(pipeline)
    for name in (*kinds, *reversed(kinds)):
        same_image(live.draw(pipeline, **calls.arguments(kinds[name], pipeline)), stock[name])
    assert accel.report(pipeline).fallbacks == []
    accel.restore(pipeline)
    assert np.array_equal(live.draw(pipeline), stock["as-ever"])


@pytest.mark.share(8)
@pytest.mark.turns(4)
def test_a_change_between_two_steps_is_seen_by_the_next(pipeline, between_steps, live, tmp_path):
    def adapter(p):
        live.lora("style")(p, tmp_path)

    twin = copy.deepcopy(pipeline)
    plain = live.draw(twin, steps=4)
    accel.optimize(pipeline)
    same_image(live.draw(pipeline, steps=4), plain)
    ours, stock = (live.draw(p, **between_steps(p, adapter)) for p in (pipeline, twin))
    same_image(ours, stock)
    assert np.abs(stock - plain).max() > 0.02
    same_image(live.draw(pipeline), live.draw(twin))
    accel.restore(pipeline)
    assert np.array_equal(live.draw(pipeline), live.draw(twin))


@pytest.mark.parametrize("name", ["sample", "timestep", "encoder_hidden_states"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_input_refilled_in_place_is_read_anew(tiny, name, mode):
    """Tensors made under inference mode count no changes."""
    model = tiny.unet()
    twin = copy.deepcopy(model)
    accel.optimize(model)
    with mode():
        inputs = {key: tensor.clone() for key, tensor in tiny.inputs(model).items()}
        first = model(**inputs).sample
        inputs[name].copy_(inputs[name] * 2 + 1)
        ours, stock = model(**inputs).sample, twin(**inputs).sample
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5 * float(stock.abs().max()))
    assert float((ours - first).abs().max()) > 1e-3


def test_a_new_prompt_where_the_old_one_lay_is_read_anew(tiny):
    """Memory is used again: the same address and count of changes, another tensor."""
    model = tiny.unet()
    twin = copy.deepcopy(model)
    inputs = tiny.inputs(model)
    place = torch.empty(2 * 7 * 12)
    accel.optimize(model)
    outputs = []
    with torch.no_grad():
        for seed in range(3):
            place.copy_(torch.randn(place.shape, generator=torch.Generator().manual_seed(seed)))
            inputs["encoder_hidden_states"] = torch.empty(0).set_(place.untyped_storage(), 0, (2, 7, 12))
            outputs.append(model(**inputs).sample)
            torch.testing.assert_close(outputs[-1], twin(**inputs).sample)
            del inputs["encoder_hidden_states"]
    assert float((outputs[0] - outputs[1]).abs().max()) > 1e-3


class Own:
    """A processor from elsewhere: the attention it is set on runs stock."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_what_a_block_that_ran_stock_left_behind_is_not_used(tiny):
    """Where products are shared out among blocks, some may not come for theirs."""
    model = tiny.unet()
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    accel.optimize(model)
    *others, last = (name for name, _ in model.named_modules() if name.endswith("attn2"))
    attention = model.get_submodule(last)
    attention.processor, plain = Own(attention.processor), attention.processor
    with torch.no_grad():
        model(**inputs)
        attention.processor = plain
        for unet in (model, twin):
            unet.get_submodule(last).to_v.weight.data.mul_(-3)
        for name in others:
            attention = model.get_submodule(name)
            attention.processor = Own(attention.processor)
        torch.testing.assert_close(model(**inputs).sample, twin(**inputs).sample)


@pytest.mark.turns(2)
def test_two_threads_on_pipelines_that_share_their_models(pipe, live, calls):
    """A pipeline of diffusers is not for two threads, since its scheduler counts steps; its models are."""
    pair = pipe, live.second_pipeline(pipe, None)

    def size(i, p):  # embeddings instead of prompts: the tokenizer is not for two threads either
        return calls.embeddings(7, seed=i)(p) | {"height": 32 + 16 * i, "width": 64}

    wanted = [[live.draw(p, **size(i, p)) for i in range(3)] for p in pair]
    accel.optimize(pair[0])

    def work(p, images):
        for _ in range(2):
            for i, image in enumerate(images):
                same_image(live.draw(p, **size(i, p)), image)

    together(work, zip(pair, wanted, strict=True))


def held() -> tuple[int, int]:
    """Python objects, and bytes of tensors, that are alive."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(t.untyped_storage().nbytes() for t in objects if type(t) is torch.Tensor)


@pytest.mark.turns(4)
def test_many_calls_of_eight_sizes_hold_nothing(tiny, few_objects):
    model = tiny.unet()
    sizes = [tiny.inputs(model, height=4 + 4 * (i % 4), width=4 + 4 * (i // 4)) for i in range(8)]
    accel.optimize(model)

    def call(times):
        with torch.no_grad():
            for i in range(times):
                model(**sizes[i % 8])

    call(16)
    tracemalloc.start()
    call(8)
    held()  # to look at every object leaves traces of its own, once
    before, (traced, _) = held(), tracemalloc.get_traced_memory()
    call(48)
    after, (now, _) = held(), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after[0] - before[0] < 25 and after[1] <= before[1]
    assert now - traced < 12_500
