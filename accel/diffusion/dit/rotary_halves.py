"""Halves of rows, which rotary embeddings take apart and put together again.

A rotation multiplies pairs of elements. Models write it in many ways: views with a step of two, chunks, complex
numbers, two assignments into an empty tensor. All end by joining two halves. From the join the halves are traced back
to views of whole rows, told apart by their offset and stride.
"""

from typing import NamedTuple

import torch

from accel.diffusion.dit.operations import REDUCTIONS, ROWWISE, operation_of
from accel.diffusion.dit.program import CONCATENATIONS, Program, Ref, TensorValue, TorchStep, refs

EVEN, ODD, FIRST, SECOND = "even", "odd", "first", "second"


class RotaryHalf(NamedTuple):
    """Half of the rows of value `whole`: its elements `columns`; both None where computed from other halves."""

    row_shape: tuple[int, ...]
    columns: str | None = None
    whole: int | None = None


class RotaryJoin(NamedTuple):
    """Two halves joined to rows. name: "interleave" or "concatenate". halves: two values, or a complex one."""

    name: str
    halves: tuple[int, ...]


def interleave(even: torch.Tensor, odd: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Elements of both in turn."""
    return torch.stack((even, odd), -1).flatten(-2).to(dtype)


def concatenate(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Both along the last dimension."""
    return torch.cat((first, second), -1).to(dtype)


def halves_of(width: int) -> dict[str, tuple[int, int]]:
    """The first column of each half of rows, and the distance between its columns."""
    return {EVEN: (0, 2), ODD: (1, 2), FIRST: (0, 1), SECOND: (width // 2, 1)}


class RotaryHalves:
    """Which values of a program are halves of rows, and which join halves.

    joins: by the number of the whole row. inside: values between two halves and a row.
    """

    def __init__(self, program: Program):
        self.program, self.values = program, program.values
        self.makers, self.users = program.makers(), program.users()
        self.halves: dict[int, RotaryHalf] = {}
        self.joins: dict[int, RotaryJoin] = {}
        self.inside: set[int] = set()  # between two halves and a row: in no program by itself
        for step in program.steps:
            self._join(step)

    def _join(self, step: TorchStep) -> None:
        if not isinstance(step.result, Ref):
            return
        number = step.result.number
        if step.name in ("interleave", "concatenate"):
            self._try(number, RotaryJoin(step.name, tuple(ref.number for ref in step.args[:2])))
        elif step.name == "stack" and self.program.joined_dim(step) == -1 and len(list(step.args[0])) == 2:
            self._flattened(number, RotaryJoin("interleave", tuple(step.taken)))
        elif step.name == "view_as_real":
            self._flattened(number, RotaryJoin("interleave", (step.taken[0],)))
        elif step.name in CONCATENATIONS and self.program.joined_dim(step) == -1 and len(step.taken) == 2:
            a, b = (self.values[one] for one in step.taken)
            if a.shape == b.shape:
                self._try(number, RotaryJoin("concatenate", tuple(step.taken)))

    def _flattened(self, number: int, join: RotaryJoin) -> None:
        """Pairs of elements, (..., C / 2, 2), of which nothing but the flattened rows is used."""
        pairs = self.values[number]
        views = [v for v in self.values if v.number != number and v.number in self.makers and self._views(v, number)]
        used = {place for place in self.users[number]}
        whole = (*pairs.shape[:-2], pairs.shape[-2] * 2)
        if not views or used != {self.makers[v.number] for v in views} or any(v.shape != whole for v in views):
            return
        if number in refs(self.program.result):
            return
        for view in views:
            self._try(view.number, join, inside=number)

    def _views(self, value: TensorValue, number: int) -> bool:
        return self.program.steps[self.makers[value.number]].taken == [number]

    def _try(self, number: int, join: RotaryJoin, inside: int | None = None) -> None:
        """Accepts the join if its halves come from rows that were split, or from tables."""
        value = self.values[number]
        if value.pinned or value.shape[-1] % 2:
            return
        found: dict[int, RotaryHalf] = {}
        if all(self._half(half, value.shape, found) for half in join.halves) and any(
            half.columns is not None for half in found.values()
        ):
            self.halves |= found
            self.joins[number] = join
            if inside is not None:
                self.inside.add(inside)

    def _half(self, number: int, row_shape: tuple[int, ...], found: dict[int, RotaryHalf]) -> bool:
        """Whether the value is a half of rows of this shape."""
        if number in found:
            return True
        value = self.values[number]
        if value.shape[-1:] != (row_shape[-1] // 2,) or value.pinned:
            return False
        if number in self.halves and self.halves[number].row_shape != row_shape:
            return False
        columns = self._columns_of(value, row_shape)
        if columns is not None:
            found[number] = columns
            return True
        place = self.makers.get(number)
        if value.shape != (*row_shape[:-1], row_shape[-1] // 2):
            return False
        operation = None if place is None else operation_of(self.program.steps[place], self.values)
        if operation is None or operation.name in (*REDUCTIONS, *ROWWISE):
            return value.dtype is not torch.complex64  # read as it is
        found[number] = RotaryHalf(row_shape)
        for ref in operation.operands:
            other = self.values[ref.number]
            if other.shape == value.shape:
                if not self._half(ref.number, row_shape, found):
                    return False
        return True

    def _columns_of(self, value: TensorValue, row_shape: tuple[int, ...]) -> RotaryHalf | None:
        """The value as elements of a whole row: a view of it, or a complex view of its pairs."""
        step = None if value.number not in self.makers else self.program.steps[self.makers[value.number]]
        if value.dtype is torch.complex64:
            if step is None or step.name != "view_as_complex":
                return None
            pairs = self.values[step.taken[0]]
            whole = self.viewed(pairs, row_shape)
            if whole is None or pairs.shape != (*row_shape[:-1], row_shape[-1] // 2, 2):
                return None
            same = pairs.stride == (*whole.stride[:-1], 2 * whole.stride[-1], whole.stride[-1])
            return RotaryHalf(row_shape, "pairs", whole.number) if same and pairs.offset == whole.offset else None
        whole = self.viewed(value, row_shape)
        if whole is None or value.shape != (*row_shape[:-1], row_shape[-1] // 2):
            return None
        if not _same_rows(value, whole):
            return None
        column, ahead = whole.stride[-1], value.offset - whole.offset
        for name, (start, apart) in halves_of(row_shape[-1]).items():
            if ahead == start * column and (value.stride[-1] == apart * column or row_shape[-1] == 2):
                return RotaryHalf(row_shape, name, whole.number)
        return None

    def viewed(self, value: TensorValue, row_shape: tuple[int, ...]) -> TensorValue | None:
        """The nearest value of this shape that the value is a view of."""
        number = value.number
        while number in self.makers:
            step = self.program.steps[self.makers[number]]
            if not step.taken or self.values[step.taken[0]].base != value.base:
                return None
            number = step.taken[0]
            if self.values[number].shape == row_shape:
                return self.values[number]
        return None


def _same_rows(a: TensorValue, b: TensorValue) -> bool:
    pairs = zip(a.stride[:-1], b.stride[:-1], a.shape[:-1], strict=True)
    return all(x == y or size == 1 for x, y, size in pairs)
