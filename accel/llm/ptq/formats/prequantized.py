"""Quantized linears that a model arrived with: those of other libraries, known by the tensors they hold."""

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from accel_kernels import Quantized
from torch import nn

from accel.comparison import relative_rms
from accel.errors import reason_of
from accel.patching.rule import set_data
from accel.quantization.formats.stored_weight import probe
from accel.tolerances import PREQUANTIZED

Reading = TypeVar("Reading", bound="PrequantizedLinear")
PACKAGE = "compressed_tensors."
PROBED = 64  # outputs that are compared
UNROUNDED = "activations keep their dtype, and the original layer rounds them: give `activations` to round them too"


class PrequantizedLinear(ABC):
    """One of them. kind: what the report calls it. big: the tensor that holds the numbers. note: what is different.

    input_scale: of all its inputs, fixed, (1,) float32; None where it has none for numbers like the weight's.

    `read` gives its weight, in the same memory where the layout is ours, and `back` the big tensor again. `release`
    empties the big tensor, so that the numbers are held once; `refill` gives them back.
    """

    kind: str
    big: torch.Tensor
    note = ""
    input_scale: torch.Tensor | None = None

    def __init__(self, module: Any):
        self.module = module  # of a class of another package

    @classmethod
    @abstractmethod
    def recognize(cls, module: nn.Module, dtype: torch.dtype) -> "PrequantizedLinear | str | None":
        """The module in this layout, why it is left alone, or None where it is in another. dtype: of the model."""

    @abstractmethod
    def read(self) -> Quantized:
        """Raises ValueError where its tensors do not fit one another."""

    @abstractmethod
    def back(self, quantized: Quantized) -> torch.Tensor: ...

    def release(self) -> None:
        if not self.big.is_inference():
            set_data(self.big, lambda data: data.new_empty(0))

    def refill(self, quantized: Quantized, dtype: torch.dtype | None) -> None:
        """dtype: which the model has been given meanwhile, None where it has kept its own."""
        self.module.to(device=quantized.data.device, dtype=dtype)
        if not self.big.is_inference():
            whole = self.back(quantized)
            alone = whole.untyped_storage().nbytes() == whole.nbytes  # and no rows beside another's, see `Stacked`
            set_data(self.big, lambda data: whole if alone else whole.clone())

    @property
    def bias(self) -> nn.Parameter | None:
        held = held_tensors(self.module).get("bias")
        return held if held is None or isinstance(held, nn.Parameter) else nn.Parameter(held, requires_grad=False)


def held_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the module's own."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def of_package(function: object) -> bool:
    """Whether a forward or a hook is one of compressed-tensors' own."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__globals__", {}).get("__name__", "").startswith(PACKAGE)


def closest(*readings: Reading, dtype: torch.dtype) -> Reading | str:
    """The reading of one module that is closest to what it computes, or why none is close: a copy that shares its
    tensors is called with small numbers. Some modules pack theirs in another way at their first call.
    """
    weights, module = [one.read().rows(0, PROBED) for one in readings], readings[0].module
    device, columns = weights[0].data.device, weights[0].shape[1]
    x = torch.randn(4, columns, generator=torch.Generator().manual_seed(0), device="cpu").to(device, dtype)
    try:
        with torch.inference_mode(False), torch.no_grad():
            found = probe(module).forward(x)[..., :PROBED].float()
    except Exception as error:  # whatever a forward may raise
        return f"calling it to compare raised {reason_of(error)}"
    bias = held_tensors(module).get("bias")
    bias = None if bias is None else bias[:PROBED].float()
    products = (F.linear(x.float(), weight.dequantized(torch.float32), bias) for weight in weights)
    apart, best = min((relative_rms(found, product), at) for at, product in enumerate(products))
    if apart < PREQUANTIZED:
        return readings[best]
    return f"it computes something else than its tensors say ({apart:.0%} off)"
