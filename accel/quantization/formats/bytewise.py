"""Linears of numbers of 8 bits with scales, or of 4: transformers' in float8, torchao's and Quanto's tensors."""

from math import gcd
from typing import Any

import torch
from accel_kernels.gemm.blocks.affine import affine_weight
from accel_kernels.gemm.blocks.codebook import PIECE
from torch import nn

from accel.quantization.formats.stored import ScaledBytes, StoredWeight

NUMBERS = (torch.float8_e4m3fn, torch.int8)
UNIT = 16  # columns that share a scale, or several such
DYNAMIC = 2**-8  # the scale that numbers get whose largest is 1.75
# What of a tensor changes inputs before they are multiplied.
OF_INPUTS = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale", "activation_quantization", "activation_qtype")


def read_float8(module: Any) -> StoredWeight | str | None:
    """transformers' linear in float8, with a scale for all of a weight or for each block, such as of 128 x 128."""
    weight, scales = (module._parameters.get(name) for name in ("weight", "weight_scale_inv"))
    if not isinstance(module, nn.Linear) or scales is None or weight is None or weight.dtype != torch.float8_e4m3fn:
        return None
    fixed = module._parameters.get("activation_scale")
    held = float8_weight(weight, scales, vars(module).get("block_size"))
    if isinstance(held, str):
        return held
    return StoredWeight(held, module._parameters["bias"], None, DYNAMIC if fixed is None else fixed)


def float8_weight(weight: torch.Tensor, scales: torch.Tensor, block: Any) -> ScaledBytes | str:
    """Of these tensors; block: rows and columns to a scale, None where there is one. Or why they are none."""
    return _held(weight.detach(), scales.detach(), None, block or weight.shape)


def read_tensor(module: Any) -> StoredWeight | str | None:
    """A linear whose weight is a tensor of torchao or Quanto around whole bytes; it multiplies in their dtype."""
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or weight is None or type(weight) is nn.Parameter:
        return None
    inside = vars(weight)
    data, scales = inside.get("qdata", inside.get("_data")), inside.get("scale", inside.get("_scale"))
    if data is None:
        return None
    if type(data) is not torch.Tensor or type(scales) is not torch.Tensor or data.dtype not in NUMBERS:
        return f"its weight is a {type(weight).__name__}"
    if any(inside.get(name) is not None for name in OF_INPUTS):
        return "it rounds its inputs too"
    if data.shape[-1] * 2 == weight.shape[-1]:
        return _pairs(module, weight, data, scales)
    rows = scales if scales.dim() == 2 else scales.reshape(1, -1)
    block = [-(-size // count) for size, count in zip(data.shape, rows.shape, strict=True)]
    if data.shape != weight.shape or list(inside.get("block_size", block)) != block:
        return f"scales {tuple(scales.shape)} for a weight {tuple(weight.shape)}"
    held = _held(data, rows, inside.get("zero_point"), block)
    return held if isinstance(held, str) else StoredWeight(held, module._parameters["bias"], weight.dtype)


def _pairs(module: Any, weight: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> StoredWeight | str:
    """Of torchao's plain tensor of 4 bits, two numbers to a byte."""
    (rows, columns), inside = weight.shape, vars(weight)
    zeros, (tall, group) = inside.get("zero_point"), inside.get("block_size", (0, 0))
    if inside.get("activation_dtype", torch.bfloat16) != torch.bfloat16:
        return "it rounds its inputs too"
    if tall != 1 or not group or group % PIECE or columns % group or data.dtype != torch.int8:
        return f"4 bits in blocks of {tall} x {group}"
    if type(zeros) is not torch.Tensor or not zeros.is_floating_point() or not scales.is_floating_point():
        return "4 bits with scales or zeros of a way of their own"
    if any(tuple(one.shape) != (columns // group, rows) for one in (scales, zeros)):
        return f"scales {tuple(scales.shape)} for a weight {tuple(weight.shape)}"
    held = affine_weight(data.view(torch.uint8), scales, zeros, columns, group)
    return StoredWeight(held, module._parameters["bias"], weight.dtype)


def _held(data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, block: Any) -> ScaledBytes | str:
    (rows, columns), (tall, wide) = data.shape, block
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    if gcd(wide, columns) % UNIT:
        return f"a scale to {wide} of {columns} columns"
    count = -(-rows // tall) * -(-columns // wide)
    if scales.numel() != count or not (zeros is None or (zeros.numel() == count and zeros.dtype == torch.int8)):
        return f"{scales.numel()} scales of {count} blocks"
    if not scales.is_floating_point():
        return f"scales of {scales.dtype}"
    return ScaledBytes(data, scales, zeros, (tall, wide))
