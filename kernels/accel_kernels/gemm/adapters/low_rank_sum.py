"""What adapters of low rank add to products of one input: y + scale * (x A^T) B^T (Hu et al., "LoRA", 2021).

Up to three products, as of queries, keys and values, in one launch: x is read once, x A^T stays in registers.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.gemm.fused_linear import fused_linear
from accel_kernels.op import dtype_reason, make_op, random_cases

MOST_RANK = 128
MOST_SUMS = 3
MOST_COLUMNS, LEAST_ROWS = 2048, 256  # of x: a program walks along all columns, and has some of the rows


class LowRank(NamedTuple):
    """An adapter of a linear (N, K). down: (R, K), A; up: (N, R), B; scale: by which what it adds is multiplied.

    Both are in the dtype of x, or in float32, as peft loads them; x is then cast before.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float


def reference(x, ys, adapters):
    """x: (..., K); ys: products (..., N) of x; adapters: a `LowRank` for each. Returns the sums, (..., N) each.

    x A^T, its product with B, that times the scale, and the sum are rounded to the dtype of the adapter, as peft does.
    The result is rounded to the dtype of y.
    """
    return tuple(_exact(x.to(one.down.dtype), y, one) for y, one in zip(ys, adapters, strict=True))


def _exact(x: torch.Tensor, y: torch.Tensor, one: LowRank) -> torch.Tensor:
    return (y + F.linear(F.linear(x, one.down), one.up) * one.scale).to(y.dtype)


def in_passes(x, ys, adapters):
    """The same in two products each, the second of which adds to y; of one row by kernels that start early."""
    wide = {kind: x.to(kind) for kind in {one.down.dtype for one in adapters}}
    return tuple(_added(wide[one.down.dtype], y, one) for y, one in zip(ys, adapters, strict=True))


def _added(x: torch.Tensor, y: torch.Tensor, one: LowRank) -> torch.Tensor:
    if x.numel() == x.shape[-1] and x.dtype == y.dtype and y.is_contiguous() and one.down.shape[0] % 8 == 0:
        return fused_linear(fused_linear(x, one.down), one.up, residual=y, scale=one.scale)
    inner = F.linear(x, one.down).flatten(0, -2)
    rows = y.reshape(inner.shape[0], -1).to(inner.dtype)
    return torch.addmm(rows, inner, one.up.t(), alpha=one.scale).view(y.shape).to(y.dtype)


def supports(x, ys, adapters) -> str | None:
    if x.numel() == 0:
        return "empty"
    if not 1 <= len(ys) <= MOST_SUMS:
        return f"{len(ys)} products, not 1 to {MOST_SUMS}"
    if not x.is_contiguous():
        return "x not contiguous"
    for y, one in zip(ys, adapters, strict=True):
        rank, columns = one.down.shape
        if columns != x.shape[-1] or one.up.shape != (y.shape[-1], rank):
            return f"an adapter {tuple(one.up.shape)} of {tuple(one.down.shape)}"
        if not 1 <= rank <= MOST_RANK:
            return f"rank {rank}, more than {MOST_RANK}"
        if not (one.down.is_contiguous() and one.up.is_contiguous()):
            return "matrices of an adapter not contiguous"
        if y.stride(-1) != 1 or any(y.stride(i) != y.stride(i + 1) * y.shape[i + 1] for i in range(y.dim() - 2)):
            return "rows of a product not evenly spaced"
        kind = one.down.dtype
        if one.up.dtype != kind or kind not in (x.dtype, torch.float32) or y.dtype not in (x.dtype, kind):
            return "x, a product or an adapter of other dtypes"
    if len({one.down.dtype for one in adapters}) > 1:
        return "adapters of different dtypes"
    return dtype_reason(x, *ys, *(t for one in adapters for t in one[:2]))


def pays(x, ys, adapters) -> bool:
    """Whether one launch takes less time than two for each product. By counting: not measured yet."""
    return len(ys) > 1 and x.shape[-1] <= MOST_COLUMNS and x.numel() >= LEAST_ROWS * x.shape[-1]


@random_cases
def _case(rand, *shape, outs, rank, stacked=True, scale=0.5, wide=False):
    kind = torch.float32 if wide else rand.dtype
    x, ranks = rand(*shape), rank if isinstance(rank, tuple) else (rank,) * len(outs)
    ys = rand(*shape[:-1], sum(outs)).split(outs, dim=-1)
    adapters = tuple(
        LowRank(
            rand(r, shape[-1], spread=shape[-1] ** -0.5, dtype=kind),
            rand(n, r, spread=r**-0.5, dtype=kind),
            scale * (i + 1),
        )
        for i, (n, r) in enumerate(zip(outs, ranks, strict=True))
    )
    return (x, tuple(y if stacked else y.contiguous() for y in ys), adapters), {}


CASES = (
    _case("one", 2, 5, 72, outs=(40,), rank=4, small=True),
    _case("three", 2, 21, 64, outs=(48, 24, 33), rank=(2, 16, 20), small=True),
    _case("wide-rank", 1, 17, 136, outs=(70,), rank=128, scale=-1.5, small=True),
    _case("two-apart", 33, 40, outs=(32, 160), rank=8, stacked=False, small=True),
    _case("one-row", 1, 1, 96, outs=(64, 64), rank=16, small=True),
    _case("wide", 2, 7, 72, outs=(40, 24), rank=4, wide=True, small=True),
    _case("sdxl-qkv-16", 2, 1024, 1280, outs=(1280,) * 3, rank=16),
    _case("sdxl-qkv-64", 2, 4096, 640, outs=(640,) * 3, rank=64),
    _case("sdxl-up-16", 2, 1024, 1280, outs=(10240,), rank=16),
    _case("sdxl-down-16", 2, 1024, 5120, outs=(1280,), rank=16),
    _case("llama-qkv-16", 1, 1, 4096, outs=(4096, 1024, 1024), rank=16),
    _case("llama-qkv-16-wide", 1, 1, 4096, outs=(4096, 1024, 1024), rank=16, wide=True),
)

low_rank_sum = make_op("low_rank_sum", reference, supports, CASES, pays=pays, instead=in_passes)
