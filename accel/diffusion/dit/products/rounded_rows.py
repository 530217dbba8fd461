"""Rows that a quantized linear rounds to 8 bits, rounded once for all linears that take them.

A quantized linear is recorded as one step. Where it rounds its rows, the step is split into the rounding, as operations
on rows, and the product. So rows are rounded in the pass that makes them, or in a pass of their own after an attention.
Where the columns are a concatenation, each piece is rounded by itself with the peak of all.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from accel_kernels.rowwise.program import NUMBERS
from accel_kernels.rowwise.rowwise import TORCH

from accel.diffusion.dit.program import CONCATENATIONS, Program, Ref, TorchStep, refs
from accel.quantization.activations import KERNELS, QuantizedCall, RoundedCall, weight_dtype_of
from accel.quantization.activations import ROW_DTYPES as DTYPES

ROUNDED = (torch.float16, torch.bfloat16)  # in float32 products of fewer bits run no kernel
PLAIN = ("int8", "fp8")  # ways of rounding rows that are nothing but numbers and a scale


@dataclass(frozen=True)
class RowFunction:
    """A step that is one operation of row programs, by its name; run as it is, a chain of torch's.

    "peak" takes rows, and perhaps a peak that is the least; "scale_" takes a peak; "numbers_" rows and their peak.
    """

    name: str

    def __call__(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if self.name == "peak":
            return torch.maximum(TORCH["peak"](x.float()), *others) if others else TORCH["peak"](x.float())
        result = TORCH[self.name](x.float(), *others)
        return result.to(NUMBERS.get(self.name, result.dtype))


class RoundedRows(NamedTuple):
    """Elements in 8 bits (..., K) and scales (..., 1) of a value."""

    numbers: Ref
    scales: Ref


def with_rounded_rows(program: Program) -> Program:
    """The program with quantized linears that round as a rounding, shared by those of one input, and products."""
    if not any(isinstance(step.function, QuantizedCall) for step in program.steps):
        return program
    return _Splitter(program).program


class _Splitter:
    """Writes `program`, anew from the one it is given."""

    def __init__(self, program: Program):
        self.before, self.makers = program, program.makers()
        self.program = Program(list(program.values), [], program.result)
        self.found: dict[tuple[int, str], RoundedRows] = {}
        self.places = {place for place, step in enumerate(program.steps) if self._rounds(step)}
        users, kept = program.users(), set(refs(program.result))
        self.alone = {number for number, by in users.items() if number not in kept and self.places.issuperset(by)}
        apart: set[int] = set()  # concatenations of which the pieces are rounded
        for place, step in enumerate(program.steps):
            call = step.function if place in self.places else None
            self.program.steps += [step] if call is None else self._product(step, call, apart)
        self.program.steps = [step for step in self.program.steps if not apart.issuperset(step.made or [-1])]

    def _rounds(self, step: TorchStep) -> bool:
        call = step.function
        if not isinstance(call, QuantizedCall) or call.exact or not isinstance(step.args[0], Ref):
            return False
        if call.products != KERNELS:  # `verify` judges rounding and products one by one
            return False
        x = self.before.values[step.args[0].number]
        activations = call.rounds(x.numel // max(1, x.shape[-1]))
        return activations in PLAIN and x.dtype in ROUNDED and not x.pinned

    def _product(self, step: TorchStep, call: Any, apart: set[int]) -> list[TorchStep]:
        x, kind = step.args[0].number, weight_dtype_of(call.activations)
        made: list[TorchStep] = []
        if (x, kind) not in self.found:
            pieces = self._pieces(x)
            apart.update([x] * (len(pieces) > 1))
            self.found[x, kind] = self._rounded(pieces, x, kind, made)
        rounded = RoundedCall(call, self.before.values[x].dtype)
        args = (*self.found[x, kind], *step.args[1:])
        return [*made, replace(step, function=rounded, name=rounded.__name__, args=args)]

    def _pieces(self, number: int) -> list[int]:
        """Parts of the columns of a value that nothing but such products takes; itself where it is not put together."""
        place, values = self.makers.get(number), self.before.values
        step = None if place is None else self.before.steps[place]
        if step is None or step.name not in CONCATENATIONS or number not in self.alone:
            return [number]
        parts = step.taken
        last = self.before.joined_dim(step) == -1 and len(set(parts)) == len(parts)
        fit = all(values[n].dtype == values[number].dtype and not values[n].pinned for n in parts)
        return parts if last and fit else [number]

    def _rounded(self, pieces: list[int], whole: int, kind: str, made: list[TorchStep]) -> RoundedRows:
        """Appends the steps that round a value. The widest piece comes last: its pass knows the peak of all."""
        peak: Ref | None = None
        for number in sorted(pieces, key=lambda n: self.before.values[n].shape[-1]):
            least = () if peak is None else (peak,)
            peak = self._step("peak", (Ref(number), *least), self._like(number, torch.float32, 1), made)
        scales = self._step(f"scale_{kind}", (peak,), self._like(whole, torch.float32, 1), made)
        numbers = [
            self._step(f"numbers_{kind}", (Ref(number), peak), self._like(number, DTYPES[kind]), made)
            for number in pieces
        ]
        if len(numbers) == 1:
            return RoundedRows(numbers[0], scales)
        joint = self._like(whole, DTYPES[kind])
        made.append(TorchStep(torch.cat, "cat", (numbers, -1), {}, joint))
        return RoundedRows(joint, scales)

    def _step(self, name: str, args: tuple[Any, ...], result: Ref, made: list[TorchStep]) -> Ref:
        made.append(TorchStep(RowFunction(name), name, args, {}, result))
        return result

    def _like(self, number: int, dtype: torch.dtype, columns: int | None = None) -> Ref:
        """A new value with the rows of another."""
        value = self.before.values[number]
        shape = value.shape if columns is None else (*value.shape[:-1], columns)
        return self.program.add(shape, dtype, value.device)
