"""Linears as bitsandbytes has them, in 4 bits, and as transformers has them, in float8."""

import torch
from torch import nn

from support.noted import OperationCount


def four_bit(linear: nn.Linear, kind="nf4", nested=False, dtype=None, block=64, **more) -> nn.Linear:
    """dtype: in which it multiplies; of the linear's own unless told. block: numbers to a scale."""
    import bitsandbytes

    n, k = linear.weight.shape
    dtype = dtype or linear.weight.dtype
    made = bitsandbytes.nn.Linear4bit(k, n, False, compute_dtype=dtype, quant_type=kind, **more)
    weight = linear.weight.detach()
    data, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=block, compress_statistics=nested, quant_type=kind
    )
    settings = {"quant_type": kind, "blocksize": block, "compress_statistics": nested, "bnb_quantized": True}
    made.weight = bitsandbytes.nn.Params4bit(data, False, state, module=made, **settings)
    made.quant_state, made.bias = state, linear.bias
    return made.eval()


def float8(linear: nn.Linear, block=(128, 128), powers=False, fixed=None) -> nn.Linear:
    """block: None for one scale. powers: of two. fixed: the scale of inputs."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    n, k = linear.weight.shape
    tall, wide = block or (n, k)
    scheme = {"scale_fmt": "ue8m0" if powers else "float", "activation_scheme": "static" if fixed else "dynamic"}
    made = FP8Linear(k, n, block, has_bias=linear.bias is not None, **scheme)
    tiles = [
        [part.abs().amax() / 448 for part in row.split(wide, 1)] for row in linear.weight.detach().float().split(tall)
    ]
    scales = torch.tensor(tiles)
    scales = torch.exp2(scales.log2().ceil()) if powers else scales
    wide_scales = scales.repeat_interleave(tall, 0)[:n].repeat_interleave(wide, 1)[:, :k]
    made.weight.data = (linear.weight.detach().float() / wide_scales).to(torch.float8_e4m3fn)
    made.weight_scale_inv.data = scales.to(made.weight_scale_inv.dtype).reshape(made.weight_scale_inv.shape)
    if fixed:
        made.activation_scale.data.fill_(fixed)
    made.bias = linear.bias
    return made.requires_grad_(False).eval()


def as_elsewhere(monkeypatch) -> None:
    """No CPU has the instructions for which bitsandbytes packs weights in another way at a call."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


def product_count() -> OperationCount:
    """How many of bitsandbytes' own products run inside."""
    return OperationCount(lambda function: function.namespace == "bitsandbytes")
