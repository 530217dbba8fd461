"""What arrives quantized and is not understood is left alone, with its reason."""

import pytest
import torch
from torch import nn

import accel
from support.llm.families import make
from support.llm.prequantized.folders import compressed
from support.llm.prequantized.linears import GptqLinear
from support.llm.prequantized.models import prequantized
from support.llm.quantized import held_by, logits, sites


def spoiled(model, change):
    module = model.model.layers[1].mlp.up_proj
    change(module)
    return module


def reversed_columns(module):
    module.g_idx = module.g_idx.flip(0).contiguous()


def three_bits(module):
    module.qweight = torch.zeros(6, module.qweight.shape[1], dtype=torch.int32)


def other_maths(module):
    module.forward = lambda x: GptqLinear.forward(module, x) * 1.1


def raising(module):
    module.forward = lambda x: [][1]


def lost_zeros(module):
    module.qzeros = module.qzeros[:, :-1].contiguous()


def flat(module):
    module.qweight = module.qweight.flatten()


def no_groups(module):
    module.scales = module.scales[:0]


def hooked(module):
    module.register_forward_hook(lambda *given: None)


LEFT = {
    "act-order: its columns are in an order of their own": reversed_columns,
    "3 bits: only 4 are read": three_bits,
    "it computes something else than its tensors say (": other_maths,
    "calling it to compare raised IndexError": raising,
    "64 inputs in 2 groups, zero points (2, 11)": lost_zeros,
    "384 bits: only 4 are read": flat,
    "its tensors cannot be read: ZeroDivisionError": no_groups,
    "forward hooks": hooked,
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_not_understood_is_left_alone_and_said(reason):
    model, _ = prequantized("gptq")
    module = spoiled(model, LEFT[reason])
    with pytest.raises(ValueError, match=r"strict=True: model.layers.1.mlp.up_proj \(weights\): "):
        accel.optimize(model, strict=True)
    assert not held_by(model)
    accel.optimize(model)
    assert len(held_by(model)) == 13 and model.model.layers[1].mlp.up_proj is module
    status, said = sites(model)["model.layers.1.mlp.up_proj"]
    assert status == "skipped" and reason in said
    accel.restore(model)
    assert not held_by(model)


def test_four_bits_of_bitsandbytes_are_left_alone():
    model = make("llama")
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    weight.data = torch.zeros(96 * 32, 1, dtype=torch.uint8)
    weight.quant_state = object()
    accel.optimize(model)
    assert sites(model)["model.layers.0.mlp.up_proj"][0] == "skipped"


@pytest.mark.parametrize("damage", ["scales", "shape", "bits", "order"])
def test_compressed_tensors_that_do_not_fit_are_left_alone(damage, folders):
    model = compressed(folders("llama-biases", "int4-g32"))
    module = model.model.layers[0].mlp.down_proj
    if damage == "scales":
        module.weight_scale = nn.Parameter(torch.ones(64, 5), requires_grad=False)
    elif damage == "shape":
        module.weight_shape.data = torch.tensor([64, 104])
    elif damage == "bits":
        module.weight_packed.data = module.weight_packed.data[:, :9].contiguous()
    else:
        module.register_buffer("weight_g_idx", torch.arange(96))
    accel.optimize(model)
    assert model.model.layers[0].mlp.down_proj is module and len(held_by(model)) == 13
    assert sites(model)["model.layers.0.mlp.down_proj"][0] == "skipped"
    assert len(model._forward_pre_hooks) == 1  # there is something left to dequantize


def test_dequantized_by_a_call_before(folders):
    model = compressed(folders("llama-biases", "int8"))
    before = logits(model)["logits"]
    accel.optimize(model)
    assert not held_by(model)
    assert {reason for _, reason in sites(model).values()} == {
        "its weight was dequantized by a call before accel.optimize"
    }
    assert torch.equal(logits(model)["logits"], before) or accel.verify(model).passed


def test_quantized_activations_are_said(folders):
    model = compressed(folders("llama-biases", "fp8"))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = object()
    accel.optimize(model)
    assert all("activations keep their dtype" in reason for _, reason in sites(model).values())
