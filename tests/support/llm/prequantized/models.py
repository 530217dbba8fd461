"""Linears, models and folders of other tools' quantized weights."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import accel
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import layers, make


def words(rows: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """(n, m) of 0..15 as int32 (n / 8, m), the first row of eight in the lowest bits; or of 0..255, four to a word."""
    count = 32 // bits
    packed = torch.zeros(rows.shape[0] // count, rows.shape[1], dtype=torch.int64)
    for place in range(count):
        packed |= rows[place::count].long() << bits * place
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def nibbles(packed: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """`words` taken back."""
    found = torch.stack([(packed.long() >> bits * place) & (1 << bits) - 1 for place in range(32 // bits)], dim=1)
    return found.flatten(0, 1)


class GptqLinear(nn.Module):
    """offset: what is taken off a zero point before it is stored, 1 in the first version of the format."""

    def __init__(self, q, z, scales, bias, offset=1, order=None, bits=4):
        super().__init__()
        self.offset, columns, self.bits = offset, q.shape[1], bits
        group = columns // scales.shape[1]
        g_idx = torch.arange(columns) // group
        g_idx = g_idx if order is None else g_idx[order]
        self.register_buffer("g_idx", g_idx.int())
        self.register_buffer("qweight", words(q.t(), bits))
        self.register_buffer("qzeros", words(z - offset & (1 << bits) - 1, bits).t().contiguous())
        self.register_buffer("scales", scales.t().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x):
        words = self.qweight.view(torch.int32)
        numbers, zeros = nibbles(words, self.bits), nibbles(self.qzeros.t(), self.bits).t() + self.offset
        index = self.g_idx.long()
        weight = (numbers - zeros[index]).float() * self.scales[index].float()
        out = x @ weight.to(x.dtype)
        return out if self.bias is None else out + self.bias


class PackingLinear(GptqLinear):
    """As gptqmodel's for CPUs: packs its words in another way at its first call, and has its bias in half precision."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.bias = None if self.bias is None else self.bias.half()

    def forward(self, x):
        self.qweight = self.qweight.view(torch.uint8)
        return super().forward(x)


class AwqLinear(nn.Module):
    ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

    def __init__(self, q, z, scales, bias):
        super().__init__()
        self.register_buffer("qweight", words(self._shuffled(q)).t().contiguous())
        self.register_buffer("qzeros", words(self._shuffled(z)).t().contiguous())
        self.register_buffer("scales", scales.t().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def _shuffled(self, rows):
        return rows.reshape(-1, 8, rows.shape[1])[:, list(self.ORDER)].flatten(0, 1)

    def _ordered(self, packed):
        found = nibbles(packed.t()).reshape(-1, 8, packed.shape[0])
        ordered = torch.empty_like(found)
        ordered[:, list(self.ORDER)] = found
        return ordered.flatten(0, 1)

    def forward(self, x):
        numbers, zeros = self._ordered(self.qweight), self._ordered(self.qzeros)
        group = numbers.shape[1] // zeros.shape[1]
        weight = (numbers - zeros.repeat_interleave(group, 1)).float()
        weight = weight * self.scales.t().repeat_interleave(group, 1).float()
        out = x @ weight.t().to(x.dtype)
        return out if self.bias is None else out + self.bias


def prequantized(kind: str, name: str = "llama-biases", dtype=torch.float32, **changes):
    """(a model whose linears are this library's, the same with their values as plain weights)."""
    model = make(name, dtype, **changes)
    twin = copy.deepcopy(model)
    for path, layer in layers(model).items():
        for where, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear:
                made, values = MAKERS[kind](linear)
                layer.set_submodule(where, made)
                plain = twin.get_submodule(f"{path}.{where}")
                plain.weight.data = values.to(dtype)
                plain.bias = None if plain.bias is None else nn.Parameter(made.bias.detach().to(dtype), False)
    return model, twin


def four_bits(make_linear, linear, symmetric=False, kind="int4", **options):
    """kind: int8 for eight."""
    rounded = round_to_nearest(linear.weight, Scheme(kind, 32, symmetric))
    zeros = torch.zeros_like(rounded.scales, dtype=torch.int8) if rounded.zeros is None else rounded.zeros
    above = 8 if kind == "int4" else 128
    zeros = zeros.clamp_min(1 - above)  # the first version of GPTQ's format has no room for the least
    rounded = rounded._replace(zeros=zeros)
    numbers, zeros = rounded.numbers().int() + above, zeros.int() + above
    return make_linear(numbers, zeros, rounded.scales, linear.bias, **options), rounded.dequantized(torch.float32)


def eight_bits(linear):
    rounded = round_to_nearest(linear.weight.float(), Scheme("int8"))
    modules = pytest.importorskip("bitsandbytes").nn
    made = modules.Linear8bitLt(
        linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False
    )
    parts = {"CB": rounded.data, "SCB": rounded.scales.flatten() * 127}
    made.weight, made.bias = modules.Int8Params(rounded.data, False, False, **parts), linear.bias
    return made.eval(), rounded.dequantized(torch.float32)


MAKERS = {
    "gptq": lambda linear: four_bits(GptqLinear, linear),
    "gptq-v2": lambda linear: four_bits(GptqLinear, linear, offset=0),
    "gptq-symmetric": lambda linear: four_bits(GptqLinear, linear, symmetric=True),
    "gptq-8": lambda linear: four_bits(GptqLinear, linear, kind="int8", bits=8),
    "gptq-8-v2": lambda linear: four_bits(GptqLinear, linear, kind="int8", bits=8, offset=0),
    "gptq-packs": lambda linear: four_bits(PackingLinear, linear),
    "awq": lambda linear: four_bits(AwqLinear, linear),
    "bitsandbytes": eight_bits,
}


def saved_folders(tmp_path_factory):
    """A function of (name, scheme, dtype): where such a model, quantized, is saved; with " bytes" as others save it."""
    made = {}

    def folder(name="llama-biases", scheme="int8", dtype=torch.float32):
        key = (name, scheme, dtype)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved")
            scheme, *rest = scheme.split()
            accel.quantize(make(name, dtype), scheme).save_pretrained(made[key])
            if rest:
                unpack(made[key])
        return made[key]

    return folder


def unpack(folder):
    """A file of packed 8-bit numbers in the format "int-quantized", a byte each."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    file, config = folder / "model.safetensors", folder / "config.json"
    found = load_file(file)
    for path in [name.removesuffix("_packed") for name in found if name.endswith("_packed")]:
        shape = found.pop(f"{path}_shape")
        found[path] = unpack_from_int32(found.pop(f"{path}_packed"), 8, shape)
        if f"{path}_zero_point" in found:
            zeros = unpack_from_int32(found[f"{path}_zero_point"], 8, torch.Size((shape[0], 1)), packed_dim=0)
            found[f"{path}_zero_point"] = zeros.contiguous()
    save_file(found, file, {"format": "pt"})
    said = json.loads(config.read_text())
    said["quantization_config"].pop("dequantize", None)
    config.write_text(json.dumps(said).replace("pack-quantized", "int-quantized"))


def compressed(folder):
    pytest.importorskip("compressed_tensors")
    return AutoModelForCausalLM.from_pretrained(folder).eval()
