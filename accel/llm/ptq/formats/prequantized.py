"""Quantized linears that a model arrived with: those of other libraries, known by the tensors they hold."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from accel_kernels import Quantized
from torch import nn

from accel.comparison import relative_rms
from accel.errors import reason_of
from accel.llm.ptq.formats import compressed_tensors as compressed
from accel.patching.rule import set_data
from accel.patching.structure import stock_method
from accel.quantization.activations import NUMBERS, is_static, kind_of
from accel.tolerances import PREQUANTIZED

PACKAGE = "compressed_tensors."
PROBED = 64  # outputs that are compared
UNROUNDED = "activations keep their dtype, which the layer it came as rounds too: `activations` asks for it"


class PrequantizedLinear(ABC):
    """One of them. kind: what the report calls it. big: the tensor that holds the numbers. note: what is different.

    input_scale: of all its inputs, fixed, (1,) float32; None where it has none for numbers like the weight's.

    `read` gives its weight, in the same memory where the layout is ours, and `back` the big tensor again. Once read it
    is released: ours holds the numbers, until they are given back.
    """

    kind: str
    big: torch.Tensor
    note = ""
    input_scale: torch.Tensor | None = None

    def __init__(self, module: Any):
        self.module = module  # of a class of another package

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


class CompressedTensors(PrequantizedLinear):
    """As transformers makes of a folder in the layout of compressed-tensors, before its first call."""

    @classmethod
    def recognize(cls, module: nn.Module, dtype: torch.dtype) -> "CompressedTensors | str | None":
        held = held_tensors(module)
        if not isinstance(module, nn.Linear) or "weight_scale" not in held:
            return None
        weight = held.get("weight")
        if weight is not None and weight.is_floating_point() and weight.dtype not in compressed.BYTES:
            return "its weight was dequantized by a call before accel.optimize"
        if "weight_g_idx" in held:
            return "act-order: its columns are in an order of their own"
        forward = vars(module).get("forward")
        if forward is not None and not stock_method(module, forward) and not of_package(forward):
            return f"its forward was replaced ({type(forward).__name__})"
        return cls(module)

    def __init__(self, module: nn.Module):
        super().__init__(module)
        held = held_tensors(module)
        self.big = held["weight_packed"] if "weight_packed" in held else held["weight"]
        self.bytes = "weight_packed" in held and compressed.bits(held["weight_packed"], held["weight_shape"]) == 8
        self.kind = compressed.METHOD
        found = getattr(vars(module).get("quantization_scheme"), "input_activations", None)
        self.note = UNROUNDED if found is not None else ""
        said = {name: getattr(found, name, None) for name in ("num_bits", "type", "symmetric", "strategy", "dynamic")}
        activations = compressed.rounding_of(said)
        if activations is not None and is_static(activations) and NUMBERS[kind_of(activations)] == self.big.dtype:
            self.input_scale = compressed.input_scale(held)

    def read(self) -> Quantized:
        held = {name: tensor.detach() for name, tensor in held_tensors(self.module).items()}
        return compressed.read(held)

    def back(self, quantized: Quantized) -> torch.Tensor:
        return compressed.to_bytes(quantized.data) if self.bytes else quantized.data


def held_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the module's own."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def of_package(function: object) -> bool:
    """Whether a forward or a hook is one of compressed-tensors' own."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__globals__", {}).get("__name__", "").startswith(PACKAGE)


def disagrees(module: nn.Module, quantized: Quantized, bias: torch.Tensor | None, dtype: torch.dtype) -> str | None:
    """Why the module is not a product with this weight: it is called with small numbers, and compared."""
    device = quantized.data.device
    x = torch.randn(4, quantized.shape[1], generator=torch.Generator().manual_seed(0)).to(device, dtype)
    few = quantized.rows(0, PROBED)
    wanted = x.float() @ few.dequantized(torch.float32).t()
    if bias is not None:
        wanted = wanted + bias[:PROBED].float()
    try:
        with torch.inference_mode(False), torch.no_grad():
            found = module.forward(x)[..., :PROBED].float()
    except Exception as error:  # whatever a forward may raise
        return f"calling it to compare raised {reason_of(error)}"
    apart = relative_rms(found, wanted)
    return None if apart < PREQUANTIZED else f"it computes something else than its tensors say ({apart:.0%} off)"
