"""Experts that came in MXFP4 and were written out, as transformers does without its kernels: packed again, exactly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, NamedTuple
from weakref import ref

import torch
from accel_kernels.gemm.quantized_weight import MX_GROUP, MXFP4, Quantized, mxfp4_weight
from torch import nn
from transformers import PreTrainedModel

from accel.llm.moe.experts import ExpertFormula
from accel.llm.ptq.model import Find, experts
from accel.parallel.sharded_layers import expert_sharding
from accel.patching.rule import set_data
from accel.quantization.experts import ExpertStacks, QuantizedExperts
from accel.quantization.model import quantization_record
from accel.quantization.patch import QuantizedModulePatch, exchange
from accel.quantization.scheme import Scheme

SCHEME = Scheme(MXFP4.name, MX_GROUP)
SAMPLE = 64  # rows of a stack by which others are told from MXFP4's
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


class Mxfp4Experts(QuantizedModulePatch):
    """A patch: (plain, packed) experts of one model. Plain weights are freed, and written again by `undo`, bit for bit.

    found: by path, those whose weights begin as MXFP4's do. As it is applied each is read in full, and stays plain
    where one number is another. rows: (path, status, reason) of these. records: of stacks, see `Report.weights`.
    """

    def __init__(self, model: PreTrainedModel, find: Find):
        super().__init__(model, True)
        self.found, _ = experts(model, SCHEME, partial(_formula, find))
        self.rows: list[tuple[str, str, str]] = []
        self.records: list[dict] = []
        self.made: dict[nn.Module, tuple[QuantizedExperts, PlainExperts]] = {}

    def apply(self) -> None:
        if self.there or not self.found:
            return
        self.there, self.rows, self.records = True, [], []
        try:
            with torch.inference_mode(False), torch.no_grad():
                for path, stacks in self.found.items():
                    self.rows.append((path, *self._pack(path, stacks)))
        except BaseException:
            self.undo()
            raise

    def _pack(self, path: str, stacks: ExpertStacks) -> tuple[str, str]:
        module = stacks.module
        try:
            packed = PlainExperts(stacks).read()
        except ValueError as error:
            return "skipped", str(error)
        fresh = QuantizedExperts(stacks, packed, SCHEME)
        # Those of the first time, for other patches are bound to them.
        new, plain = self.made.setdefault(module, (fresh, PlainExperts(stacks)))
        vars(new).update(vars(fresh), arrived=plain)
        for name, found in packed.items():
            weight = module.get_parameter(name)
            self.records.append(quantization_record(f"{path}.{name}", SCHEME, weight, found, None, inf, True))
        exchange(self.root, [(module, new)])
        self.pairs.append((module, new))
        plain.release()
        return "patched", f"{SCHEME}, bit for bit"

    def undo(self) -> None:
        if not self.there:
            return
        with torch.inference_mode(False), torch.no_grad():
            while self.pairs:
                module, new = self.pairs[-1]
                assert isinstance(new, QuantizedExperts)
                new.arrived.refill(new)
                new.arrived = None
                vars(module).update(new.settings())
                exchange(self.root, [(new, module)])
                vars(new)["_buffers"] = {}
                self.pairs.pop()
        self.there = False


class PlainExperts:
    """Experts whose plain stacks are freed while others hold them packed."""

    def __init__(self, stacks: ExpertStacks):
        self.stacks, self.order = stacks, list(stacks.module._parameters)
        self.freed: dict[str, Freed] = {}

    def read(self) -> dict[str, Quantized]:
        """The stacks in MXFP4. Raises ValueError where they would be other numbers."""
        packed = {}
        for name in self.stacks.names:
            found = packed_exactly(self.stacks.matrices(name))
            if found is None:
                raise ValueError(f"{name}: some of its numbers are not those of MXFP4")
            packed[name] = found
        return packed

    def release(self) -> None:
        parameters = self.stacks.module._parameters
        self.freed = {name: Freed.of(parameters.pop(name)) for name in self.stacks.names}

    def refill(self, packed: QuantizedExperts) -> None:
        held = self.stacks.module._parameters
        found = packed._parameters | {name: one.back(packed, name) for name, one in self.freed.items()}
        held.clear()
        held.update({name: found[name] for name in self.order})
        self.freed = {}

    @contextmanager
    def whole(self, packed: QuantizedExperts) -> Iterator[nn.Module]:
        """Inside, the plain ones are there."""
        self.refill(packed)
        try:
            yield self.stacks.module
        finally:
            self.release()


class Freed(NamedTuple):
    """A parameter that is gone, unless someone else holds it: another model over the same weights keeps it as it is."""

    held: Callable[[], Any]
    dtype: torch.dtype
    requires_grad: bool
    attributes: dict[str, Any]

    @classmethod
    def of(cls, weight: Any) -> "Freed":
        return cls(ref(weight), weight.dtype, weight.requires_grad, vars(weight))

    def __reduce__(self) -> tuple:
        return Freed, (_nobody, *self[1:])  # who holds it has none of a copy

    def back(self, module: QuantizedExperts, name: str) -> nn.Parameter:
        """It, or another of the same bits, where the module is by now and in its dtype."""
        packed, weight = module.stack(name), self.held()
        if weight is None:
            whole = module.written(name, packed, self.dtype).to(module.dtype).contiguous()
            weight = nn.Parameter(whole, self.requires_grad)
            vars(weight).update(self.attributes)
        elif (weight.device, weight.dtype) != (packed.data.device, module.dtype):
            set_data(weight, lambda data: data.to(packed.data.device, module.dtype))
        return weight


def _nobody() -> None:
    """In place of a reference."""


def _formula(find: Find, module: nn.Module) -> ExpertFormula | str:
    """What experts compute whose weights may have come from MXFP4, or why they stay as they are."""
    if expert_sharding(module) is not None or module.training:
        return "they are divided among ranks, or in training"
    for stack in (one for one in module.parameters(recurse=False) if one.dim() == 3):
        rows = [one[:, :SAMPLE] for one in (stack[:1], stack[:1].transpose(1, 2))]
        if not stack.is_contiguous() or not any(map(_begins, rows)):
            return "their numbers are not those of MXFP4"
    return find(module)


def _begins(rows: torch.Tensor) -> bool:
    held = bool(rows.any()) and not rows.shape[2] % MX_GROUP
    return held and packed_exactly(rows) is not None


def packed_exactly(stack: torch.Tensor) -> Quantized | None:
    """(E, N, K), in any strides, as rows (E N, K) of MXFP4; None where they would not be the same bits."""
    parts, same = [], []
    for matrix in stack.detach():
        parts.append(mxfp4_weight(matrix))
        bits = (one.contiguous().view(BITS[one.itemsize]) for one in (matrix, parts[-1].dequantized(matrix.dtype)))
        same.append(torch.eq(*bits).all())
    if not bool(torch.stack(same).all()):
        return None
    scales = torch.cat([one.scales.view(torch.uint8) for one in parts]).view(torch.float8_e8m0fnu)
    return Quantized(torch.cat([one.data for one in parts]), scales, None, MXFP4)
