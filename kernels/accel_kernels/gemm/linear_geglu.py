"""A linear layer and the GEGLU after it in one kernel: the wide middle of the feed-forward is never written.

y = (x Wv^T + bv) * gelu(x Wg^T + bg), exact GELU; Shazeer, "GLU Variants Improve Transformer", 2020.
"""

import torch
import torch.nn.functional as F

from accel_kernels.device import multiprocessors, tma_reason
from accel_kernels.elementwise.geglu import geglu
from accel_kernels.op import contiguous_reason, dtype_reason, make_op, random_case

BLOCK_M, BLOCK_N = 128, 128
LEAST_USE = 0.75  # of the multiprocessors over all rounds; below, cuBLAS and a pass for GEGLU are faster (H200)


def reference(x, weight, bias=None):
    """x: (..., K); weight: (2 D, K); bias: (2 D,) or None. Returns (..., D)."""
    return geglu.reference(F.linear(x, weight, bias))


def instead(x, weight, bias=None):
    """The same by torch's product, and one pass."""
    return geglu(F.linear(x, weight, bias))


def supports(x, weight, bias=None) -> str | None:
    if x.numel() == 0:
        return "empty"
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] % 2:
        return f"input {tuple(x.shape)} and weight {tuple(weight.shape)}"
    if (reason := contiguous_reason(x=x, weight=weight)) is not None:
        return reason
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {x.dtype} is not float16 or bfloat16"
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return "input, weight and bias of several dtypes"
    if x.shape[-1] % 8 or weight.shape[0] % 16:
        return "features that are not a multiple of 8, as the tensor memory accelerator needs"
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return "not aligned to 16 bytes"
    return tma_reason(x.device) or dtype_reason(x, weight, bias)


def pays(x, weight, bias=None) -> bool:
    """Whether tiles fill the GPU well enough for the one kernel to win over cuBLAS's choice of tiles."""
    programs = multiprocessors(x.device)
    rows = x.numel() // x.shape[-1]
    tiles = -(-rows // BLOCK_M) * -(-(weight.shape[0] // 2) // BLOCK_N)
    return tiles / (-(-tiles // programs) * programs) >= LEAST_USE


def _case(name, *shape, inner, bias=True, small=False):
    def make(rand):
        weight = rand(2 * inner, shape[-1], spread=shape[-1] ** -0.5)
        return (rand(*shape), weight, rand(2 * inner) if bias else None), {}

    return random_case(name, make, small)


CASES = (
    _case("tiny", 2, 5, 64, inner=32, small=True),
    _case("odd", 3, 47, 72, inner=136, small=True),
    _case("no-bias", 1, 130, 40, inner=24, bias=False, small=True),
    _case("sd15-64", 2, 4096, 320, inner=1280),
    _case("sd15-32", 2, 1024, 640, inner=2560),
    _case("sdxl-64", 2, 4096, 640, inner=2560),
    _case("sdxl-32", 2, 1024, 1280, inner=5120),
)

linear_geglu = make_op("linear_geglu", reference, supports, CASES, pays=pays, instead=instead)
