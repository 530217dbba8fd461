"""Which steps of a program become one pass over memory: those on rows of one shape with nothing between them.

A step works on rows of a shape if it is computed row by row. Its result has that shape, is a half of it, or has one
number a row. Such steps that feed each other are one fusion group. What takes a value to a product and back must run
between two groups. So each step has a depth, which counts products and other such ways, and a group has one depth.

What is much smaller than the rows that take it, such as the modulation of a sequence, is recomputed for each row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from accel_kernels.rowwise.program import FULL, HALF, NUMBERS, ONE

from accel.diffusion.dit.operations import REDUCTIONS, ROWWISE, Operation, operation_of
from accel.diffusion.dit.program import CONCATENATIONS, Program, Ref, refs
from accel.diffusion.dit.rotary_halves import RotaryHalves

MOST_RECOMPUTED = 6  # operations that are done anew for each row
LEAST_COLUMNS = 8  # columns of a row
TIMES_SMALLER = 4  # times, that a value must be smaller for it


class RowPlace(NamedTuple):
    """What a value is among rows of a shape: whole rows (FULL), halves (HALF), or one number a row (ONE)."""

    row_shape: tuple[int, ...]
    width: str


@dataclass
class FusionGroup:
    """steps: places in the program, in order. values: what they make."""

    row_shape: tuple[int, ...]
    steps: list[int]
    values: frozenset[int]


class FusionGroups:
    """places: of all values that a row program can compute. found: the groups that are worth a kernel."""

    def __init__(self, program: Program):
        self.program, self.values = program, program.values
        self.rotary = RotaryHalves(program)
        self.makers, self.users = self.rotary.makers, self.rotary.users
        self.operations: dict[int, Operation] = {}  # by value
        self.places: dict[int, RowPlace] = {}
        self.depths: dict[int, int] = {}
        for step in program.steps:
            for number in step.made:
                self._place(number)
                self.depths[number] = self._depth(number)
        self._delay()
        self.components = self._components()
        self.found = [fused for fused in map(self._fused, self.components) if fused is not None]

    def sources(self, number: int) -> list[int]:
        """The values that a placed one is computed from; halves of a row come from the whole row."""
        if number in self.rotary.joins:
            taken = self.rotary.joins[number].halves
        else:
            taken = tuple(ref.number for ref in self._operands(self.operations[number]))
        return [self.whole(one) for one in taken]

    def whole(self, number: int) -> int:
        """The row that a value is columns of, or itself."""
        half = self.rotary.halves.get(number)
        return number if half is None or half.whole is None else half.whole

    def recomputed(self, number: int, row_shape: tuple[int, ...]) -> bool:
        """Whether the value is recomputed for each row of this shape."""
        return 0 < self._cost(number, row_shape) <= MOST_RECOMPUTED

    def _cost(self, number: int, row_shape: tuple[int, ...]) -> int:
        """Operations that recomputing the value takes; 0 where it lies in memory, or has to."""
        place, value = self.places.get(number), self.values[number]
        if place is None or number in self.rotary.joins or number in self.rotary.halves or place.width == ONE:
            return 0
        operation = self.operations[number]
        if operation.name in (*REDUCTIONS, *ROWWISE) or value.numel * TIMES_SMALLER > torch.Size(row_shape).numel():
            return 0
        if not _broadcasts(value.shape, row_shape):
            return 0
        return 1 + sum(self._cost(ref.number, row_shape) for ref in operation.operands)

    def _operands(self, operation: Operation) -> list[Ref]:
        return [*operation.operands, *(one for _, one in operation.then)]

    def _place(self, number: int) -> None:
        value = self.values[number]
        if number in self.rotary.joins:
            self.places[number] = RowPlace(value.shape, FULL)
            return
        step = self.program.steps[self.makers[number]]
        operation = operation_of(step, self.values)
        half = self.rotary.halves.get(number)
        if operation is None or (half is not None and half.columns is not None):
            return
        if value.dtype is torch.complex64 and half is None:
            return
        taken = (self.values[ref.number].dtype for ref in self._operands(operation))
        if half is None and torch.complex64 in taken:
            return
        self.operations[number] = operation
        if half is not None:
            self.places[number] = RowPlace(half.row_shape, HALF)
        elif operation.name in REDUCTIONS:
            taken = operation.operands[0].number
            of = self.places.get(taken)
            row_shape = of.row_shape if of is not None and of.width == FULL else self.values[taken].shape
            self.places[number] = RowPlace(row_shape, ONE)
        else:
            row_shapes = {self._one(ref.number, value.shape) for ref in operation.operands}
            alone = [row_shape for row_shape in row_shapes if row_shape is not None]
            self.places[number] = RowPlace(alone[0], ONE) if len(alone) == 1 else RowPlace(value.shape, FULL)

    def _one(self, number: int, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the rows of which this is one number each."""
        place = self.places.get(number)
        return (
            place.row_shape if place is not None and place.width == ONE and self.values[number].shape == shape else None
        )

    def _depth(self, number: int) -> int:
        place = self.places.get(number)
        if place is None:
            step = self.program.steps[self.makers[number]]
            if self._between(number):
                return max((self.depths.get(one, 0) for one in step.taken), default=0)
            return max((self.depths.get(one, 0) + (one in self.places) for one in step.taken), default=0)
        depths = [0]
        for source in self.sources(number):
            other = self.places.get(source)
            apart = (
                other is not None
                and other.row_shape != place.row_shape
                and not self.recomputed(source, place.row_shape)
            )
            depths.append(self.depths.get(source, 0) + apart)
        return max(depths)

    def _delay(self) -> None:
        """Moves values that only a greater depth takes to that depth."""
        kept = set(refs(self.program.result))
        ready: dict[int, int | None] = {}  # the least depth that takes a value; None where it must lie in memory
        for step in reversed(self.program.steps):
            for number in step.made:
                place = self.places.get(number)
                makes = (made for user in self.users[number] for made in self.program.steps[user].made or [-1])
                taken = [self._taken_at(number, made, place, ready) for made in makes]
                known = [depth for depth in taken if depth is not None]
                ready[number] = None if number in kept or not taken or len(known) < len(taken) else min(known)
                later = ready[number]
                if place is not None and later is not None:
                    self.depths[number] = max(self.depths[number], later)

    def _taken_at(self, number: int, made: int, place: RowPlace | None, ready: dict[int, int | None]) -> int | None:
        other = self.places.get(made)
        if other is None:  # between a row and its halves, or something else
            return ready.get(made) if self._between(made) else None
        same = place is None or other.row_shape == place.row_shape or self.recomputed(number, other.row_shape)
        return self.depths[made] if same else None

    def _between(self, number: int) -> bool:
        """Whether a value lies between a row and its halves, and only there."""
        half = self.rotary.halves.get(number)
        return number in self.rotary.inside or (half is not None and half.whole is not None)

    def _components(self) -> list[frozenset[int]]:
        """Values that feed each other over rows of one shape, at one depth."""
        group: dict[int, int] = {}

        def top(number: int) -> int:
            while group[number] != number:
                number = group[number]
            return number

        for number, place in self.places.items():
            group[number] = number
            for source in self.sources(number):
                other = self.places.get(source)
                if (
                    other is not None
                    and other.row_shape == place.row_shape
                    and self.depths[source] == self.depths[number]
                ):
                    group[top(number)] = top(source)
        members: dict[int, list[int]] = {}
        for number in group:
            members.setdefault(top(number), []).append(number)
        return [frozenset(numbers) for numbers in members.values()]

    def _fused(self, numbers: frozenset[int]) -> FusionGroup | None:
        row_shape = self.places[min(numbers)].row_shape
        work = sum(1 if n in self.rotary.joins else self._work(self.operations[n]) for n in numbers)
        names = {self.operations[n].name for n in numbers if n in self.operations}
        alone = all(map(self._put_together, numbers)) or any(self._taken_apart(n, row_shape) for n in numbers)
        alone = alone or not names.isdisjoint(("peak", *NUMBERS))  # of which torch makes many
        few = work + (len(numbers) > work) < 2 and not alone
        if few or len(row_shape) < 2 or row_shape[-1] < LEAST_COLUMNS:
            return None
        return FusionGroup(row_shape, sorted({self.makers[n] for n in numbers}), numbers)

    def _work(self, operation: Operation) -> int:
        """How much there is to do: a norm and its weight are two."""
        return (operation.name != "round") + len(operation.then)

    def _taken_apart(self, number: int, row_shape: tuple[int, ...]) -> bool:
        """Whether a value is computed from a concatenation, of which a pass can read the pieces."""
        makers = (self.makers.get(one) for one in self.sources(number) if self.values[one].shape == row_shape)
        return any(place is not None and self.program.steps[place].name in CONCATENATIONS for place in makers)

    def _put_together(self, number: int) -> bool:
        """Whether a single concatenation takes the value, which a pass can write into."""
        users = [self.program.steps[place] for place in self.users[number]]
        return len(users) == 1 and users[0].name in CONCATENATIONS and number not in refs(self.program.result)


def _broadcasts(shape: tuple[int, ...], row_shape: tuple[int, ...]) -> bool:
    if len(shape) > len(row_shape):
        return False
    return all(size in (1, wide) for size, wide in zip(shape[::-1], row_shape[::-1], strict=False))
