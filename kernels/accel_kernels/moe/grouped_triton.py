"""Many tokens: pairs of token and choice sorted by expert, then products of tiles of rows that share one.

`group_kernel` sorts the pairs. `grouped_up_kernel` and `grouped_down_kernel` multiply tiles of up to ROWS pairs of one
expert. `shared_sum_kernel` adds up each token's choices in their order, so that equal calls give equal bits. The host
waits for nothing. Sums are in fp32, what lies between two kernels is in the dtype of x.

Each kernel may start before the one in front has ended, and releases the next one only after its own wait. So what is
older than the kernel in front is complete. It is read before the wait, past the L1 cache, which may be stale.

Expert e has the tiles from starts[e] // ROWS + e on: room for all of its pairs whatever the others have. The host
launches pairs // ROWS + experts tiles; one without pairs has expert -1 in `tiles`, and its programs leave at once.
"""

import triton
import triton.language as tl

from accel_kernels.gemm.quantized_weight import PackedWeight
from accel_kernels.moe.gating_triton import apply_gating, gate_and_up_rows, placed_weight
from accel_kernels.moe.quantized_products_triton import quantized_sums, scaled, shifted


@triton.jit(do_not_specialize=("pairs", "experts", "rows"))
def group_kernel(
    index_ptr, order_ptr, starts_ptr, tiles_ptr, pairs, experts, rows, ONCE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One expert a program. order: (pairs,) int32; starts: (experts + 1,) int32; tiles: int32, see above.

    rows: pairs to a tile. ONCE: there are at most BLOCK pairs, which are then read once.
    """
    expert = tl.program_id(0)
    idx = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ONCE:
        found = tl.load(index_ptr + idx, mask=idx < pairs, other=-1)
        mine = (found == expert).to(tl.int32)
        first, count = tl.sum(((found >= 0) & (found < expert)).to(tl.int32), axis=0), tl.sum(mine, axis=0)
        tl.store(order_ptr + first + tl.cumsum(mine, axis=0) - 1, idx, mask=mine != 0)
    else:
        below = tl.zeros((BLOCK,), tl.int32)
        own = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, pairs, BLOCK):
            found = tl.load(index_ptr + start + idx, mask=start + idx < pairs, other=-1)
            below += ((found >= 0) & (found < expert)).to(tl.int32)
            own += (found == expert).to(tl.int32)
        first, count = tl.sum(below, axis=0), tl.sum(own, axis=0)
        place = first
        for start in range(0, pairs, BLOCK):
            found = tl.load(index_ptr + start + idx, mask=start + idx < pairs, other=-1)
            mine = (found == expert).to(tl.int32)
            tl.store(order_ptr + place + tl.cumsum(mine, axis=0) - 1, start + idx, mask=mine != 0)
            place += tl.sum(mine, axis=0)
    tl.store(starts_ptr + expert, first)
    begin, end = first // rows + expert, (first + count) // rows + expert + 1
    if expert == experts - 1:
        tl.store(starts_ptr + experts, first + count)
        end = pairs // rows + experts  # pairs of no expert take no place
    for tile in range(begin, end):
        tl.store(tiles_ptr + tile, tl.where((tile - begin) * rows < count, expert, -1))


@triton.jit(do_not_specialize=("chosen",))
def grouped_up_kernel(
    x_ptr, weight, bias_ptr, places_ptr, order_ptr, starts_ptr, tiles_ptr, h_ptr, chosen, inner,
    K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr, GATING: tl.constexpr, INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    UPCAST: tl.constexpr, UNPACK_MODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TAIL: rows of a product for so few pairs; 0 where all have ROWS. UNIT, GROUPS: as in
    `quantized_products_triton`."""
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    first, end = places_of_tile(tile, expert, starts_ptr, ROWS)
    given = x_ptr, weight, bias_ptr, places_ptr, order_ptr, h_ptr, chosen, inner, expert, first, end
    if TAIL > 0 and end - first <= TAIL:
        up_rows(*given, K, UNIT, GROUPS, GATING, INTERLEAVED, TRANSPOSED, TAIL, COLUMNS, DEPTH, UPCAST, UNPACK_MODE)
    else:
        up_rows(*given, K, UNIT, GROUPS, GATING, INTERLEAVED, TRANSPOSED, ROWS, COLUMNS, DEPTH, UPCAST, UNPACK_MODE)


@triton.jit
def up_rows(
    x_ptr, weight, bias_ptr, places_ptr, order_ptr, h_ptr, chosen, inner, expert, first, end,
    K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr, GATING: tl.constexpr, INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr,
    UNPACK_MODE: tl.constexpr,
):  # fmt: skip
    """Stores the inner channels of the pairs at the places from `first` on; returns `first`."""
    row_idx = first + tl.arange(0, ROWS)
    row_mask = row_idx < end
    token = tl.load(order_ptr + row_idx, mask=row_mask, other=0) // chosen
    n_idx = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n_mask = n_idx < inner
    k_idx = tl.arange(0, DEPTH)
    expert = expert.to(tl.int64)
    PRODUCTS: tl.constexpr = 2 if GATING.gated else 1
    if places_ptr is not None:
        words, scales, zeros = placed_weight(weight, places_ptr, expert)
        weight = PackedWeight(words, None if weight.scales is None else scales, None if weight.zeros is None else zeros)
    w_ptr = weight.words
    x_place = x_ptr + token.to(tl.int64)[:, None] * K + k_idx[None, :]
    if weight.scales is not None:
        gate_row, up_row = gate_and_up_rows(expert, n_idx, inner, INTERLEAVED, PRODUCTS)
        x_row = x_ptr + token.to(tl.int64) * K
        up, gate = quantized_sums(
            x_row, row_mask, weight, up_row, gate_row, K, UNIT, GROUPS, ROWS, COLUMNS, PRODUCTS, DEPTH, UPCAST,
            UNPACK_MODE,
        )  # fmt: skip
        gate, up = scaled(gate, weight, gate_row, GROUPS), scaled(up, weight, up_row, GROUPS)
        gate, up = shifted(gate, bias_ptr, gate_row), shifted(up, bias_ptr, up_row)
    elif PRODUCTS == 1:
        w_place = stack_places(w_ptr, expert, n_idx, k_idx, inner, K, TRANSPOSED)
        up = stack_product(x_place, w_place, row_mask, n_mask, k_idx, inner, K, TRANSPOSED, DEPTH, UPCAST)
        if bias_ptr is not None:
            up += tl.load(bias_ptr + expert * inner + n_idx, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        gate = up
    elif INTERLEAVED:  # gates and ups in one product, told apart at the end
        wide_idx = tl.program_id(1) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)
        wide_mask = wide_idx < 2 * inner
        w_place = stack_places(w_ptr, expert, wide_idx, k_idx, 2 * inner, K, TRANSPOSED)
        wide = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
        for step in range(0, K, DEPTH):
            x = loaded_tile(x_place + step, row_mask[:, None], (k_idx < K - step)[None, :], K, DEPTH)
            w = loaded_tile(
                along_inputs(w_place, step, 2 * inner, TRANSPOSED), wide_mask[None, :], (k_idx < K - step)[:, None],
                K, DEPTH,
            )  # fmt: skip
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            wide = tl.dot(x, w, wide, input_precision="ieee")
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * 2 * inner + wide_idx, mask=wide_mask, other=0.0)
            wide += bias.to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(wide, (ROWS, COLUMNS, 2)))
    else:
        gate_place = stack_places(w_ptr, expert, n_idx, k_idx, 2 * inner, K, TRANSPOSED)
        up_place = stack_places(w_ptr, expert, inner + n_idx, k_idx, 2 * inner, K, TRANSPOSED)
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(0, K, DEPTH):
            k_mask = k_idx < K - step
            x = loaded_tile(x_place + step, row_mask[:, None], k_mask[None, :], K, DEPTH)
            w = loaded_tile(
                along_inputs(gate_place, step, 2 * inner, TRANSPOSED), n_mask[None, :], k_mask[:, None], K, DEPTH
            )
            u = loaded_tile(
                along_inputs(up_place, step, 2 * inner, TRANSPOSED), n_mask[None, :], k_mask[:, None], K, DEPTH
            )
            if UPCAST:
                x, w, u = x.to(tl.float32), w.to(tl.float32), u.to(tl.float32)
            gate = tl.dot(x, w, gate, input_precision="ieee")
            up = tl.dot(x, u, up, input_precision="ieee")
        if bias_ptr is not None:
            bias_ptr += expert * 2 * inner
            gate += tl.load(bias_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + inner + n_idx, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    y = apply_gating(gate, up, GATING)
    place = h_ptr + row_idx.to(tl.int64)[:, None] * inner + n_idx[None, :]
    tl.store(place, y.to(h_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])
    return first


@triton.jit
def grouped_down_kernel(
    h_ptr, weight, bias_ptr, places_ptr, order_ptr, starts_ptr, tiles_ptr, y_ptr, hidden,
    K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
    TAIL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr, UNPACK_MODE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """TAIL: see `grouped_up_kernel`."""
    tile = tl.program_id(0)
    expert = tl.load(tiles_ptr + tile, cache_modifier=".cg")
    if expert < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    first, end = places_of_tile(tile, expert, starts_ptr, ROWS)
    given = h_ptr, weight, bias_ptr, places_ptr, order_ptr, y_ptr, hidden, expert, first, end
    if TAIL > 0 and end - first <= TAIL:
        down_rows(*given, K, UNIT, GROUPS, TRANSPOSED, TAIL, COLUMNS, DEPTH, UPCAST, UNPACK_MODE, PDL)
    else:
        down_rows(*given, K, UNIT, GROUPS, TRANSPOSED, ROWS, COLUMNS, DEPTH, UPCAST, UNPACK_MODE, PDL)


@triton.jit
def down_rows(
    h_ptr, weight, bias_ptr, places_ptr, order_ptr, y_ptr, hidden, expert, first, end,
    K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr, UNPACK_MODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stores what the expert makes of the pairs at the places from `first` on; returns `first`."""
    row_idx = first + tl.arange(0, ROWS)
    row_mask = row_idx < end
    n_idx = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n_mask = n_idx < hidden
    k_idx = tl.arange(0, DEPTH)
    expert = expert.to(tl.int64)
    if places_ptr is not None:
        words, scales, zeros = placed_weight(weight, places_ptr, expert)
        weight = PackedWeight(words, None if weight.scales is None else scales, None if weight.zeros is None else zeros)
    w_row = expert * hidden + tl.minimum(n_idx, hidden - 1)
    h_row = h_ptr + row_idx.to(tl.int64) * K
    h_place = h_ptr + row_idx.to(tl.int64)[:, None] * K + k_idx[None, :]
    w_place = stack_places(weight.words, expert, n_idx, k_idx, hidden, K, TRANSPOSED)
    pair = tl.load(order_ptr + row_idx, mask=row_mask, other=0, cache_modifier=".cg").to(tl.int64)
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if weight.scales is not None:
        y, _ = quantized_sums(
            h_row, row_mask, weight, w_row, w_row, K, UNIT, GROUPS, ROWS, COLUMNS, 1, DEPTH, UPCAST, UNPACK_MODE
        )
        y = shifted(scaled(y, weight, w_row, GROUPS), bias_ptr, w_row)
    else:
        y = stack_product(h_place, w_place, row_mask, n_mask, k_idx, hidden, K, TRANSPOSED, DEPTH, UPCAST)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + expert * hidden + n_idx, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    mask = row_mask[:, None] & n_mask[None, :]
    tl.store(y_ptr + pair[:, None] * hidden + n_idx[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    return first


@triton.jit
def places_of_tile(tile, expert, starts_ptr, ROWS: tl.constexpr):
    """Where a tile's pairs begin in `order`, and where its expert's end."""
    start = tl.load(starts_ptr + expert, cache_modifier=".cg")
    end = tl.load(starts_ptr + expert + 1, cache_modifier=".cg")
    return start + (tile - start // ROWS - expert) * ROWS, end


@triton.jit
def stack_places(w_ptr, expert, n_idx, k_idx, n, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Where the tile (inputs, outputs) of an expert's matrix begins: one of (outputs n, inputs K), or transposed."""
    if TRANSPOSED:
        return w_ptr + expert * n * K + k_idx.to(tl.int64)[:, None] * n + n_idx[None, :]
    else:
        return w_ptr + expert * n * K + n_idx.to(tl.int64)[None, :] * K + k_idx[:, None]


@triton.jit
def stack_product(
    x_place, w_place, row_mask, n_mask, k_idx, n, K: tl.constexpr, TRANSPOSED: tl.constexpr, DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows times outputs, of n, of an expert's matrix. Places: of the first inputs, k_idx."""
    y = tl.zeros((row_mask.shape[0], n_mask.shape[0]), tl.float32)
    for step in range(0, K, DEPTH):
        k_mask = k_idx < K - step
        x = loaded_tile(x_place + step, row_mask[:, None], k_mask[None, :], K, DEPTH)
        w = loaded_tile(along_inputs(w_place, step, n, TRANSPOSED), n_mask[None, :], k_mask[:, None], K, DEPTH)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w, y, input_precision="ieee")
    return y


@triton.jit
def along_inputs(place, step, n, TRANSPOSED: tl.constexpr):
    """The places so many inputs further on."""
    if TRANSPOSED:
        return place + step * n
    else:
        return place + step


@triton.jit
def loaded_tile(place, mask, k_mask, K: tl.constexpr, DEPTH: tl.constexpr):
    """The tile; zeros beyond the K inputs."""
    if K % DEPTH == 0:
        return tl.load(place, mask=mask, other=0.0)
    else:
        return tl.load(place, mask=mask & k_mask, other=0.0)


@triton.jit(do_not_specialize=("chosen", "experts"))
def shared_sum_kernel(
    pairs_ptr, index_ptr, shares_ptr, y_ptr, chosen, experts, hidden, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Shares times what the experts gave, one token a program, all choices at once. CHOICES: a power of two.

    A pair of no expert has nothing in `pairs`.
    """
    token = tl.program_id(0).to(tl.int64)
    n_idx = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n_mask = n_idx < hidden
    c_idx = tl.arange(0, CHOICES)
    choice = token * chosen + c_idx
    expert = tl.load(index_ptr + choice, mask=c_idx < chosen, other=-1, cache_modifier=".cg")
    share = tl.load(shares_ptr + choice, mask=c_idx < chosen, other=0.0, cache_modifier=".cg").to(tl.float32)
    there = (expert >= 0) & (expert < experts)
    share = tl.where(there, share, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = pairs_ptr + choice[:, None] * hidden + n_idx[None, :]
    given = tl.load(place, mask=there[:, None] & n_mask[None, :], other=0.0).to(tl.float32)
    y = tl.sum(share[:, None] * given, axis=0)
    tl.store(y_ptr + token * hidden + n_idx, y.to(y_ptr.dtype.element_ty), mask=n_mask)
