"""Linear layers of few rows whose weights are numbers of fewer bits, at the speed at which memory gives them.

One row: as the kernel of `projection`, a thread reading 16 bytes of a row at a time, which a scale covers as a whole.
Two rows to 64: numbers become the left factor of the tensor cores, scales multiply what comes out.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.op import multiprocessors
from accel_kernels.rehearsal import launch
from accel_kernels.triton_kernels.dependents import programmatic
from accel_kernels.triton_kernels.launch import power_of_two
from accel_kernels.triton_kernels.projection import Shape, apply_norm, both_biases, epilogue
from accel_kernels.triton_kernels.shares import upcast
from accel_kernels.triton_kernels.unpacking import excess, factor, manner, planes

NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FORMATS = {torch.int8: "int8", torch.int32: "int4", torch.float8_e4m3fn: "fp8"}


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
def _vector(ptr, q_idx, K: tl.constexpr, DTYPE: tl.constexpr, PER: tl.constexpr):
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
def _normed(xs, mean, rstd, offset, nw_ptr, nb_ptr, q_idx, K: tl.constexpr, DTYPE: tl.constexpr, NORM: tl.constexpr,
            HAS_NW: tl.constexpr, HAS_NB: tl.constexpr, PER: tl.constexpr):  # fmt: skip
    """The norm of each place, but for the 1 / rms of RMSNorm."""
    ws, bs = xs, xs
    if HAS_NW:
        ws = _vector(nw_ptr, q_idx, K, DTYPE, PER)
    if HAS_NB:
        bs = _vector(nb_ptr, q_idx, K, DTYPE, PER)
    inside = (q_idx[:, None] * 4 + tl.arange(0, 4)[None, :]) * PER < K
    hs = ()
    for place in tl.static_range(PER):
        h = xs[place]
        if NORM == "layer":
            h = tl.where(inside, (h - mean) * rstd, 0.0)
        if HAS_NW:
            h *= ws[place] + offset
        if HAS_NB:
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
def _excess_of(hs, FORMAT: tl.constexpr, MANNER: tl.constexpr, PER: tl.constexpr):
    """(quads, 4) what the excess of `planes` adds to the sum of a word."""
    over = hs[0] * excess(0, FORMAT, MANNER)
    for place in tl.static_range(1, PER):
        over += hs[place] * excess(place, FORMAT, MANNER)
    return over


@triton.jit
def _words(w_ptr, n_row, q_idx, inside, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """(quads, rows, 4): threads lie along the quads, so that each has the same quad of all rows, and x but once."""
    w_idx = q_idx[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    # Compilers order threads by contiguity, and equals as they like: this says quads before rows, words before both.
    place = tl.max_contiguous(w_ptr + n_row[None, :, None] * WORDS + w_idx, [2, 1, 4])
    if EVEN:  # where not inside, whatever was in the registers: nobody takes it
        return tl.load(place, mask=inside, eviction_policy="evict_first")
    else:
        return tl.load(place, mask=inside & (w_idx < WORDS), other=0, eviction_policy="evict_first")


@triton.jit
def _products(words, hs, over, sums, s_ptr, z_ptr, group, two16, FORMAT: tl.constexpr, GROUPED: tl.constexpr,
              ZEROS: tl.constexpr, MANNER: tl.constexpr, PER: tl.constexpr):  # fmt: skip
    """(quads, rows) sums of weights times h, scaled where scales are by group."""
    if GROUPED:
        s = tl.load(s_ptr + group)
    if ZEROS:
        z = tl.load(z_ptr + group)
    numbers = planes(words, two16, FORMAT, MANNER)
    if FORMAT == "int4" or (FORMAT == "int8" and MANNER == "rough"):
        total = numbers[0] * hs[0][:, None] - over[:, None]
    else:
        total = numbers[0] * hs[0][:, None]
    for place in tl.static_range(1, PER):
        total += numbers[place] * hs[place][:, None]
    part = tl.sum(total, axis=2)
    if ZEROS:
        part -= z.to(tl.float32) * sums[:, None]
    if GROUPED:
        part *= s.to(tl.float32)
    return part


@triton.jit
def one_row_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, u_ptr, us_ptr, uz_ptr, b_ptr, c_ptr, nw_ptr, nb_ptr, r_ptr, y_ptr, n, two16, eps,
    offset, scale, K: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, ZEROS: tl.constexpr,
    DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr, NORM: tl.constexpr, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr, MANNER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 8 if FORMAT == "int4" else 4
    WORDS: tl.constexpr = K // PER
    QUADS: tl.constexpr = (WORDS + 3) // 4
    EVEN: tl.constexpr = WORDS % (4 * BLOCK_Q) == 0
    WHOLE: tl.constexpr = BLOCK_Q >= QUADS
    GROUPED: tl.constexpr = GROUPS > 1
    GROUP_QUADS: tl.constexpr = QUADS // GROUPS
    first = tl.program_id(0) * BLOCK_N
    q_idx = tl.arange(0, BLOCK_Q)
    n_row = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    always = tl.full((1, 1, 1), 1, tl.int1)
    # The first weights before the wait: they do not depend on the kernel in front.
    w = _words(w_ptr, n_row, q_idx, always, WORDS, EVEN)
    u = w
    if GATE:
        u = _words(u_ptr, n_row, q_idx, always, WORDS, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    mean = 0.0
    rstd = 1.0
    squares = tl.zeros((BLOCK_Q,), tl.float32)
    if NORM == "layer":
        total = tl.zeros((BLOCK_Q,), tl.float32)
        for start in tl.static_range(0, QUADS, BLOCK_Q):
            total += _sum(_vector(x_ptr, start + q_idx, K, DTYPE, PER), 1, PER)
        mean = tl.sum(total, axis=0) / K
        for start in tl.static_range(0, QUADS, BLOCK_Q):
            squares += _distances(_vector(x_ptr, start + q_idx, K, DTYPE, PER), mean, start + q_idx, K, PER)
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    factor = 1.0
    if WHOLE:  # a program goes through several blocks of rows with the x it has once made
        xs = _vector(x_ptr, q_idx, K, DTYPE, PER)
        if NORM == "rms":
            factor = tl.rsqrt(tl.sum(_sum(xs, 2, PER), axis=0) / K + eps)
        hs = xs
        if NORM != "none":
            hs = _normed(xs, mean, rstd, offset, nw_ptr, nb_ptr, q_idx, K, NORM_DTYPE, NORM, HAS_NW, HAS_NB, PER)
        over, sums = _excess_of(hs, FORMAT, MANNER, PER), _sum(hs, 1, PER)
        step = tl.num_programs(0) * BLOCK_N
        groups = (tl.minimum(q_idx, QUADS - 1) // GROUP_QUADS)[:, None]
        for block in range(first, n, step):
            n_idx = block + tl.arange(0, BLOCK_N)
            n_row = tl.minimum(n_idx, n - 1).to(tl.int64)
            more = tl.full((1, 1, 1), block + step, tl.int32) < n
            later = tl.minimum(n_idx + step, n - 1).to(tl.int64)
            next_w = _words(w_ptr, later, q_idx, more, WORDS, EVEN)
            next_u = next_w
            if GATE:
                next_u = _words(u_ptr, later, q_idx, more, WORDS, EVEN)
            group = n_row[None, :] * GROUPS + groups
            acc = _products(w, hs, over, sums, s_ptr, z_ptr, group, two16, FORMAT, GROUPED, ZEROS, MANNER, PER)
            acc_u = acc
            if GATE:
                acc_u = _products(u, hs, over, sums, us_ptr, uz_ptr, group, two16, FORMAT, GROUPED, ZEROS, MANNER, PER)
            _write(
                acc, acc_u, factor, n_idx, n, s_ptr, us_ptr, b_ptr, c_ptr, r_ptr, y_ptr, scale, GROUPED, HAS_BIAS,
                GATE, RESIDUAL, KIND,
            )  # fmt: skip
            w, u = next_w, next_u
    else:
        acc = tl.zeros((BLOCK_Q, BLOCK_N), tl.float32)
        acc_u = tl.zeros((BLOCK_Q, BLOCK_N), tl.float32)
        for start in tl.static_range(0, QUADS, BLOCK_Q):
            at = start + q_idx
            next_w, next_u = w, u
            if start + BLOCK_Q < QUADS:
                next_w = _words(w_ptr, n_row, at + BLOCK_Q, always, WORDS, EVEN)
                if GATE:
                    next_u = _words(u_ptr, n_row, at + BLOCK_Q, always, WORDS, EVEN)
            xs = _vector(x_ptr, at, K, DTYPE, PER)
            if NORM == "rms":  # a factor of the whole sum: known only when all of x has been seen, and needed then
                squares += _sum(xs, 2, PER)
            hs = xs
            if NORM != "none":
                hs = _normed(xs, mean, rstd, offset, nw_ptr, nb_ptr, at, K, NORM_DTYPE, NORM, HAS_NW, HAS_NB, PER)
            over, sums = _excess_of(hs, FORMAT, MANNER, PER), _sum(hs, 1, PER)
            group = n_row[None, :] * GROUPS + (tl.minimum(at, QUADS - 1) // GROUP_QUADS)[:, None]
            acc += _products(w, hs, over, sums, s_ptr, z_ptr, group, two16, FORMAT, GROUPED, ZEROS, MANNER, PER)
            if GATE:
                acc_u += _products(u, hs, over, sums, us_ptr, uz_ptr, group, two16, FORMAT, GROUPED, ZEROS, MANNER, PER)
            w, u = next_w, next_u
        if NORM == "rms":
            factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        n_idx = first + tl.arange(0, BLOCK_N)
        _write(
            acc, acc_u, factor, n_idx, n, s_ptr, us_ptr, b_ptr, c_ptr, r_ptr, y_ptr, scale, GROUPED, HAS_BIAS, GATE,
            RESIDUAL, KIND,
        )  # fmt: skip


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _write(
    acc, acc_u, factor, n_idx, n, s_ptr, us_ptr, b_ptr, c_ptr, r_ptr, y_ptr, scale, GROUPED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    n_mask = n_idx < n
    if GATE:
        y, other = tl.reduce((acc, acc_u), 0, _both)
        other *= factor
    else:
        y = tl.sum(acc, axis=0)
        other = y
    y *= factor
    if not GROUPED:
        y *= tl.load(s_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
        if GATE:
            other *= tl.load(us_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    y = epilogue(y, other, n_idx, n_mask, b_ptr, c_ptr, scale, HAS_BIAS, GATE, KIND)
    if RESIDUAL:
        y += tl.load(r_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + n_idx, y.to(y_ptr.dtype.element_ty), mask=n_mask)


@triton.jit
def _dotted(acc, words, x, s_ptr, z_ptr, group, sums, FORMAT: tl.constexpr, DTYPE: tl.constexpr, GROUPED: tl.constexpr,
            ZEROS: tl.constexpr, MANNER: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """acc + weights times x, (shares, BLOCK_N, BLOCK_M), scaled where scales are by group."""
    if GROUPED:
        s = tl.load(s_ptr + group)
    if ZEROS:
        z = tl.load(z_ptr + group)
    w = factor(words, FORMAT, DTYPE, MANNER)
    if UPCAST:
        w = w.to(tl.float32)
    if GROUPED or ZEROS:
        part = tl.dot(w, x, input_precision="ieee")
        if ZEROS:
            part -= z.to(tl.float32)[:, :, None] * sums[:, None, :]
        if GROUPED:
            part *= s.to(tl.float32)[:, :, None]
        return acc + part
    else:
        return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit(do_not_specialize=("m",))
def few_rows_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, u_ptr, us_ptr, uz_ptr, b_ptr, c_ptr, r_ptr, y_ptr, m, n, scale,
    K: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MANNER: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each warp sums a share of the columns: by themselves, warps wait for nobody, and a step spans SHARES blocks."""
    PER: tl.constexpr = 8 if FORMAT == "int4" else 4
    BLOCK_W: tl.constexpr = BLOCK_K // PER
    WORDS: tl.constexpr = K // PER
    GROUPED: tl.constexpr = GROUPS > 1
    EVEN: tl.constexpr = K % (SHARES * BLOCK_K) == 0
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_idx, share = tl.arange(0, BLOCK_M), tl.arange(0, SHARES)
    n_mask, m_mask = n_idx < n, m_idx < m
    n_row = tl.minimum(n_idx, n - 1).to(tl.int64)
    k_idx = share[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    w_idx = share[:, None] * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((SHARES, BLOCK_N, BLOCK_M), tl.float32)
    acc_u = tl.zeros((SHARES, BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, SHARES * BLOCK_K):
        at, w_at = start + k_idx, start // PER + w_idx
        x_place = x_ptr + m_idx[None, None, :] * K + at[:, :, None]
        w_place = n_row[None, :, None] * WORDS + w_at[:, None, :]
        inside = (w_at < WORDS)[:, None, :]
        if EVEN:
            x = tl.load(x_place, mask=m_mask[None, None, :], other=0.0)
            w = tl.load(w_ptr + w_place, eviction_policy="evict_first")
        else:
            x = tl.load(x_place, mask=m_mask[None, None, :] & (at < K)[:, :, None], other=0.0)
            w = tl.load(w_ptr + w_place, mask=inside, other=0, eviction_policy="evict_first")
        group = n_row[None, :] * GROUPS + (tl.minimum(start + share * BLOCK_K, K - 1) // (K // GROUPS))[:, None]
        sums = 0.0
        if ZEROS:
            sums = tl.sum(x.to(tl.float32), axis=1)
        if UPCAST:
            x = x.to(tl.float32)
        acc = _dotted(acc, w, x, s_ptr, z_ptr, group, sums, FORMAT, DTYPE, GROUPED, ZEROS, MANNER, UPCAST)
        if GATE:
            if EVEN:
                u = tl.load(u_ptr + w_place, eviction_policy="evict_first")
            else:
                u = tl.load(u_ptr + w_place, mask=inside, other=0, eviction_policy="evict_first")
            acc_u = _dotted(acc_u, u, x, us_ptr, uz_ptr, group, sums, FORMAT, DTYPE, GROUPED, ZEROS, MANNER, UPCAST)
    if PDL:  # not before: programs that wait would take the shared memory that the pipeline needs
        tl.extra.cuda.gdc_launch_dependents()
    y, other = tl.sum(acc, axis=0), tl.sum(acc_u, axis=0)
    if not GROUPED:
        y *= tl.load(s_ptr + n_row).to(tl.float32)[:, None]
        if GATE:
            other *= tl.load(us_ptr + n_row).to(tl.float32)[:, None]
    n_col, n_col_mask = n_idx[:, None], n_mask[:, None]
    y = epilogue(y, other, n_col, n_col_mask, b_ptr, c_ptr, scale, HAS_BIAS, GATE, KIND)
    place, mask = m_idx[None, :].to(tl.int64) * n + n_col, m_mask[None, :] & n_col_mask
    if RESIDUAL:
        y += tl.load(r_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def quantised_projection(
    x, weight, bias=None, *, norm=None, up=None, up_bias=None, activation=None, residual=None, scale=1.0, shape=None
):  # fmt: skip
    """Same arguments and result as the reference; up to 64 rows. shape: a Shape, else chosen by size.

    One row: `stages` of the shape says how many programs a multiprocessor is thought to run at once.
    """
    n, k = weight.shape
    rows = x.numel() // k
    y = torch.empty((*x.shape[:-1], n), device=x.device, dtype=x.dtype)
    gate, pdl = up is not None, programmatic(x.device)
    up_bias = both_biases(bias, up_bias, gate)
    if gate and bias is None and up_bias is not None:
        bias = torch.zeros_like(up_bias)
    format = FORMATS[weight.data.dtype]
    words = (*_tensors(weight), *(_tensors(up) if gate else (None, None, None)))
    flags = {
        "K": k, "GROUPS": weight.scales.shape[1], "FORMAT": format, "ZEROS": weight.zeros is not None,
        "HAS_BIAS": bias is not None, "GATE": gate, "RESIDUAL": residual is not None, "KIND": activation,
        "MANNER": manner(x.dtype),
    }  # fmt: skip
    if rows == 1:
        shape = shape or one_row_shape(n, k, format, gate)
        nw, nb, eps, centred, offset = norm or (None, None, 0.0, False, 0.0)
        packed = all(t is None or (t.dtype == x.dtype and t.data_ptr() % 8 == 0) for t in (nw, nb))
        if packed:
            nw, nb = (None if t is None else t.view(torch.int64) for t in (nw, nb))
        dtype = NAMES[x.dtype]
        block_q = power_of_two(shape.columns * weight.bits // 128)
        launch(
            one_row_kernel, (programs(n, k, weight.bits, shape, x.device),),
            x.view(-1).view(torch.int64), *words, bias, up_bias, nw, nb, residual, y, n, 1 << 16, eps, offset,
            float(scale),
            **flags, DTYPE=dtype, NORM_DTYPE=dtype if packed else None,
            NORM="none" if norm is None else "layer" if centred else "rms", HAS_NW=nw is not None,
            HAS_NB=nb is not None, BLOCK_N=shape.rows, BLOCK_Q=block_q,
            PDL=bool(pdl), num_warps=shape.warps, **pdl,
        )  # fmt: skip
        return y
    if norm is not None:  # a pass of its own: inside, it would stand between the weights and the tensor cores
        x = apply_norm(x, norm)
    shape = shape or few_rows_shape(rows, n, format, gate)
    columns = min(shape.columns, weight.group & -weight.group) if weight.scales.shape[1] > 1 else shape.columns
    pdl = pdl if rows > 16 else {}  # as measured
    launch(
        few_rows_kernel, (triton.cdiv(n, shape.rows),),
        x, *words, bias, up_bias, residual, y, rows, n, float(scale),
        **flags, SHARES=shape.warps, BLOCK_M=max(16, power_of_two(rows)), BLOCK_N=shape.rows, BLOCK_K=columns,
        UPCAST=upcast(x.dtype), PDL=bool(pdl), num_warps=shape.warps,
        num_stages=shape.stages, **pdl,
    )  # fmt: skip
    return y


def _tensors(weight):
    return weight.data.view(torch.int32), weight.scales, weight.zeros


def one_row_shape(n: int, k: int, format: str, gate: bool) -> Shape:
    """Whole rows where x fits the registers, else columns that divide them.

    By counting instructions: a thread with fewer weights of a row spends more of them on adding up and writing it.
    """
    columns = power_of_two(k) if k <= 4096 else 1024 if k % 1024 == 0 and k % 2048 else 2048
    rows = 2 if gate else 4
    while rows > 1 and n // rows < 256:
        rows //= 2
    quads = columns // (32 if format == "int4" else 16)
    if format == "int4":
        return Shape(rows, columns, max(1, min(2, quads // 32)), 6)
    return Shape(rows, columns, max(1, min(4, quads // 32)), 5 if gate else 4)


def programs(n: int, k: int, bits: int, shape: Shape, device: torch.device) -> int:
    """One for each block of rows; where blocks have whole rows, as many as run at once, with equal work."""
    blocks = triton.cdiv(n, shape.rows)
    if shape.columns < k:
        return blocks
    room = shape.stages * multiprocessors(device)
    return triton.cdiv(blocks, triton.cdiv(blocks, room))


def few_rows_shape(rows: int, n: int, format: str, gate: bool) -> Shape:
    """A program of 32 rows reads x as often as 64 do, twice in all; worth it only while x is small."""
    wide = max(16, power_of_two(rows))
    block = 64 if wide > 16 and not gate and n // 64 >= 60 else 32 if n // 32 >= 60 else 16
    return Shape(block, 64 if wide > 32 else 128, 4, 3)


def _types(**groups):
    return {f"{name}_ptr": f"*{dtype}" for dtype, names in groups.items() for name in names.split()}


def _specimens(formats=("int8", "int4")):
    vectors = "s us b c r y"
    numbers = {"n": "i32", "two16": "i32", "eps": "fp32", "offset": "fp32", "scale": "fp32"}
    one = _types(i64="x nw nb", i32="w u", bf16=vectors, i8="z uz") | numbers
    few = _types(i32="w u", bf16="x " + vectors, i8="z uz") | numbers | {"m": "i32"}
    for format in formats:
        for gate in (False, True):
            flags = {
                "K": 4096, "GROUPS": 32 if format == "int4" else 1, "FORMAT": format,
                "ZEROS": gate and format == "int4", "HAS_BIAS": False, "GATE": gate, "RESIDUAL": not gate,
                "KIND": "silu" if gate else None, "MANNER": "rough", "PDL": False,
            }  # fmt: skip
            shape = one_row_shape(4096, 4096, format, gate)
            names = {"DTYPE": tl.bfloat16, "NORM_DTYPE": tl.bfloat16, "NORM": "rms", "HAS_NW": True, "HAS_NB": False}
            sizes = {"BLOCK_N": shape.rows, "BLOCK_Q": shape.columns // (32 if format == "int4" else 16)}
            yield one_row_kernel, one, flags | names | sizes, shape.warps
            for rows in (8, 64):
                shape = few_rows_shape(rows, 4096, format, gate)
                sizes = {"SHARES": shape.warps, "BLOCK_M": max(16, rows), "BLOCK_N": shape.rows, "UPCAST": False}
                sizes["BLOCK_K"] = shape.columns
                yield few_rows_kernel, few, flags | sizes, shape.warps, shape.stages


SPECIMENS = tuple(_specimens())
