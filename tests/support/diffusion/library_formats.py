"""Linears quantized by other libraries, as their own calls do it, or hold them after they loaded a file."""

import pytest
import torch
from accel_kernels.gemm.blocks.ggml import GGML
from torch import nn

from support.kernels.ggml import random_blocks


def by_torchao(kind):
    def quantize(model):
        torchao = pytest.importorskip("torchao.quantization", reason="needs torchao: make test-formats")
        torchao.quantize_(model, getattr(torchao, kind)())

    return quantize


def torchao_int4(model):
    """By the tensor's constructor: torchao makes it by the package mslk, and multiplies it so."""
    kinds = pytest.importorskip("torchao.quantization.quantize_.workflows", reason="needs torchao: make test-formats")
    for linear in [one for one in model.modules() if type(one) is nn.Linear and one.in_features % 32 == 0]:
        groups = linear.weight.detach().unflatten(1, (-1, 32))
        least = groups.amin(-1)
        scale = (groups.amax(-1) - least) / 15
        numbers = ((groups - least[..., None]) / scale[..., None]).round().clamp(0, 15).flatten(1).to(torch.int8) - 8
        packed = numbers[:, ::2] & 15 | numbers[:, 1::2] << 4
        beside = [one.t().contiguous() for one in (scale, least + 8 * scale)]
        held = kinds.Int4Tensor(packed, *beside, [1, 32], linear.weight.shape)
        linear.weight = nn.Parameter(held, requires_grad=False)
    if not hasattr(torch.ops.mslk, "bf16i4bf16_rowwise"):
        torch.library.define("mslk::bf16i4bf16_rowwise", "(Tensor x, Tensor w, Tensor scale, Tensor zero) -> Tensor")
        torch.library.impl("mslk::bf16i4bf16_rowwise", "default", _int4_product)


def _int4_product(x, data, scale, zero):
    numbers = torch.stack([data << 4 >> 4, data >> 4], -1).flatten(1).unflatten(1, (len(scale), -1)).float()
    weight = numbers * scale.t().float()[..., None] + zero.t().float()[..., None]
    return x @ weight.flatten(1).to(x.dtype).t()


def by_quanto(weights):
    def quantize(model):
        quanto = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: make test-formats")
        quanto.quantize(model, weights=getattr(quanto, weights))
        quanto.freeze(model)

    return quantize


def by_bitsandbytes(model):
    """4 bits; it loads none itself where there is no GPU."""
    kinds = pytest.importorskip("bitsandbytes").nn
    for path, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and linear.in_features % 64 == 0:
            sizes = linear.in_features, linear.out_features, linear.bias is not None
            new = kinds.Linear4bit(*sizes, compute_dtype=linear.weight.dtype)
            new.weight = kinds.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            new.bias = linear.bias
            model.set_submodule(path, new.to("cpu"))


FORMATS = {
    "torchao-int8": by_torchao("Int8WeightOnlyConfig"),
    "torchao-int8-int8": by_torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao-int4": torchao_int4,
    "torchao-float8": by_torchao("Float8WeightOnlyConfig"),
    "quanto-int8": by_quanto("qint8"),
    "quanto-float8": by_quanto("qfloat8"),
    "quanto-int4": by_quanto("qint4"),
    "bitsandbytes-nf4": by_bitsandbytes,
}
READ = {"torchao-int8", "torchao-int4", "torchao-float8", "quanto-int8", "quanto-float8"}  # where they lie


def quantized(model, format, dtype):
    """The model in this dtype, its linears in this format."""
    model = model.to(dtype)
    FORMATS[format](model)
    return model.requires_grad_(False).eval()


def in_blocks(model, name: str, dtype: torch.dtype):
    """Every linear of whole GGUF blocks holds random ones of this format, the rest is in dtype. Returns the model."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFParameter, _replace_with_gguf_linear

    format, packed = GGML[name], {}
    for place, module in model.to(dtype).named_modules():
        if type(module) is nn.Linear and module.in_features % format.columns == 0:
            count = module.weight.numel() // format.columns
            data = random_blocks(format, count, len(packed), 0.1 / 2 ** (format.low.bits + (format.packing != "") * 5))
            kind = gguf.GGMLQuantizationType[name]
            packed[f"{place}.weight"] = GGUFParameter(data.reshape(module.out_features, -1), quant_type=kind)
    kept = dict(model.named_parameters())
    _replace_with_gguf_linear(model, dtype, packed)
    for place, parameter in (kept | packed).items():
        owner, _, own = place.rpartition(".")
        model.get_submodule(owner)._parameters[own] = parameter
    return model
