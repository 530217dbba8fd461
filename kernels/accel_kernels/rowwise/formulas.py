"""Operations on tiles of fp32, as Triton's text. Functions by name are those of `functions_triton.py`."""

import struct

import torch

from accel_kernels.row_numbers import LEAST_PEAK, MOST, REACH
from accel_kernels.rowwise.program import MOVES_HALVES, MOVES_PAIRS, NUMBERS

# What needs no rounding where its registers are of the dtype already.
KEEPS = ("neg", "abs", "relu", "maximum", "minimum", "round", "amax", *MOVES_PAIRS, *MOVES_HALVES)

FORMULAS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "tl.math.div_rn({0}, {1})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "add_number": "{0} + {number}",
    "mul_number": "{0} * {number}",
    "div_number": "{0} * {reciprocal}",
    "rsub_number": "{number} - {0}",
    "rdiv_number": "divided({number}, {0})",
    "clamp_min": "tl.maximum({0}, {number}, propagate_nan=tl.PropagateNan.ALL)",
    "clamp_max": "tl.minimum({0}, {number}, propagate_nan=tl.PropagateNan.ALL)",
    "neg": "-{0}",
    "square": "{0} * {0}",
    "sqrt": "tl.math.sqrt_rn({0})",
    "abs": "tl.abs({0})",
    "relu": "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "round": "{0}",
    "gelu": "gelu_erf({0})",
    **{
        name: f"{name}({{0}})"
        for name in ("rsqrt", "reciprocal", "exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh")
    },
    **{name.replace("numbers", "scale"): f"scale_tile({{0}}, {REACH[kind]})" for name, kind in NUMBERS.items()},
    "numbers_int8": f"int8_tile({{0}}, {{1}}, {REACH[torch.int8]}, {MOST[torch.int8]})",
    "numbers_fp8": f"float8_tile({{0}}, {{1}}, {REACH[torch.float8_e4m3fn]})",
}
# Of values that are rounded to 8 bits and nothing else: see `functions_triton.py`.
NEAR = {name: f"near_{name}({{0}})" for name in ("sigmoid", "silu", "gelu_tanh")}


def rounding(dtype: torch.dtype) -> str:
    """Of the function that rounds to it."""
    return str(dtype).removeprefix("torch.")


def peak_of(largest: str) -> str:
    """Of a row, by its largest magnitude."""
    return f"tl.maximum({largest}, {literal(LEAST_PEAK)})"


def larger_of(a: str, b: str) -> str:
    return FORMULAS["maximum"].format(a, b)


def literal(number: float) -> str:
    """A number as it is in fp32."""
    try:
        (value,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        value = float("inf") if number > 0 else float("-inf")
    return repr(value) if value - value == 0 else f'float("{value}")'
