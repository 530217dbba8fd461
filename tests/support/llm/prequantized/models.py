"""Linears, models and folders of other tools' quantized weights."""

import copy
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import accel
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import layers, make


def places(beside: torch.Tensor, bits: int) -> torch.Tensor:
    """(1, bits, 1): 0, 1, ..., on the device of another tensor."""
    return torch.arange(bits, device=beside.device)[None, :, None]


def words(rows: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """(n, m) of numbers of so many bits as int32 (n bits / 32, m): one stream of bits, the first in the lowest."""
    stream = (rows.long()[:, None] >> torch.arange(bits, device=rows.device)[None, :, None] & 1).reshape(
        -1, 32, rows.shape[1]
    )
    packed = (stream << places(rows, 32)).sum(1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def nibbles(packed: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """`words` taken back."""
    stream = (packed.long()[:, None] >> places(packed, 32) & 1).reshape(-1, bits, packed.shape[1])
    return (stream << places(packed, bits)).sum(1)


class GptqLinear(nn.Module):
    """offset: what is taken off a zero point before it is stored, 1 in the first version of the format. sizes: of the
    groups, where they are not equal. act_order: in which columns lie.
    """

    def __init__(self, q, z, scales, bias, offset=1, bits=4, sizes=None, act_order=None):
        super().__init__()
        self.offset, columns, self.bits = offset, q.shape[1], bits
        sizes = [columns // scales.shape[1]] * scales.shape[1] if sizes is None else sizes
        g_idx = torch.arange(scales.shape[1]).repeat_interleave(torch.tensor(sizes))
        if act_order is not None:
            q, g_idx = q[:, act_order], g_idx[act_order]
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

    def __init__(self, q, z, scales, bias, bits=4):
        super().__init__()
        self.bits = bits
        self.register_buffer("qweight", words(self._shuffled(q), bits).t().contiguous())
        self.register_buffer("qzeros", words(self._shuffled(z), bits).t().contiguous())
        self.register_buffer("scales", scales.t().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def _shuffled(self, rows):
        return rows if self.bits != 4 else rows.reshape(-1, 8, rows.shape[1])[:, list(self.ORDER)].flatten(0, 1)

    def _ordered(self, packed):
        if self.bits != 4:
            return nibbles(packed.t(), self.bits)
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


def packed(make_linear, linear, symmetric=False, bits=4, sizes=None, act_order=False, **options):
    """A linear of another library with a weight of so many bits, and the values of that.

    act_order: True for one order for all of so many inputs, "each" for one by outputs too.
    """
    sizes = [32] * (linear.in_features // 32) if sizes is None else sizes
    group_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    values, half = linear.weight.detach().float(), 1 << bits - 1
    low, high = (
        torch.stack([edge(part, 1) for part in values.split(sizes, 1)], 1) for edge in (torch.amin, torch.amax)
    )
    if symmetric:
        scales, zeros = torch.maximum(high, -low) / (half - 1), torch.full_like(low, half)
    else:
        scales = (high.clamp_min(0) - low.clamp_max(0)) / (2 * half - 1)
        zeros = (
            (-low.clamp_max(0) / scales).round().clamp(1, 2 * half - 1)
        )  # the first version has no room for the least
    scales = scales.to(linear.weight.dtype)
    numbers = (values / scales[:, group_of] + zeros[:, group_of]).round().clamp(0, 2 * half - 1)
    rounded = (numbers - zeros[:, group_of]) * scales.float()[:, group_of]
    if make_linear is AwqLinear:
        return make_linear(numbers.int(), zeros.int(), scales, linear.bias, bits=bits), rounded
    seed = linear.in_features + (act_order == "each") * linear.out_features
    order = torch.randperm(linear.in_features, generator=torch.Generator().manual_seed(seed)) if act_order else None
    options |= {"bits": bits, "sizes": sizes, "act_order": order}
    made = make_linear(numbers.int(), zeros.int(), scales, linear.bias, **options)
    return made, rounded if order is None else rounded[:, order]


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
    "gptq": partial(packed, GptqLinear),
    "gptq-v2": partial(packed, GptqLinear, offset=0),
    "gptq-symmetric": partial(packed, GptqLinear, symmetric=True),
    "gptq-8": partial(packed, GptqLinear, bits=8),
    "gptq-8-v2": partial(packed, GptqLinear, bits=8, offset=0),
    "gptq-packs": partial(packed, PackingLinear),
    "gptq-order": partial(packed, GptqLinear, act_order=True),
    "gptq-2": partial(packed, GptqLinear, bits=2),
    "gptq-3-order": partial(packed, GptqLinear, bits=3, offset=0, act_order=True),
    "gptq-5": partial(packed, GptqLinear, bits=5),
    "gptq-8-orders": partial(packed, GptqLinear, bits=8, act_order="each"),
    "gptq-uneven": lambda linear: packed(GptqLinear, linear, sizes=[*[32] * (linear.in_features // 32 - 2), 64]),
    "awq": partial(packed, AwqLinear),
    "awq-2": partial(packed, AwqLinear, bits=2),
    "awq-3": partial(packed, AwqLinear, bits=3),
    "awq-8": partial(packed, AwqLinear, bits=8),
    "bitsandbytes": eight_bits,
}


def saved_folders(tmp_path_factory):
    """A function of (name, scheme, dtype): where such a model, quantized, is saved; with " bytes" as others save it, of
    4 bits with a number in that many.
    """
    made = {}

    def folder(name="llama-biases", scheme="int8", dtype=torch.float32):
        key = (name, scheme, dtype)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved")
            scheme, *rest = scheme.split()
            accel.quantize(make(name, dtype), scheme).save_pretrained(made[key])
            if rest:
                unpack(made[key], rest[0])
        return made[key]

    return folder


def unpack(folder, bits):
    """A file of packed 8-bit numbers in the format "int-quantized", a byte each; of 4 bits in so many, what is beyond
    cut off.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    file, config = folder / "model.safetensors", folder / "config.json"
    found = load_file(file)
    for path in [name.removesuffix("_packed") for name in found if name.endswith("_packed")]:
        if bits != "bytes":
            numbers = unpack_from_int32(found[f"{path}_packed"], 4, found[f"{path}_shape"])
            most = 1 << int(bits) - 1
            found[f"{path}_packed"] = pack_to_int32(numbers.clamp(-most, most - 1), int(bits))
            continue
        shape = found.pop(f"{path}_shape")
        found[path] = unpack_from_int32(found.pop(f"{path}_packed"), 8, shape)
        if f"{path}_zero_point" in found:
            zeros = unpack_from_int32(found[f"{path}_zero_point"], 8, torch.Size((shape[0], 1)), packed_dim=0)
            found[f"{path}_zero_point"] = zeros.contiguous()
    save_file(found, file, {"format": "pt"})
    said = json.loads(config.read_text())
    said["quantization_config"].pop("dequantize", None)
    if bits == "bytes":
        config.write_text(json.dumps(said).replace("pack-quantized", "int-quantized"))
    else:
        config.write_text(json.dumps(said).replace('"num_bits": 4', f'"num_bits": {bits}'))


def compressed(folder):
    pytest.importorskip("compressed_tensors")
    return AutoModelForCausalLM.from_pretrained(folder).eval()
