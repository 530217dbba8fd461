"""Which norm a module computes, told by running it on numbers that tell norms apart."""

import copy
from dataclasses import dataclass

import torch
from accel_kernels import Norm
from accel_kernels.norm import reference
from torch import nn

LIMIT = 1e-5  # in fp32, relative to the largest output


@dataclass(frozen=True)
class NormKind:
    """A norm over the last dimension: the names of its weight, bias and eps on the module, and its formula.

    `of(module)` is the norm with the tensors that the module holds now.
    """

    weight: str | None
    bias: str | None
    eps: str
    centred: bool
    offset: float

    def of(self, module: nn.Module) -> Norm:
        weight, bias = (None if name is None else module._parameters[name] for name in (self.weight, self.bias))
        return Norm(weight, bias, float(getattr(module, self.eps)), self.centred, self.offset)


def norm_kind(module: nn.Module, width: int | None = None) -> NormKind | None:
    """The norm a module computes over its last dimension, or None where it is no norm known here.

    width: of the last dimension, where the module has no weight to tell it. The class's own forward runs on a copy with
    random weights: ones and zeros would not tell w from 1 + w, and low precision not one eps from another.
    """
    attributes = vars(module)
    parameters = {name: p for name, p in attributes["_parameters"].items() if p is not None}
    if attributes["_modules"] or attributes["_buffers"] or len(parameters) > 2:
        return None
    if any(p.dim() != 1 or p.shape[0] != next(iter(parameters.values())).shape[0] for p in parameters.values()):
        return None
    width = next((p.shape[0] for p in parameters.values()), width)
    epsilons = [name for name, value in attributes.items() if type(value) is float and 0 < value < 0.1]
    if width is None or not epsilons:
        return None
    probe = copy.copy(module)
    g = torch.Generator().manual_seed(0)
    fresh = {name: nn.Parameter(torch.randn(width, generator=g), requires_grad=False) for name in parameters}
    vars(probe)["_parameters"] = {name: fresh.get(name) for name in attributes["_parameters"]}
    vars(probe)["training"] = False
    # A mean that LayerNorm takes away; and numbers so small that eps shows.
    x = torch.randn(2, 3, width, generator=g) * 2 + 1.5
    inputs = (x, x * float(getattr(module, epsilons[0])) ** 0.5)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            wanted = [type(module).forward(probe, given) for given in inputs]
    except Exception:  # not called with one tensor, or not on a CPU: no norm we know
        return None
    for kind in _kinds(parameters, epsilons):
        norm = kind.of(probe)
        if all(_close(reference(given, norm), out) for given, out in zip(inputs, wanted, strict=True)):
            return kind
    return None


def _kinds(parameters: dict, epsilons: list[str]) -> list[NormKind]:
    names = list(parameters)
    pairs = {0: [(None, None)], 1: [(names[0], None)] if names else [], 2: [tuple(names), tuple(reversed(names))]}
    return [
        NormKind(weight, bias, eps, centred, offset)
        for weight, bias in pairs[len(names)]
        for eps in epsilons
        for centred in (False, True)
        for offset in ((0.0, 1.0) if weight is not None else (0.0,))
    ]


def _close(got: torch.Tensor, wanted: object) -> bool:
    if not isinstance(wanted, torch.Tensor) or got.shape != wanted.shape or not torch.isfinite(wanted).all():
        return False
    return float((got - wanted).abs().max()) <= LIMIT * float(wanted.abs().max().clamp_min(1e-6))
