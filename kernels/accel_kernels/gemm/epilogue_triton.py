"""Parts of products inside kernels: the order of tiles, and the `Epilogue`, what follows the sums in fp32."""

import triton
import triton.language as tl

from accel_kernels.elementwise.activations_triton import activate


@triton.jit
def tile_place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile. GROUP rows of tiles go along the columns together, and share weights in L2."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + tile % (GROUP * tiles_n) % height, tile % (GROUP * tiles_n) // height


@triton.jit
def epilogue(y, other, n_idx, n_mask, scales_ptr, up_scales_ptr, after, GATE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Scales, bias, activation, gate, scale and modulation of a block of sums; `store_sum` adds what is added.

    y, other: the sums of the weight and of its gate's. n_idx: rows of the weight, as they lie in y. scales_ptr,
    up_scales_ptr: scales of those rows, which the sums still lack, or None. after: `EpilogueArguments`.
    """
    if scales_ptr is not None:
        y *= tl.load(scales_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    if after.bias is not None:
        y += tl.load(after.bias + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    y = activate(y, ACTIVATION)
    if GATE:
        if scales_ptr is not None:
            other *= tl.load(up_scales_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
        if after.bias is not None:
            other += tl.load(after.up_bias + n_idx, mask=n_mask, other=0.0).to(tl.float32)
        y *= other
    y *= after.scale
    if after.modulation is not None:
        y *= tl.load(after.modulation + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def low_rank_sums(
    y, other, n_idx, n_mask, low, RANK: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr
):
    """The sums of one row, plus those of adapters. low: `LowRankArguments`. ROWS: of A; COPIES: see `hand_on`."""
    r_idx = tl.arange(0, RANK)
    place = n_idx[:, None] * RANK + r_idx[None, :]
    part = (n_idx >= low.first).to(tl.int32) + (n_idx >= low.second).to(tl.int32)
    up = tl.load(low.up + place, mask=n_mask[:, None], other=0.0).to(tl.float32)
    y += tl.sum(up * _inner(low, part[:, None] * RANK + r_idx[None, :], ROWS, COPIES), axis=1)
    if GATE:
        up = tl.load(low.gate_up + place, mask=n_mask[:, None], other=0.0).to(tl.float32)
        other += tl.sum(up * _inner(low, RANK + r_idx[None, :], ROWS, COPIES), axis=1)
    return y, other


@triton.jit
def _inner(low, place, ROWS: tl.constexpr, COPIES: tl.constexpr):
    """x A^T at these places; what other programs of this launch hand on, as soon as all of it is there."""
    if low.tagged is None:
        found = tl.load(low.inner + place).to(tl.float32)
    else:
        step = tl.load(low.step).to(tl.int64)
        at = low.tagged + tl.program_id(0) % COPIES * ROWS + place
        handed = tl.load(at, volatile=True)
        while tl.max(((handed >> 32) != step).to(tl.int32).reshape(at.numel)) > 0:
            handed = tl.load(at, volatile=True)
        found = (handed & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return found


@triton.jit
def hand_on(low, row, value, ROWS: tl.constexpr, COPIES: tl.constexpr):
    """Gives a number of x A^T to other programs: value and step in 64 bits, which are written at once."""
    step, bits = tl.load(low.step).to(tl.int64), value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    copies = tl.arange(0, COPIES)
    tl.store(low.tagged + copies * ROWS + row, (step << 32 | bits) + tl.zeros_like(copies))


@triton.jit
def sigmoid_share(after, m_idx, m_mask):
    """By what the sums of these rows are multiplied."""
    return 1.0 / (1.0 + tl.exp(-tl.load(after.share + m_idx, mask=m_mask, other=0.0).to(tl.float32)))


@triton.jit
def store_sum(y, place, mask, after, y_ptr):
    """Stores at `place` what `epilogue` gives, plus the addend and the residual that lie at the same place."""
    if after.addend is not None:
        y += tl.load(after.addend + place, mask=mask, other=0.0).to(tl.float32) * after.scale
    if after.residual is not None:
        y += tl.load(after.residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)
