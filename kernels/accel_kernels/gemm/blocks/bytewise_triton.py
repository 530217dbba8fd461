"""The unpackers of `bytewise.py` inside kernels."""

import triton
import triton.language as tl

SUBNORMAL = tl.constexpr(2.0**120)  # from the bits of float8 in a float32's upper half to its value


@triton.jit
def bytewise(weight, piece, mask, FORMAT: tl.constexpr):
    """(N, B) pieces -> (N, B * 32). FORMAT: "fp8 bits" for cards without float8, which convert it by its bits."""
    side = weight.side
    place = piece[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    held = tl.load(weight.data + place, mask=mask[:, :, None], other=0)
    number = piece.to(tl.int32)  # 64 bits divide slowly
    row = number // side.pieces
    at = (row >> side.tall) * side.across + (number - row * side.pieces >> side.wide)
    if FORMAT == "fp8":
        numbers = held.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif FORMAT == "fp8 bits":
        bits = held.to(tl.int32)
        numbers = ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * SUBNORMAL
        numbers = tl.where((bits & 127) == 127, float("nan"), numbers)
    else:
        numbers = held.to(tl.int8, bitcast=True).to(tl.float32)
    if side.zeros is not None:
        numbers -= tl.load(side.zeros + at, mask=mask, other=0).to(tl.float32)[:, :, None]
    scale = tl.load(side.scales + at, mask=mask, other=0)
    if scale.dtype == tl.uint8:
        exponent = scale.to(tl.int32)
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
        scale = tl.where(exponent == 255, float("nan"), scale)
    return (numbers * scale.to(tl.float32)[:, :, None]).reshape(piece.shape[0], piece.shape[1] * 32)


@triton.jit
def bfloat16_values(weight, piece, mask):
    """The same of 16 bits."""
    place = piece[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    held = tl.load(weight.data.to(tl.pointer_type(tl.int16)) + place, mask=mask[:, :, None], other=0)
    return (held.to(tl.int32) << 16).to(tl.float32, bitcast=True).reshape(piece.shape[0], piece.shape[1] * 32)
