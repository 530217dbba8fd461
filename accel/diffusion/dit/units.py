"""What a schedule is made of: passes, products, and recorded steps that run as they were."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accel_kernels import dequantize, dequantize_blocks
from accel_kernels.gemm.blocks.block_linear import reads_blocks

from accel.diffusion.dit.lowering import Operand, Pass
from accel.diffusion.dit.program import TorchStep
from accel.quantization.activations import QuantizedCall, RoundedCall
from accel.quantization.formats.stored_weight import StoredCall


@dataclass
class _StepUnit:
    step: TorchStep
    place: int

    @property
    def takes(self) -> set[int]:
        return set(self.step.taken)


class TorchCall(_StepUnit):
    """A recorded step, run as it was."""

    @property
    def makes(self) -> set[int]:
        return set(self.step.made)


@dataclass
class Copy:
    """A piece of a concatenation that no pass makes, put where it belongs."""

    source: Operand
    output: Operand
    place: int

    @property
    def takes(self) -> set[int]:
        return {self.source.number}

    @property
    def makes(self) -> set[int]:
        return {self.output.number}


@dataclass
class GeluProduct(_StepUnit):
    """A linear and the GELU of it, by the tanh formula, which a product can do at its end."""

    output: Operand

    @property
    def makes(self) -> set[int]:
        return {self.output.number}


@dataclass
class StackedProduct:
    """Linears of one input, as one product whose columns are their results. output: rows of a tensor to write to."""

    steps: list[TorchStep]
    place: int
    output: Operand | None = None

    @property
    def takes(self) -> set[int]:
        return {number for step in self.steps for number in step.taken}

    @property
    def makes(self) -> set[int]:
        into = () if self.output is None else (self.output.number,)
        return {*into, *(number for step in self.steps for number in step.made)}


Unit = Pass | TorchCall | Copy | GeluProduct | StackedProduct


def is_product(step: TorchStep) -> bool:
    """Whether it is a linear, plain or quantized."""
    if isinstance(step.function, QuantizedCall | RoundedCall | StoredCall):
        return True
    return step.name == "linear" and len(step.args) in (2, 3) and not step.kwargs


def run_product(
    function: Callable, args: list, linear: Callable, gelu: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What the step of a product gives. function, args: of it. linear: what multiplies by a plain weight.

    gelu: the GELU of it. out: where it is written and what is returned, if given. A quantized weight is read as it lies
    where rows are few, and written out before them where not; rows in 8 bits are multiplied as they are.
    """
    rows = args[0].numel() // max(1, args[0].shape[-1])
    if isinstance(function, RoundedCall):
        y = function(*args, activation="gelu_tanh") if gelu else function(*args)
    elif isinstance(function, StoredCall):
        stored, x = function.read(*args[1:]), args[0]
        if stored.dtype in (None, x.dtype) and not reads_blocks(x):
            weight, bias = dequantize_blocks(stored.weight, x.dtype), stored.bias
            return run_product(F.linear, [x, weight, None if bias is None else bias.to(x.dtype)], linear, gelu, out)
        y = F.gelu(stored(x), approximate="tanh") if gelu else stored(x)
    elif not isinstance(function, QuantizedCall):
        given = {"gelu": True} if gelu else {}
        return linear(*args, **given) if out is None else linear(*args, **given, out=out)
    elif function.written_out(rows):
        x, *parts, bias = args
        return run_product(F.linear, [x, dequantize(function.weight(*parts), x.dtype), bias], linear, gelu, out)
    else:
        y = F.gelu(function(*args), approximate="tanh") if gelu else function(*args)
    return y if out is None else out.copy_(y)
