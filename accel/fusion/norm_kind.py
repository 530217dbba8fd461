"""Which norm a module computes, recognized by running it on inputs that tell norms apart."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from accel_kernels import Norm, rms_norm
from accel_kernels.norm.norm import reference
from accel_kernels.norm.rms_norm import GATES, Gate
from torch import nn

from accel.comparison import relative_max
from accel.errors import reason_of
from accel.tolerances import NORM, NORM_NARROW

NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class NormKind:
    """A norm over the last dimension: the names of its weight, bias and eps on the module, and its formula.

    groups, gate: as `accel_kernels.norm.rms_norm` takes them; the gate by its activation, and whether it comes first.
    keeps: the patterns of fp32 (True) or 16 bits, of input, weight and gate, for which the output has the input's
    dtype. Torch's promotion may give another one. `of(module)` is the norm with the module's present tensors.
    """

    weight: str | None
    bias: str | None
    eps: str
    centered: bool
    offset: float
    groups: int = 1
    gate: tuple[str, bool] | None = None
    keeps: tuple[tuple[bool, ...], ...] = ()

    def of(self, module: nn.Module) -> Norm:
        weight, bias = (None if name is None else module._parameters[name] for name in (self.weight, self.bias))
        return Norm(weight, bias, float(getattr(module, self.eps)), self.centered, self.offset)

    def keeps_dtype(self, *tensors: torch.Tensor | None) -> bool:
        """Whether the norm of the first of these, with this weight and by this gate, has its dtype in stock."""
        dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
        wide = tuple(dtype not in NARROW for dtype in dtypes)
        usual = len(set(dtypes)) == 1 or set(dtypes) - {torch.float32} in ({dtype} for dtype in NARROW)
        return usual and wide in self.keeps


def norm_kind(module: nn.Module, width: int | None = None) -> NormKind | None:
    """The norm a module computes over its last dimension, or None where it is no norm known here.

    width: of the last dimension, where the module has no weight to tell it. The class's own forward runs on a copy with
    random weights: ones and zeros would not tell w from 1 + w, and low precision not one eps from another.
    """
    probe = _Probe.of(module, width)
    return None if probe is None else probe.find(_kinds(probe), gated=False)


def rms_norm_kinds(module: nn.Module) -> tuple[NormKind | None, NormKind | None]:
    """The RMSNorms that a module computes of one tensor, and with a gate beside it, perhaps in several groups."""
    probe = _Probe.of(module, None)
    if probe is None:
        return None, None
    plain = [kind for kind in _kinds(probe) if kind.weight is not None and kind.bias is None and not kind.centered]
    grouped = [replace(kind, groups=groups) for groups in probe.groups() for kind in plain]
    gates = [(activation, first) for activation in GATES for first in (True, False)]
    gated = [replace(kind, gate=gate) for gate in gates for kind in grouped]
    return probe.find(grouped, gated=False), probe.find(gated, gated=True)


class _Probe:
    """A copy of a module with random weights, and what its class's forward makes of random inputs."""

    def __init__(self, module: nn.Module, width: int, names: list[str], epsilons: list[str]):
        self.names, self.epsilons, self.width = names, epsilons, width
        self.generator = torch.Generator().manual_seed(0)
        self.module = random_twin(module, self.generator)
        # So that a formula without buffers holds only if none counts.
        held = vars(module)["_buffers"].items()
        vars(self.module)["_buffers"] = {name: None if b is None else self._random(*b.shape) for name, b in held}
        # A mean that LayerNorm takes away; and numbers so small that eps shows.
        x = self._random(2, 3, width) * 2 + 1.5
        self.inputs = (x, x * float(getattr(module, epsilons[0])) ** 0.5)
        self.gate = self._random(2, 3, width) * 2

    @classmethod
    def of(cls, module: nn.Module, width: int | None) -> "_Probe | None":
        """None for what is made as no norm is."""
        attributes = vars(module)
        parameters = {name: p for name, p in attributes["_parameters"].items() if p is not None}
        if attributes["_modules"] or len(parameters) > 2:
            return None
        if any(p.dim() != 1 or p.shape[0] != next(iter(parameters.values())).shape[0] for p in parameters.values()):
            return None
        width = next((p.shape[0] for p in parameters.values()), width)
        epsilons = [name for name, value in attributes.items() if type(value) is float and 0 < value < 0.1]
        return cls(module, width, list(parameters), epsilons) if width and epsilons else None

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float32)

    def groups(self) -> list[int]:
        """Numbers of groups that the module may mean: one, or what its own numbers say of count or size."""
        numbers = [value for value in vars(self.module).values() if type(value) is int and value > 0]
        fit = [value for value in numbers if self.width % value == 0]
        return list(dict.fromkeys((1, *fit, *(self.width // value for value in fit))))

    def find(self, kinds: list[NormKind], gated: bool) -> NormKind | None:
        """The first kind that agrees with what the module gives."""
        calls = [(x, self.gate) if gated else (x,) for x in self.inputs]
        wanted = [out for call in calls if (out := self._run(*call)) is not None]
        if len(wanted) < len(calls):
            return None
        for kind in kinds:
            pairs = zip(calls, wanted, strict=True)
            if all(close(self._expected(kind, *call), out, NORM) for call, out in pairs):
                return replace(kind, keeps=tuple(self._kept(kind)))
        return None

    def _run(self, *call: torch.Tensor) -> torch.Tensor | None:
        out = stock_output(self.module, *call)
        return out if isinstance(out, torch.Tensor) else None

    def _expected(self, kind: NormKind, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        norm = kind.of(self.module)
        if kind.groups == 1 and kind.gate is None:
            return reference(x, norm)
        by = None if kind.gate is None or gate is None else Gate(gate, *kind.gate)
        return rms_norm.reference(x, norm.weight, norm.eps, offset=norm.offset, groups=kind.groups, gate=by)

    def _kept(self, kind: NormKind) -> Iterator[tuple[bool, ...]]:
        """For `NormKind.keeps`; the last of each is the gate's."""
        wide = vars(self.module)["_parameters"]
        dtypes = {True: torch.float32, False: torch.bfloat16}
        present = (True, bool(self.names), kind.gate is not None)
        for pattern in product((True, False), repeat=sum(present)):
            types = iter(dtypes[one] for one in pattern)
            x = self.inputs[0].to(next(types))
            weights = next(types) if self.names else None
            narrow = {n: p if p is None else nn.Parameter(p.to(weights), requires_grad=False) for n, p in wide.items()}
            vars(self.module)["_parameters"] = narrow
            call = (x,) if kind.gate is None else (x, self.gate.to(next(types)))
            out, expected = self._run(*call), self._expected(kind, *call)
            vars(self.module)["_parameters"] = wide
            if out is not None and out.dtype == x.dtype and close(expected, out, NORM_NARROW):
                yield pattern


def _kinds(probe: _Probe) -> list[NormKind]:
    first, second = (*probe.names, None, None)[:2]
    pairs = [(first, second)] if second is None else [(first, second), (second, first)]
    return [
        NormKind(weight, bias, eps, centered, offset)
        for weight, bias in pairs
        for eps in probe.epsilons
        for centered in (False, True)
        for offset in ((0.0, 1.0) if weight is not None else (0.0,))
    ]


def random_twin(
    module: nn.Module, generator: torch.Generator, shapes: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> Any:
    """A copy of a module, not of what is in it, with random parameters in float32 on the CPU. shapes: if others."""
    twin, held = copy.copy(module), vars(module)["_parameters"]
    random = {
        name: p
        if p is None
        else torch.randn(*shapes.get(name, p.shape), generator=generator, device="cpu", dtype=torch.float32)
        for name, p in held.items()
    }
    parameters = {name: p if p is None else nn.Parameter(p, requires_grad=False) for name, p in random.items()}
    vars(twin).update(_parameters=parameters, training=False)
    return twin


def stock_output(module: nn.Module, *inputs: object) -> Any:
    """What the forward of the module's class gives; None where it takes no such inputs, or not on a CPU."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return type(module).forward(module, *inputs)
    except Exception as error:
        reason_of(error)
        return None


def close(got: torch.Tensor, wanted: torch.Tensor, limit: float = NORM) -> bool:
    """Whether they differ by at most this share of the largest number wanted."""
    return relative_max(got, wanted) <= limit
