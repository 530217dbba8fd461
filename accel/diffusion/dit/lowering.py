"""A fusion group as a row program: registers, operations, inputs and results."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from accel_kernels.rowwise.program import FULL, HALF, NUMBERS, ONE, RowOp, RowProgram

from accel.diffusion.dit.fusion_groups import FusionGroup, FusionGroups
from accel.diffusion.dit.operations import REDUCTIONS

REAL, IMAGINARY = "real", "imag"


class NotLowered(Exception):
    """Raised with the reason why a fusion group cannot be a row program."""


class Window(NamedTuple):
    """A range of a dimension, which is counted from the last: -1."""

    dim: int
    start: int
    size: int


class Operand(NamedTuple):
    """A value that a pass reads or writes, or a window of it. flat: its heads as one row. part: of a complex value."""

    number: int
    window: Window | None = None
    flat: bool = False
    part: str | None = None


@dataclass
class Pass:
    """One pass over memory. place: the last recorded step whose work it does."""

    program: RowProgram
    shape: tuple[int, ...]
    inputs: list[Operand]
    outputs: list[Operand]
    place: int

    @property
    def takes(self) -> set[int]:
        return {one.number for one in self.inputs}

    @property
    def makes(self) -> set[int]:
        return {one.number for one in self.outputs}


class Lowering:
    """Lowers a fusion group.

    window: the part of the rows that this pass works on, None for all. given: values that stand for others there, as a
    piece of a concatenation does for the whole.
    """

    def __init__(
        self,
        groups: FusionGroups,
        group: FusionGroup,
        window: Window | None = None,
        given: dict[int, int] | None = None,
    ):
        self.groups, self.group, self.window, self.given = groups, group, window, given or {}
        self.values = groups.values
        self.row_shape = resized(group.row_shape, window)
        self.inputs: dict[Operand, int] = {}
        self.widths: list[str] = []
        self.ops: list[tuple[int, RowOp]] = []
        self.registers: dict[int, tuple[int, ...]] = {}  # by value; two of a complex one

    def lowered(self, results: list[int]) -> Pass:
        """Raises NotLowered."""
        found = [self._single(number) for number in results]
        order = [*self.inputs.values(), *(register for register, _ in self.ops)]
        renamed = {register: place for place, register in enumerate(order)}
        ops = tuple(op._replace(args=tuple(renamed[one] for one in op.args)) for _, op in self.ops)
        program = RowProgram(
            len(self.row_shape) - 1,
            self.row_shape[-1],
            tuple(self.widths[register] for register in self.inputs.values()),
            ops,
            tuple(renamed[one] for one in found),
            tuple(self.values[number].dtype for number in results),
        )
        outputs = [Operand(number, self.window) for number in results]
        return Pass(program, self.row_shape[:-1], list(self.inputs), outputs, self.group.steps[-1])

    def _single(self, number: int) -> int:
        registers = self._registers(number)
        if len(registers) != 1:
            raise NotLowered("complex results")
        return registers[0]

    def _registers(self, number: int) -> tuple[int, ...]:
        number = self.given.get(number, number)
        if number not in self.registers:
            self.registers[number] = self._made(number)
        return self.registers[number]

    def _made(self, number: int) -> tuple[int, ...]:
        half, joins = self.groups.rotary.halves.get(number), self.groups.rotary.joins
        if half is not None and half.columns is not None and half.whole is not None:
            whole = self._single(half.whole)
            columns = ("even", "odd") if half.columns == "pairs" else (half.columns,)
            return tuple(self._op(name, (whole,), self.values[half.whole].dtype, width=HALF) for name in columns)
        if (
            number in self.group.values
            or self.groups.recomputed(number, self.group.row_shape)
            or self._continues(number)
        ):
            if number in joins:
                halves = [one for source in joins[number].halves for one in self._registers(source)]
                return (self._op(joins[number].name, tuple(halves), self.values[number].dtype, width=FULL),)
            return self._operation(number)
        return self._input(number)

    def _continues(self, number: int) -> bool:
        """Whether a piece of a concatenation is computed over rows of the same shape; its work is then done here."""
        place = self.groups.places.get(number)
        if number not in self.given.values() or place is None or place != (self.row_shape, FULL):
            return False
        component = next(one for one in self.groups.components if number in one)
        self.group = FusionGroup(self.group.row_shape, self.group.steps, self.group.values | component)
        return True

    def _operation(self, number: int) -> tuple[int, ...]:
        operation, dtype = self.groups.operations[number], self.values[number].dtype
        taken = [self._registers(ref.number) for ref in operation.operands]
        if dtype is torch.complex64:
            return self._complex(operation.name, taken)
        if any(len(registers) != 1 for registers in taken):
            raise NotLowered(f"{operation.name} of complex numbers")
        registers = tuple(registers[0] for registers in taken)
        first = torch.float32 if operation.then or operation.name in NUMBERS else dtype
        result = self._op(operation.name, registers, first, operation.number)
        for place, (name, ref) in enumerate(operation.then):
            last = place == len(operation.then) - 1
            result = self._op(name, (result, self._single(ref.number)), dtype if last else torch.float32)
        return (result,)

    def _complex(self, name: str, taken: list[tuple[int, ...]]) -> tuple[int, ...]:
        if name != "mul" or [len(registers) for registers in taken] != [2, 2]:
            raise NotLowered(f"{name} of complex numbers")
        (a, b), (c, d) = taken

        def mul(x: int, y: int) -> int:
            return self._op("mul", (x, y), torch.float32)

        real = self._op("sub", (mul(a, c), mul(b, d)), torch.float32)
        return real, self._op("add", (mul(a, d), mul(b, c)), torch.float32)

    def _op(self, name: str, args: tuple[int, ...], dtype: torch.dtype, number: float = 0.0, width: str = "") -> int:
        if not width:
            widths = {self.widths[one] for one in args} - {ONE}
            if len(widths) > 1:
                raise NotLowered("halves and rows in one operation")
            width = ONE if name in REDUCTIONS else (widths.pop() if widths else ONE)
        register = len(self.widths)
        self.widths.append(width)
        self.ops.append((register, RowOp(name, args, number, dtype)))
        return register

    def _input(self, number: int) -> tuple[int, ...]:
        value = self.values[number]
        if value.pinned:
            raise NotLowered("memory that is written in place")
        columns = value.shape[-1] if value.shape else 1
        widths = {self.row_shape[-1]: FULL, self.row_shape[-1] // 2: HALF, 1: ONE}
        if columns not in widths or len(value.shape) > len(self.row_shape):
            raise NotLowered(f"a value of {columns} columns among rows of {self.row_shape[-1]}")
        window = None
        for dim, size in enumerate(reversed(value.shape), 1):
            wide = self.row_shape[-dim] if dim > 1 else columns
            if size in (1, wide):
                continue
            if self.window is None or -dim != self.window.dim or size != self.group.row_shape[-dim]:
                raise NotLowered(f"a value of shape {value.shape} among rows of {self.row_shape}")
            window = self.window
        return self._registers_of(Operand(number, window), widths[columns])

    def _registers_of(self, whole: Operand, width: str) -> tuple[int, ...]:
        """The register of an input, which is new if it has none; of a complex one those of both parts."""
        parts = (REAL, IMAGINARY) if self.values[whole.number].dtype.is_complex else (None,)
        keys = [whole._replace(part=part) for part in parts]
        for key in keys:
            if key not in self.inputs:
                self.inputs[key] = len(self.widths)
                self.widths.append(width)
        return tuple(self.inputs[key] for key in keys)


def resized(row_shape: tuple[int, ...], window: Window | None) -> tuple[int, ...]:
    """The shape with the size that the window has along its dimension."""
    if window is None:
        return row_shape
    sizes = list(row_shape)
    sizes[window.dim] = window.size
    return tuple(sizes)
