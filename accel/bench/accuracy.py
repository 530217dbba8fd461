"""How far an output is from the same model run in full precision."""

import copy
from typing import Any

import torch
from torch import nn

from accel.bench.cases import Case
from accel.verification.precision import finer, full_precision


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: _cast(inner, dtype) for key, inner in value.items()}
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def reference(case: Case, module: nn.Module, inputs: list[dict], dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs of an upcast copy of the module: float32, or float64 where the module is in float32 itself."""
    return in_full(case, nn.Module.to(copy.deepcopy(module), finer(dtype)), inputs, dtype)


def in_full(case: Case, twin: nn.Module, inputs: list[dict], dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs of such a copy, on inputs cast to it. dtype: of the module that it is a copy of."""
    with full_precision():
        return [case.call(twin, _cast(kwargs, finer(dtype))) for kwargs in inputs]


def relative_error(outputs: list[torch.Tensor], references: list[torch.Tensor]) -> float:
    """Root mean square of the error over that of the reference, the worst of all calls; nan where anything is nan."""
    errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(outputs, references, strict=True)]
    return torch.stack(errors).max().item()  # torch's max keeps a nan, Python's may drop it


def max_abs_error(outputs: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    errors = [(a.double() - b.double()).abs().max() for a, b in zip(outputs, others, strict=True)]
    return torch.stack(errors).max().item()
