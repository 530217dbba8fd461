"""After restore the last reference to a model frees its weights, as in stock, not the garbage collector."""

import gc
import weakref

import pytest
from torch import nn
from transformers import GenerationConfig

import accel
from support.diffusion.tiny_models import make_sdxl_pipeline
from support.llm.families import make, prompt
from support.one_of_each import dit, language_model, run, unet, vae
from support.patched import fast_forwards

GREEDY = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)


def called(made):
    model, inputs, _ = made()
    return model, lambda: run(model, inputs)


def generating(name="llama"):
    model, inputs = make(name), {"input_ids": prompt()}
    return model, lambda: model.generate(**inputs, generation_config=GREEDY)


def batching():
    model = language_model()[0]
    return model, lambda: model.generate_batch([[5, 6, 7], [8, 9]], generation_config=GREEDY)


def drawing():
    pipe = make_sdxl_pipeline()
    return pipe, lambda: pipe("a", num_inference_steps=2, height=16, width=16, output_type="np")


CASES = {
    "unet": (lambda: called(unet), {}),
    "vae": (lambda: called(vae), {}),
    "dit": (lambda: called(dit), {}),
    "step cache": (lambda: called(unet), {"step_cache": 3}),
    "step cache of a dit": (lambda: called(dit), {"step_cache": 3}),
    "quantized unet": (lambda: called(unet), {"weights": "int8"}),
    "generate": (generating, {}),
    "generate, not all layers": (lambda: generating("lfm2"), {}),
    "generate_batch": (batching, {}),
    "quantized language model": (generating, {"weights": "int8"}),
    "pipeline": (drawing, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.share(1)
def test_the_last_reference_frees_all_weights(case):
    make, options = CASES[case]
    obj, call = make()
    models = [obj] if isinstance(obj, nn.Module) else [one for one in obj.components.values() if hasattr(one, "config")]
    models = [one for one in models if isinstance(one, nn.Module)]
    weights = [weakref.ref(p) for model in models for p in model.parameters()]
    gc.disable()
    try:
        accel.optimize(obj)
        call()
        accel.optimize(obj, **options)  # what is planned anew lets go too
        assert any(map(fast_forwards, models))
        call()
        accel.restore(obj)
        del obj, call, models
        left = sum(weight() is not None for weight in weights)
    finally:
        gc.enable()
    assert left == 0, f"{left} of {len(weights)}"
