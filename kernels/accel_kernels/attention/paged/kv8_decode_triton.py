"""`decode` over keys and values in 8 bits at the speed of the memory: up to 8 heads a group, 64 or 128 channels."""

import torch

from accel_kernels.attention.paged.kv8_decode_kernel_triton import kv8_decode_kernel
from accel_kernels.attention.paged.kv_quantization_triton import code_of
from accel_kernels.attention.paged.split_kv import CODES_FILL, CODES_REGISTERS, FILL, KV8_BLOCKS
from accel_kernels.dependent_launch_triton import programmatic
from accel_kernels.launch import interpreted
from accel_kernels.op import capability, multiprocessors
from accel_kernels.warmup import launch

BLOCK, WARPS, HEADS = 64, 4, 8  # tokens of a block of the store; 16 to a warp; columns of a product
MOST_SPLITS = 64
AHEAD = 0  # blocks that are on their way to the L2 cache besides the one on its way to the registers
COMBINED = 16  # shares that are put together at once


def decodes_codes(q, kv) -> bool:
    """Whether this kernel takes a call that `decode` takes."""
    if kv.key_scales is None or interpreted() or capability(q.device) < (8, 0):
        return False
    heads, dim = q.shape[2:]
    few = heads // kv.keys.shape[2] <= HEADS
    return few and dim in (64, 128) and q.dtype in (torch.float16, torch.bfloat16) and kv.block == BLOCK


def kv8_decode(
    q, k, v, kv, scale, *, cos=None, sin=None, q_norm=None, k_norm=None, window=None, softcap=None, sinks=None,
    slopes=None,
):  # fmt: skip
    """`decode` of what `decodes_codes`."""
    rows, _, heads, dim = q.shape
    kv_heads = k.shape[2]
    units, group = rows * kv_heads, heads // kv_heads
    few, splits = (min(MOST_SPLITS, max(1, n * multiprocessors(q.device) // units)) for n in (FILL, CODES_FILL))
    out = torch.empty((rows, 1, heads * dim), device=q.device, dtype=q.dtype)
    parts, stats, split_counters = None, None, None
    if splits > 1:
        parts = torch.empty(units * HEADS * splits * dim, device=q.device, dtype=torch.float32)
        stats = torch.empty(units * HEADS * splits * 2, device=q.device, dtype=torch.float32)
        split_counters = kv.split_counters
        if split_counters is None or split_counters.numel() < units:
            split_counters = torch.zeros(units, device=q.device, dtype=torch.int32)
    angles = (0, 0) if cos is None else (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(2))
    pdl = programmatic(q.device)
    _, _, q_eps, _, q_offset = q_norm or (None, None, 0.0, False, 0.0)
    _, _, k_eps, _, k_offset = k_norm or (None, None, 0.0, False, 0.0)
    launch(
        kv8_decode_kernel, (units, splits),
        q, k, v, out, cos, sin, q_norm and q_norm.weight, k_norm and k_norm.weight, parts, stats, split_counters, sinks,
        slopes, kv.metadata, q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2), *angles,
        kv.layer, heads, kv_heads, float(scale), window or 0, float(softcap or 0.0), splits, few,
        q_eps, q_offset, k_eps, k_offset,
        GROUP=group, DIM=dim, PAIRS=0 if cos is None else cos.shape[-1], Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None, HAS_PADDING_MASK=kv.padding_mask is not None, HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None, HAS_SLOPES=slopes is not None,
        AHEAD=AHEAD, BLOCK=BLOCK, LEAST=KV8_BLOCKS, MOST=MOST_SPLITS, COMBINED=COMBINED, SPLIT=splits > 1,
        CODE=code_of(kv.key_scales, kv.keys), PDL=bool(pdl), num_warps=WARPS, maxnreg=CODES_REGISTERS, **pdl,
    )  # fmt: skip
    return out
