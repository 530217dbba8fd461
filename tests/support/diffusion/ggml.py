"""Denoisers whose linears hold blocks of GGUF, as diffusers loads them from such a file."""

import torch
from accel_kernels.gemm.blocks.ggml import GGML

from support.kernels.ggml import random_blocks


def in_blocks(model, name: str, dtype: torch.dtype):
    """Every linear of whole blocks holds random ones of this format, the rest of the model is in dtype. Returns it."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFParameter, _replace_with_gguf_linear

    format, packed = GGML[name], {}
    for place, module in model.to(dtype).named_modules():
        if type(module) is torch.nn.Linear and module.in_features % format.columns == 0:
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
