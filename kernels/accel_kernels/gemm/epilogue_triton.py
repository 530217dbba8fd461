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
def store_rows(y, other, row, n_idx, n_mask, m_idx, m_mask, n, weight, up, after, y_ptr, SCALED: tl.constexpr,
               GATE: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    """Stores what follows the sums (N, M) of rows `n_idx` of a weight and `m_idx` of x. row: n_idx, the last one for
    what lies beyond. SCALED: the sums are; otherwise each row of the weight has one scale.
    """
    if not SCALED:
        y *= tl.load(weight.scales + row).to(tl.float32)[:, None]
        if GATE:
            other *= tl.load(up.scales + row).to(tl.float32)[:, None]
    n_col, n_col_mask = n_idx[:, None], n_mask[:, None]
    y = epilogue(y, other, n_col, n_col_mask, None, None, after, GATE, ACTIVATION)
    store_sum(y, m_idx[None, :].to(tl.int64) * n + n_col, m_mask[None, :] & n_col_mask, after, y_ptr)


@triton.jit
def loaded(place, mask, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """What is at these places, 0 where nothing is. EVEN: there is something everywhere."""
    if EVEN:
        return tl.load(place, eviction_policy=POLICY)
    else:
        return tl.load(place, mask=mask, other=0, eviction_policy=POLICY)


@triton.jit
def low_rank_operands(
    n_idx, n_mask, low, RANK: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr
):
    """What `low_rank_sums` takes, loaded ahead. low: `LowRankArguments`. ROWS: of A; COPIES: see `hand_on`.

    Places of x A^T, what is there now, and B, for the weight; and for its gate, or the same again.
    """
    r_idx = tl.arange(0, RANK)
    place = n_idx[:, None] * RANK + r_idx[None, :]
    part = (n_idx >= low.first).to(tl.int32) + (n_idx >= low.second).to(tl.int32)
    base = low.inner
    if low.tagged is not None:
        base = low.tagged + tl.program_id(0) % COPIES * ROWS
    at = base + part[:, None] * RANK + r_idx[None, :]
    up = tl.load(low.up + place, mask=n_mask[:, None], other=0.0)
    found = tl.load(at, volatile=True)
    if GATE:
        gate_at = base + RANK + r_idx[None, :] + part[:, None] * 0
        gate_up = tl.load(low.gate_up + place, mask=n_mask[:, None], other=0.0)
        operands = (at, found, up, gate_at, tl.load(gate_at, volatile=True), gate_up)
    else:
        operands = (at, found, up, at, found, up)
    return operands


@triton.jit
def low_rank_sums(y, other, operands, step, GATE: tl.constexpr):
    """The sums of one row, plus those of adapters. step: of what programs of this launch hand on; None of no such."""
    y += tl.sum(operands[2].to(tl.float32) * _arrived(operands[0], operands[1], step), axis=1)
    if GATE:
        other += tl.sum(operands[5].to(tl.float32) * _arrived(operands[3], operands[4], step), axis=1)
    return y, other


@triton.jit
def _arrived(at, found, step):
    """Numbers of x A^T, as soon as all of them are there."""
    if step is None:
        values = found.to(tl.float32)
    else:
        while tl.max(((found >> 32) != step).to(tl.int32).reshape(found.numel)) > 0:
            found = tl.load(at, volatile=True)
        values = (found & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return values


@triton.jit
def hand_on(low, step, row, value, ROWS: tl.constexpr, COPIES: tl.constexpr):
    """Gives a number of x A^T to other programs: value and step in 64 bits, which are written at once."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
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
