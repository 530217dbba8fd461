"""The order in which passes and the remaining recorded steps run: each after all that it takes.

A fusion group that takes a concatenation along rows becomes one pass for each piece, and these write side by side.
Where something else takes it, the passes that make its pieces write into it.
"""

from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise

from accel_kernels.rowwise.program import FULL, RowOp, RowProgram

from accel.diffusion.dit.fusion_groups import LEAST_COLUMNS, FusionGroup, FusionGroups
from accel.diffusion.dit.heads import HeadLowering
from accel.diffusion.dit.lowering import Lowering, NotLowered, Operand, Pass, Window
from accel.diffusion.dit.operations import FLOATS, operation_of
from accel.diffusion.dit.products.stacks import Stacks
from accel.diffusion.dit.program import CONCATENATIONS, Program, Ref, refs
from accel.diffusion.dit.ranks.collectives import Collective
from accel.diffusion.dit.ranks.exchanges import Exchange
from accel.diffusion.dit.units import Copy, GeluProduct, TorchCall, Unit, is_product


class Schedule:
    """units: in the order they run; dropped: why fusion groups stayed steps."""

    def __init__(self, program: Program):
        self.program, self.groups = program, FusionGroups(program)
        self.results = set(refs(program.result))
        self.dropped: list[str] = []
        self.layouts: dict[int, tuple[int, ...]] = {}  # strides of values that need not lie as torch has them
        self.units = self._scheduled()

    def _scheduled(self) -> list[Unit]:
        groups = list(self.groups.found)
        while True:
            try:
                return self._attempt(groups)
            except _Dropped as dropped:
                self.dropped.append(dropped.reason)
                groups.remove(dropped.group)
                self.groups.found = groups

    def _attempt(self, groups: list[FusionGroup]) -> list[Unit]:
        """The units that the returned values need."""
        owner = {number: place for place, group in enumerate(groups) for number in group.values}
        makers, steps = self.groups.makers, self.program.steps
        wanted: dict[int, set[int]] = {}  # of each group
        passes: dict[int, list[Unit]] = {}
        calls = {place: TorchCall(step, place) for place, step in enumerate(steps) if step.writes}
        needed = [*self.results, *(number for call in calls.values() for number in call.takes)]
        seen: set[int] = set()
        while needed:
            number = needed.pop()
            if number in seen or number not in makers:
                continue
            seen.add(number)
            if number in owner:
                place = owner[number]
                wanted.setdefault(place, set()).add(number)
                passes[place] = self._passes(groups[place], sorted(wanted[place]))
                needed += [taken for unit in passes[place] for taken in unit.takes]
            elif makers[number] not in calls:
                calls[makers[number]] = TorchCall(steps[makers[number]], makers[number])
                needed += calls[makers[number]].takes
        units: list[Unit] = [*calls.values(), *(unit for found in passes.values() for unit in found)]
        activated = {found[0] for found in map(self._gelu, units) if found is not None}
        units = Stacks(self.program, units, activated, self.results, self._concatenation).units
        return self._ordered(self._activated(self._concatenated(units)), groups)

    def _activated(self, units: list[Unit]) -> list[Unit]:
        """Where a GELU takes a linear's result, and nothing else does, both are one."""
        makers = {number: unit for unit in units if isinstance(unit, TorchCall) for number in unit.makes}
        users = self._users(units)
        for unit in list(units):
            found = self._gelu(unit)
            product = None if found is None else makers.get(found[0])
            if found is None or product is None or users[found[0]] != 1:
                continue
            if is_product(product.step):
                units.remove(unit)
                units.remove(product)
                units.append(GeluProduct(product.step, unit.place, found[1]))
        return units

    def _gelu(self, unit: Unit) -> tuple[int, Operand] | None:
        """What a unit takes and where it puts it, if GELU by the tanh formula is all that it does."""
        if isinstance(unit, Pass):
            alone = [op.name for op in unit.program.ops] == ["gelu_tanh"] and len(unit.outputs) == 1
            whole = alone and unit.inputs[0] == Operand(unit.inputs[0].number)
            return (unit.inputs[0].number, unit.outputs[0]) if whole else None
        if isinstance(unit, TorchCall) and unit.step.name == "gelu" and isinstance(unit.step.result, Ref):
            operation = operation_of(unit.step, self.program.values)
            if operation is not None and operation.name == "gelu_tanh":
                return unit.step.taken[0], Operand(unit.step.result.number)
        return None

    def _users(self, units: list[Unit]) -> dict[int, int]:
        """How many units take each value, one more for what is returned."""
        users: dict[int, int] = dict.fromkeys(self.results, 1)
        for unit in units:
            for number in unit.takes:
                users[number] = users.get(number, 0) + 1
        return users

    def _passes(self, group: FusionGroup, results: list[int]) -> list[Unit]:
        whole: list[tuple[Window | None, dict[int, int]]] = [(None, {})]
        with suppress(NotLowered):
            return [HeadLowering(self.groups, group).lowered(results)]
        for pieces in (self._pieces(group), whole):
            try:
                return [Lowering(self.groups, group, window, given).lowered(results) for window, given in pieces]
            except NotLowered as error:
                reason = str(error)
        raise _Dropped(group, reason)

    def _pieces(self, group: FusionGroup) -> list[tuple[Window | None, dict[int, int]]]:
        """Windows of the rows, one for each piece of a concatenation that the group takes, and the pieces by the whole.

        A single window, None, where it takes no concatenation.
        """
        values, taken = self.program.values, {n for p in group.steps for n in self.program.steps[p].taken}
        taken |= {self.groups.whole(number) for number in taken}
        found: list[list[tuple[Window, dict[int, int]]]] = []
        for number in sorted(taken - group.values):
            dim = self._concatenation(number)
            if dim in (None, -1) or values[number].shape != group.row_shape:
                continue
            start, windows = 0, []
            for piece in self.program.steps[self.groups.makers[number]].taken:
                size = values[piece].shape[dim]
                windows.append((Window(dim, start, size), {number: piece}))
                start += size
            found.append(windows)
        if not found or any([w for w, _ in one] != [w for w, _ in found[0]] for one in found):
            return [(None, {})]
        return [
            (parts[0][0], {k: v for _, given in parts for k, v in given.items()}) for parts in zip(*found, strict=True)
        ]

    def _concatenation(self, number: int) -> int | None:
        """The dimension, counted from the last, along which the value was put together; None for any other value."""
        place = self.groups.makers.get(number)
        if place is None or self.program.steps[place].name == "stack" or number in self.groups.rotary.joins:
            return None
        step, value = self.program.steps[place], self.program.values[number]
        pieces = [self.program.values[n] for n in step.taken]
        alike = all(one.dtype == value.dtype and len(one.shape) == len(value.shape) for one in pieces)
        once = len(set(step.taken)) == len(step.taken)
        return self.program.joined_dim(step) if alike and once and not value.pinned else None

    def _concatenated(self, units: list[Unit]) -> list[Unit]:
        """Passes write their results right where they are put together."""
        users = self._users(units)
        makers = {n: unit for unit in units if isinstance(unit, Pass) for n in unit.makes}
        for call in [unit for unit in units if isinstance(unit, TorchCall)]:
            number = call.step.result.number if isinstance(call.step.result, Ref) else -1
            dim = self._concatenation(number) if number >= 0 else None
            pieces = call.step.taken
            direct = [piece in makers and users[piece] == 1 and self._whole(makers[piece], piece) for piece in pieces]
            attended = self._attended(number, units)
            sent = call.step.name in CONCATENATIONS and self._sent(number, units)
            if dim is None or not (any(direct) or sent or (attended and self._strided(pieces))):
                continue
            if attended:
                self.layouts[number] = strides_like(
                    self.program.values[number].shape, self.program.values[pieces[0]].stride
                )
            start = 0
            units.remove(call)
            for piece, written in zip(pieces, direct, strict=True):
                size = self.program.values[piece].shape[dim]
                output = Operand(number, Window(dim, start, size))
                start += size
                if written:
                    one = makers[piece]
                    one.outputs = [output if out.number == piece else out for out in one.outputs]
                else:
                    units.append(self._copy(piece, output, call.place))
        return units

    def _attended(self, number: int, units: list[Unit]) -> bool:
        """Whether attention alone takes the value, which takes any layout."""
        users = [unit for unit in units if number in unit.takes]
        names = {unit.step.name if isinstance(unit, TorchCall) else "" for unit in users}
        return names == {"scaled_dot_product_attention"} and number not in self.results

    def _sent(self, number: int, units: list[Unit]) -> bool:
        """Whether an exchange alone takes views of the value: torch puts together what has four dimensions slowly."""
        views = {value.number for value in self.program.values if value.base == number}
        takers = [unit for unit in units if not views.isdisjoint(unit.takes) and not views >= unit.makes]
        exchanges = (isinstance(unit, TorchCall) and isinstance(unit.step.function, Exchange) for unit in takers)
        return bool(takers) and all(exchanges) and number not in self.results

    def _strided(self, numbers: list[int]) -> bool:
        """Whether none of the values lies in the order of its dimensions."""
        values = [self.program.values[number] for number in numbers]
        return all(list(value.stride) != sorted(value.stride, reverse=True) for value in values)

    def _copy(self, number: int, output: Operand, place: int) -> Unit:
        value = self.program.values[number]
        if value.dtype not in FLOATS or value.shape[-1] < LEAST_COLUMNS or value.stride[-1] != 1 or value.pinned:
            return Copy(Operand(number), output, place)
        rows, width = len(value.shape) - 1, value.shape[-1]
        same = RowProgram(rows, width, (FULL,), (RowOp("round", (0,), 0.0, value.dtype),), (1,), (value.dtype,))
        return Pass(same, value.shape[:-1], [Operand(number)], [output], place)

    def _whole(self, unit: Pass, number: int) -> bool:
        return next(out.window is None for out in unit.outputs if out.number == number)

    def _ordered(self, units: list[Unit], groups: list[FusionGroup]) -> list[Unit]:
        """In recorded order, each unit after those that make what it takes."""
        makers: dict[int, list[int]] = {}
        for index, unit in enumerate(units):
            for number in unit.makes:
                makers.setdefault(number, []).append(index)
        takes = [{source for n in unit.takes for source in makers.get(n, ())} - {i} for i, unit in enumerate(units)]
        places = {unit.place: index for index, unit in enumerate(units) if isinstance(unit, TorchCall)}
        before: dict[int, int] = {}
        for place in sorted(places):
            step = self.program.steps[place]
            for number in (*step.taken, *step.made):
                value = self.program.values[number]
                if value.pinned:
                    if value.base in before and before[value.base] != places[place]:
                        takes[places[place]].add(before[value.base])
                    before[value.base] = places[place]
        together = [
            places[place] for place in sorted(places) if isinstance(self.program.steps[place].function, Collective)
        ]
        for former, latter in pairwise(together):  # in one order on all ranks, whatever else each of them does
            takes[latter].add(former)
        sorter = TopologicalSorter(dict(enumerate(takes)))
        try:
            sorter.prepare()
        except CycleError as error:
            stuck = next(units[index] for index in sorted(error.args[1]) if isinstance(units[index], Pass))
            raise _Dropped(next(one for one in groups if one.steps[-1] == stuck.place), "it waits for itself") from None
        ready: list[tuple[int, int]] = []
        order = []
        while sorter.is_active():
            for index in sorter.get_ready():
                heappush(ready, (units[index].place, index))
            _, index = heappop(ready)
            order.append(units[index])
            sorter.done(index)
        return order


def strides_like(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides for this shape, with dimensions in the order of the given strides."""
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


class _Dropped(Exception):
    def __init__(self, group: FusionGroup, reason: str):
        super().__init__(reason)
        self.group, self.reason = group, reason
