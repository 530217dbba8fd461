"""Linears that hold the blocks of a GGUF file: those of diffusers, and of transformers."""

from typing import Any

import torch
from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.blocks.ggml import BF16, GGML

from accel.quantization.formats.stored import MISPLACED, StoredWeight, as_bytes

FORMATS = {30: BF16} | {format.code: format for format in GGML.values()}  # by ggml's number of a type


def read_ggml(module: Any) -> StoredWeight | str | None:
    """A linear whose weight is bytes (N, bytes of a row), of a type that the weight names, or the module.

    diffusers' weight does, and computes in float16 before it multiplies in the module's `compute_dtype`. transformers'
    module does; its kernels compute in float32, and it multiplies in the dtype of the inputs.
    """
    weight, compute = module._parameters.get("weight"), torch.float16
    code = None if weight is None else vars(weight).get("quant_type")
    if code is None:
        code, compute = vars(module).get("ggml_type"), torch.float32
    if weight is None or code is None:
        return None
    if int(code) not in FORMATS:
        return f"its weight is of the GGUF type {getattr(code, 'name', code)}"
    format, columns = FORMATS[int(code)], module.in_features
    if module._buffers.get("input_permutation") is not None:
        return "it puts its inputs in another order"
    if columns % format.columns or tuple(weight.shape) != (
        module.out_features, columns // format.columns * format.bytes,
    ):  # fmt: skip
        return f"a weight {tuple(weight.shape)} for {module.out_features} outputs of {columns} inputs"
    if (data := as_bytes(weight)).data_ptr() % 4:
        return MISPLACED
    held = BlockWeight(data, columns, format, torch.float32 if format is BF16 else compute)
    return StoredWeight(held, module._parameters.get("bias"), vars(module).get("compute_dtype"))
