"""Scales of blocks for kernels whose products are of parts, see `units_triton`.

Four threads have a row. Each reads what scales of its unit of a span are made of, and makes them. Rows: of a block,
which with a gate alternate by eight between both weights.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.blocks.fragments.units_triton import SPAN, unit_words
from accel_kernels.gemm.blocks.ggml_triton import ggml_format
from accel_kernels.gemm.quantized.operands.mma_operands_triton import of_either, places, steps
from accel_kernels.gemm.quantized.write_triton import write


@constexpr_function
def has_minimum(source):
    """Whether sums of x are taken off, too."""
    return source == "runs"


@gluon.jit
def within(row, n, WHOLE: gl.constexpr):
    """Rows that are there. WHOLE: whether n is a multiple of a block's rows; what blocks beyond have is masked."""
    if WHOLE:
        return row
    else:
        return gl.minimum(row, n - 1)


@gluon.jit
def span_scales(weight, up, block, blocks, span, n, ROWS: gl.constexpr, K: gl.constexpr, FORMAT: gl.constexpr,
                SOURCE: gl.constexpr, GATE: gl.constexpr, WHOLE: gl.constexpr, S: gl.constexpr,
                layout: gl.constexpr):  # fmt: skip
    """Tensors (S, ROWS, 4) as they lie in memory, of spans span, span + 2 ... layout: as `scales_layout`."""
    share, row, unit = places(S, ROWS, 4, layout)
    TILE: gl.constexpr = ROWS // 2 if GATE else ROWS
    upper = row % 16 >= 8
    real = within(block * TILE + (row // 16 * 8 + row % 8 if GATE else row), n, WHOLE)
    span += share * 2
    inside = (span < K // SPAN) & (block < blocks)
    if SOURCE == "table":
        place = (real * (K // 32) + span * 8 + unit * 2) >> weight.side.shift
        held = of_either(weight.side.absmax, up.side.absmax, place, inside, upper, GATE)
        if weight.side.code2 is not None:
            return held, of_either(weight.side.absmax2, up.side.absmax2, place >> 8, inside, upper, GATE)
        else:
            return (held,)
    else:
        F: gl.constexpr = ggml_format(FORMAT)
        first = real * (K // SPAN) + span
        if SOURCE == "runs":
            place = first * (F.bytes // 4) + unit * 0
            w, u = weight.data.to(gl.pointer_type(gl.int32)), up.data.to(gl.pointer_type(gl.int32))
            return (
                of_either(w, u, place, inside, upper, GATE),
                of_either(w, u, place + F.scales // 4, inside, upper, GATE),
                of_either(w, u, place + F.scales // 4 + 1, inside, upper, GATE),
                of_either(w, u, place + F.scales // 4 + 2, inside, upper, GATE),
            )
        else:
            w, u = weight.data.to(gl.pointer_type(gl.int16)), up.data.to(gl.pointer_type(gl.int16))
            if SOURCE == "bytes" or SOURCE == "halves":
                place = (first * 4 + unit) * F.bytes
                return (
                    of_either(w, u, place, inside, upper, GATE),
                    of_either(w, u, place + F.bytes // 2, inside, upper, GATE),
                )
            else:
                place = first * 105
                own = place + 96 + unit // 2 * 4 + unit % 2
                return (
                    of_either(w, u, place + 104 + unit * 0, inside, upper, GATE),
                    of_either(w, u, own, inside, upper, GATE),
                    of_either(w, u, own + 2, inside, upper, GATE),
                )


@gluon.jit
def set_scales(weight, up, block, blocks, turn, n, ROWS: gl.constexpr, K: gl.constexpr, FORMAT: gl.constexpr,
               SOURCE: gl.constexpr, GATE: gl.constexpr, WHOLE: gl.constexpr, S: gl.constexpr,
               layout: gl.constexpr):  # fmt: skip
    """The same of both spans of sets S * turn and on."""
    first = span_scales(weight, up, block, blocks, turn * S * 2, n, ROWS, K, FORMAT, SOURCE, GATE, WHOLE, S, layout)
    span = turn * S * 2 + 1
    return first, span_scales(weight, up, block, blocks, span, n, ROWS, K, FORMAT, SOURCE, GATE, WHOLE, S, layout)


@gluon.jit
def _byte(words, AT: gl.constexpr):
    """Byte AT as a float32: in the fraction of 2^23."""
    return (((words >> (8 * AT)) & 255) | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def _signed_byte(words, AT: gl.constexpr):
    return (((words >> (8 * AT)) & 255 ^ 128) | 0x4B000000).to(gl.float32, bitcast=True) - 8388736.0


@gluon.jit
def _half_float(bits):
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def part_scales(held, weight, up, ROWS: gl.constexpr, SOURCE: gl.constexpr, ZERO: gl.constexpr, GATE: gl.constexpr,
                S: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Of each thread's unit and every part: its scale, and where `has_minimum` by what a sum of x is multiplied.

    ZERO: what numbers are too large by.
    """
    _, row, unit = places(S, ROWS, 4, layout)
    upper = row % 16 >= 8
    if SOURCE == "table":
        if weight.side.code2 is not None:
            scale = of_either(weight.side.code2, up.side.code2, held[0].to(gl.int32), True, upper, GATE)
            shift = gl.load(weight.side.offset)
            if GATE:
                shift = gl.where(upper, gl.load(up.side.offset), shift)
            return (scale * held[1] + shift,)
        else:
            return held
    elif SOURCE == "runs":
        first, second, rest = held[1], held[2], held[3]
        s = gl.where(unit >= 2, (rest & 0x0F0F0F0F) | ((first >> 2) & 0x30303030), first & 0x3F3F3F3F)
        m = gl.where(unit >= 2, ((rest >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030), second & 0x3F3F3F3F)
        s, m = s >> (unit % 2 * 16), m >> (unit % 2 * 16)
        d, least = _half_float(held[0]), _half_float(held[0] >> 16)
        a, b = d * _byte(s, 0), d * _byte(s, 1)
        return a, b, a * -ZERO - least * _byte(m, 0), b * -ZERO - least * _byte(m, 1)
    elif SOURCE == "bytes" or SOURCE == "halves":
        return _half_float(held[0]), _half_float(held[1])
    else:
        d, a, b = _half_float(held[0]), held[1].to(gl.int32), held[2].to(gl.int32)
        return d * _signed_byte(a, 0), d * _signed_byte(a, 1), d * _signed_byte(b, 0), d * _signed_byte(b, 1)


@gluon.jit
def half_words(weight, up, block, blocks, turn, n, STEP: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr,
               FORMAT: gl.constexpr, SOURCE: gl.constexpr, GATE: gl.constexpr, WHOLE: gl.constexpr,
               S: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Words of both halves of a block's rows, of unit STEP of sets S * turn and on; 0 where there is nothing.

    layout: of (S, ROWS / 2, 8), as `words_layout`.
    """
    H: gl.constexpr = ROWS // 2
    share, row, word = places(S, H, 8, layout)
    span = (turn * S + share) * 2
    inside = (span + STEP // 4 < K // SPAN) & (block < blocks)
    if GATE:
        row = within(block * H + row, n, WHOLE).to(gl.int64)
        low = unit_words(weight.data, row, span, word, inside, STEP, K, FORMAT, SOURCE)
        return low, unit_words(up.data, row, span, word, inside, STEP, K, FORMAT, SOURCE)
    else:
        row = block * ROWS + row // 8 * 16 + row % 8
        low = within(row, n, WHOLE).to(gl.int64)
        high = low + 8 if WHOLE else within(row + 8, n, WHOLE).to(gl.int64)
        first = unit_words(weight.data, low, span, word, inside, STEP, K, FORMAT, SOURCE)
        return first, unit_words(weight.data, high, span, word, inside, STEP, K, FORMAT, SOURCE)


@gluon.jit
def joined_words(halves):
    """Twice (S, N / 2, words) as (S, N, words), eight rows of either in turns."""
    found = ()
    for at in gl.static_range(len(halves[0])):
        found = found + (_in_turns(halves[0][at], halves[1][at]),)
    return found


@gluon.jit
def _in_turns(low, high):
    S: gl.constexpr = low.shape[0]
    H: gl.constexpr = low.shape[1]
    W: gl.constexpr = low.shape[2]
    w = gl.join(low.reshape([S, H // 8, 8, W]), high.reshape([S, H // 8, 8, W]))
    return w.permute((0, 1, 4, 2, 3)).reshape([S, 2 * H, W])


@gluon.jit
def banks(ROWS: gl.constexpr, S: gl.constexpr, layout: gl.constexpr):
    """Where each thread's bank begins, in the shape of `joined_words` words."""
    H: gl.constexpr = ROWS // 2
    share, row, word = places(S, H, 8, layout)
    bank = ((row % 8 * 16 + word // 2 * 4) + share * 0,)
    return joined_words((bank, bank))[0]


@constexpr_function
def _shuffle(unit):
    return f"shfl.sync.idx.b32 $0, $1, {unit}, 0x1c03, -1;"


@gluon.jit
def of_unit(values, UNIT_AT: gl.constexpr):
    """(S, N, 4), of each thread's unit, as this unit's for all four threads."""
    TEXT: gl.constexpr = _shuffle(UNIT_AT)
    return gl.inline_asm_elementwise(TEXT, "=f,f", [values], dtype=gl.float32, is_pure=True, pack=1)


@constexpr_function
def rows_layout(words, rows, warps):
    """(1, rows, 4 words), 8 rows of each warp or 16, which alternate by eight."""
    more = [[0, 8, 0]] if rows == 16 * warps else []
    lanes = [[0, 0, words], [0, 0, 2 * words], *steps(3, 1, 1, 8)]
    return gl.DistributedLinearLayout(
        steps(3, 2, 1, words) + more, lanes, steps(3, 1, rows // warps, rows), [], [1, rows, 4 * words]
    )


@constexpr_function
def sums_layout(warps, rows, columns, gate):
    """Of warps' sums (warps, rows, columns): a thread has all of some, and with a gate those of both weights."""
    bits = [[0, 8, 0]] if gate else []
    lanes = [basis for basis in steps(3, 1, 1, rows) if basis not in bits]
    spread = steps(3, 2, 1, columns)
    while len(lanes) < 5:
        lanes.append(spread.pop() if spread else [0, 0, 0])
    across, count = [], warps
    while count > 1:
        across.append(spread.pop() if spread else [0, 0, 0])
        count //= 2
    registers = steps(3, 0, 1, warps) + bits + lanes[5:] + spread
    return gl.DistributedLinearLayout(registers, lanes[:5], across, [], [warps, rows, columns])


@gluon.jit
def write_sums(y, first, weight, up, after, y_ptr, m, n, GATE: gl.constexpr, ACTIVATION: gl.constexpr):
    """Writes what follows sums (rows, columns) of a weight, which with a gate alternate by eight with its gate's.

    first: the first of the weight's rows.
    """
    N: gl.constexpr = y.shape[0]
    M: gl.constexpr = y.shape[1]
    other = y
    if GATE:
        y, other = gl.split(y.reshape([N // 16, 2, 8, M]).permute((0, 2, 3, 1)))
        y, other = y.reshape([N // 2, M]), other.reshape([N // 2, M])
    OUT: gl.constexpr = y.type.layout
    write(y, other, first, 0, weight, up, after, y_ptr, m, n, True, GATE, ACTIVATION, OUT)


@gluon.jit
def loads_in_order():
    """Loads before this are started before those after it: else the assembler puts them off until they are needed."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
