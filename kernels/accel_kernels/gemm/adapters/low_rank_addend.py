"""What many adapters of low rank add to one product, each to its own part of the outputs, in one pass.

A library's product then adds this to its sums, before they are rounded: two launches in all. So do keys and values of
the prompt, of all cross-attentions of a model. For few parts `hopper_gemm`, or passes, take half the time (H100).
"""

import torch
import torch.nn.functional as F

from accel_kernels.gemm.adapters.low_rank_term import LowRankTerm
from accel_kernels.op import contiguous_reason, dtype_reason, make_op, random_cases

PROGRAMS = 65535  # of a launch, along the parts


def reference(x, term, bias=None):
    """b + (x A^T) B^T (Hu et al., "LoRA", 2021), (..., N). x: (..., K); term: without a gate; bias: (N,)."""
    parts = zip((0, *term.ends), term.ends, term.inner(x).split(term.rank, dim=-1), strict=False)
    y = torch.cat([F.linear(inner, term.up[start:end]) for start, end, inner in parts], -1)
    return y if bias is None else y + bias


def supports(x, term, bias=None) -> str | None:
    n, k = len(term.up), x.shape[-1]
    if x.numel() == 0:
        return "empty"
    if x.dtype == torch.float32:
        return "float32, which cuBLAS adds up with less error"
    if k % 8:
        return f"{k} inputs, not a multiple of 8"
    if (reason := term.reason(x, (n, k), False, PROGRAMS) or contiguous_reason(x=x)) is not None:
        return reason
    if bias is not None and bias.shape != (n,):
        return f"a bias {tuple(bias.shape)} for {n} outputs"
    return dtype_reason(x, bias, products=True)


@random_cases
def _case(rand, *shape, ends, rank=16, bias=True, by_row=False):
    k, n = shape[-1], ends[-1]
    down, up = rand(len(ends) * rank, k, spread=k**-0.5), rand(n, rank, spread=rank**-0.5)
    rows = rand(shape[0], len(down)).gt(0).to(rand.dtype) if by_row else None
    term = LowRankTerm(down, up, ends, rows=rows, starts=part_starts(ends, rand.device))
    return (rand(*shape), term, rand(n) if bias else None), {}


def part_starts(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """As of `LowRankTerm`."""
    return torch.tensor((0, *ends), dtype=torch.int32, device="cpu").to(device)


CASES = (
    _case("odd", 37, 72, ends=(136,), small=True),
    _case("by-row", 2, 9, 48, ends=(8, 40, 48), rank=32, by_row=True, bias=False, small=True),
    _case("many-parts", 1, 5, 40, ends=(16, 48, 64, 65, 100), small=True),
    _case("sdxl-out", 2, 1024, 1280, ends=(1280,)),
    _case("sdxl-down", 2, 1024, 5120, ends=(1280,), rank=64),
    _case("sdxl-prompt", 2, 77, 2048, ends=tuple(range(640, 640 * 21, 640))),
)

low_rank_addend = make_op("low_rank_addend", reference, supports, CASES)
