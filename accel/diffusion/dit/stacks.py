"""Linears that take the same input, such as those of queries, keys and values, as one product.

A product of 3072 columns fills the last of its waves over the multiprocessors worse than one of 9216, and each is a
launch. The results are then columns of one tensor: what takes them must read rows that lie apart, as passes and
attention do.
"""

from accel.diffusion.dit.lowering import Pass
from accel.diffusion.dit.operations import ROWWISE, operation_of
from accel.diffusion.dit.program import Program, Ref, TensorValue, TorchStep
from accel.diffusion.dit.regions import CONCATENATIONS
from accel.diffusion.dit.units import StackedProduct, TorchCall, Unit

MOST_STACKED = 256 * 2**20  # bytes of weights in one storage: what stacking them needs for a moment on top
ALIGNED = 16  # bytes at which the columns of each begin, as attention wants its rows
READ_APART = ("scaled_dot_product_attention", *CONCATENATIONS)


class Stacks:
    """units: with one product in the place of those that take the same input. kept: the results of linears that are
    to stay by themselves; results: values that are returned.
    """

    def __init__(self, program: Program, units: list[Unit], kept: set[int], results: set[int]):
        self.program, self.values, self.results = program, program.values, results
        self.users: dict[int, list[Unit]] = {}
        for unit in units:
            for number in unit.takes:
                self.users.setdefault(number, []).append(unit)
        groups: dict[tuple, list[TorchCall]] = {}
        for unit in units:
            if isinstance(unit, TorchCall) and not unit.makes & kept:
                kind = self._kind(unit.step)
                if kind is not None and self._read_apart(kind[-1]):
                    groups.setdefault(kind[:-1], []).append(unit)
        self.units = list(units)
        for group in groups.values():
            self._stack(group)

    def _stack(self, group: list[TorchCall]) -> None:
        if len(group) < 2 or sum(self._bytes(call.step) for call in group) > MOST_STACKED:
            return
        for call in group:
            self.units.remove(call)
        calls = sorted(group, key=lambda call: call.place)
        self.units.append(StackedProduct([call.step for call in calls], calls[0].place))

    def _bytes(self, step: TorchStep) -> int:
        weight = self.values[step.args[1].number]
        return weight.numel * weight.dtype.itemsize

    def _kind(self, step: TorchStep) -> tuple | None:
        """What linears of one product are alike in, and the number of the result; None for anything else."""
        if step.name != "linear" or len(step.args) not in (2, 3) or step.kwargs or not isinstance(step.result, Ref):
            return None
        x, weight, bias = (*step.args, None)[:3]
        if not isinstance(x, Ref) or not self._parameter(weight, 2) or not (bias is None or self._parameter(bias, 1)):
            return None
        result, dtype = self.values[step.result.number], self.values[weight.number].dtype
        same = self.values[x.number].dtype == result.dtype == dtype
        aligned = not result.shape[-1] * dtype.itemsize % ALIGNED
        if not same or not aligned or result.pinned or self.values[x.number].pinned or len(result.shape) < 2:
            return None
        return x, dtype, bias is None, bias and self.values[bias.number].dtype, result.number

    def _parameter(self, ref: object, dims: int) -> bool:
        if not isinstance(ref, Ref):
            return False
        value = self.values[ref.number]
        return value.root is not None and value.root[0] == "weight" and len(value.shape) == dims

    def _read_apart(self, number: int) -> bool:
        """Whether all that takes the result, or views of it, reads rows that do not follow one another."""
        views = [value for value in self.values if value.base == number]
        return all(
            value.number not in self.results
            and keeps_rows(value, self.values[number])
            and all(self._takes_apart(unit, number) for unit in self.users.get(value.number, ()))
            for value in views
        )

    def _takes_apart(self, unit: Unit, number: int) -> bool:
        if not isinstance(unit, TorchCall):
            return isinstance(unit, Pass)
        if all(self.values[made].base == number for made in unit.makes):  # a view
            return not unit.step.writes
        name = unit.step.name
        return name in READ_APART or (name not in ROWWISE and operation_of(unit.step, self.values) is not None)


def keeps_rows(view: TensorValue, whole: TensorValue) -> bool:
    """Whether the view is one of rows of (.., C), or of lanes of them, however far each row lies from the next."""
    lanes = whole.shape[-1]
    last = view.offset % lanes
    for size, stride in zip(view.shape, view.stride, strict=True):
        if size > 1 and stride < lanes:
            last += (size - 1) * stride
        elif size > 1 and stride % lanes:
            return False
    return last < lanes
