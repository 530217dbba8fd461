"""bitsandbytes' linears of 8 bits, and of 4: NF4 and FP4, their scales in float32 or in 8 bits themselves."""

from operator import attrgetter
from typing import Any

import torch
from accel_kernels import BlockWeight, Quantized
from accel_kernels.gemm.blocks.codebook import CODEBOOKS, NESTED, PIECE, Codebook
from accel_kernels.gemm.quantized_weight import PER_WORD
from torch import nn

from accel.quantization.formats.repacked import UNROUNDED, Repacked
from accel.quantization.formats.stored import StoredWeight, as_bytes

TOP = 127


def read_bitsandbytes8(module: Any) -> Repacked | str | None:
    """Linear8bitLt: int8 (N, K), and 127 times the scales in `SCB`, of the weight; after a call, of `state`."""
    weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None  # and no embedding
    scales = None if weight is None or weight.dtype != torch.int8 else _scales(module)
    if weight is None or scales is None:
        return None
    if weight.dim() != 2 or weight.shape[1] % PER_WORD or scales.numel() != weight.shape[0]:
        return f"a weight {tuple(weight.shape)} with {scales.numel()} scales"
    return Repacked(module, "bitsandbytes int8", "weight", (_int8_weight,), attrgetter("data"), UNROUNDED)


def _int8_weight(module: Any) -> Quantized:
    scales = _scales(module)
    if scales is None:
        raise ValueError("no scales beside its weight, nor in its state")
    return Quantized.of(module.weight.detach(), scales.detach().float().reshape(-1, 1) / TOP)


def _scales(module: Any) -> torch.Tensor | None:
    found = getattr(module._parameters["weight"], "SCB", None)
    return getattr(vars(module).get("state"), "SCB", None) if found is None else found


def read_bitsandbytes(module: Any) -> StoredWeight | str | None:
    """A linear whose weight has a `quant_state`. It multiplies in `compute_dtype`, which its first call may choose."""
    weight = module._parameters.get("weight")
    state = None if weight is None else vars(weight).get("quant_state")
    if state is None:
        return None
    if weight.is_meta or not module.compute_type_is_set:
        return "it has not been called yet"
    if weight.device.type == "cpu" and module.support_avx512bf16_for_cpu:
        return "on this CPU bitsandbytes packs its weight in another way at a call"
    if tuple(state.shape) != (module.out_features, module.in_features) or state.quant_type not in CODEBOOKS:
        return f"a weight {tuple(state.shape)} in {state.quant_type}"
    columns, scaled = state.shape[1], state.blocksize
    ends = weight.device.type == "cpu"  # where in bitsandbytes no block goes from a row to the next
    if columns % (scaled if ends else PIECE) or scaled % PIECE or scaled & scaled - 1:
        return f"rows of {columns} columns in blocks of {scaled}"
    nested = (None, None, None)
    if state.nested:
        if state.state2.blocksize != NESTED:
            return f"scales in blocks of {state.state2.blocksize}"
        nested = state.state2.code, state.state2.absmax, state.offset
    side = Codebook(state.code, state.absmax, (scaled // PIECE).bit_length() - 1, *nested)
    tensors = {name: one for name, one in side._asdict().items() if isinstance(one, torch.Tensor)}
    dtypes = dict.fromkeys(tensors, torch.float32) | ({"absmax": torch.uint8} if state.nested else {})
    if any(one.dtype != dtypes[name] for name, one in tensors.items()):
        return "scales of another dtype"
    held = BlockWeight(as_bytes(weight), columns, CODEBOOKS[state.quant_type], side=side)
    return StoredWeight(held, module._parameters["bias"], module.compute_dtype)
