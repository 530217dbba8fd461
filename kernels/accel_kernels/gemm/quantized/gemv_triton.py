"""One row times a weight of fewer bits, on the CUDA cores.

A thread reads 16 bytes of a row of the weight at a time: a quad of words, which one scale covers. It has the same quad
of all rows of its program, so that x is read, normed and kept in registers once.

Serves one row in 16 bits times every format, on every card that has the dtype.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import multiprocessors, programmatic
from accel_kernels.gemm.epilogue_triton import epilogue, store_sum
from accel_kernels.gemm.fused_linear_triton import Shape
from accel_kernels.gemm.quantized.operands.unpacking_triton import excess, per_word, planes, unpack_mode, wide_scale
from accel_kernels.gemm.quantized_weight import PackedWeight
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch

NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _halves(bits, DTYPE: tl.constexpr):
    """Two 16-bit floats of an int32, as fp32."""
    if DTYPE == tl.bfloat16:
        return (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)
    else:
        low = (bits & 65535).to(tl.int16).to(DTYPE, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def vector(ptr, q_idx, K: tl.constexpr, DTYPE: tl.constexpr, PER: tl.constexpr):
    """What each place of the words of these quads is multiplied with: PER tensors (quads, 4).

    DTYPE: what an int64 of ptr holds four of, read two at a time; None where elements are read one by one.
    """
    if DTYPE is None:
        words = q_idx[:, None] * 4 + tl.arange(0, 4)[None, :]
        xs = ()
        for place in tl.static_range(PER):
            xs = xs + (tl.load(ptr + words * PER + place, mask=words * PER < K, other=0.0).to(tl.float32),)
        return xs
    else:
        parts = ()
        for pair in tl.static_range(PER // 2):
            at = q_idx[:, None] * PER + 2 * pair + tl.arange(0, 2)[None, :]
            parts = parts + tl.split(tl.load(ptr + at, mask=at < K // 4, other=0))
        if PER == 8:
            first, second = (
                _stack(parts[0], parts[2], parts[4], parts[6]),
                _stack(parts[1], parts[3], parts[5], parts[7]),
            )
            return _four(first, DTYPE) + _four(second, DTYPE)
        else:
            return _four(_stack(parts[0], parts[1], parts[2], parts[3]), DTYPE)


@triton.jit
def _stack(a, b, c, d):
    """(quads, 4)."""
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], 4)


@triton.jit
def _four(bits, DTYPE: tl.constexpr):
    return _halves(bits.to(tl.int32), DTYPE) + _halves((bits >> 32).to(tl.int32), DTYPE)


@triton.jit
def _normed(xs, mean, rstd, norm, q_idx, K: tl.constexpr, DTYPE: tl.constexpr, NORM: tl.constexpr, PER: tl.constexpr):
    """The norm of each place, but for the 1 / rms of RMSNorm."""
    ws, bs = xs, xs
    if norm.weight is not None:
        ws = vector(norm.weight, q_idx, K, DTYPE, PER)
    if norm.bias is not None:
        bs = vector(norm.bias, q_idx, K, DTYPE, PER)
    inside = (q_idx[:, None] * 4 + tl.arange(0, 4)[None, :]) * PER < K
    hs = ()
    for place in tl.static_range(PER):
        h = xs[place]
        if NORM == "layer":
            h = tl.where(inside, (h - mean) * rstd, 0.0)
        if norm.weight is not None:
            h *= ws[place] + norm.offset
        if norm.bias is not None:
            h += bs[place]
        hs = hs + (h,)
    return hs


@triton.jit
def _sum(xs, POWER: tl.constexpr, PER: tl.constexpr):
    """(quads,) sums of x, or of its squares."""
    total = xs[0] if POWER == 1 else xs[0] * xs[0]
    for place in tl.static_range(1, PER):
        total += xs[place] if POWER == 1 else xs[place] * xs[place]
    return tl.sum(total, axis=1)


@triton.jit
def _distances(xs, mean, q_idx, K: tl.constexpr, PER: tl.constexpr):
    """(quads,) sums of squared distances from the mean."""
    inside = (q_idx[:, None] * 4 + tl.arange(0, 4)[None, :]) * PER < K
    away = ()
    for place in tl.static_range(PER):
        away = away + (tl.where(inside, xs[place] - mean, 0.0),)
    return _sum(away, 2, PER)


@triton.jit
def _excess_of(hs, FORMAT: tl.constexpr, UNPACK_MODE: tl.constexpr, PER: tl.constexpr):
    """(quads, 4) what the excess of `planes` adds to the sum of a word."""
    over = hs[0] * excess(0, FORMAT, UNPACK_MODE)
    for place in tl.static_range(1, PER):
        over += hs[place] * excess(place, FORMAT, UNPACK_MODE)
    return over


@triton.jit
def quad_words(weight, n_row, q_idx, inside, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """(quads, rows, 4): threads lie along the quads, so that each has the same quad of all rows, and x but once."""
    w_idx = q_idx[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    # Compilers order threads by contiguity, and equals as they like: this says quads before rows, words before both.
    place = tl.max_contiguous(weight.words + n_row[None, :, None] * WORDS + w_idx, [2, 1, 4])
    if EVEN:  # where not inside, anything: it is not used
        return tl.load(place, mask=inside, eviction_policy="evict_first")
    else:
        return tl.load(place, mask=inside & (w_idx < WORDS), other=0, eviction_policy="evict_first")


@triton.jit
def _numbers(weight, n_row, groups, inside, GROUPS: tl.constexpr):
    """Scales and zeros of quads by rows, read as early as the words; where there are none, anything."""
    at = n_row[None, :] * GROUPS + groups[:, None]
    s, z = at, at
    if GROUPS > 1:
        s = tl.load(weight.scales + at, mask=inside)
    if weight.zeros is not None:
        z = tl.load(weight.zeros + at, mask=inside)
    return s, z


@triton.jit
def products(words, s, z, hs, over, sums, two16, FORMAT: tl.constexpr, GROUPED: tl.constexpr, ZEROS: tl.constexpr,
              UNPACK_MODE: tl.constexpr, PER: tl.constexpr):  # fmt: skip
    """(quads, rows) sums of weights times h, scaled where scales are by group."""
    numbers = planes(words, two16, FORMAT, UNPACK_MODE)
    if FORMAT == "int4" or (FORMAT == "int8" and UNPACK_MODE == "rough"):
        total = numbers[0] * hs[0][:, None] - over[:, None]
    else:
        total = numbers[0] * hs[0][:, None]
    for place in tl.static_range(1, PER):
        total += numbers[place] * hs[place][:, None]
    part = tl.sum(total, axis=2)
    if ZEROS:
        part -= z.to(tl.float32) * sums[:, None]
    if GROUPED:
        part *= wide_scale(s)
    return part


@triton.jit
def quantized_gemv_kernel(
    x_ptr, weight, up, norm, after, y_ptr, n, two16,
    K: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    UNPACK_MODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = per_word(FORMAT)
    WORDS: tl.constexpr = K // PER
    QUADS: tl.constexpr = (WORDS + 3) // 4
    EVEN: tl.constexpr = WORDS % (4 * BLOCK_Q) == 0
    WHOLE: tl.constexpr = BLOCK_Q >= QUADS
    GROUPED: tl.constexpr = GROUPS > 1
    ZEROS: tl.constexpr = weight.zeros is not None
    GROUP_QUADS: tl.constexpr = QUADS // GROUPS
    first = tl.program_id(0) * BLOCK_N
    q_idx = tl.arange(0, BLOCK_Q)
    n_row = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    always = tl.full((1, 1, 1), 1, tl.int1)
    # The first weights before the wait: they do not depend on the kernel in front.
    w = quad_words(weight, n_row, q_idx, always, WORDS, EVEN)
    every = tl.full((1, 1), 1, tl.int1)
    groups = tl.minimum(q_idx, QUADS - 1) // GROUP_QUADS
    s, z = _numbers(weight, n_row, groups, every, GROUPS)
    u, t, v = w, s, z
    if GATE:
        u = quad_words(up, n_row, q_idx, always, WORDS, EVEN)
        t, v = _numbers(up, n_row, groups, every, GROUPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    mean = 0.0
    rstd = 1.0
    squares = tl.zeros((BLOCK_Q,), tl.float32)
    if NORM == "layer":
        total = tl.zeros((BLOCK_Q,), tl.float32)
        for start in tl.static_range(0, QUADS, BLOCK_Q):
            total += _sum(vector(x_ptr, start + q_idx, K, DTYPE, PER), 1, PER)
        mean = tl.sum(total, axis=0) / K
        for start in tl.static_range(0, QUADS, BLOCK_Q):
            squares += _distances(vector(x_ptr, start + q_idx, K, DTYPE, PER), mean, start + q_idx, K, PER)
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + norm.eps)
    factor = 1.0
    if WHOLE:  # a program goes through several blocks of rows with the x it has once made
        xs = vector(x_ptr, q_idx, K, DTYPE, PER)
        if NORM == "rms":
            factor = tl.rsqrt(tl.sum(_sum(xs, 2, PER), axis=0) / K + norm.eps)
        hs = xs
        if NORM != "none":
            hs = _normed(xs, mean, rstd, norm, q_idx, K, NORM_DTYPE, NORM, PER)
        over, sums = _excess_of(hs, FORMAT, UNPACK_MODE, PER), _sum(hs, 1, PER)
        step = tl.num_programs(0) * BLOCK_N
        for block in range(first, n, step):
            n_idx = block + tl.arange(0, BLOCK_N)
            n_row = tl.minimum(n_idx, n - 1).to(tl.int64)
            more = tl.full((1, 1, 1), block + step, tl.int32) < n
            later = tl.minimum(n_idx + step, n - 1).to(tl.int64)
            next_w = quad_words(weight, later, q_idx, more, WORDS, EVEN)
            some = more.reshape(1, 1)
            next_s, next_z = _numbers(weight, later, groups, some, GROUPS)
            next_u, next_t, next_v = next_w, next_s, next_z
            if GATE:
                next_u = quad_words(up, later, q_idx, more, WORDS, EVEN)
                next_t, next_v = _numbers(up, later, groups, some, GROUPS)
            acc = products(w, s, z, hs, over, sums, two16, FORMAT, GROUPED, ZEROS, UNPACK_MODE, PER)
            acc_u = acc
            if GATE:
                acc_u = products(u, t, v, hs, over, sums, two16, FORMAT, GROUPED, ZEROS, UNPACK_MODE, PER)
            _write(acc, acc_u, factor, n_idx, n, weight, up, after, y_ptr, GROUPED, GATE, ACTIVATION)
            w, s, z, u, t, v = next_w, next_s, next_z, next_u, next_t, next_v
    else:
        acc = tl.zeros((BLOCK_Q, BLOCK_N), tl.float32)
        acc_u = tl.zeros((BLOCK_Q, BLOCK_N), tl.float32)
        for start in tl.static_range(0, QUADS, BLOCK_Q):
            at = start + q_idx
            next_w, next_s, next_z, next_u, next_t, next_v = w, s, z, u, t, v
            if start + BLOCK_Q < QUADS:
                later = tl.minimum(at + BLOCK_Q, QUADS - 1) // GROUP_QUADS
                next_w = quad_words(weight, n_row, at + BLOCK_Q, always, WORDS, EVEN)
                next_s, next_z = _numbers(weight, n_row, later, every, GROUPS)
                if GATE:
                    next_u = quad_words(up, n_row, at + BLOCK_Q, always, WORDS, EVEN)
                    next_t, next_v = _numbers(up, n_row, later, every, GROUPS)
            xs = vector(x_ptr, at, K, DTYPE, PER)
            if NORM == "rms":  # a factor of the whole sum: known only when all of x has been seen, and needed then
                squares += _sum(xs, 2, PER)
            hs = xs
            if NORM != "none":
                hs = _normed(xs, mean, rstd, norm, at, K, NORM_DTYPE, NORM, PER)
            over, sums = _excess_of(hs, FORMAT, UNPACK_MODE, PER), _sum(hs, 1, PER)
            acc += products(w, s, z, hs, over, sums, two16, FORMAT, GROUPED, ZEROS, UNPACK_MODE, PER)
            if GATE:
                acc_u += products(u, t, v, hs, over, sums, two16, FORMAT, GROUPED, ZEROS, UNPACK_MODE, PER)
            w, s, z, u, t, v = next_w, next_s, next_z, next_u, next_t, next_v
        if NORM == "rms":
            factor = tl.rsqrt(tl.sum(squares, axis=0) / K + norm.eps)
        n_idx = first + tl.arange(0, BLOCK_N)
        _write(acc, acc_u, factor, n_idx, n, weight, up, after, y_ptr, GROUPED, GATE, ACTIVATION)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _write(acc, acc_u, factor, n_idx, n, weight, up, after, y_ptr, GROUPED: tl.constexpr, GATE: tl.constexpr,
           ACTIVATION: tl.constexpr):  # fmt: skip
    n_mask = n_idx < n
    if GATE:
        y, other = tl.reduce((acc, acc_u), 0, _both)
        other *= factor
    else:
        y = tl.sum(acc, axis=0)
        other = y
    y *= factor
    if not GROUPED:
        y *= tl.load(weight.scales + n_idx, mask=n_mask, other=0.0).to(tl.float32)
        if GATE:
            other *= tl.load(up.scales + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    y = epilogue(y, other, n_idx, n_mask, None, None, after, GATE, ACTIVATION)
    store_sum(y, n_idx, n_mask, after, y_ptr)


def quantized_gemv(x, weight, norm, after, shape, y):
    """Writes what `quantized_linear` returns into y. shape: its `stages` is the number of programs that a
    multiprocessor is expected to run at once.
    """
    n, k = weight.shape
    before, kind = kernel_arguments(norm)
    nw, nb, *_ = before
    packed = all(t is None or (t.dtype == x.dtype and t.data_ptr() % 8 == 0) for t in (nw, nb))
    if packed:
        nw, nb = (None if t is None else t.view(torch.int64) for t in (nw, nb))
        before = before._replace(weight=nw, bias=nb)
    dtype = NAMES[x.dtype]
    launch(
        quantized_gemv_kernel, (programs(n, k, shape, x.device),),
        x.view(-1).view(torch.int64), PackedWeight.of(weight), PackedWeight.of(after.up), before, after.arguments, y, n,
        1 << 16, K=k, GROUPS=weight.scales.shape[1], FORMAT=weight.format.name, UNPACK_MODE=unpack_mode(x.dtype),
        **after.flags, DTYPE=dtype, NORM_DTYPE=dtype if packed else None, NORM=kind, BLOCK_N=shape.rows,
        BLOCK_Q=power_of_two(shape.columns * weight.format.bits // 128), num_warps=shape.warps,
        **programmatic(x.device),
    )  # fmt: skip


def programs(n: int, k: int, shape: Shape, device: torch.device) -> int:
    """One for each block of rows; where blocks have whole rows, as many as run at once, with equal work."""
    blocks = triton.cdiv(n, shape.rows)
    if shape.columns < k:
        return blocks
    room = shape.stages * multiprocessors(device)
    return triton.cdiv(blocks, triton.cdiv(blocks, room))
