"""The operations of row programs: of each its kind, a reference in torch, and its formula on tiles of fp32."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.rowwise.row_numbers import MOST, REACH, row_numbers, row_peak, row_scale

FP8 = torch.float8_e4m3fn


class Operation(NamedTuple):
    """kind: "unary", "binary" and "number", of one register, two, or one and a number; "to_one", a reduction; "norm";
    "take" and "join", moves of lanes; "numbers", 8-bit numbers from values and their peak.
    reference: in plain torch. formula: by functions of `functions_triton.py`; None where `Source` writes its own text.
    """

    kind: str
    reference: Callable[..., torch.Tensor]
    formula: str | None = None


OPERATIONS = {
    "add": Operation("binary", torch.add, "{0} + {1}"),
    "sub": Operation("binary", torch.sub, "{0} - {1}"),
    "mul": Operation("binary", torch.mul, "{0} * {1}"),
    "div": Operation("binary", torch.div, "tl.math.div_rn({0}, {1})"),
    "maximum": Operation("binary", torch.maximum, "larger({0}, {1})"),
    "minimum": Operation("binary", torch.minimum, "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
    "add_number": Operation("number", torch.add, "{0} + {number}"),
    "mul_number": Operation("number", torch.mul, "{0} * {number}"),
    "div_number": Operation("number", torch.div, "{0} * {reciprocal}"),
    "rsub_number": Operation("number", lambda x, number: number - x, "{number} - {0}"),
    "rdiv_number": Operation("number", lambda x, n: torch.div(torch.full_like(x, n), x), "divided({number}, {0})"),
    "clamp_min": Operation("number", torch.clamp_min, "larger({0}, {number})"),
    "clamp_max": Operation("number", torch.clamp_max, "tl.minimum({0}, {number}, propagate_nan=tl.PropagateNan.ALL)"),
    "neg": Operation("unary", torch.neg, "-{0}"),
    "square": Operation("unary", torch.square, "{0} * {0}"),
    "sqrt": Operation("unary", torch.sqrt, "tl.math.sqrt_rn({0})"),
    "rsqrt": Operation("unary", torch.rsqrt, "tl.rsqrt({0})"),
    "reciprocal": Operation("unary", torch.reciprocal, "divided(1.0, {0})"),
    "exp": Operation("unary", torch.exp, "library.exp({0})"),
    "log": Operation("unary", torch.log, "library.log({0})"),
    "sin": Operation("unary", torch.sin, "library.sin({0})"),
    "cos": Operation("unary", torch.cos, "library.cos({0})"),
    "abs": Operation("unary", torch.abs, "tl.abs({0})"),
    "tanh": Operation("unary", torch.tanh, "tanh({0})"),
    "sigmoid": Operation("unary", torch.sigmoid, "sigmoid({0})"),
    "silu": Operation("unary", F.silu, "silu({0})"),
    "gelu": Operation("unary", F.gelu, "gelu_erf({0})"),
    "gelu_tanh": Operation("unary", lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh({0})"),
    "relu": Operation("unary", F.relu, "larger({0}, 0.0)"),
    "round": Operation("unary", lambda x: x, "{0}"),
    "scale_int8": Operation(
        "unary", lambda peak: row_scale(peak, torch.int8), f"scale_tile({{0}}, {REACH[torch.int8]})"
    ),
    "scale_fp8": Operation("unary", lambda peak: row_scale(peak, FP8), f"scale_tile({{0}}, {REACH[FP8]})"),
    "sum": Operation("to_one", lambda x: x.sum(-1, keepdim=True)),
    "mean": Operation("to_one", lambda x: x.mean(-1, keepdim=True)),
    "amax": Operation("to_one", lambda x: x.amax(-1, keepdim=True)),
    "peak": Operation("to_one", row_peak),
    "layer_norm": Operation("norm", lambda x, eps: F.layer_norm(x, x.shape[-1:], eps=eps)),
    "rms_norm": Operation("norm", lambda x, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)),
    "even": Operation("take", lambda x: x[..., 0::2]),
    "odd": Operation("take", lambda x: x[..., 1::2]),
    "first": Operation("take", lambda x: x[..., : x.shape[-1] // 2]),
    "second": Operation("take", lambda x: x[..., x.shape[-1] // 2 :]),
    "interleave": Operation("join", lambda a, b: torch.stack(torch.broadcast_tensors(a, b), -1).flatten(-2)),
    "concatenate": Operation("join", lambda a, b: torch.cat(torch.broadcast_tensors(a, b), -1)),
    "numbers_int8": Operation(
        "numbers", lambda x, peak: row_numbers(x, peak, torch.int8),
        f"int8_tile({{0}}, {{1}}, {REACH[torch.int8]}, {MOST[torch.int8]})",
    ),
    "numbers_fp8": Operation(
        "numbers", lambda x, peak: row_numbers(x, peak, FP8), f"float8_tile({{0}}, {{1}}, {REACH[FP8]}, {{by_hand}})"
    ),
}  # fmt: skip
# Near formulas, of values that are rounded to 8 bits and nothing else: see `functions_triton.py`.
NEAR = {name: f"near_{name}({{0}})" for name in ("sigmoid", "silu", "gelu_tanh")}
# The text of a value of fp32 rounded to each dtype; what `numbers_` give is of 8 bits already.
ROUNDED = {
    torch.float32: "{}", torch.float16: "({}).to(tl.float16)", torch.bfloat16: "bfloat16({})", torch.int8: "{}",
    FP8: "{}",
}  # fmt: skip
# What needs no rounding where its registers are of the dtype already.
KEEPS = (
    *("neg", "abs", "relu", "maximum", "minimum", "round", "amax"),
    *(name for name, one in OPERATIONS.items() if one.kind in ("take", "join")),
)
