"""`decode` over int8 or fp8 keys and values at the speed of the memory: up to 8 heads a group, 64 or 128 channels.

Every warp attends to 16 of the 64 tokens of a block, with products as in `kv8_mma_triton`. Warps share nothing and have
no barrier before the end. A warp loads the next block into registers that the codes of this one no longer need.

The weight of a value is exp2(score + log2(scale)), scaled so that the largest is 2^14; fp16 ends at 65504. So neither
small scales nor small probabilities leave the range of fp16 while they still count.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.attention.paged.kv8.kv8_merge_triton import add_new, finish_heads
from accel_kernels.attention.paged.kv8.kv8_mma_triton import (
    add_values,
    exp2,
    joined,
    key_scores,
    load_four,
    load_word,
    load_words,
    log2_and_inverse,
    of_lane,
    quad_max,
    registers,
    two_halves,
)
from accel_kernels.attention.paged.kv_quantization_triton import fitted
from accel_kernels.attention.paged.online_softmax_triton import IN_BASE_2, capped, in_base_2
from accel_kernels.attention.paged.rotary_store_triton import angle_of, apply_rope, mates
from accel_kernels.attention.paged.store_triton import AT_COLUMNS, AT_LAYERS, AT_PADDING_MASK, OF_EACH, row_of, share_of
from accel_kernels.sizes import power_of_two

BLOCK = gl.constexpr(64)  # tokens of a block of the store, 16 to a warp
HEADS = 8  # columns of a product
TOP = gl.constexpr(14.0)  # the largest weight, in base 2
power_of_two_up = gluon.constexpr_function(power_of_two)


@gluon.jit
def _load_keys(keys, row, limit, stride, WORDS: gl.constexpr):
    return load_words(gl.minimum(row, limit), stride, keys, WORDS, 64, 4)


@gluon.jit
def _load_values(values, row, limit, stride, WORDS: gl.constexpr):
    return load_words(gl.minimum(row, limit), stride, values, WORDS, 128, min(WORDS, 4))


@gluon.jit(do_not_specialize=("layer", "window", "splits", "few_splits"))
def kv8_decode_kernel(
    q, k, v, o_ptr, angles, q_norm, k_norm, scratch, sinks_ptr, slopes_ptr, metadata_ptr,
    ragged, layer, heads, kv_heads, scale, window, softcap, splits, few_splits,
    GROUP: gl.constexpr, DIM: gl.constexpr, PAIRS: gl.constexpr, INTERLEAVED: gl.constexpr,
    HAS_PADDING_MASK: gl.constexpr, LEAST: gl.constexpr, KV_DTYPE: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    INTEGERS: gl.constexpr = KV_DTYPE == gl.int8
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [num_warps, 1], [1, 0])
    # Registers, lanes and warps of queries as operands: (16 of each 64 channels; t, g; all the same).
    FRAGMENT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]] + [[0, 64]] * (DIM // 128), [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]], [], [8, DIM],
    )  # fmt: skip
    K_WORDS: gl.constexpr = DIM // 16  # of a token, a thread
    V_WORDS: gl.constexpr = DIM // 32
    element = q.data.dtype.element_ty
    b = (gl.program_id(0) // kv_heads).to(gl.int64)
    g = (gl.program_id(0) % kv_heads).to(gl.int64)
    split = gl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    stored, table = row_of(metadata_ptr, layer, b, ragged)
    at = metadata_ptr + AT_LAYERS + OF_EACH * layer
    keys, values = gl.load(at) + g * DIM, gl.load(at + 1) + g * DIM
    k_scales, v_scales = gl.load(at + 2) + g * (4 * BLOCK), gl.load(at + 3) + g * (4 * BLOCK)
    padding_mask = None
    if HAS_PADDING_MASK:
        padding_mask = gl.load(metadata_ptr + AT_PADDING_MASK) + b * gl.load(metadata_ptr + AT_COLUMNS) * BLOCK
    if k is None:  # the new token is stored already, by a kernel that may not have ended
        stored += 1
        if window is not None:
            window += 1
        if PDL:
            tl.extra.cuda.gdc_wait()
    blocks, start, stop, active = share_of(stored, window, split, splits, few_splits, True, BLOCK, LEAST)
    if ragged is not None:  # behind the decodes there is none
        active = gl.where(b < gl.load(ragged.counts), active, 0)

    # A thread is (warp, g, t), its head lane_g of the group; tokens and channels are those of `code_fragments`.
    warp = gl.expand_dims(gl.arange(0, num_warps, gl.SliceLayout(1, LANES)), 1)
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, LANES)), 0)
    lane_g = lane // 4 + warp * 0
    t = lane % 4 + warp * 0
    token = 16 * warp + 4 * t
    key = 16 * warp + 4 * (lane_g // 2) + lane_g % 2
    one = warp * 0 + lane * 0 + 1
    stride = kv_heads * DIM * one
    k_channel = (16 * t).to(gl.int64)
    v_channel = (4 * min(V_WORDS, 4) * lane_g).to(gl.int64)
    scale_place = (4 * token).to(gl.int64)

    last = gl.maximum(gl.minimum(stop, blocks) - 1, 0)
    near = gl.minimum(start, last)
    block = gl.load(table + near).to(gl.int64)
    block_after = gl.load(table + gl.minimum(near + 1, last)).to(gl.int64)
    limit = gl.maximum(stored - 1 - near * BLOCK, 0)
    place = block * BLOCK * kv_heads
    k_now = _load_keys(keys + place * DIM + k_channel, key, limit, stride, K_WORDS)
    k_two = _load_keys(keys + place * DIM + k_channel, key + 2, limit, stride, K_WORDS)
    k_scale = load_four(k_scales + 4 * place + scale_place)
    v_scale = load_four(v_scales + 4 * place + scale_place)
    seen_now = lane_g
    if HAS_PADDING_MASK:
        seen_now = load_word(padding_mask + near * BLOCK + token)
    v_base = values + place * DIM + v_channel
    v_a = _load_values(v_base, token, limit, stride, V_WORDS)
    v_b = _load_values(v_base, token + 1, limit, stride, V_WORDS)
    v_c = _load_values(v_base, token + 2, limit, stride, V_WORDS)
    v_d = _load_values(v_base, token + 3, limit, stride, V_WORDS)

    if PDL:
        tl.extra.cuda.gdc_wait()
    d_idx = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    m_idx = gl.arange(0, 8, gl.SliceLayout(1, WIDE))
    d_mask, m_mask = d_idx < DIM, m_idx < GROUP
    if split >= active:
        if ragged is not None:  # of no sequence zeros come out
            zero_place = gl.expand_dims((b * heads + g * GROUP + m_idx) * DIM, 1) + gl.expand_dims(d_idx, 0)
            zero_mask = gl.expand_dims(m_mask, 1) & gl.expand_dims(d_mask & (split + active == 0), 0)
            gl.store(o_ptr + zero_place, gl.zeros([8, DIM], o_ptr.dtype.element_ty, WIDE), mask=zero_mask)
        return
    mate, sign, pair = mates(d_idx, PAIRS, INTERLEAVED)
    cos, sin = angle_of(angles.cos, angles.sin, b * angles.row + pair * angles.pair, d_idx, PAIRS)
    head = g * GROUP + m_idx
    q_heads = q.data + b * q.row + gl.expand_dims(head, 1) * q.head
    q_mask = gl.expand_dims(m_mask, 1) & gl.expand_dims(d_mask, 0)
    query = apply_rope(q_heads, q_norm, b, q_mask, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS)
    query = query.to(element)
    halves, unit = fitted(query)
    halves = gl.convert_layout(halves, FRAGMENT).to(gl.int16, bitcast=True)
    low, high = gl.split(gl.reshape(halves, [8, DIM // 2, 2]))
    pairs = (low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16)
    pairs = gl.permute(gl.reshape(pairs, [8, DIM // 64, 4, 8]), (0, 2, 1, 3))
    queries = registers(gl.reshape(pairs, [32, DIM // 8]), LANES)
    q_scale = gl.reshape(gl.expand_dims(unit * scale, 1) + gl.zeros([8, 4], gl.float32, WIDE), [32])
    q_scale = gl.expand_dims(gl.convert_layout(q_scale, gl.SliceLayout(0, LANES)), 0) + (0 * warp).to(gl.float32)

    slope = q_scale * 0.0
    row_max = gl.full([num_warps, 32], -float("inf"), gl.float32, LANES)
    row_sum = gl.zeros([num_warps, 32], gl.float32, LANES)
    some_head = lane_g < GROUP
    if slopes_ptr is not None:
        slope = in_base_2(slopes_ptr, g * GROUP + lane_g, some_head)
    if sinks_ptr is not None:
        if split == 0:
            sink = in_base_2(sinks_ptr, g * GROUP + lane_g, some_head)
            row_max = gl.where(warp == 0, sink, row_max)
            row_sum = gl.where((warp == 0) & (t == 0), 16384.0, row_sum)  # 2^TOP
    acc = ()
    for _ in gl.static_range(V_WORDS):
        acc = acc + ((gl.zeros([num_warps, 32], gl.float32, LANES),) * 8,)

    for i in range(start, stop):
        two = key_scores(k_now, queries, K_WORDS, INTEGERS)
        others = key_scores(k_two, queries, K_WORDS, INTEGERS)
        products = (two[0], two[1], others[0], others[1])
        after = gl.minimum(i + 1, last)
        limit = stored - 1 - after * BLOCK
        place = block_after * BLOCK * kv_heads
        k_base = keys + place * DIM + k_channel
        k_now = _load_keys(k_base, key, limit, stride, K_WORDS)
        k_two = _load_keys(k_base, key + 2, limit, stride, K_WORDS)
        block_after = gl.load(table + gl.minimum(i + 2, last)).to(gl.int64)
        if i * BLOCK < stored:  # always; so that the compiler does not put off the loads before it
            scores = ()
            inverses = ()
            for j in gl.static_range(4):
                n = i * BLOCK + token + j
                seen = n < stored
                if window is not None:
                    seen = seen & (n > stored - window)
                if HAS_PADDING_MASK:
                    seen = seen & (((seen_now >> (8 * j)) & 255) != 0)
                log_scale, inverse = log2_and_inverse(gl.where(seen, v_scale[j], 1.0))
                if softcap is not None:
                    score = capped(products[j] * (q_scale * k_scale[j]), softcap)
                else:
                    score = products[j] * (q_scale * IN_BASE_2 * k_scale[j])
                if slopes_ptr is not None:
                    score += slope * n
                scores = scores + (gl.where(seen, score + log_scale, -float("inf")),)
                inverses = inverses + (inverse,)
            k_scale = load_four(k_scales + 4 * place + scale_place)
            v_scale = load_four(v_scales + 4 * place + scale_place)
            if HAS_PADDING_MASK:
                seen_now = load_word(padding_mask + after * BLOCK + token)
            best = gl.maximum(gl.maximum(scores[0], scores[1]), gl.maximum(scores[2], scores[3]))
            new_max = gl.maximum(row_max, quad_max(best))
            top = gl.where(new_max == -float("inf"), 0.0, new_max)  # nothing seen yet: keep infinities apart
            shrink = exp2(row_max - top)
            row_max = new_max
            row_sum *= shrink
            weights = ()
            for j in gl.static_range(4):
                weight = exp2(scores[j] - (top - TOP))
                row_sum += weight * inverses[j]
                weights = weights + (weight,)
            w_low = two_halves(weights[0], weights[1])
            w_high = two_halves(weights[2], weights[3])
            # Accumulators belong to heads 2 t and 2 t + 1, everything else to head lane_g.
            even, odd = of_lane(shrink, 8 * t), of_lane(shrink, 8 * t + 4)
            more = ()
            for w in gl.static_range(V_WORDS):
                kept = ()
                for j in gl.static_range(4):
                    kept = kept + (acc[w][2 * j] * even, acc[w][2 * j + 1] * odd)
                more = more + (add_values(v_a[w], v_b[w], v_c[w], v_d[w], w_low, w_high, kept, INTEGERS),)
            acc = more
            v_base = values + place * DIM + v_channel
            v_a = _load_values(v_base, token, limit, stride, V_WORDS)
            v_b = _load_values(v_base, token + 1, limit, stride, V_WORDS)
            v_c = _load_values(v_base, token + 2, limit, stride, V_WORDS)
            v_d = _load_values(v_base, token + 3, limit, stride, V_WORDS)

    # Of every warp, head lane_g; then of all, (heads, channels).
    row_max -= TOP
    top = gl.expand_dims(gl.max(row_max, axis=0), 0)
    shrink = exp2(row_max - gl.where(top == -float("inf"), 0.0, top))
    even, odd = of_lane(shrink, 8 * t), of_lane(shrink, 8 * t + 4)
    parts = ()
    for w in gl.static_range(V_WORDS):
        for j in gl.static_range(4):
            parts = parts + (acc[w][2 * j] * even, acc[w][2 * j + 1] * odd)
    OF_WARPS: gl.constexpr = gl.BlockedLayout(
        [num_warps, 1, 8], [1, 256 // DIM, DIM // 8], [1, num_warps, 1], [2, 1, 0]
    )
    parts = gl.permute(gl.reshape(joined(parts), [num_warps, 8, 4, DIM // 8, 2]), (0, 2, 4, 1, 3))
    sums = gl.allocate_shared_memory(gl.float32, [num_warps, 8, DIM], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
    sums.store(gl.reshape(parts, [num_warps, 8, DIM]))
    total = gl.convert_layout(gl.sum(sums.load(OF_WARPS), axis=0), WIDE)
    row_sum = gl.sum(gl.reshape(gl.sum(row_sum * shrink, axis=0), [8, 4]), axis=1)
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, WIDE))
    row_max = gl.max(gl.reshape(gl.max(row_max, axis=0), [8, 4]), axis=1)
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, WIDE))

    if k is not None:
        if split == active - 1:
            row_max, row_sum, total = add_new(
                row_max, row_sum, total, query, k.data + b * k.row + g * k.head, v.data + b * v.row + g * v.head,
                k_norm, slopes_ptr, table, padding_mask, metadata_ptr + AT_LAYERS + OF_EACH * layer, stored, g,
                kv_heads, scale, softcap, d_idx, mate, m_idx, cos, sin, sign, DIM, PAIRS, BLOCK, GROUP, KV_DTYPE, WIDE,
            )  # fmt: skip
    finish_heads(
        total, row_max, row_sum, o_ptr, scratch, split, splits, active, b, g, heads, m_idx,
        GROUP, power_of_two_up(GROUP), DIM, WIDE, num_warps,
    )  # fmt: skip
