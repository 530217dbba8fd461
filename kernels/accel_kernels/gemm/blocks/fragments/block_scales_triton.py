"""Scales of blocks for kernels whose products are of parts, see `units_triton`.

Four threads have a row. Each reads what scales of its unit of a span are made of, and makes them. Rows: of a block,
which with a gate alternate by eight between both weights.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.blocks.fragments.units_triton import SPAN, is_affine, unit_parts
from accel_kernels.gemm.blocks.ggml_triton import ggml_format
from accel_kernels.gemm.quantized.operands.mma_operands_triton import of_either, places, scales_layout


@constexpr_function
def has_minimum(source):
    """Whether sums of x are taken off, too."""
    return source in ("runs", "affine", "affine-32")


@gluon.jit
def span_scales(weight, up, block, blocks, span, n, ROWS: gl.constexpr, K: gl.constexpr, FORMAT: gl.constexpr,
                SOURCE: gl.constexpr, GATE: gl.constexpr, STRIDE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Tensors (S, ROWS, 4) as they lie in memory, of the warps' spans: span, span + STRIDE ..."""
    share, row, unit = places(num_warps, ROWS, 4, scales_layout(num_warps, ROWS))
    TILE: gl.constexpr = ROWS // 2 if GATE else ROWS
    upper = row % 16 >= 8
    real = gl.minimum(block * TILE + (row // 16 * 8 + row % 8 if GATE else row), n - 1)
    span += share * STRIDE
    inside = (span < K // SPAN) & (block < blocks)
    if SOURCE == "table":
        place = (real * (K // 32) + span * 8 + unit * 2) >> weight.side.shift
        held = of_either(weight.side.absmax, up.side.absmax, place, inside, upper, GATE)
        if weight.side.code2 is not None:
            return held, of_either(weight.side.absmax2, up.side.absmax2, place >> 8, inside, upper, GATE)
        else:
            return (held,)
    elif is_affine(SOURCE):
        held = ()
        for part in gl.static_range(unit_parts(SOURCE)):
            # A division by how many pieces a group has, of which there are at most 512: a multiplication.
            group = (span * 8 + unit * 2 + part) * ((1 << 20) // weight.side.group + 1) >> 20
            place = group * weight.side.rows + real
            held = held + (
                of_either(weight.side.scale, up.side.scale, place, inside, upper, GATE),
                of_either(weight.side.zero, up.side.zero, place, inside, upper, GATE),
            )
        return held
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
            if SOURCE == "bytes":
                place = first * 136 + unit * 34
                return (of_either(w, u, place, inside, upper, GATE), of_either(w, u, place + 17, inside, upper, GATE))
            else:
                place = first * 105
                own = place + 96 + unit // 2 * 4 + unit % 2
                return (
                    of_either(w, u, place + 104 + unit * 0, inside, upper, GATE),
                    of_either(w, u, own, inside, upper, GATE),
                    of_either(w, u, own + 2, inside, upper, GATE),
                )


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
                num_warps: gl.constexpr):  # fmt: skip
    """Of each thread's unit and every part: its scale, and where `has_minimum` by what a sum of x is multiplied.

    ZERO: what numbers are too large by.
    """
    _, row, unit = places(num_warps, ROWS, 4, scales_layout(num_warps, ROWS))
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
    elif is_affine(SOURCE):
        scales = ()
        least = ()
        for part in gl.static_range(unit_parts(SOURCE)):
            scales = scales + (held[2 * part].to(gl.float32),)
            least = least + (held[2 * part + 1].to(gl.float32) - scales[part] * (ZERO + 8),)
        return scales + least
    elif SOURCE == "runs":
        first, second, rest = held[1], held[2], held[3]
        s = gl.where(unit >= 2, (rest & 0x0F0F0F0F) | ((first >> 2) & 0x30303030), first & 0x3F3F3F3F)
        m = gl.where(unit >= 2, ((rest >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030), second & 0x3F3F3F3F)
        s, m = s >> (unit % 2 * 16), m >> (unit % 2 * 16)
        d, least = _half_float(held[0]), _half_float(held[0] >> 16)
        a, b = d * _byte(s, 0), d * _byte(s, 1)
        return a, b, a * -ZERO - least * _byte(m, 0), b * -ZERO - least * _byte(m, 1)
    elif SOURCE == "bytes":
        return _half_float(held[0]), _half_float(held[1])
    else:
        d, a, b = _half_float(held[0]), held[1].to(gl.int32), held[2].to(gl.int32)
        return d * _signed_byte(a, 0), d * _signed_byte(a, 1), d * _signed_byte(b, 0), d * _signed_byte(b, 1)
