"""Pieces of Triton's text for tiles of fp32."""

import struct

import torch

from accel_kernels.row_numbers import LEAST_PEAK


def rounding(dtype: torch.dtype) -> str:
    """Of the function that rounds to it."""
    return str(dtype).removeprefix("torch.")


def peak_of(largest: str) -> str:
    """Of a row, by its largest magnitude."""
    return f"tl.maximum({largest}, {literal(LEAST_PEAK)})"


def larger_of(a: str, b: str) -> str:
    """The text of a maximum that keeps NaN."""
    return f"tl.maximum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"


def literal(number: float) -> str:
    """A number as it is in fp32."""
    try:
        (value,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        value = float("inf") if number > 0 else float("-inf")
    return repr(value) if value - value == 0 else f'float("{value}")'
