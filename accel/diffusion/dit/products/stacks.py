"""Linears that take the same input, such as those of queries, keys and values, as one product.

A product of 9216 columns fills the GPU better than three of 3072, in one launch. The results are columns of one tensor,
so what takes them must read rows that lie apart, as passes and attention do.

Where columns of an image's and a text's product are concatenated, both write into one tensor from the beginning. The
concatenation is then a view of it.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from accel.diffusion.dit.lowering import Operand, Pass, Window
from accel.diffusion.dit.operations import ROWWISE, operation_of
from accel.diffusion.dit.program import CONCATENATIONS, Program, Ref, TensorValue, TorchStep
from accel.diffusion.dit.ranks.exchanges import EXCHANGE
from accel.diffusion.dit.units import StackedProduct, TorchCall, Unit

MOST_STACKED = 256 * 2**20  # bytes of weights in one storage: what stacking them needs for a moment on top
MOST_IMAGES = 4  # whose rows are put together by a product for each
ALIGNED = 16  # bytes at which the columns of each begin, as attention wants its rows
READS_STRIDED = ("scaled_dot_product_attention", EXCHANGE, *CONCATENATIONS)


class Columns(NamedTuple):
    """Where a value lies in the rows of a stacked product. strides: of its dimensions; None for that of rows."""

    product: int
    rows: int
    strides: tuple[int | None, ...]
    offset: int


class Stacks:
    """Replaces linears of one input by one product in `units`.

    kept: results of linears that stay separate. results: values that are returned. concatenation: gives the dimension
    along which a value was concatenated, counted from the last, else None.
    """

    def __init__(
        self,
        program: Program,
        units: list[Unit],
        kept: set[int],
        results: set[int],
        concatenation: Callable[[int], int | None],
    ):
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
        self.products: list[StackedProduct] = []
        for group in groups.values():
            self._stack(group)
        self.first = self._first_columns()
        joints: dict[tuple[int, ...], list[tuple[TorchCall, Columns]]] = {}
        for unit in self.units:
            found = self._joint(unit, concatenation)
            if found is not None:
                joints.setdefault(found[0], []).append(found[1])
        for products, calls in joints.items():
            self._join(products, calls)

    def _stack(self, group: list[TorchCall]) -> None:
        if len(group) < 2 or sum(self._bytes(call.step) for call in group) > MOST_STACKED:
            return
        for call in group:
            self.units.remove(call)
        calls = sorted(group, key=lambda call: call.place)
        self.products.append(StackedProduct([call.step for call in calls], calls[0].place))
        self.units.append(self.products[-1])

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
        """Whether all that takes the result, or views of it, can read rows that do not follow one another."""
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
        return name in READS_STRIDED or (name not in ROWWISE and operation_of(unit.step, self.values) is not None)

    def _first_columns(self) -> dict[int, tuple[int, int]]:
        """Of the result of each linear, the product that gives it, by its place in the list, and its first column."""
        found = {}
        for place, product in enumerate(self.products):
            column = 0
            for step in product.steps:
                found[step.result.number] = place, column
                column += self.values[step.result.number].shape[-1]
        return found

    def _width(self, product: int) -> int:
        return sum(self.values[step.result.number].shape[-1] for step in self.products[product].steps)

    def _joint(
        self, unit: Unit, concatenation: Callable[[int], int | None]
    ) -> tuple[tuple[int, ...], tuple[TorchCall, Columns]] | None:
        """The products whose columns the unit puts together, with it and how these lie in the first of them."""
        if not isinstance(unit, TorchCall) or not isinstance(unit.step.result, Ref):
            return None
        number = unit.step.result.number
        dim = concatenation(number)
        if dim is None or not self._read_apart(number):
            return None
        found = [self._columns(piece, dim) for piece in unit.step.taken]
        pieces = [one for one in found if one is not None]
        products = tuple(one.product for one in pieces)
        alike = {one[2:] for one in pieces}
        if len(pieces) < len(found) or len(set(products)) < len(products) or len(alike) != 1:
            return None
        return products, (unit, pieces[0])

    def _columns(self, number: int, dim: int) -> Columns | None:
        """Of a view of a linear's result, whose dimension `dim` is that of all its rows. Strides of what is before the
        rows are counted in whole tensors of them.
        """
        view = self.values[number]
        if view.base not in self.first or not view.numel:
            return None
        (product, column), whole = self.first[view.base], self.values[view.base]
        rows, columns = whole.shape[-2], whole.shape[-1]
        strides: list[int | None] = []
        for place, (size, stride) in enumerate(zip(view.shape, view.stride, strict=True)):
            if place - len(view.shape) == dim:
                if (size, stride) != (rows, columns) or rows < 2:
                    return None
                strides.append(None)
            elif size == 1 or stride < columns:
                strides.append(stride if size > 1 else 1)
            elif stride % (rows * columns):
                return None
            else:
                strides.append(-stride // (rows * columns))
        return Columns(product, rows, tuple(strides), column + view.offset) if view.offset < columns else None

    def _join(self, products: Sequence[int], calls: list[tuple[TorchCall, Columns]]) -> None:
        """One tensor for the rows of all these products. Of several images each has rows of its own in it, so there all
        columns must be put together: each image is a product by itself.
        """
        units = [self.products[place] for place in products]
        shapes = [self.values[unit.steps[0].result.number].shape for unit in units]
        widths, before = {self._width(place) for place in products}, {shape[:-2] for shape in shapes}
        if len(widths) > 1 or len(before) > 1 or any(unit.output is not None for unit in units):
            return
        images, width, rows = prod(before.pop()), widths.pop(), sum(shape[-2] for shape in shapes)
        joined = {self.values[piece].base for call, _ in calls for piece in call.step.taken}
        if images > MOST_IMAGES or (images > 1 and joined != {step.result.number for u in units for step in u.steps}):
            return
        first = self.values[units[0].steps[0].result.number]
        whole, start = self.program.add((*shapes[0][:-2], rows, width), first.dtype, first.device), 0
        for unit, (*_, size, _) in zip(units, shapes, strict=True):
            unit.output = Operand(whole.number, Window(-2, start, size))
            start += size
        for call, columns in calls:
            strides = [width if s is None else s if s >= 0 else -s * rows * width for s in columns.strides]
            result = call.step.result
            args = (whole, self.values[result.number].shape, tuple(strides), columns.offset)
            self.units[self.units.index(call)] = TorchCall(
                TorchStep(torch.as_strided, "as_strided", args, {}, result), call.place
            )


def keeps_rows(view: TensorValue, whole: TensorValue) -> bool:
    """Whether the view is of rows (.., C), or of columns of them, however far apart the rows lie."""
    columns = whole.shape[-1]
    if not columns:
        return False
    last = view.offset % columns
    for size, stride in zip(view.shape, view.stride, strict=True):
        if size > 1 and stride < columns:
            last += (size - 1) * stride
        elif size > 1 and stride % columns:
            return False
    return last < columns
