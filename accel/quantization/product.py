"""Products with a linear's weight, plain or quantized, for forwards that do its work without calling it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accel_kernels import Norm, Quantized, QuantizedRows, dequantize, fused_linear, hopper_gemm, quantized_linear
from accel_kernels.device import Feature, has
from accel_kernels.gemm.adapters.low_rank_term import MOST_PARTS, LowRankTerm
from accel_kernels.gemm.fused_linear import MOST_ROWS, apply_norm
from accel_kernels.gemm.hopper.hopper_gemm import in_passes
from accel_kernels.gemm.linear import torch_linear
from accel_kernels.op import FLOATS
from torch import Tensor, nn

from accel.libraries.adapters import BASE, base
from accel.patching.structure import foreign, plain, tampered
from accel.quantization.adapters import adapts_plain, low_rank, low_rank_term, read_low_rank, with_adapters
from accel.quantization.formats.stored_weight import stored_weight
from accel.quantization.module import QuantizedLinear, row_tensors

MULTIPLIED = (nn.Linear, nn.Conv2d, QuantizedLinear)  # by exact type


class Rows:
    """norm(x) for all products that take it; x: (..., K). The norm is computed once, and so is each way of rounding."""

    __slots__ = ("_normed", "_ordered", "_rounded", "norm", "x")

    def __init__(self, x: Tensor, norm: Norm | None = None):
        self.x, self.norm = x, norm
        self._normed: Tensor | None = None
        self._rounded: dict[tuple, QuantizedRows] = {}
        self._ordered: dict[tuple | None, Tensor] = {}

    def normed(self) -> Tensor:
        if self.norm is None:
            return self.x
        if self._normed is None:
            self._normed = apply_norm(self.x, self.norm)
        return self._normed

    def rounded(self, linear: QuantizedLinear, activations: str) -> QuantizedRows:
        """The rows as this linear rounds them, computed once for all linears that round alike."""
        key = linear.rounding
        if key not in self._rounded:
            self._rounded[key] = linear.products.rounded(self.x, activations, self.norm, linear.fixed)
        return self._rounded[key]

    def ordered(self, linear: QuantizedLinear, weight: Quantized) -> Tensor:
        """norm(x), its columns as they lie in the weight of this linear: gathered once for all of one order."""
        if weight.order is None:
            return self.normed()
        key = linear.order
        if key not in self._ordered:
            self._ordered[key] = self.normed().index_select(-1, weight.order)
        return self._ordered[key]


def plain_linear(module: nn.Module | None) -> str | None:
    """None where the module multiplies by its weight and does nothing else, else the reason; see `plain`."""
    return tampered(module) if type(module) is QuantizedLinear else plain(module, nn.Linear, stored=True)


def keeps_forward(layer: nn.Module) -> bool:
    """Whether a layer runs its own forward inside a fused one: with adapters, or a weight in a format of a library."""
    if type(layer) is QuantizedLinear:
        return False
    return type(layer) not in MULTIPLIED or type(layer._parameters["weight"]) is not nn.Parameter


def layer_reason(*layers: nn.Module | None) -> str | None:
    """Why a fused forward can neither multiply by one of these layers nor call it; None where it can.

    What is called must be of a library, so that a trial of it does nothing else.
    """
    for layer in layers:
        if layer is None or not isinstance(base(layer), MULTIPLIED):
            return plain(layer, nn.Linear, stored=True)
        reason = next(filter(None, map(foreign, layer.modules())), None) if keeps_forward(layer) else None
        if reason or (reason := tampered(layer, stored=True)):
            return reason
    return None


def own_forwards(layers: Iterable[nn.Module | None]) -> str:
    """Which of them are called, for the report: by the package and the class of the layer, or of its weight."""
    called = [layer for layer in layers if layer is not None and keeps_forward(layer) and not _understood(layer)]
    kinds = {type(layer._parameters["weight"] if type(layer) in MULTIPLIED else layer) for layer in called}
    named = sorted(f"{kind.__module__.partition('.')[0]}'s {kind.__name__}" for kind in kinds)
    told = "runs its own forward" if len(named) == 1 else "run their own forward"
    return f"{', '.join(named)} {told}" if named else ""


def _understood(layer: nn.Module) -> bool:
    """Whether it is a product with a weight that is read as it lies, or such a one and adapters of low rank."""
    inner = base(layer)
    if not isinstance(inner, nn.Linear) or (keeps_forward(inner) and stored_weight(inner) is None):
        return False
    return inner is layer or any(read_low_rank(layer, dtype) is not None for dtype in FLOATS)


def adapts(layer: nn.Module) -> bool:
    """Whether it has nothing but adapters of low rank, around a plain linear or a weight that is read as it lies."""
    return BASE in layer._modules and (adapts_plain(layer) or (keeps_forward(base(layer)) and _understood(layer)))


def device_and_dtype(linear: nn.Linear) -> tuple[torch.device, torch.dtype]:
    """Where its weight is, and in what dtype it is multiplied."""
    if type(linear) is QuantizedLinear:
        return linear.data.device, linear.dtype
    return linear.weight.device, linear.weight.dtype


def matrix(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """The weight (N, K); a quantized one written out in dtype, for this one use."""
    return dequantize(linear.quantized, dtype) if type(linear) is QuantizedLinear else linear.weight


def rounds(linear: nn.Module | None, x: Tensor) -> str | None:
    """How this linear rounds the rows of x, a value of `Options.activations`; None where it does not."""
    return linear.rounds(x) if type(linear) is QuantizedLinear else None


def order_of(linear: nn.Module) -> tuple | None:
    """Equal for linears that can have one input put in order once; see `Quantized`."""
    return linear.order if type(linear) is QuantizedLinear else None


def deferred(linear: nn.Module, x: Tensor) -> bool:
    """Whether the next pass should add the bias: not on a CPU, nor where rounded rows add it at no cost."""
    return x.is_cuda and not keeps_forward(linear) and rounds(linear, x) is None


def product(linear: Any, x: Tensor | Rows, bias: bool = True, multiply: Callable = F.linear) -> Tensor:
    """x W^T, with bias where there is one. x: (..., K). multiply: what multiplies by a plain weight, as F.linear.

    A layer that is called, or has adapters, adds its bias always, and one whose weight is read where it lies; see
    `deferred`.
    """
    rows = x if isinstance(x, Rows) else Rows(x)
    if keeps_forward(linear):
        inner = base(linear)
        if (term := joint_term((linear,), rows.x)) is not None:
            return adapted_product(rows.normed(), row_tensors(inner), term, multiply)
        adapters = () if inner is linear else low_rank(linear, rows.x)
        stored = stored_weight(inner) if adapters is not None and tampered(inner, stored=True) is None else None
        if adapters is None or (inner is linear and stored is None):
            return linear(rows.normed())
        y = product(inner, rows, multiply=multiply) if stored is None else stored(rows.normed())
        return with_adapters(rows.normed(), [y], [adapters])[0] if adapters else y
    *weight, shift = row_tensors(linear)
    return multiplied(linear, (*weight, shift if bias else None), rows, multiply)


def joint_term(layers: Sequence[Any], x: Tensor) -> LowRankTerm | None:
    """What adapters add to the one product of x and linears with plain weights of its dtype; see `low_rank_term`."""
    bases = map(base, layers)
    plain = (type(one) is nn.Linear and plain_linear(one) is None and one.weight.dtype == x.dtype for one in bases)
    return low_rank_term(layers, x) if all(plain) else None


def adapted_product(x: Tensor, tensors: Sequence[Any], term: LowRankTerm, multiply: Callable, **after: Any) -> Tensor:
    """x W^T + b, with what adapters add as more columns of both; x: (..., K). tensors: W and b. multiply: as of
    `product`, where no kernel of ours takes both. after: what follows, as of `hopper_gemm`.
    """
    x, rows = x.contiguous(), x.numel() // x.shape[-1]
    if rows <= MOST_ROWS and "out" not in after:
        return fused_linear(x, *tensors, low_rank=term, **after)
    if has(x.device, Feature.WARPGROUPS) and len(term.ends) <= MOST_PARTS:
        return hopper_gemm(x, *tensors, low_rank=term, **after)
    return in_passes(x, *tensors, low_rank=term, linear=torch_linear if multiply is F.linear else multiply, **after)


def adapted_linears(
    layers: Sequence[Any], multiply: Callable, x: Tensor, *tensors: Any, gelu: bool = False, out: Tensor | None = None
) -> Tensor:
    """The outputs of linears that may have adapters of low rank, side by side.

    tensors: the weight and the bias of all. multiply: as of `product`. gelu: its tanh formula, of the outputs. out:
    where they are written and what is returned, if given.
    """
    into, after = {} if out is None else {"out": out}, {"activation": "gelu_tanh"} if gelu else {}
    if (term := joint_term(layers, x)) is not None:
        return adapted_product(x, tensors, term, multiply, **into, **after)
    found = [low_rank(layer, x) if keeps_forward(layer) else () for layer in layers]
    if not any(found):
        return multiply(x, *tensors, **into, **({"gelu": True} if gelu else {}))
    parts = multiply(x, *tensors).split([base(layer).out_features for layer in layers], dim=-1)
    sums = with_adapters(x, parts, [own or () for own in found])
    y = torch.cat(list(sums), -1) if len(sums) > 1 else sums[0]
    y = F.gelu(y, approximate="tanh") if gelu else y
    return y if out is None else out.copy_(y)


def multiplied(linear: nn.Linear, tensors: Sequence[Any], rows: Rows, multiply: Callable = F.linear) -> Tensor:
    """x W^T + b with tensors like those of `row_tensors` of this linear: its own, or several linears' in one.

    A quantized weight meets many rows in 8 bits where the linear rounds them. It is read as it lies by other rows where
    they are few, and written out before them where not.
    """
    *parts, bias = tensors
    if type(linear) is not QuantizedLinear:
        return multiply(rows.normed(), *parts, bias)
    weight = linear.read(*parts)
    if (activations := linear.rounds(rows.x)) is not None:
        return rounded_product(linear, activations, rows, weight, bias)
    x, weight = rows.ordered(linear, weight), weight._replace(order=None)
    if x.numel() <= weight.most_rows * x.shape[-1]:
        return quantized_linear(x.contiguous(), weight, bias)
    return multiply(x, dequantize(weight, x.dtype), bias)


def rounded_product(
    linear: QuantizedLinear, activations: str, rows: Rows, weight: Quantized, bias: Tensor | None, **after: Any
) -> Tensor:
    """x W^T + b of rows in 8 bits, for a linear that rounds them, or others like it whose weights lie in one with its.

    activations: how it rounds them. after: what follows in the same pass, as of `int8_linear`: residual, up, up_bias,
    activation.
    """
    return linear.products.product(activations)(rows.rounded(linear, activations), weight, bias, **after)


def rounded_geglu(linear: QuantizedLinear, activations: str, rows: Rows) -> Tensor:
    """value * gelu(gate), exact GELU, of a linear that rounds rows and gives values, then gates; one product."""
    half = linear.out_features // 2
    lists = [(None, None) if part is None else part.split(half) for part in row_tensors(linear)]
    (*value, shift), (*gate, gate_shift) = zip(*lists, strict=True)
    more = {"up": linear.read(*value), "up_bias": shift, "activation": "gelu"}
    return rounded_product(linear, activations, rows, linear.read(*gate), gate_shift, **more)
