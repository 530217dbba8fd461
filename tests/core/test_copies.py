"""Optimized objects that are copied and freed."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import accel
from accel.patching.fast_forward import FastForward
from benchmarks.models.tiny_denoisers import given, transformer
from support.diffusion.tiny_models import make_sdxl_pipeline, make_unet, make_vae, unet_inputs
from support.llm.families import make, prompt
from support.patched import fast_forwards


def unet():
    model = make_unet()
    return model, unet_inputs(model), "conv_out"


def vae():
    return make_vae(), {"sample": torch.randn(1, 3, 16, 16)}, "post_quant_conv"


def dit():
    return transformer("flux"), given("flux"), "proj_out"


def language_model():
    return make("llama"), {"input_ids": prompt()}, "lm_head"


MADE = (unet, vae, dit, language_model)


def run(call, inputs):
    with torch.no_grad():
        output = call(**inputs)
    return output[0] if isinstance(output, tuple) else next(iter(output.values()))


def copied(model, head):
    return with_head(copy.copy(model), head)


def with_its_dict(model, head):
    twin = type(model).__new__(type(model))
    vars(twin).update(vars(model))
    return with_head(twin, head)


def with_head(twin, head):
    other = copy.deepcopy(getattr(twin, head))
    other.weight.data *= 1.5
    vars(twin)["_modules"] = twin._modules | {head: other}
    return twin


def replica(model, head):
    """As nn.DataParallel makes one: every module is a copy, with weights of its own."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, twin in copies.items():
        for name, child in module._modules.items():
            twin._modules[name] = copies.get(child)
        for name, p in module._parameters.items():
            setattr(twin, name, None if p is None else 1.1 * p.detach())
    return copies[model]


def owned(model):
    forwards = ((m, vars(m).get("forward")) for m in model.modules())
    return [m for m, forward in forwards if isinstance(forward, FastForward) and forward.owner is m]


WAYS = (copied, with_its_dict, replica)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_a_copy_computes_with_what_it_holds(made, way):
    model, inputs, head = made()
    stock = copy.deepcopy(model)
    wanted, of_copy = run(stock, inputs), run(way(stock, head), inputs)
    accel.optimize(model)
    patched = len(fast_forwards(model))
    assert patched
    run(model, inputs)
    twin = way(model, head)
    torch.testing.assert_close(run(twin, inputs), of_copy, rtol=1e-4, atol=1e-4)
    direct = way(model, head)
    torch.testing.assert_close(run(lambda **given: direct.forward(**given), inputs), of_copy, rtol=1e-4, atol=1e-4)
    if way is copied:
        torch.testing.assert_close(run(way(model, head).forward, inputs), of_copy, rtol=1e-4, atol=1e-4)
    before = accel.report(model).fallbacks
    torch.testing.assert_close(run(model, inputs), wanted, rtol=1e-4, atol=1e-4)
    assert accel.report(model).fallbacks == before and len(owned(model)) == patched
    accel.restore(model)
    assert torch.equal(run(model, inputs), wanted)
    assert torch.equal(run(twin, inputs), of_copy)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_what_holds_a_copy_is_restored_and_optimized_again(copied):
    model, inputs, _ = unet()
    wanted = run(model, inputs)
    accel.optimize(model)
    model.mid_block.resnets[0] = copied(model.mid_block.resnets[0])
    whole = copy.copy(model)
    assert accel.restore(whole) is whole and fast_forwards(model)
    torch.testing.assert_close(run(accel.optimize(whole), inputs), wanted, rtol=1e-4, atol=1e-4)
    accel.restore(whole)
    accel.restore(model)
    assert not fast_forwards(model) and torch.equal(run(model, inputs), wanted)


def test_an_attribute_that_names_anothers_forward_is_no_copy():
    model, inputs, _ = unet()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self):
            raise NotImplementedError

    accel.optimize(model)
    wanted = run(model, inputs)
    outer = Outer()
    outer.forward = model.forward
    twin = copy.copy(model)
    assert torch.equal(run(outer, inputs), wanted) and torch.equal(run(twin, inputs), wanted)


def saved(model, folder):
    save = model.save_pretrained
    save(folder)


@pytest.mark.parametrize("direct", [True, False])
def test_a_copy_of_a_quantized_model_is_saved_as_it_is(direct, tmp_path):
    model, inputs, head = language_model()
    accel.quantize(model, "int8")
    twin = copied(model, head)
    wanted = run(twin, inputs)
    if direct:
        twin.save_pretrained(tmp_path)
    else:
        saved(twin, tmp_path)
    assert torch.equal(run(accel.load(tmp_path), inputs), wanted)


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
    "generate, not all layers": (lambda: generating("lfm2-biases"), {}),
    "generate_batch": (batching, {}),
    "quantized language model": (generating, {"weights": "int8"}),
    "pipeline": (drawing, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.share(6)
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
