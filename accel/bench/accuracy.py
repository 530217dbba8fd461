"""How far an output is from the same model run in full precision."""

import torch
from torch import nn

from accel.bench.case import Case, cast
from accel.fusion.float32_precision import full_precision
from accel.verification.precision import finer, upcast


def reference(case: Case, module: nn.Module, inputs: list[dict], dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs of an upcast copy of the module: float32, or float64 where the module is in float32 itself."""
    return in_full(case, upcast(module, finer(dtype)), inputs, dtype)


def in_full(case: Case, twin: nn.Module, inputs: list[dict], dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs of such a copy, on inputs cast to it. dtype: of the module that it is a copy of."""
    with full_precision():
        return [case.call(twin, cast(kwargs, finer(dtype))) for kwargs in inputs]


def max_abs_error(outputs: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference of any two elements."""
    errors = [(a.double() - b.double()).abs().max() for a, b in zip(outputs, others, strict=True)]
    return torch.stack(errors).max().item()
