"""The end of a program of `kv8_decode_kernel`: the new token, and all shares put together, as in `decode`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.attention.paged.kv_quantization_triton import rounded
from accel_kernels.attention.paged.online_softmax_triton import add_token, in_base_2
from accel_kernels.attention.paged.rotary_store_triton import apply_rope
from accel_kernels.attention.paged.split_kv import KV8_MOST_SPLITS
from accel_kernels.attention.paged.store_triton import stored_at
from accel_kernels.gemm.gluon_triton import all_threads

MOST = gl.constexpr(KV8_MOST_SPLITS)
COMBINED = gl.constexpr(16)  # shares that are put together at once


@gluon.jit
def add_new(
    row_max, row_sum, total, query, k_ptr, v_ptr, k_norm, slopes_ptr, table, padding_mask, at, stored, g, kv_heads,
    scale, softcap, d_idx, mate, m_idx, cos, sin, sign, DIM: gl.constexpr, PAIRS: gl.constexpr,
    BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_DTYPE: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Rounds and stores the new key and value, and attends to them."""
    element = query.dtype
    one = gl.arange(0, 1, gl.SliceLayout(1, WIDE))
    row = gl.expand_dims(one, 1)
    mask = (row == 0) & gl.expand_dims(d_idx < DIM, 0)
    k_new = apply_rope(k_ptr + row, k_norm, g, mask, d_idx, mate, d_idx < DIM, cos, sin, sign, DIM, PAIRS)
    v_new = gl.load(v_ptr + row + gl.expand_dims(d_idx, 0), mask=mask, other=0.0)
    k_new, k_scale = rounded(k_new.to(element).to(gl.float32), KV_DTYPE)
    v_new, v_scale = rounded(v_new.to(gl.float32), KV_DTYPE)
    block = gl.load(table + stored // BLOCK).to(gl.int64)
    at_scale = (block * kv_heads + g) * BLOCK + stored % BLOCK + one
    gl.store(stored_at(at, 2, gl.float32) + at_scale, k_scale)
    gl.store(stored_at(at, 3, gl.float32) + at_scale, v_scale)
    place = ((block * BLOCK + stored % BLOCK) * kv_heads + g) * DIM + gl.expand_dims(d_idx, 0) + row
    gl.store(stored_at(at, 0, KV_DTYPE) + place, k_new, mask=mask)
    gl.store(stored_at(at, 1, KV_DTYPE) + place, v_new, mask=mask)
    k_new = k_new.to(gl.float32) * gl.expand_dims(k_scale, 1)
    v_new = v_new.to(gl.float32) * gl.expand_dims(v_scale, 1)
    slope = None
    if slopes_ptr is not None:
        slope = in_base_2(slopes_ptr, g * GROUP + m_idx, m_idx < GROUP)
    padding_mask_ptr = None
    if padding_mask is not None:
        padding_mask_ptr = padding_mask.to(gl.pointer_type(gl.int8))
    return add_token(query, k_new, v_new, row_max, row_sum, total, stored, scale, softcap, slope, padding_mask_ptr)


@gluon.jit
def finish_heads(
    total, row_max, row_sum, o_ptr, scratch, split, splits, active, b, g, heads, m_idx,
    GROUP: gl.constexpr, GROUP_UP: gl.constexpr, DIM: gl.constexpr, WIDE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`online_softmax_triton.finish` of the heads of a group: the last program to finish combines all shares."""
    d_idx = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    unit = gl.program_id(0).to(gl.int64)
    m_mask = m_idx < GROUP
    mask = gl.expand_dims(m_mask, 1) & gl.expand_dims(d_idx < DIM, 0)
    out = gl.expand_dims((b * heads + g * GROUP + m_idx) * DIM, 1) + gl.expand_dims(d_idx, 0)
    if (scratch.sums is None) or (active <= 1):
        if split == 0:
            y = total / gl.expand_dims(gl.where(row_sum == 0.0, 1.0, row_sum), 1)
            gl.store(o_ptr + out, y.to(o_ptr.dtype.element_ty), mask=mask)
    elif split < active:
        mine = (unit * 8 + m_idx) * splits + split
        gl.store(scratch.sums + gl.expand_dims(mine, 1) * DIM + gl.expand_dims(d_idx, 0), total, mask=mask)
        gl.store(scratch.stats + mine * 2, row_max, mask=m_mask)
        gl.store(scratch.stats + mine * 2 + 1, row_sum, mask=m_mask)
        all_threads()
        taken = gl.atomic_add(scratch.split_counters + unit, 1, sem="acq_rel")
        if taken == active - 1:
            gl.atomic_xchg(scratch.split_counters + unit, 0)
            for row in gl.static_range(0, GROUP, min(GROUP_UP, num_warps)):
                _combine(
                    o_ptr + (b * heads + g * GROUP) * DIM, scratch, unit * 8, row, splits, active, GROUP,
                    min(GROUP_UP, num_warps), DIM, WIDE, num_warps,
                )  # fmt: skip


@gluon.jit
def _combine(
    o_ptr, scratch, unit, first, splits, active, GROUP: gl.constexpr, ROWS: gl.constexpr,
    DIM: gl.constexpr, WIDE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Puts the shares of ROWS heads together."""
    SHARES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 128 // DIM, DIM // 4], [ROWS, num_warps // ROWS, 1], [2, 1, 0]
    )
    OUT: gl.constexpr = gl.SliceLayout(1, SHARES)
    EACH: gl.constexpr = gl.SliceLayout(2, SHARES)
    m_idx = first + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    s_idx = gl.arange(0, MOST, gl.SliceLayout(0, WIDE))
    all_stats = gl.expand_dims((unit + m_idx) * splits, 1) + gl.expand_dims(s_idx, 0)
    there = gl.expand_dims(m_idx < GROUP, 1) & gl.expand_dims(s_idx < active, 0)
    tops = gl.load(scratch.stats + all_stats * 2, mask=there, other=-float("inf"))
    sums = gl.load(scratch.stats + all_stats * 2 + 1, mask=there, other=0.0)
    top = gl.max(tops, axis=1)
    top = gl.where(top == -float("inf"), 0.0, top)
    total = gl.sum(sums * gl.exp2(tops - gl.expand_dims(top, 1)), axis=1)
    total = gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, OUT)), 1)
    top = gl.expand_dims(gl.convert_layout(top, gl.SliceLayout(1, EACH)), 1)

    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, EACH))
    d_idx = gl.expand_dims(gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(0, SHARES))), 0), 0)
    y = gl.zeros([ROWS, DIM], gl.float32, OUT)
    for early in range(0, active, COMBINED):
        shares = early + gl.arange(0, COMBINED, gl.SliceLayout(0, EACH))
        theirs = gl.expand_dims((unit + rows) * splits, 1) + gl.expand_dims(shares, 0)
        some = gl.expand_dims(rows < GROUP, 1) & gl.expand_dims(shares < active, 0)
        weights = gl.exp2(gl.load(scratch.stats + theirs * 2, mask=some, other=-float("inf")) - top)
        mask = gl.expand_dims(some, 2) & (d_idx < DIM)
        parts = gl.load(scratch.sums + gl.expand_dims(theirs, 2) * DIM + d_idx, mask=mask, other=0.0)
        y += gl.sum(parts * gl.expand_dims(weights, 2), axis=1)
    y = y / gl.where(total == 0.0, 1.0, total)
    m_out = first + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, OUT)), 1)
    d_out = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, OUT)), 0)
    gl.store(o_ptr + m_out * DIM + d_out, y.to(o_ptr.dtype.element_ty), mask=(m_out < GROUP) & (d_out < DIM))
