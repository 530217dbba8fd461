"""Products of a plan: linears, plain or quantized, and GELU by the tanh formula at the end of one."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from accel_kernels import dequantize
from accel_kernels.gemm.quantized_weight import MOST_QUANTIZED_ROWS

from accel.diffusion.dit.program import TorchStep
from accel.quantization.call import QuantizedCall, RoundedCall


def is_product(step: TorchStep) -> bool:
    if isinstance(step.function, QuantizedCall | RoundedCall):
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
    elif not isinstance(function, QuantizedCall):
        given = {"gelu": True} if gelu else {}
        return linear(*args, **given) if out is None else linear(*args, **given, out=out)
    elif function.exact or function.rounds(rows) is not None or rows <= MOST_QUANTIZED_ROWS:
        y = F.gelu(function(*args), approximate="tanh") if gelu else function(*args)
    else:
        x, data, scales, zeros, bias = args
        weight = dequantize(function.weight(data, scales, zeros), x.dtype)
        return run_product(F.linear, [x, weight, bias], linear, gelu, out)
    return y if out is None else out.copy_(y)
