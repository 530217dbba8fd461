"""Models whose linears are those of another library, and the same models with plain weights."""

import copy

import torch
from torch import nn

from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import layers, make
from support.llm.prequantized.linears import AwqLinear, BitsandbytesLinear, GptqLinear


def prequantized(kind: str, name: str = "llama-biases", dtype=torch.float32, **changes):
    """(a model whose linears are this library's, the same with their values as plain weights)."""
    model = make(name, dtype, **changes)
    twin = copy.deepcopy(model)
    for path, layer in layers(model).items():
        for where, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear:
                made, values = MAKERS[kind](linear)
                layer.set_submodule(where, made)
                twin.get_submodule(f"{path}.{where}").weight.data = values.to(dtype)
    return model, twin


def four_bits(make_linear, linear, symmetric=False, **options):
    rounded = round_to_nearest(linear.weight, Scheme("int4", 32, symmetric))
    zeros = torch.zeros_like(rounded.scales, dtype=torch.int8) if rounded.zeros is None else rounded.zeros
    zeros = zeros.clamp_min(-7)  # the first version of GPTQ's format has no room for the least
    rounded = rounded._replace(zeros=zeros)
    numbers, zeros = rounded.numbers().int() + 8, zeros.int() + 8
    return make_linear(numbers, zeros, rounded.scales, linear.bias, **options), rounded.dequantized(torch.float32)


def eight_bits(linear):
    rounded = round_to_nearest(linear.weight.float(), Scheme("int8"))
    made = BitsandbytesLinear(rounded.data, rounded.scales.flatten() * 127, linear.bias)
    return made, rounded.dequantized(torch.float32)


MAKERS = {
    "gptq": lambda linear: four_bits(GptqLinear, linear),
    "gptq-v2": lambda linear: four_bits(GptqLinear, linear, offset=0),
    "gptq-symmetric": lambda linear: four_bits(GptqLinear, linear, symmetric=True),
    "awq": lambda linear: four_bits(AwqLinear, linear),
    "bitsandbytes": eight_bits,
}
