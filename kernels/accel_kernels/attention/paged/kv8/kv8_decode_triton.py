"""`decode` over keys and values in 8 bits at the speed of the memory: up to 8 heads a group, 64 or 128 channels."""

import torch

from accel_kernels.attention.paged.decode_arguments import decode_arguments
from accel_kernels.attention.paged.kv8.kv8_decode_kernel_triton import kv8_decode_kernel
from accel_kernels.attention.paged.kv_quantization_triton import kv_dtype_of
from accel_kernels.attention.paged.split_kv import FILL, KV8_BLOCKS, KV8_FILL, KV8_REGISTERS, scratch_of, split_count
from accel_kernels.device import AMPERE, interpreted, programmatic, reaches
from accel_kernels.warmup import launch

BLOCK, WARPS, HEADS = 64, 4, 8  # tokens of a block of the store; 16 to a warp; columns of a product
MOST_SPLITS = 64
COMBINED = 16  # shares that are put together at once


def decodes_kv8(q, kv) -> bool:
    """Whether this kernel takes a call that `decode` takes."""
    if kv.key_scales is None or interpreted() or not reaches(q.device, AMPERE):
        return False
    heads, dim = q.shape[2:]
    few = heads // kv.keys.shape[2] <= HEADS
    return few and dim in (64, 128) and q.dtype in (torch.float16, torch.bfloat16) and kv.block == BLOCK


def kv8_decode(q, k, v, kv, scale, out=None, **more):
    """`decode` of what `decodes_kv8`."""
    rows, _, heads, dim = q.shape
    kv_heads = k.shape[2]
    units = rows * kv_heads
    few, splits = (split_count(units, q.device, fill, MOST_SPLITS) for fill in (FILL, KV8_FILL))
    out = torch.empty((rows, 1, heads * dim), device=q.device, dtype=q.dtype) if out is None else out
    scratch = scratch_of(units, splits, units * HEADS * splits, dim, q.device, kv.split_counters)
    arguments, constants = decode_arguments(q, k, v, out, kv, scale, scratch, splits, few, **more)
    launch(
        kv8_decode_kernel, (units, splits), *arguments,
        **constants, BLOCK=BLOCK, LEAST=KV8_BLOCKS, MOST=MOST_SPLITS, COMBINED=COMBINED,
        KV_DTYPE=kv_dtype_of(kv.key_scales, kv.keys), num_warps=WARPS, maxnreg=KV8_REGISTERS, **programmatic(q.device),
    )  # fmt: skip
    return out
