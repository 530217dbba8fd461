"""Experts of a mixture that hold their stacks of matrices in fewer bits."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from accel_kernels import Quantized
from accel_kernels.gemm.quantized_weight import PARTS
from torch import nn

from accel.in_flight import GATE
from accel.parallel.sharded_layers import local
from accel.quantization.activations import buffers_of, from_buffers
from accel.quantization.module import QuantizedLinear, StockState, overwritten, without_casting
from accel.quantization.scheme import Scheme

LIKE = "like"  # a buffer without numbers, in the dtype that stacks are written out in
AT_ONCE = 2**26  # numbers that are written out at a time: some are in float32 meanwhile


class ExpertStacks(NamedTuple):
    """A module of experts, and the names of its two stacks of matrices. transposed: both are (E, inputs, outputs)."""

    module: nn.Module
    names: tuple[str, ...]
    transposed: bool

    def matrices(self, name: str) -> torch.Tensor:
        """A stack as (E, outputs, inputs), a view where it is transposed."""
        held = self.module._parameters[name]
        assert held is not None
        stack = local(held)
        return stack.transpose(1, 2) if self.transposed else stack

    @property
    def inputs_dim(self) -> int:
        """Along which the inputs of a stack lie."""
        return 1 if self.transposed else 2

    def inputs(self, name: str) -> int:
        """Of each matrix of a stack."""
        return self.matrices(name).shape[-1]


class QuantizedExperts(StockState):
    """Experts whose two stacks are `Quantized`, in place of a module of class `kind`, whose settings it takes over.

    The parts of a stack are buffers, such as "gate_up_proj_data": moved with the module, never cast, in the state_dict;
    float8 as bytes. Biases and activation are the original's. dtype: of the stacks before quantization, changed by
    `.to(dtype)`.

    A call runs the code of `kind` over dequantized stacks, in the dtype of the tokens. So gradients flow to tokens,
    shares and biases. Fused code reads the packed stacks, see `stack`.
    """

    def __init__(self, original: ExpertStacks, stacks: Mapping[str, Quantized], scheme: Scheme):
        super().__init__()
        module, own = original.module, {*vars(self), GATE}
        vars(self).update({name: value for name, value in vars(module).items() if name not in own})
        self._modules = module._modules
        self.kind, self.transposed, self.scheme = type(module), original.transposed, scheme
        self.register_buffer(LIKE, original.matrices(original.names[0]).detach().new_empty(0), persistent=False)
        self.formats = {name: quantized.format for name, quantized in stacks.items()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
        for name, quantized in stacks.items():
            for part, tensor in buffers_of(quantized).items():
                self.register_buffer(f"{name}_{part}", tensor)
        for name, parameter in module._parameters.items():
            if name not in stacks:
                self.register_parameter(name, parameter)

    @property
    def dtype(self) -> torch.dtype:
        """That of an empty tensor which casts change; as an attribute it would count as a changed setting."""
        return self.get_buffer(LIKE).dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        self._buffers[LIKE] = self.get_buffer(LIKE).to(dtype)

    def stack(self, name: str) -> Quantized:
        """The rows of all matrices of this stack, (E outputs, inputs)."""
        return self.read(name, *(self._buffers[f"{name}_{part}"] for part in PARTS))

    def take(self) -> None:
        for name, quantized in self.arrived.read().items():
            for part, new in buffers_of(quantized).items():
                self._buffers[f"{name}_{part}"] = overwritten(self._buffers[f"{name}_{part}"], new)

    def read(self, name: str, data: Any, scales: Any, zeros: Any) -> Quantized:
        """The stack that buffers like its own are."""
        return from_buffers(self.formats[name], data, scales, zeros)

    def written(self, name: str, quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """A stack as the original holds it, (E, outputs, inputs) or transposed, its values rounded to dtype."""
        rows, columns = quantized.shape
        result = torch.empty(rows, columns, dtype=dtype, device=quantized.data.device)
        for start in range(0, rows, step := max(1, AT_ONCE // columns)):
            result[start : start + step] = quantized.rows(start, start + step).dequantized(dtype)
        matrices = result.unflatten(0, (self.shapes[name][0], -1))
        return matrices.transpose(1, 2) if self.transposed else matrices

    def original_class(self) -> nn.Module:
        """An empty module of the class whose code runs."""
        module = self.kind.__new__(self.kind)
        nn.Module.__init__(module)
        return module.eval()

    def settings(self) -> dict[str, Any]:
        """What was set on it since, and before on the original: all but what every module has, and its own."""
        own = {*vars(self.original_class()), *OWN, GATE, "forward"}
        return {name: value for name, value in vars(self).items() if name not in own}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's: tokens (T, H), choices (T, k) and shares (T, k)."""
        given = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        dtype = next(one.dtype for one in given if one.is_floating_point())
        stock = self.kind.__new__(self.kind)  # whose attributes are this module's, with stacks beside them
        vars(stock).update(vars(self))
        for name in self.formats:
            vars(stock)[name] = self.written(name, self.stack(name), dtype)
        return self.kind.forward(stock, *args, **kwargs)

    def train(self, mode: bool = True) -> "QuantizedExperts":
        """Warns where the weights would be trained but for a default of ours."""
        if mode and self.scheme.exact:
            warnings.warn("experts packed in MXFP4 are not trained; accel.restore(model) writes them out", stacklevel=2)
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "QuantizedExperts":
        return super()._apply(without_casting(self, fn, LIKE), recurse)

    def extra_repr(self) -> str:
        return f"{self.kind.__name__}, {self.scheme}"


WORDS = (torch.int32, torch.uint8)
OWN = ("kind", "transposed", "scheme", "formats", "shapes", "arrived")  # attributes that originals do not have


def holds_numbers(module: nn.Module) -> bool:
    """Whether it is a linear or experts in fewer bits, whose buffers are the weight: ours, or words as of GPTQ."""
    words = (one for one in module._buffers.values() if one is not None and one.dtype in WORDS)
    return type(module) in (QuantizedLinear, QuantizedExperts) or any(one.dim() == 2 for one in words)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class whose code a module stands for: of quantized experts the original's."""
    return module.kind if isinstance(module, QuantizedExperts) else type(module)


def stock_parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of what the forward of that class takes."""
    return tuple(inspect.signature(stock_class(module).forward).parameters)[1:]
