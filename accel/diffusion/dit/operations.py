"""Functions of torch as operations of a row program: each element from those at its place, or a row from itself."""

from typing import Any, NamedTuple

import torch

from accel.diffusion.dit.products.rounded_rows import RowFunction
from accel.diffusion.dit.program import Ref, TensorValue, TorchStep

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BINARY = {
    "add": "add", "__add__": "add", "__radd__": "add", "sub": "sub", "__sub__": "sub", "subtract": "sub",
    "__rsub__": "rsub", "rsub": "rsub", "mul": "mul", "__mul__": "mul", "__rmul__": "mul", "multiply": "mul",
    "div": "div", "__truediv__": "div", "divide": "div", "true_divide": "div", "__rtruediv__": "rdiv",
    "__rdiv__": "rdiv", "maximum": "maximum", "minimum": "minimum",
}  # fmt: skip
UNARY = {
    "neg": "neg", "__neg__": "neg", "negative": "neg", "square": "square", "sqrt": "sqrt", "rsqrt": "rsqrt",
    "reciprocal": "reciprocal", "exp": "exp", "log": "log", "sin": "sin", "cos": "cos", "abs": "abs",
    "tanh": "tanh", "sigmoid": "sigmoid", "silu": "silu", "relu": "relu",
}  # fmt: skip
CASTS = {"to", "float", "half", "bfloat16", "type_as", "type"}
REDUCTIONS = {"mean", "sum", "amax", "peak"}
ROWWISE = {"layer_norm", "rms_norm"}


class Operation(NamedTuple):
    """One operation of a row program, before registers are assigned.

    operands: Refs, or numbers where torch was given these. number: the constant of operations that take one. then: what
    follows, such as a norm's weight and bias.
    """

    name: str
    operands: tuple[Any, ...]
    number: float = 0.0
    then: tuple[tuple[str, Any], ...] = ()


def operation_of(step: TorchStep, values: list[TensorValue]) -> Operation | None:
    """The operation of a step; None for a function or arguments that row programs do not have."""
    if step.writes or not isinstance(step.result, Ref):
        return None
    if isinstance(step.function, RowFunction):
        if step.function.name == "peak":
            return Operation("peak", step.args[:1], then=tuple(("maximum", least) for least in step.args[1:]))
        return Operation(step.function.name, step.args)
    result = values[step.result.number]
    if result.dtype not in (*FLOATS, torch.complex64) or result.pinned or not result.shape:
        return None
    if any(values[number].dtype not in (*FLOATS, torch.complex64) for number in step.taken):
        return None
    if any(values[number].device != result.device for number in step.taken):  # moved, or a number on the CPU
        return None
    name, args, kwargs = step.name, step.args, step.kwargs
    if name in BINARY:
        return _binary(BINARY[name], args, kwargs)
    if name in ("pow", "__pow__") and len(args) == 2 and not kwargs and args[1] == 2 and isinstance(args[0], Ref):
        return Operation("square", args[:1])
    if name in UNARY and len(args) == 1 and not any(kwargs.values()):
        return Operation(UNARY[name], args)
    if name == "gelu" and len(args) == 1:
        kind = kwargs.get("approximate", "none")
        return Operation({"none": "gelu", "tanh": "gelu_tanh"}[kind], args) if kind in ("none", "tanh") else None
    if name in CASTS and args and isinstance(args[0], Ref):
        if values[args[0].number].shape != result.shape or result.dtype is torch.complex64:
            return None
        return Operation("round", args[:1])
    if name in REDUCTIONS:
        return _reduction(name, args, kwargs, values)
    if name in ROWWISE:
        return _norm(name, args, kwargs, values)
    return None


def _binary(name: str, args: tuple, kwargs: dict) -> Operation | None:
    if len(args) != 2 or any(value is not None and value != 1 for value in kwargs.values()):
        return None
    a, b = args
    if not all(isinstance(one, Ref | int | float) and not isinstance(one, bool) for one in args):
        return None
    if isinstance(a, Ref) and isinstance(b, Ref):
        if name in ("rsub", "rdiv"):
            return Operation(name[1:], (b, a))
        return Operation(name, (a, b))
    if isinstance(b, Ref):  # a number first, as torch.mul takes it
        a, b, name = b, a, {"sub": "rsub", "div": "rdiv"}.get(name, name)
    if not isinstance(a, Ref):
        return None
    if name in ("add", "mul", "rsub", "rdiv"):
        return Operation(f"{name}_number", (a,), float(b))
    if name == "sub":
        return Operation("add_number", (a,), -float(b))
    if name == "div" and b:
        return Operation("mul_number", (a,), float(torch.ones((), device="cpu") / b))  # as torch does on a GPU, in fp32
    return None


def _reduction(name: str, args: tuple, kwargs: dict, values: list[TensorValue]) -> Operation | None:
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    x, dim = given.pop("input", None), given.pop("dim", None)
    if not isinstance(x, Ref) or given.pop("keepdim", False) is not True or any(v is not None for v in given.values()):
        return None
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if not isinstance(dim, int) or dim not in (-1, len(values[x.number].shape) - 1):
        return None
    return Operation(name, (x,))


def _norm(name: str, args: tuple, kwargs: dict, values: list[TensorValue]) -> Operation | None:
    order = ["input", "normalized_shape", "weight", "bias", "eps"]
    if name == "rms_norm":
        order.remove("bias")
    given = dict(zip(order, args, strict=False)) | kwargs
    x, eps = given.get("input"), given.get("eps", 1e-5 if name == "layer_norm" else None)
    if not isinstance(x, Ref) or eps is None or tuple(given["normalized_shape"]) != values[x.number].shape[-1:]:
        return None
    then = [("mul", given.get("weight")), ("add", given.get("bias"))]
    return Operation(name, (x,), float(eps), tuple((what, one) for what, one in then if one is not None))
