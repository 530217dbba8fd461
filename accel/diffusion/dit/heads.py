"""Norms over whole rows and rotations of their heads, in one pass.

Wan and similar models norm queries and keys over all heads, then rotate each head by the same table. The norm works on
rows (.., H * D), the rotation on heads (.., H, D), which are two shapes. Pairs of elements are the same in both. A
table repeated over heads is one that repeats along the row. So the rotation can be computed on whole rows.
"""

from accel_kernels.rowwise.program import FULL, HALF, ONE

from accel.diffusion.dit.fusion_groups import FusionGroup, FusionGroups
from accel.diffusion.dit.lowering import Lowering, NotLowered, Operand, Pass
from accel.diffusion.dit.operations import REDUCTIONS, ROWWISE
from accel.diffusion.dit.program import CONCATENATIONS, TensorValue, refs


class HeadLowering(Lowering):
    """A lowering of a fusion group of heads. Raises NotLowered where it cannot be computed on whole rows."""

    def __init__(self, groups: FusionGroups, group: FusionGroup):
        super().__init__(groups, group)
        if len(group.row_shape) < 3:
            raise NotLowered("no heads")
        self.row_shape = (*group.row_shape[:-2], group.row_shape[-2] * group.row_shape[-1])
        self.folded: set[int] = set()  # values over whole rows that are computed here
        self.over_rows = False

    def lowered(self, results: list[int]) -> Pass:
        if not all(self._flat(self.values[number]) for number in results):
            raise NotLowered("results that are no whole rows")
        found = super().lowered(results)
        if not self.folded:
            raise NotLowered("nothing over whole rows")
        found.outputs = [one._replace(flat=True) for one in found.outputs]
        return found

    def _made(self, number: int) -> tuple[int, ...]:
        if self.over_rows:
            return self._operation(number) if number in self.folded else super()._input(number)
        if (row := self._row(number)) is not None:
            return self._whole(row)
        rotary = self.groups.rotary
        half, join = rotary.halves.get(number), rotary.joins.get(number)
        apart = half is not None and half.columns in ("first", "second")
        if apart or (join is not None and join.name != "interleave"):
            raise NotLowered("halves of heads")
        place, operation = self.groups.places.get(number), self.groups.operations.get(number)
        if place is not None and place.width == ONE:
            raise NotLowered("one number for each head")
        if operation is not None and operation.name in (*REDUCTIONS, *ROWWISE):
            raise NotLowered("a norm of each head")
        return super()._made(number)

    def _whole(self, row: int) -> tuple[int, ...]:
        self.folded |= self._own(row)
        self.over_rows = True
        try:
            return self._registers(row)
        finally:
            self.over_rows = False

    def _row(self, number: int) -> int | None:
        """The value over whole rows of which this is the view by heads, if nothing else takes it."""
        view = self.values[number]
        row = self.groups.rotary.viewed(view, self.row_shape) if view.shape == self.group.row_shape else None
        if row is None:
            return None
        column = row.stride[-1]
        same = view.stride == (*row.stride[:-1], view.shape[-1] * column, column) and view.offset == row.offset
        return row.number if same and row.number in self._own(row.number) else None

    def _own(self, row: int) -> set[int]:
        """The row and the values over whole rows that it is computed from, as far as nothing else takes them."""
        found, waiting = set(), [row]
        while waiting:
            number = waiting.pop()
            place = self.groups.places.get(number)
            if number in found or place is None or place.row_shape != self.row_shape or place.width == HALF:
                continue
            if number in self.groups.operations and number not in self.groups.rotary.joins:
                found.add(number)
                waiting += self.groups.sources(number)
        kept = set(refs(self.groups.program.result))
        while True:
            shared = {n for n in found if n in kept or not self._taken_in(n, found)}
            if not shared:
                return found
            found -= shared

    def _taken_in(self, number: int, found: set[int]) -> bool:
        """Whether everything that takes the value is in `found` or in this group."""
        base, rotary = self.values[number].base, self.groups.rotary
        views = [value.number for value in self.values if value.base == base]
        users = (self.groups.program.steps[user] for view in views for user in self.groups.users[view])
        made = {n for step in users for n in step.made or [-1]}
        inside = found | self.group.values | rotary.inside
        return all(one in inside or one in views or one in rotary.halves for one in made)

    def _flat(self, value: TensorValue) -> bool:
        """Whether heads lie side by side where the value is written: as torch had it, or else contiguous."""
        users = {self.groups.program.steps[user].name for user in self.groups.users[value.number]}
        if value.shape != self.group.row_shape or users & set(CONCATENATIONS):
            return False
        own = value.dense and value.base == value.number and value.stride[-1] == 1
        return not own or value.stride[-2] == value.shape[-1]

    def _input(self, number: int) -> tuple[int, ...]:
        value = self.values[number]
        if value.pinned:
            raise NotLowered("memory that is written in place")
        *rows, heads, columns = (1,) * (2 - len(value.shape)) + value.shape
        wide = self.group.row_shape[-1]
        widths = {wide: FULL, wide // 2: HALF, 1: ONE}
        if columns not in widths or len(value.shape) > len(self.group.row_shape) or (heads > 1 and columns == 1):
            raise NotLowered(f"a value of shape {value.shape} among heads of {wide} columns")
        if any(size not in (1, whole) for size, whole in zip(rows[::-1], self.group.row_shape[-3::-1], strict=False)):
            raise NotLowered(f"a value of shape {value.shape} among rows of {self.group.row_shape}")
        if heads > 1 and value.stride[-2] != columns * value.stride[-1]:
            raise NotLowered("heads that do not lie side by side")
        return self._registers_of(Operand(number, flat=len(value.shape) > 1), widths[columns])
